"""Loading real checkpoints: from the hub (simulated), in shards, from one file, into little memory; and everything that can be wrong with them."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from helpers.pipelines import enliven
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file

from videoqat.cli import main
from videoqat.config import (
    CompareConfig,
    CompareEntry,
    ConvertConfig,
    GenerateConfig,
    GenerationRuntimeConfig,
    ModelConfig,
    RuntimeConfig,
    SamplingConfig,
    TrainConfig,
    hub_name,
)
from videoqat.errors import CheckpointError, ConfigError
from videoqat.generation.engine import Engine
from videoqat.models import hub
from videoqat.models.convert import convert
from videoqat.models.spec import family_of
from videoqat.models.weights import num_weights, weight_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
SAMPLING = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2)
CPU = RuntimeConfig(device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_pipeline: Path) -> Path:
    """A tiny Wan pipeline that shows something. Shared: copy it before changing it."""
    return enliven(tiny_pipeline, tmp_path_factory.mktemp("loading") / "model")


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


# Names


def test_names_of_the_hub() -> None:
    assert hub_name("Wan-AI/Wan2.1-T2V-1.3B-Diffusers") == ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "main")
    assert hub_name("org/name@refs/pr/2") == ("org/name", "refs/pr/2")
    for other in ("name", "/org/name", "./org/name", "a/b/c", "org/name@", "", "org/na me"):
        assert hub_name(other) is None


def test_every_setting_that_takes_a_model_is_resolved(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(hub, "resolve", lambda reference, *, weights: asked.append((reference, weights)) or "/folder")
    compare = CompareConfig(entries=[CompareEntry(name="a", model="o/a"), CompareEntry(name="b", model="o/b")])
    resolved = hub.resolve_models(compare)
    assert [entry.model for entry in resolved.entries] == ["/folder", "/folder"]
    assert [entry.model for entry in compare.entries] == ["o/a", "o/b"]
    assert hub.resolve_models(TrainConfig(model=ModelConfig(path="o/c", component="transformer_2"))).model == ModelConfig("/folder", "transformer_2")
    assert hub.resolve_models(GenerateConfig(model="o/d"), weights=False).model == "/folder"
    assert asked == [("o/a", True), ("o/b", True), ("o/c", True), ("o/d", False)]


# The hub


class FakeHub:
    """A hub with one repository, the folder `files`, and a cache beside it, laid out as huggingface_hub does."""

    def __init__(self, files: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files, self.cache, self.fetched, self.error = files, cache, [], None
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda _, name, revision: self.info(name, revision))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    @property
    def listed(self) -> list[str]:
        return [path.relative_to(self.files).as_posix() for path in self.files.rglob("*") if path.is_file()]

    def info(self, name: str, revision: str) -> Any:
        if self.error is not None:
            raise self.error
        if (name, revision) not in (("org/tiny", "main"), ("org/tiny", COMMIT)):
            kind = hub_errors.RevisionNotFoundError if name == "org/tiny" else hub_errors.RepositoryNotFoundError
            raise kind.__new__(kind)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.listed])

    def download(self, name: str, revision: str, allow_patterns: list[str]) -> str:
        folder = self.cache / "models--org--tiny" / "snapshots" / COMMIT
        (self.cache / "models--org--tiny" / "refs").mkdir(parents=True, exist_ok=True)
        (self.cache / "models--org--tiny" / "refs" / "main").write_text(COMMIT)
        for path in set(allow_patterns) & set(self.listed):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.files / path, folder / path)
            self.fetched.append(path)
        return str(folder)


@pytest.fixture
def fake(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.chdir(tmp_path)
    return FakeHub(copy, tmp_path / "cache", monkeypatch)


def test_what_is_needed_is_fetched_once(fake: FakeHub) -> None:
    for needless in (
        "README.md",
        "transformer/diffusion_pytorch_model.fp16.safetensors",
        "text_encoder/pytorch_model.bin",
        "original/model.safetensors",
    ):
        (fake.files / needless).parent.mkdir(exist_ok=True)
        (fake.files / needless).write_bytes(b"needless")
    folder = hub.resolve("org/tiny", weights=False)
    assert not any(path.endswith(".safetensors") for path in fake.fetched)
    assert hub.resolve("org/tiny") == folder
    assert sorted(fake.fetched[-3:]) == [
        WEIGHTS.replace("transformer/diffusion_pytorch_", "text_encoder/"),
        WEIGHTS,
        WEIGHTS.replace("transformer", "vae"),
    ]
    assert not any((Path(folder) / path).read_text(errors="ignore") == "needless" for path in fake.fetched)
    assert Engine(folder, CPU).family.name == "wan"
    # From now on nobody asks the hub, by branch or by commit.
    fake.error, count = AssertionError("the hub was asked"), len(fake.fetched)
    assert hub.resolve("org/tiny") == hub.resolve(f"org/tiny@{COMMIT}") == hub.resolve("org/tiny", weights=False) == folder
    assert len(fake.fetched) == count
    assert hub.origin(folder) == {"folder": folder, "hub": "org/tiny", "commit": COMMIT}


def test_a_snapshot_that_is_not_whole_is_completed(fake: FakeHub) -> None:
    folder = Path(hub.resolve("org/tiny"))
    (folder / WEIGHTS).unlink()
    fake.fetched.clear()
    assert hub.resolve("org/tiny") == str(folder)
    assert WEIGHTS in fake.fetched
    (folder / WEIGHTS).unlink()
    fake.error = hub_errors.OfflineModeIsEnabled()
    with pytest.raises(CheckpointError, match=r"org/tiny is not whole in the cache, and the hub may not be asked: HF_HUB_OFFLINE is set"):
        hub.resolve("org/tiny")


def test_a_folder_here_comes_before_the_hub(fake: FakeHub, tmp_path: Path) -> None:
    fake.error = AssertionError("the hub was asked")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert hub.resolve("org/tiny") == "org/tiny"
    assert hub.resolve(str(tmp_path)) == str(tmp_path)


def _gated() -> Exception:
    return hub_errors.GatedRepoError.__new__(hub_errors.GatedRepoError)


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("org/other", None, "org/other is neither a folder here nor a repository of the hub"),
        ("org/tiny@v2", None, "org/tiny@v2: the hub has org/tiny, but no revision 'v2'"),
        ("org/tiny", _gated, "org/tiny: the repository is gated; accept its terms at https://huggingface.co/org/tiny"),
        ("org/tiny", lambda: ConnectionError("no\nroute"), "nor whole in the cache, and the hub can't be reached: ConnectionError: no route"),
    ],
)
def test_a_hub_that_can_not_serve(fake: FakeHub, reference: str, error: Callable[[], Exception] | None, message: str) -> None:
    fake.error = error() if error else None
    with pytest.raises(CheckpointError, match=message):
        hub.resolve(reference)


def test_repositories_that_hold_something_else(fake: FakeHub) -> None:
    (fake.files / WEIGHTS).rename((fake.files / WEIGHTS).with_suffix(".bin"))
    with pytest.raises(
        CheckpointError, match=rf"the repository has no {WEIGHTS}; it has transformer/diffusion_pytorch_model.bin, a format that isn't"
    ):
        hub.resolve("org/tiny")
    (fake.files / "model_index.json").unlink()
    shutil.rmtree(fake.cache)
    with pytest.raises(CheckpointError, match=r"org/tiny is no diffusers pipeline: the repository has no model_index.json"):
        hub.resolve("org/tiny", weights=False)


def test_a_command_takes_a_name(fake: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["sampling.num_frames=5", "sampling.height=32", "sampling.width=32", "sampling.num_inference_steps=1"]
    words = ["generate", "model=org/tiny", "prompt=a", f"out={tmp_path / 'a.mp4'}", "runtime.vae_tiling=true", *size]
    assert main([*words, "--dry-run"]) == 0
    assert not any(path.endswith(".safetensors") for path in fake.fetched)
    assert main(words) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    assert (record["model"]["hub"], record["model"]["commit"]) == ("org/tiny", COMMIT)
    assert record["config"]["runtime"] | {"vae_tiling": True, "offload": "none"} == record["config"]["runtime"]
    assert main(["doctor", "model=org/nothing"]) == 2
    assert "org/nothing is neither a folder here nor a repository" in capsys.readouterr().err


# Files


def shard(folder: Path) -> None:
    """The transformer's weights in several files with an index."""
    component = folder / "transformer"
    transformer: Any = family_of(folder).load_transformer(folder, "transformer", dtype=torch.float32)
    (folder / WEIGHTS).unlink()
    transformer.save_pretrained(component, max_shard_size="1MB")


