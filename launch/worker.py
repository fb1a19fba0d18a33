"""What torchrun starts, once for each process: `videoqat train`, with its exit code kept for node.sh.

    torchrun ... worker.py STATUS train --config ... key=value ...

torchrun ends with 1 whatever a worker's exit code was, and stops the other workers at the first that isn't 0. So a training that was asked to stop,
saved and left with 75 would look like a crash, and cut off ranks that are still leaving. Here 75 counts as success before torchrun, whose nodes then
leave together, and is written down for node.sh in the folder STATUS, where each local rank has two files: RANK.pid, for signals, and RANK.exit (time
and code) if its code was not 0.
"""

import os
import sys
import time
from pathlib import Path

STOPPED = 75  # videoqat's exit code after a signal: everything is saved, start again to continue


def main() -> int:
    """Runs the command and returns the exit code for torchrun."""
    status, *arguments = sys.argv[1:]
    mine = Path(status) / os.environ["LOCAL_RANK"]
    mine.with_suffix(".exit").unlink(missing_ok=True)  # of an earlier life: torchrun may start its workers again
    mine.with_suffix(".pid").write_text(f"{os.getpid()}\n")

    from torch.distributed.elastic.multiprocessing.errors import record

    from videoqat.cli import main as videoqat

    sys.argv = ["videoqat", *arguments]  # what the run's provenance shows
    try:
        code = record(videoqat)(arguments) or 0  # record: an exception's traceback appears in torchrun's summary
    except SystemExit as end:  # argparse
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if code:
        mine.with_suffix(".exit").write_text(f"{time.time():.6f} {code}\n")
    return 0 if code == STOPPED else code


if __name__ == "__main__":
    sys.exit(main())
