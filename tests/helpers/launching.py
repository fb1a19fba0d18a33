"""Programs that stand in for `torchrun`, `srun`, ... on PATH, and what they were called with."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAUNCH = Path(__file__).resolve().parents[2] / "launch"

# Notes its arguments, then does what the test says (as Python, with `arguments` at hand).
_STAND_IN = """#!{python}
import json, os, signal, sys, time
from pathlib import Path

arguments = sys.argv[1:]
with open({calls!r}, "a") as file:
    file.write(json.dumps([{name!r}, *arguments]) + "\\n")
{body}
"""


class Desk:
    """A folder with stand-ins, and scripts started with them first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._calls = folder, folder / "calls.jsonl"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.env = {
            **{key: os.environ[key] for key in ("HOME", "LANG", "TZ") if key in os.environ},
            "PATH": f"{self.bin}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
        }

    def put(self, name: str, body: str = "") -> None:
        """A program `name` that notes its call and runs `body`."""
        path = self.bin / name
        path.write_text(_STAND_IN.format(python=sys.executable, calls=str(self._calls), name=name, body=body))
        path.chmod(0o755)

    def calls(self, name: str) -> list[list[str]]:
        """Arguments of each call of `name`, in order."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [arguments for program, *arguments in map(json.loads, lines) if program == name]

    def start(self, script: str | Path, *arguments: str, **env: str) -> "subprocess.Popen[str]":
        """Starts a script of launch/ (or one by path) in the desk's folder. It heeds SIGHUP also where the tests, begun with nohup, don't."""
        command = ["env", "--default-signal=HUP", "bash", str(LAUNCH / script), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=self.env | env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    def run(self, script: str | Path, *arguments: str, **env: str) -> Any:
        """Runs it to its end; has `returncode`, `stdout` and `stderr`."""
        return finish(self.start(script, *arguments, **env))


def finish(process: "subprocess.Popen[str]", timeout: float = 90) -> Any:
    """Waits for the end of a script; whatever happens, nothing of it is left running."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Returns when `condition` holds; a test that waits in vain fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