def test_shards(copy: Path, model: Path) -> None:
    shard(copy)
    files = weight_files(copy / "transformer")
    assert len(files) > 1
    assert num_weights(copy / "transformer") == num_weights(model / "transformer")
    # Another precision beside them is not theirs.
    shutil.copy(model / WEIGHTS, copy / WEIGHTS.replace(".safetensors", ".fp16.safetensors"))
    load = lambda folder: family_of(folder).load_transformer(folder, "transformer", dtype=torch.float32).state_dict()  # noqa: E731
    ours, theirs = load(copy), load(model)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=rf"{files[1].name} is torn or no safetensors file"):
        load(copy)
    files[1].unlink()
    with pytest.raises(CheckpointError, match=rf"{files[1].name} is missing \(and 0 more of {len(files)} shards"):
        load(copy)


def test_pickles_are_refused(copy: Path) -> None:
    (copy / WEIGHTS).rename((copy / WEIGHTS).with_suffix(".bin"))
    with pytest.raises(
        CheckpointError, match=r"has its weights in diffusion_pytorch_model.bin only, which isn't read: such a file can run any program"
    ):
        Engine(copy, CPU)


def test_fused_projections_are_refused(copy: Path) -> None:
    weights = load_file(copy / WEIGHTS)
    fused = torch.cat([weights.pop(f"blocks.0.attn1.to_{name}.weight") for name in "qkv"])
    save_file(weights | {"blocks.0.attn1.to_qkv.weight": fused}, copy / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"blocks.0.attn1.to_qkv.weight is a fused projection .* call unfuse_qkv_projections\(\)"):
        Engine(copy, CPU)


