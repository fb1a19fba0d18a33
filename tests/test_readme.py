"""The README's commands, typed one after the other into an empty folder, as a newcomer would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.programs import Forks
from test_house import ROOT, shell_lines

# The demo has a test of its own, with fewer steps; `make test` is what runs this.
ELSEWHERE = ("make demo", "make test")


@pytest.mark.slow
def test_the_readmes_commands_run_in_order(tmp_path: Path):
    """`videoqat` gets its words from bash, as typed; but not each of the commands has to load torch anew. Those that start several processes do."""
    lines = [line for line in shell_lines(ROOT / "README.md") if line not in ELSEWHERE]
    assert len(lines) >= 10
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as an activated environment has it
    words, said = tmp_path / "words", tmp_path / "said"
    # One thread, as every test worker has: the cores are shared out among workers.
    exports = f"PATH={path} PYTHONPATH={ROOT}:{ROOT / 'kernels'} OMP_NUM_THREADS=1"
    with Forks() as forks:
        for line in lines:
            script = f"export {exports}; videoqat() {{ printf '%s\\0' \"$@\" >>{words}; }}; {line}"
            result = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
            assert words.exists() == line.startswith("videoqat "), line  # alone on its line
            if words.exists():
                exit_code = forks.run(words.read_text().split("\0")[:-1], tmp_path, said)
                assert exit_code == 0, f"{line}\n{said.read_text()}"
                words.unlink()
    assert json.loads((tmp_path / "tiny-wan-qat" / "videoqat.json").read_text())["recipe"]["name"] == "attn_qat_search"
    assert len((tmp_path / "run-on-two" / "log.jsonl").read_text().splitlines()) == 20
    assert (tmp_path / "sneaker.mp4").stat().st_size > 1000
    receipt = json.loads((tmp_path / "sneaker.json").read_text())
    assert {r["kernel"] for r in receipt["receipts"]} == {"torch", "sdpa"}
    assert "<html" in (tmp_path / "comparison" / "report.html").read_text()
