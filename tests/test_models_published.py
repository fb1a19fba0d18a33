"""Published models: their sizes, and what the documentation says that they need."""

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from videoqat.config import DoctorConfig, parse_bucket
from videoqat.doctor import describe_published, doctor, model_table
from videoqat.errors import ConfigError
from videoqat.generation import memory
from videoqat.models.published import TINY, published, random_transformer, write_folder
from videoqat.models.spec import families, family_of
from videoqat.parallel.mesh import divisors
from videoqat.recipes import get_recipe

ROOT = Path(__file__).resolve().parent.parent
# 10^9 weights, as their authors and the hub's pages count them.
COUNTS = {
    "wan2.1-t2v-1.3b": 1.42,
    "wan2.1-t2v-14b": 14.3,
    "wan2.1-i2v-14b-480p": 16.4,
    "wan2.1-i2v-14b-720p": 16.4,
    "wan2.2-t2v-a14b": 14.3,
    "wan2.2-i2v-a14b": 14.3,
    "wan2.2-ti2v-5b": 5.0,
    "cogvideox-2b": 1.69,
    "cogvideox-5b": 5.57,
    "cogvideox-5b-i2v": 5.57,
    "cogvideox1.5-5b": 5.57,
    "cogvideox1.5-5b-i2v": 5.57,
    "hunyuanvideo": 12.8,
    "hunyuanvideo1.5-480p-t2v": 8.3,
    "hunyuanvideo1.5-480p-i2v": 8.3,
    "hunyuanvideo1.5-720p-t2v": 8.3,
    "hunyuanvideo1.5-720p-i2v": 8.3,
}
EXACT = {"wan2.1-t2v-1.3b": 1_418_996_800, "wan2.1-t2v-14b": 14_288_491_584}  # as in the headers of the published files
TOKENS = {"wan2.1-t2v-1.3b": 32_760, "wan2.1-t2v-14b": 75_600, "cogvideox-2b": 17_550, "hunyuanvideo": 118_800}  # of the models' papers and cards
COUNTED = ("wan2.1-t2v-1.3b", "hunyuanvideo")  # whose row is computed anew; the others take as long again


def documented() -> dict[str, list[str]]:
    """Name -> cells of its row in docs/models.md."""
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs/models.md").read_text().splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): [cell.strip() for cell in row] for row in rows}


def test_every_pipeline_of_a_family_has_a_published_model() -> None:
    assert {*COUNTS, TINY} == set(published())
    assert set(documented()) == set(COUNTS)
    assert {model.pipeline for model in published().values()} == {name for family in families() for name in family.pipeline_classes}


@pytest.mark.parametrize("name", COUNTS)
def test_sizes(tmp_path: Path, name: str) -> None:
    model, row = published()[name], documented()[name]
    folder = write_folder(tmp_path / "model", name)
    family = family_of(folder)
    assert family.components(folder) == model.components
    size = parse_bucket("size", model.size)
    for component in model.components:
        transformer = family.build(folder, component)
        count = sum(parameter.numel() for parameter in transformer.parameters())
        assert count / 1e9 == pytest.approx(COUNTS[name], rel=0.01)
        assert count == EXACT.get(name, count)
        geometry = family.geometry(folder, component)
        geometry.check_size("size", *size)
        tokens = geometry.num_tokens(*size)
        assert tokens == TOKENS.get(name, tokens)
        quantised = [layer for layer in family.attention_layers(transformer) if get_recipe("attn_qat").covers(layer.kind, layer.index)]
        pair = f"{len(model.components)} x " if len(model.components) > 1 else ""
        cells = [f"{pair}{count / 1e9:.2f}", f"{pair}{len(quantised)}", model.size, f"{tokens:,} + {family.text_tokens(folder)}"]
        assert row[1:6] == [*cells, ", ".join(map(str, divisors(geometry.num_heads)))]


