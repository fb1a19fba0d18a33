"""Functions on several gloo ranks at once, as torchrun would start them: RANK, WORLD_SIZE, LOCAL_RANK and a store are there.

    def on_each_rank(width: int) -> float:
        with open_mesh(ParallelConfig(sp=2), torch.device("cpu")) as mesh:
            ...

    results = run_ranks(on_each_rank, 2, 16)  # by rank

The function is a module's own (no closure); it, its arguments and its results are pickled. Ranks are forked from a server that has torch, diffusers,
DeepSpeed and our own modules loaded already, and use one thread each.
"""

import dataclasses
import faulthandler
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

# What all ranks need, and what takes long in some; what can't be found is left out.
_PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._inductor.compile_fx",
    "diffusers.pipelines.wan.pipeline_wan",
    "deepspeed",
    "pytest",
    "videoqat.generation.batch",
    "videoqat.training.trainer",
]


@dataclasses.dataclass
class Outcome:
    """How one rank ended: with `result`; with `error`, an exception's traceback; or with neither, killed (`exit_code` tells)."""

    result: Any = None
    error: str = ""
    exit_code: int | None = None
    returned: bool = False
    ended_at: float = 0.0


def _main(rank: int, world_size: int, port: int, module: str, file: str, name: str, arguments: bytes, pipe: Connection) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the parent's, as under torchrun
    }
    faulthandler.enable()  # a crash in native code shows where
    torch.set_num_threads(1)
    try:
        if module not in sys.modules:  # pytest imports test modules in its own way
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
        result = getattr(sys.modules[module], name)(*pickle.loads(arguments))
        pipe.send_bytes(pickle.dumps(("result", result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        raise SystemExit(1) from None


def outcomes(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120) -> list[Outcome]:
    """Runs function(*arguments) on `world_size` ranks and says how each ended; for tests in which ranks fail.

    Raises:
        TimeoutError: not all ended within `timeout` seconds (those that had not are killed).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    file = sys.modules[function.__module__].__file__
    found = [Outcome() for _ in range(world_size)]
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        started = (rank, world_size, store.port, function.__module__, file, function.__qualname__, pickle.dumps(arguments), theirs)
        process = context.Process(target=_main, args=started, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    deadline = time.monotonic() + timeout
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    try:
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting.pop(pipe)
                found[rank].ended_at = time.monotonic()
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    continue  # killed: it left no word
                setattr(found[rank], kind, value)
                found[rank].returned = kind == "result"
        for rank, process in enumerate(processes):
            process.join(max(0.0, deadline - time.monotonic()))
            found[rank].exit_code = process.exitcode
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    late = [rank for rank, outcome in enumerate(found) if outcome.exit_code is None]
    if late:
        said = "\n".join(f"rank {rank}:\n{outcome.error}" for rank, outcome in enumerate(found) if outcome.error)
        raise TimeoutError(f"rank {late} of {world_size} still ran after {timeout} s\n{said}")
    return found


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120) -> list[Any]:
    """Runs function(*arguments) on `world_size` ranks; what each returned, by rank.

    Raises:
        AssertionError: a rank failed; carries the traceback of the one that failed first.
        TimeoutError: not all ended within `timeout` seconds.
    """
    found = outcomes(function, world_size, *arguments, timeout=timeout)
    failed = [rank for rank, outcome in enumerate(found) if outcome.exit_code != 0]
    if failed:
        first = min(failed, key=lambda rank: found[rank].ended_at)
        when = ", after it had its result" if found[first].returned else ""
        raise AssertionError(f"rank {first} of {world_size} failed (exit code {found[first].exit_code}{when})\n{found[first].error}")
    return [outcome.result for outcome in found]
