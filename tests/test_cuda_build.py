"""The CUDA kernels compile for GPUs that aren't here, to the instructions and within the resources they are meant to have; and the resolver."""

import subprocess
from pathlib import Path

import pytest
import torch
from helpers import sass
from videoqat_kernels.cuda import build, layout, library

from videoqat.attention import resolve
from videoqat.attention.backends import KERNELS
from videoqat.attention.cuda_backend import EMULATED, NATIVE
from videoqat.errors import AttentionError
from videoqat.recipes import RECIPES, AttentionRecipe

SHARED_MEMORY = 99 * 1024  # that a block can have on sm_120
HEAD_DIMS = (64, 128)


@pytest.fixture(scope="session")
def nvcc() -> Path:
    try:
        return build.find_nvcc()
    except build.BuildError:
        pass
    try:
        return build.fetch_compiler()
    except build.BuildError as error:
        pytest.skip(f"no nvcc here, and none from PyPI: {str(error)[-200:]}")


@pytest.fixture(scope="session")
def libraries(nvcc, tmp_path_factory) -> dict[str, Path]:
    """native for sm_120a and sm_121a, emulated for sm_90a."""
    folder = tmp_path_factory.mktemp("built")
    return {
        product: build.build(product, architectures, str(nvcc), folder / f"{product}.so")
        for product, architectures in (("native", ["120a", "121a"]), ("emulated", ["90a"]))
    }


@pytest.fixture(scope="session")
def native(libraries) -> dict[str, list[sass.Instruction]]:
    return sass.functions(libraries["native"], "120a")


def named(functions, part: str):
    """All whose name holds `part`."""
    return {name: value for name, value in functions.items() if part in name}


@pytest.mark.parametrize(("product", "architecture"), [("native", "120a"), ("native", "121a"), ("emulated", "90a")])
def test_nothing_spills_and_two_groups_of_four_warps_fit_a_processor(libraries, product, architecture):
    """A processor has 65,536 registers; attention's blocks are of 256 threads, and 1,280 threads of the quantisers shall fit. The ring has four pairs
    of tiles."""
    used = sass.resources(libraries[product], architecture)
    assert len(named(used, "attentionILi")) == 4
    assert len(named(used, "quantize_")) == 6
    for name, usage in used.items():
        assert usage["STACK"] == usage["LOCAL"] == 0, name
        assert usage["REG"] * (1280 if "quantize_" in name else 256) <= 65536, name
        assert usage["SHARED"] <= 48 * 1024, name
    ring = 4 * (2 * 72 * 128 + 16)
    assert ring <= SHARED_MEMORY


@pytest.mark.parametrize(
    ("product", "architecture", "holds", "lacks"),
    [
        ("native", "120a", {"OMMA", "UBLKCP"}, {"HMMA", "IMMA", "LDGSTS"}),
        ("native", "121a", {"OMMA", "UBLKCP"}, {"HMMA", "IMMA", "LDGSTS"}),
        ("emulated", "90a", {"IMMA", "UBLKCP"}, {"HMMA", "OMMA", "LDGSTS"}),
    ],
)
def test_each_multiplies_and_copies_by_its_own_means(libraries, product, architecture, holds, lacks):
    """FP4 products, or INT8 ones in their place; the copy engine; and no local memory."""
    found = sass.names(libraries[product], architecture, "attentionILi") | sass.names(libraries[product], architecture, "emulated_product")
    assert holds <= found
    assert not (lacks | {"LDL", "STL"}) & found


