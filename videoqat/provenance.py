"""What a result must carry to be trusted: when, with what, on what."""

import datetime
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("videoqat", "torch", "diffusers", "transformers", "triton", "omegaconf", "numpy")


def versions() -> dict[str, str]:
    """Installed versions of what decides the numbers; `not installed` where a package is absent."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def device_name(device: str) -> str:
    """A person's name for a torch device: the GPU's model, or the CPU's with its thread count."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model} ({torch.get_num_threads()} threads)"


def commit() -> str:
    """The git commit of the source tree that runs, with `+changes` if it is dirty; `unknown` outside a checkout."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an installed package may lie within a checkout of something else
        head, dirty = git("rev-parse", "HEAD"), git("status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+changes" if dirty else "")


def provenance(device: str) -> dict[str, Any]:
    """Date (UTC), command line, commit, versions and device of the running process."""
    program = Path(sys.argv[0]).name
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["videoqat" if program == "__main__.py" else program, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions(),
        "device": device_name(device),
    }
