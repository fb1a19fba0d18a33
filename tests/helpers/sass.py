"""Machine code in a library, as far as tests of the CUDA kernels look at it."""

import functools
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


@functools.cache
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


def usual_path(loop: list[Instruction]) -> list[Instruction]:
    """What a warp goes through in most rounds: every branch forwards within the loop is taken. In these kernels such branches skip what is rare:
    masks, a maximum that rose, and asking for a copy, which one thread does."""
    path, resume = [], 0
    for i in loop:
        if i.address < resume:
            continue
        path.append(i)
        target = re.search(r"(0x[0-9a-f]+)$", i.operands) if i.name.startswith("BRA") and i.predicate else None
        if target and i.address < int(target[1], 16) <= loop[-1].address:
            resume = int(target[1], 16)
    return path


def names(library: Path, architecture: str, function: str) -> set[str]:
    """Kinds of instructions in all kernels whose mangled name holds `function`; cheaper than `functions`."""
    parts = _dump("-sass", library, architecture).split("Function : ")[1:]
    bodies = "".join(part for part in parts if function in part.partition("\n")[0])
    return set(re.findall(r"\*/ +(?:@!?U?P\w+ )?([A-Z][A-Z0-9]+)", bodies))


def count(code: list[Instruction]) -> Counter[str]:
    """How often each kind of instruction occurs."""
    return Counter(i.name.split(".")[0] for i in code)
