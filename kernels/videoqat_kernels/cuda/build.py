"""Builds the libraries from the .cu files beside this one: `make kernels`, or `python -m videoqat_kernels.cuda.build`. Needs no GPU.

The compiler is the machine's nvcc or, where there is none, PyPI's, which `fetch_compiler` puts beside the libraries (large; no part of the Python
environment, whose torch may want other versions of the same packages). Two libraries come out, of the same sources: `native`, whose product is
the FP4 tensor core's instruction, and `emulated`.
"""

import argparse
import functools
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
BUILT = FOLDER / "built"
SOURCES = ("quantize.cu", "attention.cu")
FETCHED = BUILT / "compiler"
# Versions that belong together: what pip would choose by itself for the last four is too new for the first.
COMPILER_PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
ADVICE = "install CUDA 13, or let python -m videoqat_kernels.cuda.build --fetch-compiler get PyPI's"


class Product(NamedTuple):
    """How the warp's product is made (mma.cuh): the C++ policy, and for each architecture the first CUDA that knows it."""

    policy: str
    architectures: dict[str, tuple[int, int]]


# The one list of architectures. 80 stands for every GPU from there on: its PTX goes into the library, too, and the driver compiles it.
PRODUCTS = {
    "native": Product("Native", {"120a": (12, 8), "121a": (12, 9)}),
    "emulated": Product("Emulated", {"80": (12, 8), "90a": (12, 8)}),
}


class BuildError(RuntimeError):
    """No compiler, one that is too old, or one that failed."""


def library_path(product: str) -> Path:
    """Where `build` puts the library of `product`, a key of `PRODUCTS`."""
    return BUILT / f"libvideoqat_{product}.so"


@functools.cache
def source_digest() -> str:
    """A short digest of the sources. The library carries that of its own, so that one of older sources is noticed."""
    digest = hashlib.sha256()
    for path in sorted(path for path in FOLDER.iterdir() if path.suffix in (".cu", ".cuh", ".h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find_nvcc(given: str | None = None) -> Path:
    """The compiler: `given`, that on the PATH, that of an installed toolkit, or the one fetched from PyPI.

    Raises:
        BuildError: there is none; says where to get it.
    """
    if given is not None:
        found = shutil.which(given)
        if found is None:
            raise BuildError(f"nvcc={given} does not exist or can't be run")
        return Path(found)
    for place in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", FETCHED / "nvidia" / "cu13" / "bin" / "nvcc"):
        if place is not None and Path(place).is_file():
            return Path(place)
    raise BuildError(f"no nvcc on the PATH or in /usr/local/cuda; {ADVICE}")


def fetch_compiler(folder: Path = FETCHED) -> Path:
    """PyPI's nvcc, installed into `folder`.

    Raises:
        BuildError: pip could not.
    """
    _run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *COMPILER_PACKAGES])
    return folder / "nvidia" / "cu13" / "bin" / "nvcc"


def nvcc_version(nvcc: Path) -> tuple[int, int]:
    """(major, minor) of CUDA that a compiler belongs to."""
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release (\d+)\.(\d+)", told.stdout)
    if match is None:
        raise BuildError(f"{nvcc} --version tells no release: {(told.stdout + told.stderr).strip()[-200:]!r}")
    return int(match[1]), int(match[2])


def check_version(nvcc: Path, architectures: dict[str, tuple[int, int]]) -> None:
    """Raises BuildError if the compiler is too old for one of `architectures`."""
    version = nvcc_version(nvcc)
    for architecture, needed in architectures.items():
        if version < needed:
            have, need = (".".join(map(str, v)) for v in (version, needed))
            raise BuildError(f"{nvcc} is of CUDA {have}, but sm_{architecture} needs {need} or newer; {ADVICE}")


def build(product: str, architectures: list[str] | None = None, nvcc: str | None = None, out: Path | None = None) -> Path:
    """The library of `product`, for all of its architectures or those named. Replaces an older one only when it is complete.

    Raises:
        BuildError: an unknown architecture, or the compiler is missing, too old or failed.
    """
    known = PRODUCTS[product].architectures
    unknown = [name for name in architectures or () if name not in known]
    if unknown:
        raise BuildError(f"architecture={unknown[0]!r} is not one of {product}'s: {', '.join(known)}")
    wanted = {name: needed for name, needed in known.items() if architectures is None or name in architectures}
    compiler = find_nvcc(nvcc)
    check_version(compiler, wanted)
    out = library_path(product) if out is None else out
    out.parent.mkdir(parents=True, exist_ok=True)
    defines = [f"-DVIDEOQAT_PRODUCT={PRODUCTS[product].policy}", f"-DVIDEOQAT_SOURCES={source_digest()}"]
    command = [str(compiler), "-std=c++17", "-O3", "--threads=0", f"-I{FOLDER}", *defines, "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    for name in wanted:
        code = f"[sm_{name},compute_{name}]" if name.isdigit() else f"sm_{name}"
        command += ["-gencode", f"arch=compute_{name},code={code}"]
    aside = out.with_suffix(f".{product}.part")
    libraries = compiler.resolve().parent.parent / "lib"  # where PyPI's packages have it and nvcc does not look
    _run([*command, "-shared", f"-L{libraries}", "-o", str(aside), *(str(FOLDER / source) for source in SOURCES)])
    aside.replace(out)
    return out


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr).strip()}")
    return done.stdout + done.stderr


def _can_build(products: list[str]) -> bool:
    try:
        for product in products:
            check_version(find_nvcc(), PRODUCTS[product].architectures)
    except BuildError:
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    """The command line. 0, or 2 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m videoqat_kernels.cuda.build", description="Build the CUDA attention kernels.")
    parser.add_argument("--product", choices=list(PRODUCTS), help="native or emulated; both if not given")
    parser.add_argument("--architecture", action="append", help="only this one of the product's architectures, such as 120a; may be repeated")
    parser.add_argument("--nvcc", help="the compiler")
    parser.add_argument("--fetch-compiler", action="store_true", help="where there is none, or only one that is too old, get PyPI's (hundreds of MB)")
    options = parser.parse_args(arguments)
    if options.architecture and not options.product:
        parser.error("--architecture needs --product")
    products = [options.product] if options.product else list(PRODUCTS)
    try:
        nvcc = options.nvcc
        if options.fetch_compiler and nvcc is None and not _can_build(products):
            nvcc = str(fetch_compiler())
        for product in products:
            print(build(product, options.architecture, nvcc))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
