"""Noticing that another process of the run has ended, where the main thread can't.

A rank that waits in NCCL, or for a GPU that waits there, hears of a dead peer only when NCCL's timeout is over, minutes later, and its watchdog
may need minutes more. A TCP connection breaks at once. So rank 0 and every other rank have one (gloo's) on which nothing is ever sent but a farewell,
and a thread at each end that waits for it. If the connection breaks instead, or the farewell is that of a rank that ends with an error, the main
thread has a moment to find out for itself and to end in good order; otherwise the process ends here. The others lose rank 0 by that, and end, too.
"""

import contextlib
import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from videoqat.console import own_rank

GRACE_S = 10.0  # for the main thread's own way out
LAST_WORDS_S = 2.0  # for ranks that all end with an error to hear it of each other
FOREVER = timedelta(days=365)


class Watch:
    """Watches the other ranks (rank 0) or rank 0 (the others), from `start` to `close`.

    Args:
        group: gloo, all ranks, used for nothing else.
        rank, world_size: in it.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self._group = group
        self._peers = list(range(1, world_size)) if rank == 0 else [0]
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._wait_for, args=(peer,), daemon=True, name=f"watch rank {peer}") for peer in self._peers]

    def start(self) -> None:
        """Begins to watch."""
        for thread in self._threads:
            thread.start()

    def _wait_for(self, peer: int) -> None:
        failed = torch.zeros(1)
        try:
            farewell = dist.irecv(failed, src=peer, group=self._group)
            assert farewell is not None
            farewell.wait(FOREVER)
        except RuntimeError:
            failed.fill_(1)
        if not failed.item() or self._closing.wait(GRACE_S):
            return
        print(
            f"videoqat{own_rank()}: rank {peer} has ended, and this process, which waits for it, ends, too. The first error among the ranks says "
            "why; the same command, started again, continues from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # the main thread may never come back from where it waits

    def close(self, *, clean: bool) -> None:
        """Ends watching, with a word to the others. `clean`: all ranks close; else this one ends with an error, and perhaps they do, too.

        A thread that hears of its peer only while Python shuts down would abort the process (C++ frames can't be unwound there), and its exit code
        would be lost with it. So the threads should have heard by then.
        """
        self._closing.set()
        deadline = time.monotonic() + (GRACE_S if clean else LAST_WORDS_S)
        failed = torch.tensor([0.0 if clean else 1.0])
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):  # it has left already
                word = dist.isend(failed, dst=peer, group=self._group)
                assert word is not None
                word.wait(timedelta(seconds=max(0.1, deadline - time.monotonic())))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