def test_weights_that_another_tool_has_quantised_are_refused(copy: Path) -> None:
    """Codes would have been taken for weights where they are sharded, and ended in torch's traceback elsewhere."""
    weights = load_file(copy / WEIGHTS)
    names = [f"blocks.{i}.attn1.to_q.weight" for i in range(2)]
    save_file(weights | {name: (100 * weights[name]).to(torch.int8) for name in names}, copy / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"blocks.0.attn1.to_q.weight holds integers, I8 \(and 1 more\); .*legal: floating point numbers"):
        Engine(copy, CPU)
    save_file({name: tensor.to(torch.float8_e4m3fn if name in names else torch.float64) for name, tensor in weights.items()}, copy / WEIGHTS)
    dtypes = {p.dtype for p in family_of(copy).load_transformer(copy, "transformer", dtype=torch.bfloat16).parameters()}
    assert dtypes == {torch.bfloat16, torch.float32}  # whatever the file has


@pytest.mark.parametrize("part", ["vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors", "vae/config.json", "tokenizer"])
def test_a_missing_part_is_named_before_anything_is_loaded(copy: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.setattr(type(family_of(copy)), "load_pipeline", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(CheckpointError, match=Path(part).name):
        Engine(copy, CPU)


def test_a_folder_of_only_a_transformer(model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"transformer holds a part of a pipeline alone, a WanTransformer3DModel"):
        family_of(model / "transformer")


# One file


def original_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Wan's weights as its authors name them."""
    pairs = [
        ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
        ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
        ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
        ("condition_embedder.time_proj", "time_projection.1"),
        ("proj_out", "head.head"),
        ("ffn.net.0.proj", "ffn.0"),
        ("ffn.net.2", "ffn.2"),
        (".norm2", ".norm3"),
        ("attn1.to_out.0", "self_attn.o"),
        ("attn2.to_out.0", "cross_attn.o"),
        *((f"attn{i}.to_{x}", f"{kind}_attn.{x}") for i, kind in ((1, "self"), (2, "cross")) for x in "qkv"),
        *((f"attn{i}.norm_{x}", f"{kind}_attn.norm_{x}") for i, kind in ((1, "self"), (2, "cross")) for x in "qk"),
    ]
    found = {}
    for name, tensor in weights.items():
        renamed = "head.modulation" if name == "scale_shift_table" else name.replace("scale_shift_table", "modulation")
        for ours, theirs in pairs:
            renamed = renamed.replace(ours, theirs)
        found[renamed] = tensor
    return found


def convert_to(tmp_path: Path, base: Path, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "file.safetensors")
    config = ConvertConfig(model=str(base), transformer_file=str(tmp_path / "file.safetensors"), out=str(tmp_path / "out"))
    config.validate()
    return convert(config)


@pytest.mark.parametrize("names", ["diffusers", "original"])
def test_one_file(tmp_path: Path, model: Path, names: str) -> None:
    wanted = {name: torch.randn_like(tensor).bfloat16() for name, tensor in load_file(model / WEIGHTS).items()}
    result = convert_to(tmp_path, model, wanted if names == "diffusers" else original_names(wanted))
    assert (result["names"], result["dtypes"]) == (names, ["bfloat16"])
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert set(written) == set(wanted)
    assert all(torch.equal(written[name], tensor) for name, tensor in wanted.items())
    found = hub.origin(tmp_path / "out")["converted_from"]
    assert (found["base"]["folder"], Path(found["file"]).name) == (str(model), "file.safetensors")
    assert Engine(tmp_path / "out", CPU).generate("a", 0, SAMPLING, "bf16").frames.shape == (5, 32, 32, 3)


def test_one_file_of_something_else(tmp_path: Path, model: Path) -> None:
    weights = original_names(load_file(model / WEIGHTS))
    with pytest.raises(CheckpointError, match=r"file.safetensors: weights lack blocks.1.attn1.to_q.bias"):
        convert_to(tmp_path, model, {name: tensor for name, tensor in weights.items() if name != "blocks.1.self_attn.q.bias"})
    with pytest.raises(CheckpointError, match=r"weights hold lora.weight"):
        convert_to(tmp_path, model, weights | {"lora.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"blocks.1.attn1.to_q.bias holds integers, torch.int8 \(and 0 more\)"):
        convert_to(tmp_path, model, weights | {"blocks.1.self_attn.q.bias": weights["blocks.1.self_attn.q.bias"].to(torch.int8)})
    (tmp_path / "file.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"file.safetensors is torn or no safetensors file"):
        convert(ConvertConfig(model=str(model), transformer_file=str(tmp_path / "file.safetensors"), out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_one_file_where_diffusers_knows_no_names(tmp_path: Path) -> None:
    from videoqat.models.published import published, write_folder

    base = write_folder(tmp_path / "cogvideox", "cogvideox-2b")
    assert "cogvideox-2b" in published()
    with pytest.raises(
        CheckpointError, match=r"doesn't have diffusers' names of a CogVideoXTransformer3DModel's weights, and diffusers knows no others"
    ):
        convert_to(tmp_path, base, {"transformer.layers.0.attention.dense.weight": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"transformer_file='.*a.gguf' is not legal; legal: a .safetensors file"):
        (tmp_path / "a.gguf").touch()
        ConvertConfig(model=str(base), transformer_file=str(tmp_path / "a.gguf"), out=str(tmp_path / "out")).validate()


def test_dtypes_are_those_that_diffusers_gives(copy: Path) -> None:
    from diffusers import WanTransformer3DModel

    shard(copy)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours = family_of(copy).load_transformer(copy, "transformer", dtype=dtype)
        theirs = WanTransformer3DModel.from_pretrained(copy, subfolder="transformer", dtype=dtype)
        expected = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
        found = dict(ours.named_parameters()) | dict(ours.named_buffers())
        assert found.keys() == expected.keys()
        assert all(tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]) for name, tensor in found.items())
        assert not ours.training
        assert ours.dtype == theirs.dtype


# Memory

LOAD = """
import re, sys, torch
from videoqat.models.spec import family_of
def peak(reset=False):
    if reset: open("/proc/self/clear_refs", "w").write("5")
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
family = family_of(sys.argv[1])
family.build(sys.argv[1], "transformer")  # imports
from diffusers import WanTransformer3DModel
before = peak(reset=True)
transformer = family.load_transformer(sys.argv[1], "transformer", dtype=torch.bfloat16)
print(peak() - before, sum(p.numel() * p.element_size() for p in transformer.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory")
def test_loading_takes_one_shard_more_than_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """90 M weights in fp32, 360 MB in shards of 70 MB, loaded as bf16: 180 MB, and one shard."""
    from videoqat.models.published import TINY, published, random_transformer, write_folder

    model = published()[TINY]
    sizes = {"num_attention_heads": 8, "attention_head_dim": 128, "num_layers": 5, "ffn_dim": 4096}
    monkeypatch.setitem(published(), TINY, dataclasses.replace(model, transformer=model.transformer | sizes))
    folder = write_folder(tmp_path / "model", TINY)
    transformer: Any = random_transformer(folder, "transformer", "cpu", torch.float32, 0)
    transformer.save_pretrained(folder / "transformer", max_shard_size="70MB")
    largest = max(path.stat().st_size for path in weight_files(folder / "transformer"))
    del transformer
    done = subprocess.run([sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, check=True)
    peak, size = map(int, done.stdout.split()[-2:])
    assert size > 150e6
    assert peak < size + 1.5 * largest


# Offloading and tiles


class Moves:
    """Stands in for a pipeline: notes what was called."""

    def __init__(self, vae: Any) -> None:
        self.vae, self.transformer, self.scheduler, self.calls = vae, torch.nn.Linear(1, 1), None, []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, {key: str(value) for key, value in kwargs.items()}))


@pytest.mark.parametrize(
    ("offload", "method"), [("model", "enable_model_cpu_offload"), ("sequential", "enable_sequential_cpu_offload"), ("none", None)]
)
def test_offloading_loads_on_the_host_and_lets_diffusers_move(model: Path, monkeypatch: pytest.MonkeyPatch, offload: str, method: str | None) -> None:
    loaded = []
    pipeline = Moves(SimpleNamespace(enable_tiling=lambda: loaded.append("tiling")))
    monkeypatch.setattr(type(family_of(model)), "load_pipeline", lambda _, folder, device, dtype: loaded.append(str(device)) or pipeline)
    monkeypatch.setattr(RuntimeConfig, "resolve", lambda _: (torch.device("cuda", 0), torch.bfloat16))
    Engine(model, GenerationRuntimeConfig(device="cuda:0", offload=offload, vae_tiling=True))
    assert loaded == ["cpu" if method else "cuda:0", "tiling"]
    assert [call for call in pipeline.calls if "offload" in call[0]] == ([(method, (), {"device": "cuda:0"})] if method else [])


def test_what_can_not_be(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"runtime.offload='model' is not legal; legal: none on device cpu"):
        Engine(model, GenerationRuntimeConfig(device="cpu", offload="model"))
    with pytest.raises(ConfigError, match=r"runtime.offload='disk' is not legal; legal: none, model, sequential"):
        GenerationRuntimeConfig(offload="disk").validate()
    monkeypatch.setattr(type(family_of(model)), "load_pipeline", lambda *_, **__: Moves(SimpleNamespace()))
    with pytest.raises(ConfigError, match=r"runtime.vae_slicing=True is not legal; legal: false for .*: its SimpleNamespace has no slicing"):
        Engine(model, GenerationRuntimeConfig(device="cpu", vae_slicing=True))


def test_modules_that_come_and_go_compute_the_same(model: Path) -> None:
    """With accelerate's hooks on every module, as offloading has them, our processors find weights and give the same numbers."""
    from accelerate import cpu_offload

    engine = Engine(model, CPU)
    expected = engine.generate("a", 3, SAMPLING, "attn_qat")
    cpu_offload(engine.pipeline.transformer, torch.device("cpu"), offload_buffers=True)
    assert engine.pipeline.transformer.blocks[0].attn1.to_q.weight.is_meta
    engine.install(expected.recipe)
    again = engine.generate("a", 3, SAMPLING, "attn_qat")
    assert (again.frames == expected.frames).all()
    assert again.receipts == expected.receipts
    other = engine.generate("a", 3, SAMPLING, "bf16")
    assert (other.frames != expected.frames).any()


def test_tiles_and_slices(model: Path) -> None:
    plain = Engine(model, CPU).generate("a", 3, SAMPLING, "bf16").frames
    tiled = Engine(model, GenerationRuntimeConfig(device="cpu", vae_tiling=True, vae_slicing=True))
    assert tiled.pipeline.vae.use_tiling
    assert tiled.pipeline.vae.use_slicing
    assert tiled.generate("a", 3, SAMPLING, "bf16").frames.shape == plain.shape


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_offloading_on_a_gpu(model: Path, offload: str) -> None:
    whole = Engine(model, GenerationRuntimeConfig(device="cuda")).generate("a", 3, SAMPLING, "attn_qat")
    engine = Engine(model, GenerationRuntimeConfig(device="cuda", offload=offload))
    assert {p.device.type for p in engine.pipeline.transformer.parameters()} <= {"cpu", "meta"}
    for _ in range(2):
        result = engine.generate("a", 3, SAMPLING, "attn_qat")
        assert (result.frames == whole.frames).all()
        assert result.receipts == whole.receipts
        assert all(result.timings[key] > 0 for key in ("text_s", "denoise_s", "vae_s"))
    assert {p.device.type for p in engine.pipeline.text_encoder.parameters()} <= {"cpu", "meta"}
