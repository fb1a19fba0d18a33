"""Export: a diffusers folder whose transformer is the trained one, number for number, and which says what it was trained for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.disks import full_disk
from helpers.ranks import run_ranks
from helpers.training import tiny_config
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.fsdp import fully_shard

from videoqat.config import ExportConfig, ParallelConfig
from videoqat.errors import CheckpointError, UserError
from videoqat.models.spec import family_of, read_recipe
from videoqat.parallel.mesh import open_mesh
from videoqat.recipes import RECIPES
from videoqat.training import export as module
from videoqat.training import state
from videoqat.training.export import export, plan
from videoqat.training.state import Saver
from videoqat.training.trainer import train

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def run(tiny_pipeline: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with an EMA."""
    out = tmp_path_factory.mktemp("export") / "run"
    train(tiny_config(tiny_pipeline, tiny_cache, out, train__steps=2, train__save_every=1, optimizer__ema_decay=0.5))
    return out


def stored(checkpoint: Path, part: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {part: {name: torch.zeros(tensor.shape) for name, tensor in like.items()}}
    state.load(checkpoint, tensors)
    return tensors[part]


@pytest.mark.parametrize("weights", ["auto", "ema", "raw"])
def test_export_round_trip(run: Path, tiny_pipeline: Path, tmp_path: Path, weights: str) -> None:
    out = tmp_path / "out"
    result = export(ExportConfig(run=str(run), out=str(out), weights=weights))
    exported, base = (load_file(folder / "transformer" / WEIGHTS) for folder in (out, tiny_pipeline))
    assert exported.keys() == base.keys()  # no wrapper's prefix
    part = "model" if weights == "raw" else "ema"
    for name, tensor in stored(run / "checkpoints/step-000002", part, base).items():
        assert torch.equal(exported[name], tensor), name
        assert exported[name].dtype == base[name].dtype
    assert any(not torch.equal(exported[name], base[name]) for name in base)
    assert (result["weights"], result["steps"], result["tensors"]) == ("raw" if weights == "raw" else "ema", 2, len(base))
    assert read_recipe(out) == RECIPES["attn_qat"]
    record = json.loads((out / "videoqat.json").read_text())
    assert record["provenance"]["versions"]["torch"] == torch.__version__
    assert record["training"]["steps"] == 2
    assert record["training"]["config"]["optimizer"]["ema_decay"] == 0.5
    assert record["training"]["loss"] == state.read_meta(run / "checkpoints/step-000002")["loss"]
    # All else is the base's, as files of its own.
    others = {p.relative_to(tiny_pipeline) for p in tiny_pipeline.rglob("*") if p.is_file() and p.parent.name != "transformer"}
    assert {p.relative_to(out) for p in out.rglob("*") if p.is_file() and p.parent.name != "transformer"} == others | {Path("videoqat.json")}
    for path in others:
        assert (out / path).read_bytes() == (tiny_pipeline / path).read_bytes()
        assert (out / path).stat().st_nlink == 1
        assert not (out / path).is_symlink()


def test_an_older_checkpoint_can_be_exported_by_path(run: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints/step-000001"
    assert plan(ExportConfig(run=str(run), checkpoint=str(checkpoint), out=str(tmp_path / "out")))["steps"] == 1
    assert not (tmp_path / "out").exists()
    export(ExportConfig(run=str(run), checkpoint=str(checkpoint), out=str(tmp_path / "out"), weights="raw"))
    exported = load_file(tmp_path / "out/transformer" / WEIGHTS)
    for name, tensor in stored(checkpoint, "model", exported).items():
        assert torch.equal(exported[name], tensor), name


def test_the_base_models_dtypes_stay(tiny_pipeline: Path, tiny_cache: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_pipeline, base)
    path = base / "transformer" / WEIGHTS
    tensors = load_file(path)
    half = {name: tensor.bfloat16() if "attn1.to" in name else tensor for name, tensor in tensors.items()}
    save_file(half, path, metadata={"format": "pt"})
    out = tmp_path / "run"
    train(tiny_config(base, tiny_cache, out, train__steps=1, from_scratch=False))
    export(ExportConfig(run=str(out), out=str(tmp_path / "out")))
    exported = load_file(tmp_path / "out/transformer" / WEIGHTS)
    assert {name: tensor.dtype for name, tensor in exported.items()} == {name: tensor.dtype for name, tensor in half.items()}
    for name, tensor in stored(out / "checkpoints/step-000001", "model", exported).items():
        assert torch.equal(exported[name], tensor.to(exported[name].dtype))


def test_of_a_pair_the_other_transformer_stays_and_each_recipe_is_noted(
    tiny_pipeline_pair: Path, tiny_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_pipeline_pair
    for component, recipe in (("transformer_2", "attn_qat_search"), ("transformer", "attn_qat")):
        before = {name: load_file(folder / name / WEIGHTS) for name in ("transformer", "transformer_2")}
        run, out = tmp_path / f"run_{component}", tmp_path / f"out_{component}"
        train(tiny_config(folder, tiny_cache, run, model__component=component, recipe=recipe, train__steps=1, from_scratch=False))
        export(ExportConfig(run=str(run), out=str(out)))
        for name, tensors in before.items():
            after = load_file(out / name / WEIGHTS)
            assert all(torch.equal(after[key], tensors[key]) for key in tensors) == (name != component)
        folder = out
    record = json.loads((folder / "videoqat.json").read_text())
    assert {name: entry["recipe"]["name"] for name, entry in record["components"].items()} == {
        "transformer": "attn_qat",
        "transformer_2": "attn_qat_search",
    }
    assert record["training"]["base_training"]["component"] == "transformer_2"
    assert "were trained for different recipes" in capsys.readouterr().err


def test_the_pipeline_loads_and_generates_with_the_exported_weights(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(ExportConfig(run=str(run), out=str(out)))
    pipeline = family_of(out).load_pipeline(out, device="cpu", dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline("a bag moves up", num_frames=5, height=32, width=32, num_inference_steps=2, output_type="np", guidance_scale=1.0).frames
    assert frames.shape == (1, 5, 32, 32, 3)


def save_sharded(pipeline: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Rewrites a checkpoint as two ranks would have written it, with an average that differs from the weights; what the average is."""
    meta = json.loads((checkpoint / "meta.json").read_text())
    with open_mesh(ParallelConfig(), torch.device("cpu")) as mesh, Saver(mesh, checkpoint.parent, 5) as saver:
        transformer = family_of(pipeline).load_transformer(pipeline, "transformer", dtype=torch.float32, from_scratch=True, seed=3)
        fully_shard(transformer, mesh=mesh.fsdp_mesh)
        weights = transformer.state_dict()
        average = {name: (p.detach() + 1) / 2 for name, p in transformer.named_parameters()}
        optimizer = {name: {"exp_avg": torch.zeros_like(p), "step": torch.tensor(1.0)} for name, p in transformer.named_parameters()}
        saver.start(3, {"model": weights, "optimizer": optimizer, "ema": average}, meta | {"step": 3})
        saver.finish()
        return {name: p.full_tensor() for name, p in average.items()}  # type: ignore[attr-defined]


@pytest.mark.dist
def test_what_two_ranks_trained_is_exported_by_one_process_that_reads_the_weights_alone(
    run: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run")
    expected = run_ranks(save_sharded, 2, tiny_pipeline, tmp_path / "run/checkpoints/step-000002")[0]
    assert (tmp_path / "run/checkpoints/step-000003/__1_0.distcp").stat().st_size > 0

    read: list[str] = []
    reading = FileSystemReader.read_data

    def noting(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        read.extend(item.storage_index.fqn for item in plan.items)
        return reading(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", noting)
    monkeypatch.setenv("RANK", "1")  # under torchrun the others have nothing to do
    assert export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "out"))) == {}
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("RANK", "0")
    result = export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "out")))
    assert (result["steps"], result["weights"], result["tensors"]) == (3, "ema", len(expected))
    exported = load_file(tmp_path / "out/transformer" / WEIGHTS)
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(exported[name], tensor), name
    assert set(read) == {f"ema.{name}" for name in expected}  # not the weights under the average, and nothing of the optimiser


def test_a_checkpoint_of_an_earlier_version_can_still_be_exported(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step-000002"
    meta = json.loads((checkpoint / "meta.json").read_text())
    for group in ("parallel", "validation"):
        del meta["config"][group]
    kept = ("steps", "batch_size", "seed", "activation_checkpointing", "log_every", "save_every", "keep_last", "health_every", "resume")
    meta["config"]["train"] = {key: meta["config"]["train"][key] for key in kept} | {"accumulation": 2, "autocast": "none"}
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    marker = json.loads((checkpoint / "COMMITTED").read_text())
    marker["files"]["meta.json"] = (checkpoint / "meta.json").stat().st_size
    (checkpoint / "COMMITTED").write_text(json.dumps(marker))
    assert export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "out")))["steps"] == 2


def refuse(config: ExportConfig, message: str) -> None:
    for command in (export, plan):
        with pytest.raises(UserError, match=message):
            command(config)


def test_what_can_not_be_exported_is_one_line_and_nothing_is_written(run: Path, tiny_pipeline: Path, tiny_cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "there").mkdir()
    refuse(ExportConfig(run=str(run), out=str(tmp_path / "there")), "^out='.*there' is not legal; legal: a folder that is not there yet")
    (tmp_path / "file").touch()
    refuse(ExportConfig(run=str(run), out=str(tmp_path / "file" / "out")), "^out='.*file' can't be written: .*file is no folder")
    refuse(ExportConfig(run=str(tmp_path), out=str(out)), "holds no whole checkpoint")
    torn = tmp_path / "torn/checkpoints/step-000002"
    shutil.copytree(run / "checkpoints/step-000002", torn)
    (torn / "__0_0.distcp").unlink()
    refuse(ExportConfig(run=str(tmp_path / "torn"), out=str(out)), "holds no whole checkpoint")
    refuse(ExportConfig(run=str(run), checkpoint=str(torn), out=str(out)), "step-000002 is not a whole checkpoint: __0_0.distcp is missing")

    base = tmp_path / "base"
    shutil.copytree(tiny_pipeline, base)
    train(tiny_config(base, tiny_cache, tmp_path / "other", train__steps=1, from_scratch=False))
    other = ExportConfig(run=str(tmp_path / "other"), out=str(out), weights="ema")
    refuse(other, "weights='ema' is not legal; legal: auto or raw: this run kept no EMA")
    other.weights = "auto"
    tensors = load_file(base / "transformer" / WEIGHTS)
    for name in ("blocks.1.norm2.bias", "blocks.0.ffn.net.0.proj.weight"):  # a single tensor, however small (train.trainable)
        save_file({**tensors, name: tensors[name] + 1}, base / "transformer" / WEIGHTS, metadata={"format": "pt"})
        refuse(other, r"base is no longer the model that .*step-000001 was trained from: its transformer differs")
    for torn in (b"", b"no safetensors", b"\x08\0\0\0\0\0\0\0[1, 2, 3]"):
        (base / "transformer" / WEIGHTS).write_bytes(torn)
        refuse(other, f"{WEIGHTS} is no safetensors file: its header can't be read")
    shutil.rmtree(base)
    refuse(other, "was trained from .*base, which is not there any more")
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))


def test_an_export_that_reads_back_wrong_is_not_kept(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = module._trained_transformer

    def tampering(source: Any) -> Any:
        transformer = written(source)
        save = transformer.save_pretrained

        def save_other(folder: Path) -> None:
            save(folder)
            tensors = load_file(folder / WEIGHTS)
            tensors["blocks.1.attn1.to_q.bias"][3] += 1e-3
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

        transformer.save_pretrained = save_other
        return transformer

    monkeypatch.setattr(module, "_trained_transformer", tampering)
    with pytest.raises(CheckpointError, match=r"export failed: blocks.1.attn1.to_q.bias read back"):
        export(ExportConfig(run=str(run), out=str(tmp_path / "out")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("full_at", ["what is copied", "the transformer"])
def test_a_full_disk_is_one_line_and_nothing_is_left(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: str) -> None:
    if full_at == "the transformer":
        monkeypatch.setattr(shutil, "copytree", lambda *args, **options: None)
    with full_disk(20_000), pytest.raises(UserError, match=r"out='.*/out' can't be written: .*File too large.*; nothing of it is left"):
        export(ExportConfig(run=str(run), out=str(tmp_path / "out")))
    assert not list(tmp_path.iterdir())
