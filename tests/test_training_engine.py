"""The FSDP engine: AdamW, clipping and average as plain torch computes them, in every layout; and what it gives to checkpoints and takes back."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import accumulate, tiny_job
from helpers.pipelines import enliven
from helpers.ranks import run_ranks
from helpers.steps import RATES, SETTINGS, assert_same_training, engine_run, plain_run, steps

from videoqat.config import ExampleModelConfig, ParallelConfig
from videoqat.errors import CheckpointError
from videoqat.models.spec import family_of
from videoqat.models.tiny import build_pipeline
from videoqat.parallel.mesh import open_mesh
from videoqat.training import state
from videoqat.training.engines import make_engine
from videoqat.training.optim import Ema

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wan")
    build_pipeline(ExampleModelConfig(out=str(root / "built"), num_layers=2, num_heads=2, head_dim=16))
    return enliven(root / "built", root / "alive")


@pytest.fixture(scope="module")
def alone(wan: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    out = tmp_path_factory.mktemp("alone")
    return engine_run(wan, (1, 1, 1), out), out / "step-000002"


def test_one_process_trains_as_plain_torch_does(wan: Path, alone: Any) -> None:
    expected = plain_run(wan)
    assert all(norm > 0.5 for _, norm in expected[0])  # every step was clipped
    assert_same_training(alone[0], expected, 2e-6)
    assert not all(torch.equal(expected[2][name], weight) for name, weight in expected[1].items())


def test_restored_on_the_same_layout_it_goes_on_bit_for_bit(wan: Path, alone: Any) -> None:
    (rows, weights, average), checkpoint = alone
    found, found_weights, found_average = engine_run(wan, (1, 1, 1), start=checkpoint)
    assert found == rows[2:]
    for ours, theirs in ((found_weights, weights), (found_average, average)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], x) for name, x in theirs.items())


@pytest.mark.dist
def test_other_layouts_train_alike_and_take_over_from_each_other(wan: Path, alone: Any, tmp_path: Path) -> None:
    expected, checkpoint = alone
    ranks = run_ranks(engine_run, 2, wan, (1, 2, 1), tmp_path)
    assert all(rank[0] == ranks[0][0] for rank in ranks)
    assert_same_training(ranks[0], expected, 1e-5)
    assert_same_training(engine_run(wan, (1, 1, 1), start=tmp_path / "step-000002"), expected, 1e-5)
    assert_same_training(run_ranks(engine_run, 2, wan, (2, 1, 1), None, checkpoint)[0], expected, 1e-5)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_broken_gradient_changes_nothing(wan: Path, norm: float) -> None:
    with open_mesh(ParallelConfig(), CPU) as mesh:
        job = tiny_job(wan, **SETTINGS)
        engine: Any = make_engine(job, mesh)
        accumulate(engine, job, mesh, 4)
        before = {name: x.full_tensor().clone() for kind in ("model", "ema") for name, x in engine.tensors()[kind].items()}
        with pytest.raises(ValueError, match=f"a gradient of norm {norm} is nothing to update by"):
            engine.update(1e-2, norm, 1)
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
        steps(engine, job, mesh, 1, RATES[:2])
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
        assert steps(again, job, mesh, 3, RATES[2:]) == steps(engine, job, mesh, 3, RATES[2:])
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
    average.update(parameters, 100)
    assert average.tensors["weight"].tolist() == [2.0, 3.0]
    assert average.tensors["frozen"].tolist() == [5.0]
