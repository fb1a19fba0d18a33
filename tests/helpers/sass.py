"""Machine code in a library, as far as tests of the CUDA kernels look at it."""

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton.backends.nvidia

CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?(\S+)(.*?);")


@dataclass(frozen=True)
class Instruction:
    """One line: where, under which predicate, what, with which operands."""

    address: int
    predicate: str
    name: str
    operands: str


def _dump(what: str, library: Path, architecture: str) -> str:
    command = [CUOBJDUMP, what, "-arch", f"sm_{architecture}", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions(library: Path, architecture: str) -> dict[str, list[Instruction]]:
    """Each kernel's instructions, by its mangled name."""
    found: dict[str, list[Instruction]] = {}
    for part in _dump("-sass", library, architecture).split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        lines = (_LINE.match(line) for line in body.splitlines())
        found[name.strip()] = [Instruction(int(m[1], 16), (m[2] or "").strip(), m[3], m[4].strip()) for m in lines if m]
    return found


def resources(library: Path, architecture: str) -> dict[str, dict[str, int]]:
    """Each kernel's REG (of a thread), STACK, SHARED and LOCAL (bytes)."""
    found = re.findall(r"Function (\S+):\s+(.*)", _dump("-res-usage", library, architecture))
    return {name: {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)} for name, usage in found}


def loops(code: list[Instruction]) -> list[list[Instruction]]:
    """What lies between a branch backwards and its target, for each of them."""
    found = []
    for i in code:
        target = re.search(r"(0x[0-9a-f]+)$", i.operands) if i.name.startswith("BRA") else None
        if target and int(target[1], 16) < i.address:
            found.append([j for j in code if int(target[1], 16) <= j.address <= i.address])
    return found


def main_loop(code: list[Instruction]) -> list[Instruction]:
    """The loop over tiles: the shortest in which warps wait for their turn and pass it on."""
    turns = ("BAR.SYNC", "BAR.ARV")
    return min((loop for loop in loops(code) if all(any(i.name.startswith(turn) for i in loop) for turn in turns)), key=len)


def count(code: list[Instruction]) -> Counter[str]:
    """How often each kind of instruction occurs."""
    return Counter(i.name.split(".")[0] for i in code)
