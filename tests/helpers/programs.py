"""`python -m videoqat` without waiting for torch and diffusers to load, which takes longer than most small commands.

    with Forks() as forks:
        exit_code = forks.run(["doctor", "model=tiny-wan"], folder, folder / "said")

Run as a program, this file is what forks: it has loaded torch and diffusers, and nothing of ours.
"""

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]


class Forks:
    """A process that has loaded what takes long, for as many commands as come."""

    def __init__(self) -> None:
        # One thread, as every test worker has: the cores are shared out among workers.
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._server = subprocess.Popen([sys.executable, __file__], env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True)

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)  # and a command that still runs
        self._server.communicate()

    def run(self, words: list[str], folder: Path, log: Path) -> int:
        """`python -m videoqat *words`, typed in `folder`; all that it says goes to `log`. Returns its exit code."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps([words, str(folder), str(log)]), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())


def _videoqat(words: list[str], folder: str, log: str) -> None:
    """Ends by SystemExit."""
    import torch

    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for output in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), output)
    if torch.cuda.is_available():  # CUDA has been asked for its devices, after which a fork can't use them
        os.execv(sys.executable, [sys.executable, "-m", "videoqat", *words])
    sys.argv = ["videoqat", *words]
    runpy.run_module("videoqat", run_name="__main__", alter_sys=True)


def _serve() -> None:
    del sys.path[0]  # the folder of this file, which has a `transformers`, too
    for name in ("torch.distributed.fsdp", "torch.distributed.checkpoint", "diffusers.pipelines.wan.pipeline_wan"):
        importlib.import_module(name)
    for line in sys.stdin:
        words, folder, log = json.loads(line)
        Path(log).write_text("")
        if (child := os.fork()) == 0:
            _videoqat(words, folder, log)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
