"""Disks that go wrong."""

import contextlib
import resource
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Within the block no file of this process grows beyond `size` bytes: as on a full disk, writing fails in the middle of one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
