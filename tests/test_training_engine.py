"""The FSDP engine: AdamW, clipping and average as plain torch computes them, in every layout; and what it gives to checkpoints and takes back."""

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import accumulate, loss_of, tiny_job
from helpers.pipelines import enliven
from helpers.ranks import run_ranks
from torch import Tensor

from videoqat.config import ExampleModelConfig, ParallelConfig
from videoqat.errors import CheckpointError
from videoqat.models.install import install
from videoqat.models.spec import family_of
from videoqat.models.tiny import build_pipeline
from videoqat.parallel.mesh import Mesh, open_mesh
from videoqat.training import state
from videoqat.training.engines import make_engine
from videoqat.training.optim import Ema

CPU = torch.device("cpu")
RATES = [1e-2, 5e-3, 2e-3, 1e-2]
# eps so large that a gradient of rounding errors alone moves nothing; clipping at less than every gradient's norm.
SETTINGS = {"train__batch_size": 2, "optimizer__eps": 1e-3, "optimizer__clip_norm": 0.5, "optimizer__weight_decay": 0.1, "optimizer__ema_decay": 0.7}


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wan")
    build_pipeline(ExampleModelConfig(out=str(root / "built"), num_layers=2, num_heads=2, head_dim=16))
    return enliven(root / "built", root / "alive")