def test_before_sm_90_each_thread_copies_its_share(nvcc, tmp_path):
    """Compiled without optimising, which takes half the time."""
    out = tmp_path / "attention.cubin"
    defines = ["-DVIDEOQAT_PRODUCT=Emulated", "-DVIDEOQAT_SOURCES=none"]
    command = [nvcc, "-std=c++17", "-arch=sm_80", "-Xptxas=-O0", "-cubin", f"-I{build.FOLDER}", *defines, build.FOLDER / "attention.cu", "-o", out]
    subprocess.run(command, check=True)
    found = sass.names(out, "80", "attentionILi")
    assert {"LDGSTS", "ARRIVES"} <= found
    assert not {"UBLKCP", "OMMA"} & found
    assert "IMMA" in sass.names(out, "80", "")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_main_loop_holds_what_a_tile_needs_and_no_more(native, head_dim):
    """For 16 queries and 128 keys: S takes 16 n-tiles and d / 64 steps, O d / 8 n-tiles and 2 steps; row sums, where they are wanted, 2 more."""
    (code,) = named(native, f"attentionILi{head_dim}ELb0").values()
    loop = sass.main_loop(code)
    products = [i for i in loop if i.name.startswith("OMMA")]
    assert {i.name for i in products} == {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"}
    always = [i for i in products if not i.predicate]
    assert len(always) == 16 * head_dim // 64 + head_dim // 8 * 2
    assert len(products) == len(always) + 2
    found = sass.count(loop)
    assert found["MUFU"] <= 64 + 4 + 4 + 1  # exp2 of 64 weights and 4 block maxima, 4 reciprocals, 1 rescaling
    assert found["F2FP"] <= 32 + 2 + 2  # pairs of codes; scales there and back
    assert found["LDS"] == (16 * head_dim // 128 + head_dim // 64) + (head_dim // 8 + head_dim // 64)  # 16 bytes a lane: K, V and their scales


def test_the_quantisers_convert_by_the_hardware(native):
    for code in named(native, "quantize_").values():
        assert any(i.name.startswith("F2FP") and "E2M1" in i.name for i in code)


def rows(section: str) -> dict[str, list[float]]:
    """Of the first table of a section of docs/kernels.md: each row's numbers, by what stands before them."""
    text = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n| ", 1)[1].partition("\n\n")[0].splitlines()[2:]]
    return {row[0]: [float(cell.split()[0].replace(",", "")) for cell in row[1:]] for row in table}


def test_the_documented_schedule_is_that_of_the_machine_code(nvcc, native):
    if build.nvcc_version(nvcc) != (13, 0):
        pytest.skip("docs/kernels.md counts what CUDA 13.0 compiles")
    (code,) = named(native, "attentionILi128ELb0").values()
    path = sass.usual_path(sass.main_loop(code))
    found = sass.count(path)
    kinds = {
        "tensor core": sum(i.name.startswith("OMMA") and not i.predicate for i in path),
        "exp2": found["MUFU"],
        "fp32": found["FFMA"] + found["FMUL"] + found["FADD"],
        "maxima": found["FMNMX"] + found["FSEL"] + found["F2FP"],
        "shared memory": found["LDS"],
        "issue": len(path),
    }
    documented = rows("The schedule of a tile")
    assert {unit: numbers[0] for unit, numbers in documented.items()} == {
        next(unit for unit in documented if unit.startswith(kind)): number for kind, number in kinds.items()
    }
    for unit, (number, clocks, of_tile) in documented.items():
        copies = 2 * layout.TILE * 72 / 128  # what the copy engine writes, 128 bytes a clock
        assert of_tile == (8 * number * clocks + copies if unit.startswith("shared memory") else 2 * number * clocks)
    for clocks, teraflops in rows("What to expect").values():
        assert teraflops == round(4 * 128**3 / clocks * 170 * 2.4e9 / 1e12)


def test_a_library_is_loaded_and_known_by_its_sources(libraries, tmp_path, monkeypatch):
    def load(path):
        monkeypatch.setattr(library, "library_path", lambda product: path)
        library.load.cache_clear()
        return library.load("native")

    assert load(libraries["native"]).videoqat_sources().decode() == build.source_digest()
    broken = tmp_path / "libvideoqat_native.so"
    broken.write_bytes(b"no library")
    with pytest.raises(library.LibraryError, match="can't be loaded"):
        load(broken)
    with pytest.raises(library.LibraryError, match=r"missing\.so is not built: make kernels"):
        load(tmp_path / "missing.so")
    monkeypatch.setattr(library, "source_digest", lambda: "another")
    with pytest.raises(library.LibraryError, match="built from other sources: make kernels"):
        load(libraries["native"])
    library.load.cache_clear()


def fake_nvcc(folder: Path, told: str) -> str:
    path = folder / f"nvcc-{len(told)}"
    path.write_text(f"#!/bin/sh\necho '{told}'\n")
    path.chmod(0o755)
    return str(path)


def test_compilers_that_can_not_are_refused(tmp_path, capsys):
    old = fake_nvcc(tmp_path, "Cuda compilation tools, release 12.4, V12.4.131")
    with pytest.raises(build.BuildError, match=r"is of CUDA 12.4, but sm_120a needs 12.8 or newer; install CUDA 13"):
        build.build("native", nvcc=old)
    with pytest.raises(build.BuildError, match="tells no release"):
        build.build("native", nvcc=fake_nvcc(tmp_path, "hello"))
    with pytest.raises(build.BuildError, match="nvcc=/nowhere/nvcc does not exist"):
        build.build("native", nvcc="/nowhere/nvcc")
    with pytest.raises(build.BuildError, match="architecture='120' is not one of native's: 120a, 121a"):
        build.build("native", ["120"])
    assert build.main(["--nvcc", old]) == 2
    assert "sm_120a needs 12.8" in capsys.readouterr().err


def test_a_failed_compilation_tells_and_leaves_nothing(tmp_path):
    path = tmp_path / "nvcc"
    path.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'release 13.0' || { echo broken >&2; exit 1; }\n")
    path.chmod(0o755)
    with pytest.raises(build.BuildError, match="broken"):
        build.build("native", nvcc=str(path), out=tmp_path / "out" / "lib.so")
    assert list((tmp_path / "out").iterdir()) == []


def test_without_any_compiler_it_says_where_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.Path, "is_file", lambda path: False)
    with pytest.raises(build.BuildError, match=r"no nvcc on the PATH.*--fetch-compiler"):
        build.find_nvcc()


# Layout


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_operands_hold_each_word_where_the_fragments_want_it(d):
    """layout.py against layout.cuh's text, written down once more, lane by lane."""
    generator = torch.Generator().manual_seed(d)
    steps = d // 64

    def random(*shape):
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    codes, scales = random(1, 1, 128, d // 2), random(1, 1, 128, d // 16)
    q, k = layout.pack_q(codes, scales)[0, 0], layout.pack_k(codes, scales)[0, 0, 0]
    codes, scales = codes[0, 0], scales[0, 0]
    v_codes, v_scales = random(1, 1, 64, d), random(1, 1, 8, d)
    v = layout.pack_v(v_codes, v_scales)[0, 0, 0]
    for lane in range(32):
        g, part = lane >> 2, lane & 3
        for s in range(steps):
            for i in range(4):
                row, byte = g + 8 * (i & 1), (64 * s + 32 * (i >> 1) + 8 * part) // 2
                assert torch.equal(q[3, s * 512 + lane * 16 + 4 * i :][:4], codes[48 + row, byte : byte + 4])
        assert torch.equal(q[3, 8 * d + 4 * lane :][:4], scales[48 + g + 8 * (part & 1), 4 * ((part >> 1) % steps) :][:4])
        for tile in range(16):
            p = 8 * tile + g
            key = (p & ~31) + 8 * ((p % 8) // 2) + 2 * ((p // 8) % 4) + (p & 1)
            for s in range(steps):
                for i in range(2):
                    byte = (64 * s + 32 * i + 8 * part) // 2
                    word = tile * 128 + lane * 4 + 2 * s + i if steps == 2 else tile // 2 * 128 + lane * 4 + 2 * (tile % 2) + i
                    assert torch.equal(k[4 * word :][:4], codes[key, byte : byte + 4])
                if part == tile % 4:
                    word = (tile // 4) * steps + s
                    assert torch.equal(k[64 * d + word // 4 * 512 + lane * 16 + word % 4 * 4 :][:4], scales[key, 4 * s : 4 * s + 4])
        for tile in range(d // 8):
            channel = 8 * tile + g
            for s in range(2):
                for i in range(2):
                    row = (64 * s + 32 * i + 8 * part) // 2
                    assert torch.equal(v[tile * 512 + lane * 16 + 4 * (2 * s + i) :][:4], v_codes[0, 0, row : row + 4, channel])
                if part == tile % 4:
                    word = tile // 4 * 2 + s
                    assert torch.equal(v[64 * d + word // 4 * 512 + lane * 16 + word % 4 * 4 :][:4], v_scales[0, 0, 4 * s : 4 * s + 4, channel])


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_unpacking_is_the_inverse(d):
    generator = torch.Generator().manual_seed(d)
    for rows, pack, unpack in (
        ((256, d // 2, 256, d // 16), layout.pack_q, layout.unpack_q),
        ((256, d // 2, 256, d // 16), layout.pack_k, layout.unpack_k),
        ((128, d, 16, d), layout.pack_v, layout.unpack_v),
    ):
        codes, scales = (torch.randint(0, 256, (2, 3, *shape), generator=generator, dtype=torch.uint8) for shape in (rows[:2], rows[2:]))
        assert all(torch.equal(a, b) for a, b in zip(unpack(pack(codes, scales)), (codes, scales), strict=True))


# Which kernel serves


@pytest.fixture
def blackwell(monkeypatch):
    """A GPU of compute capability 12.0, and a library that loads."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (12, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(library, "load", lambda product: None)
    monkeypatch.setattr("videoqat.attention.triton_backend._missing", lambda device_type: None)


def test_on_such_a_gpu_it_is_the_one_that_serves(blackwell):
    receipt = resolve("attn_qat", "cuda", torch.bfloat16, 128)
    assert (receipt.kernel, receipt.native) == ("cuda_nvfp4", True)
    for case in (("attn_qat", torch.bfloat16, 128, True), ("qk_nvfp4", torch.bfloat16, 128, False), ("attn_qat", torch.float32, 64, False)):
        recipe, dtype, head_dim, training = case
        chosen = resolve(recipe, "cuda", dtype, head_dim, training=training)
        assert chosen.kernel == "triton"
        assert ("cuda_nvfp4 doesn't serve here: it" in chosen.reason) == (not training)
    emulated = resolve("attn_qat", "cuda", torch.bfloat16, 128, kernel="cuda_nvfp4_emulated")
    assert not emulated.native
    assert "emulated" in emulated.reason


def test_what_serves_is_decided_by_the_gpu_that_holds_the_tensors(blackwell, monkeypatch):
    """Two kinds of GPU in one machine: which of them is current says nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0) if str(device) == "cuda:1" else (8, 9))
    assert resolve("attn_qat", "cuda:1", torch.bfloat16, 128).kernel == "cuda_nvfp4"
    receipt = resolve("attn_qat", torch.device("cuda:0"), torch.bfloat16, 128)
    assert receipt.kernel == "triton"
    assert "doesn't serve" not in receipt.reason
    with pytest.raises(AttentionError, match="this GPU is sm_89"):
        resolve("attn_qat", "cuda:0", torch.bfloat16, 128, kernel="cuda_nvfp4")


def test_a_library_that_is_not_built_is_told(blackwell, monkeypatch):
    def missing(product):
        raise library.LibraryError(f"{product} is not built: make kernels")

    monkeypatch.setattr(library, "load", missing)
    receipt = resolve("attn_qat", "cuda", torch.bfloat16, 128)
    assert receipt.kernel == "triton"
    assert receipt.reason.endswith("cuda_nvfp4 doesn't serve here: native is not built: make kernels")
    with pytest.raises(AttentionError, match="native is not built: make kernels; would work: triton"):
        resolve("attn_qat", "cuda", torch.bfloat16, 128, kernel="cuda_nvfp4")


def test_on_other_gpus_it_is_passed_by(blackwell, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert resolve("attn_qat", "cuda", torch.bfloat16, 128).kernel == "triton"
    assert "this GPU is sm_90" in (NATIVE.why_not(RECIPES["attn_qat"], "cuda", torch.bfloat16, 128, False) or "")
    assert EMULATED.why_not(RECIPES["attn_qat"], "cuda", torch.bfloat16, 128, False) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "from sm_80 on" in (EMULATED.why_not(RECIPES["attn_qat"], "cuda", torch.bfloat16, 128, False) or "")


@pytest.mark.parametrize(
    ("recipe", "dtype", "head_dim", "training", "why"),
    [
        (RECIPES["attn_qat"], torch.bfloat16, 128, True, "inference only"),
        (RECIPES["mxfp4"], torch.bfloat16, 128, False, "it multiplies nvfp4, not qk=mxfp4 and pv=mxfp4"),
        (RECIPES["sage3"], torch.bfloat16, 128, False, "no two_level_p"),
        (AttentionRecipe("d", scale_divisors=(6.0,) * 9), torch.bfloat16, 128, False, "at most 8 scale divisors, not 9"),
        (RECIPES["attn_qat"], torch.float32, 128, False, "bf16 and fp16, not torch.float32"),
        (RECIPES["attn_qat"], torch.bfloat16, 96, False, "head_dim=96 is not 64 or 128"),
    ],
)
def test_what_it_can_not_do(blackwell, recipe, dtype, head_dim, training, why):
    for kernel in (NATIVE, EMULATED):
        assert why in (kernel.why_not(recipe, "cuda", dtype, head_dim, training) or "")
        assert kernel.why_not(RECIPES["attn_qat_search"], "cuda", torch.float16, 64, False) is None


def test_on_a_cpu_neither_serves():
    for name in ("cuda_nvfp4", "cuda_nvfp4_emulated"):
        assert KERNELS[name].why_not(RECIPES["attn_qat"], "cpu", torch.bfloat16, 64, False) == "it runs on NVIDIA GPUs"


def test_a_scale_that_is_not_positive_is_refused():
    q = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(AttentionError, match=r"scale=0\.0 must be positive"):
        EMULATED.forward(q, q, q, None, RECIPES["attn_qat"], 0.0, False, False)