@pytest.mark.parametrize("name", COUNTED)
def test_the_documented_memory_is_what_doctor_says(name: str) -> None:
    described = describe_published(name)
    ours = [cell.strip() for cell in model_table([described])[-1].split("|")[1:-1]]
    theirs = documented()[name]
    assert ours[:6] == theirs[:6]
    for mine, documented_cell in zip(ours[6:], theirs[6:], strict=True):
        assert float(documented_cell) == pytest.approx(float(mine), rel=0.02), f"docs/models.md should hold: {ours}"
    memory = described["generation_memory"]
    assert memory["total"] == sum(memory[part] for part in ("encoders", "transformers", "denoising"))
    assert memory["transformers"] >= 2 * len(published()[name].components) * described["transformer"]["parameters"]
    assert memory["offloaded"] < memory["total"]


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "hunyuanvideo"])
def test_the_estimate_is_what_a_gpu_took(tmp_path: Path, name: str) -> None:
    """Against the peaks that `bench forward` measured on an H200."""
    measured = json.loads((ROOT / f"docs/benchmarks/2026-11-forward-h200-{name}.json").read_text())
    folder = str(write_folder(tmp_path / "model", name))
    estimate = memory.generation_memory(folder, parse_bucket("size", measured["size"]), {"text_encoder": 0})
    bf16 = next(one for one in measured["contenders"] if one["name"] == "bf16")
    assert estimate["transformers"] == pytest.approx(measured["weight_bytes"], rel=0.001)
    assert estimate["offloaded"] == pytest.approx(bf16["peak_bytes"], rel=0.06)


def test_doctor_knows_published_names(capsys: pytest.CaptureFixture[str]) -> None:
    described = doctor(DoctorConfig(model=TINY))
    assert described["transformer"]["num_tokens"] == 80
    assert described["origin"] == {"hub": published()[TINY].repository}
    assert described["decoding_memory"]["total"] > described["decoding_memory"]["vae"] > 0
    assert "decoding memory for 17x64x64, GiB: vae 0.5" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"model='wan9' is not legal; legal: an existing folder, org/name\[@REVISION\] on the hub, or one of wan2"):
        doctor(DoctorConfig(model="wan9"))
    with pytest.raises(ConfigError, match="size: width 40 doesn't fit"):
        doctor(DoctorConfig(model=TINY, size="17x64x40"))


def test_doctor_names_an_encoder_that_it_cannot_read(tiny_pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(tiny_pipeline, tmp_path / "model"))
    assert doctor(DoctorConfig(model=str(folder)))["generation_memory"]["encoders"] > 0
    (folder / "text_encoder" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "generation_memory" not in doctor(DoctorConfig(model=str(folder)))
    assert "can't be told: " in (said := capsys.readouterr().err)
    assert "text_encoder/model.safetensors is torn" in said


def test_what_lives_is_added_up() -> None:
    weight = torch.zeros(1000)
    with memory._Living(weight) as living:
        a = weight.view(10, 100) + 1  # the view is of what was there before
        b = a + 1
        del a
        c = b.view(-1)[:10] * 2
        assert (living.now, living.most) == (4000 + 40, 8000)
        del b, c
    assert living.now == 0


def test_blocks_of_one_kind_count_once() -> None:
    """The same as if every block ran."""
    model = published()[TINY]
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as work:
        found = []
        for layers, all_run in ((2, False), (5, False), (5, True)):
            monkeypatch.setitem(published(), TINY, dataclasses.replace(model, transformer=model.transformer | {"num_layers": layers}))
            if all_run:
                monkeypatch.setattr(memory, "_run_first_of_each_kind", lambda blocks: None)
            folder = str(write_folder(Path(work) / f"{layers}-{all_run}", TINY))
            found.append(memory.generation_memory(folder, (17, 64, 64), {"text_encoder": 10})["denoising"])
    assert found[0] == found[1] == found[2] > 0


def test_random_weights_are_of_the_dtype_asked_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", TINY, random_on="cpu")
    state = family_of(folder).load_transformer(folder, "transformer", dtype=torch.bfloat16).state_dict()
    again = random_transformer(folder, "transformer", "cpu", torch.bfloat16, 0).state_dict()
    assert {tensor.dtype for tensor in again.values()} == {torch.bfloat16, torch.float32}  # diffusers keeps some in float32
    assert all(torch.equal(state[name], again[name]) for name in again)
    other: Any = random_transformer(folder, "transformer", "cpu", torch.bfloat16, 1)
    assert not torch.equal(other.proj_out.weight, again["proj_out.weight"])