def plain_run(folder: Path) -> tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor]]:
    """Loss and norm of each step, last weights, last average: all by plain torch, four samples a step."""
    family = family_of(folder)
    transformer = family.load_transformer(folder, "transformer", dtype=torch.float32).train()
    install(transformer, "attn_qat")
    optimizer = torch.optim.AdamW(transformer.parameters(), betas=(0.9, 0.999), eps=1e-3, weight_decay=0.1)
    average = {name: p.detach().clone() for name, p in transformer.named_parameters()}
    rows = []
    for rate in RATES:
        optimizer.zero_grad()
        loss = loss_of(family, transformer, folder, [0, 1, 2, 3]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(transformer.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        for name, parameter in transformer.named_parameters():
            average[name] = 0.7 * average[name] + 0.3 * parameter.detach()
        rows.append((loss.item(), norm.item()))
    return rows, {name: p.detach() for name, p in transformer.named_parameters()}, average


def steps(engine: Any, job: Any, mesh: Mesh, rates: list[float]) -> list[tuple[float, float]]:
    rows = []
    for rate in rates:
        loss = accumulate(engine, job, mesh, 4)
        norm = engine.gradient_norm()
        engine.update(rate, norm)
        rows.append((loss, norm))
    return rows


def engine_run(folder: Path, layout: tuple[int, int, int], out: Path) -> Any:
    """The same in a layout: two steps, saved; two steps on. Loss and norm of each step, last weights, last average."""
    replicate, shard, sp = layout
    with open_mesh(ParallelConfig(dp_replicate=replicate, dp_shard=shard, sp=sp), CPU) as mesh:
        job = tiny_job(folder, **SETTINGS)
        engine: Any = make_engine(job, mesh)
        rows = steps(engine, job, mesh, RATES[:2])
        state.save(out, 2, engine.tensors(), {"step": 2}, keep_last=1, group=mesh.cpu_group)
        rows += steps(engine, job, mesh, RATES[2:])
        tensors = engine.tensors()
        del engine
        gc.collect()
        return rows, *({name: x.full_tensor() for name, x in tensors[kind].items()} for kind in ("model", "ema"))


def continued(folder: Path, layout: tuple[int, int, int], checkpoint: Path) -> Any:
    """The two steps after the save, in a layout."""
    replicate, shard, sp = layout
    with open_mesh(ParallelConfig(dp_replicate=replicate, dp_shard=shard, sp=sp), CPU) as mesh:
        job = tiny_job(folder, **SETTINGS)
        engine: Any = make_engine(job, mesh)
        engine.restore(checkpoint)
        rows = steps(engine, job, mesh, RATES[2:])
        tensors = engine.tensors()
        del engine
        gc.collect()
        return rows, *({name: x.full_tensor() for name, x in tensors[kind].items()} for kind in ("model", "ema"))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= tolerance * tensor.norm() + 1e-7, name


@pytest.fixture(scope="module")
def alone(wan: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    out = tmp_path_factory.mktemp("alone")
    return engine_run(wan, (1, 1, 1), out), out / "step-000002"


def test_one_process_trains_as_plain_torch_does(wan: Path, alone: Any) -> None:
    rows, weights, average = plain_run(wan)
    assert all(norm > 0.5 for _, norm in rows)  # every step was clipped
    found, found_weights, found_average = alone[0]
    for ours, theirs in zip(found, rows, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-6)
    assert_close(found_weights, weights, 2e-6)
    assert_close(found_average, average, 2e-6)
    assert not all(torch.equal(average[name], weight) for name, weight in weights.items())


def test_restored_on_the_same_layout_it_goes_on_bit_for_bit(wan: Path, alone: Any) -> None:
    (rows, weights, average), checkpoint = alone
    found, found_weights, found_average = continued(wan, (1, 1, 1), checkpoint)
    assert found == rows[2:]
    for ours, theirs in ((found_weights, weights), (found_average, average)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], x) for name, x in theirs.items())


@pytest.mark.dist
def test_other_layouts_train_alike_and_take_over_from_each_other(wan: Path, alone: Any, tmp_path: Path) -> None:
    (rows, weights, average), checkpoint = alone
    ranks = run_ranks(engine_run, 2, wan, (1, 2, 1), tmp_path)
    assert all(rank[0] == ranks[0][0] for rank in ranks)
    for ours, theirs in zip(ranks[0][0], rows, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert_close(ranks[0][1], weights, 1e-5)
    assert_close(ranks[0][2], average, 1e-5)
    for layout, source in (((1, 1, 1), tmp_path / "step-000002"), ((2, 1, 1), checkpoint)):
        found = continued(wan, layout, source) if layout == (1, 1, 1) else run_ranks(continued, 2, wan, layout, source)[0]
        for ours, theirs in zip(found[0], rows[2:], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert_close(found[1], weights, 1e-5)
        assert_close(found[2], average, 1e-5)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_broken_gradient_changes_nothing(wan: Path, norm: float) -> None:
    with open_mesh(ParallelConfig(), CPU) as mesh:
        job = tiny_job(wan, **SETTINGS)
        engine: Any = make_engine(job, mesh)
        accumulate(engine, job, mesh, 4)
        before = {name: x.full_tensor().clone() for kind in ("model", "ema") for name, x in engine.tensors()[kind].items()}
        with pytest.raises(ValueError, match=f"a gradient of norm {norm} is nothing to update by"):
            engine.update(1e-2, norm)
        assert all(torch.equal(before[name], x.full_tensor()) for kind in ("model", "ema") for name, x in engine.tensors()[kind].items())
        assert not engine.tensors()["optimizer"]
        del engine


def test_a_nan_in_the_gradient_shows_in_its_norm(wan: Path) -> None:
    with open_mesh(ParallelConfig(), CPU) as mesh:
        job = tiny_job(wan, **SETTINGS)
        engine: Any = make_engine(job, mesh)
        accumulate(engine, job, mesh, 4)
        engine.parameters["proj_out.bias"].grad.to_local()[3] = math.nan
        assert math.isnan(engine.gradient_norm())
        del engine


def test_frozen_parameters_stay_have_no_moments_and_average_to_themselves(wan: Path, tmp_path: Path) -> None:
    with open_mesh(ParallelConfig(), CPU) as mesh:
        job = tiny_job(wan, **SETTINGS | {"train__trainable": ["blocks.1.*", "*.norm2.bias"]})
        engine: Any = make_engine(job, mesh)
        before = {name: p.full_tensor().clone() for name, p in engine.parameters.items()}
        steps(engine, job, mesh, RATES[:2])
        trained = {name for name in before if name.startswith("blocks.1.") or name.endswith("norm2.bias")}
        tensors = engine.tensors()
        assert set(tensors["optimizer"]) == trained
        for name, old in before.items():
            assert torch.equal(tensors["model"][name].full_tensor(), old) == (name not in trained), name
            assert torch.equal(tensors["ema"][name].full_tensor(), old) == (name not in trained), name
        state.save(tmp_path, 2, tensors, {"step": 2}, keep_last=1, group=mesh.cpu_group)
        job = tiny_job(wan, **SETTINGS | {"train__trainable": ["blocks.1.*", "*.norm2.bias"]})
        again: Any = make_engine(job, mesh)
        again.restore(tmp_path / "step-000002")
        assert set(again.tensors()["optimizer"]) == trained
        assert steps(again, job, mesh, RATES[2:]) == steps(engine, job, mesh, RATES[2:])
        del engine, again, tensors


def test_tensors_have_flat_names_of_diffusers_parameters(wan: Path, alone: Any) -> None:
    with open_mesh(ParallelConfig(), CPU) as mesh:
        engine: Any = make_engine(tiny_job(wan), mesh)  # without an average
        names = set(engine.tensors()["model"])
        assert set(engine.tensors()) == {"model", "optimizer"}
        with pytest.raises(CheckpointError, match="can't be read"):
            engine.restore(alone[1].parent)
        del engine
    assert names == set(family_of(wan).build(wan, "transformer").state_dict())
    parts = ("exp_avg", "exp_avg_sq", "step")
    expected = {f"{kind}.{name}" for kind in ("model", "ema") for name in names} | {f"optimizer.{name}.{part}" for name in names for part in parts}
    assert state.tensor_keys(alone[1]) == expected


def test_the_average_of_plain_parameters() -> None:
    weight, frozen = torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.nn.Parameter(torch.tensor([5.0]), requires_grad=False)
    parameters = {"weight": weight, "frozen": frozen}
    average = Ema(parameters, 0.75)
    with torch.no_grad():
        weight += 4
    average.update(parameters)
    assert average.tensors["weight"].tolist() == [2.0, 3.0]
    assert average.tensors["frozen"].tolist() == [5.0]
