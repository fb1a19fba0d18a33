"""`python -m videoqat` without waiting for torch and diffusers to load, which takes longer than most small commands.

With a GPU it is started as usual: what was loaded has asked CUDA for devices, after which a fork can't use them.
"""

import dataclasses
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch
from helpers.ranks import loaded_already

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Ended:
    """How a program ended, and what it wrote, to both outputs."""

    exit_code: int
    said: str


def _main(words: list[str], folder: str, log: str) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.argv = ["videoqat", *words]
    runpy.run_module("videoqat", run_name="__main__", alter_sys=True)  # it ends by SystemExit


def run_videoqat(words: list[str], folder: Path, log: Path, timeout: float = 300) -> Ended:
    """`python -m videoqat *words`, typed in `folder`: in a process of its own, forked from one that has nothing of ours loaded.

    Raises:
        TimeoutError, subprocess.TimeoutExpired: it did not end within `timeout` seconds, and was killed.
    """
    if torch.cuda.is_available():
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
        with open(log, "w") as file:
            command = [sys.executable, "-m", "videoqat", *words]
            done = subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=file, timeout=timeout, check=False)
        return Ended(done.returncode, log.read_text())
    process = loaded_already().Process(target=_main, args=(words, str(folder), str(log)))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"videoqat {words} still ran after {timeout} s\n{log.read_text()}")
    return Ended(process.exitcode, log.read_text())
