"""The DeepSpeed engine: ZeRO trains as plain torch and FSDP2 do, takes over from FSDP2 and hands back, in fp32 and bf16. Gradients in all layouts are
in test_parallel_equality.py."""

import gc
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import accumulate, full_gradients, tiny_job, worst_gradient
from helpers.pipelines import enliven
from helpers.ranks import run_ranks
from helpers.sequence import draw
from helpers.steps import RATES, SETTINGS, Found, assert_same_training, engine_run, plain_run, run_in, steps
from helpers.training import tiny_config
from torch import Tensor

from videoqat.config import ExampleModelConfig, ParallelConfig, to_yaml
from videoqat.errors import CheckpointError, ConfigError
from videoqat.models.tiny import build_pipeline
from videoqat.parallel import exchange, zero
from videoqat.parallel.mesh import Mesh, open_mesh
from videoqat.parallel.ulysses import Ulysses, attend
from videoqat.recipes import get_recipe
from videoqat.training import state
from videoqat.training.engines import make_engine
from videoqat.training.runlog import read_log
from videoqat.training.trainer import train

pytest.importorskip("deepspeed")

CPU = torch.device("cpu")
TRAINED = ["blocks.1.*", "*.norm2.bias"]


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wan")
    build_pipeline(ExampleModelConfig(out=str(root / "built"), num_layers=2, num_heads=2, head_dim=16))
    return enliven(root / "built", root / "alive")


def zero_of(stage: int) -> ParallelConfig:
    return ParallelConfig(engine="deepspeed", zero_stage=stage)


def on_two_ranks(wan: Path, fsdp: Path, out: Path) -> dict[Any, Any]:
    """On one rank, all that needs two: processes are slow to start."""
    found: dict[Any, Any] = {}
    with open_mesh(ParallelConfig(engine="deepspeed"), CPU) as mesh:
        for stage, mode in ((1, "none"), (2, "full"), (3, "keep_attention")):
            changes = {"train__activation_checkpointing": mode}
            found[stage, "run"] = run_in(mesh, wan, zero_of(stage), out / str(stage), None, **changes)
            found[stage, "restored"] = run_in(mesh, wan, zero_of(stage), None, out / str(stage) / "step-000002", **changes)
        found["from fsdp"] = run_in(mesh, wan, zero_of(2), None, fsdp)
        found["stage 3 from fsdp"] = run_in(mesh, wan, zero_of(3), None, fsdp)
        for stage in (1, 3):
            found[stage, "frozen"] = frozen(mesh, wan, stage, out / f"frozen{stage}")
        found["bf16"] = [gradients(mesh, wan, parallel, "bfloat16") for parallel in (ParallelConfig(), zero_of(1), zero_of(3))]
        found["exchange"] = exchanged(mesh)
    return found


def frozen(mesh: Mesh, wan: Path, stage: int, out: Path) -> Any:
    """What became of each parameter where few are trained: (changed, average changed) by name; which have moments; losses of two ways to go on."""
    job = tiny_job(wan, **SETTINGS | {"parallel": zero_of(stage), "train__trainable": TRAINED})
    engine: Any = make_engine(job, mesh)
    before = {name: x.full_tensor() for name, x in engine.tensors()["model"].items()}
    steps(engine, job, mesh, 1, RATES[:2])
    tensors = engine.tensors()
    state.save(out, 2, tensors, {"step": 2}, keep_last=1, group=mesh.cpu_group)
    again: Any = make_engine(job, mesh)
    again.restore(out / "step-000002")
    changed = {n: tuple(not torch.equal(tensors[kind][n].full_tensor(), old) for kind in ("model", "ema")) for n, old in before.items()}
    return changed, set(tensors["optimizer"]), steps(engine, job, mesh, 3, RATES[2:]), steps(again, job, mesh, 3, RATES[2:])


def gradients(mesh: Mesh, wan: Path, parallel: ParallelConfig, dtype: str) -> tuple[float, dict[str, Tensor]]:
    gc.collect()
    job = tiny_job(wan, train__batch_size=2, train__compute_dtype=dtype, parallel=parallel, train__activation_checkpointing="full")
    engine = make_engine(job, mesh)
    loss = accumulate(engine, job, mesh, 8)
    return loss, {name: gradient.clone() for name, gradient in full_gradients(engine).items()}


def exchanged(mesh: Mesh) -> list[Tensor]:
    """Pairs, by our all-to-all and by DeepSpeed's: of several dtypes, a gradient, and attention on both wires."""
    group = mesh.fsdp_mesh.get_group()
    x, upstream = (torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(10 * i + mesh.rank)) for i in (1, 2))
    pairs: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        pairs += [way((10 * x).to(dtype), group.group_name) for way in (exchange.all_to_all, zero.all_to_all)]
    ways: list[Callable[[Tensor, str], Tensor]] = [exchange.all_to_all, zero.all_to_all]
    for way in ways:
        leaf = x.clone().requires_grad_()
        pairs += torch.autograd.grad(way(leaf, group.group_name), leaf, upstream)
    for wire in ("bf16", "packed"):
        for way in ways:
            ulysses = Ulysses(group, wire, way)
            ulysses.num_tokens = 27
            q, k, v = draw(*[(1, ulysses.part_size, 2, 16)] * 3, seed=mesh.rank)
            pairs.append(attend(q, k, v, get_recipe("attn_qat"), kernel="auto", ulysses=ulysses))
    return pairs


@pytest.fixture(scope="module")
def runs(wan: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, list[dict[Any, Any]], Path]:
    """FSDP alone in one process; what two ranks with DeepSpeed found; where these saved."""
    out = tmp_path_factory.mktemp("saved")
    alone = engine_run(wan, (1, 1, 1), out / "fsdp")
    return alone, run_ranks(on_two_ranks, 2, wan, out / "fsdp" / "step-000002", out, timeout=300), out


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_trains_as_plain_torch_does_and_goes_on_bit_for_bit(wan: Path, runs: Any, stage: int) -> None:
    alone, ranks, _ = runs
    rows, weights, average = ranks[0][stage, "run"]
    assert_same_training((rows, weights, average), plain_run(wan), 5e-6)
    assert_same_training((rows, weights, average), alone, 5e-6)
    assert all(rank[stage, "run"][0] == rows for rank in ranks)  # norms and losses, to the last bit
    again, again_weights, again_average = ranks[0][stage, "restored"]
    assert again == rows[2:]
    for ours, theirs in ((again_weights, weights), (again_average, average)):
        assert all(torch.equal(ours[name], x) for name, x in theirs.items())


@pytest.mark.dist
def test_a_run_may_change_its_engine(wan: Path, runs: Any) -> None:
    alone, ranks, out = runs
    for way in ("from fsdp", "stage 3 from fsdp"):
        assert_same_training(ranks[0][way], alone, 1e-5)
    for stage in (1, 3):
        checkpoint = out / str(stage) / "step-000002"
        assert state.tensor_keys(checkpoint) == state.tensor_keys(out / "fsdp" / "step-000002")
        assert_same_training(engine_run(wan, (1, 1, 1), start=checkpoint), alone, 1e-5)


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_stay_and_have_no_moments(runs: Any, stage: int) -> None:
    changed, moments, went_on, again = runs[1][0][stage, "frozen"]
    trained = {name for name in changed if name.startswith("blocks.1.") or name.endswith("norm2.bias")}
    assert moments == trained
    assert all(pair == ((True, True) if name in trained else (False, False)) for name, pair in changed.items())
    assert went_on == again


@pytest.mark.dist
def test_bf16_is_that_of_fsdp(runs: Any) -> None:
    """Also in what diffusers keeps in fp32. All blocks add to the text's gradient, in bf16, and hooks change their order."""
    (loss, expected), *others = runs[1][0]["bf16"]
    text = {name for name in expected if ".text_embedder." in name}
    for other_loss, found in others:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert worst_gradient(*({name: x for name, x in them.items() if name not in text} for them in (found, expected)))[0] < 1e-6
        assert worst_gradient(*({name: them[name] for name in text} for them in (found, expected)))[0] < 1e-2


@pytest.mark.dist
def test_its_exchange_is_ours_to_the_last_bit(runs: Any) -> None:
    for rank in runs[1]:
        pairs = rank["exchange"]
        for ours, theirs in [*zip(pairs[0:6:2], pairs[1:6:2], strict=True), *zip(pairs[6::2], pairs[7::2], strict=True)]:
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        assert not torch.equal(pairs[0], pairs[1] * 0)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_process_without_a_launcher(wan: Path, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    with open_mesh(zero_of(stage), CPU) as mesh:
        job = tiny_job(wan, **SETTINGS | {"parallel": zero_of(stage)})
        engine: Any = make_engine(job, mesh)
        expected = plain_run(wan)
        assert steps(engine, job, mesh, 1, RATES[:2]) == [pytest.approx(row, rel=2e-6) for row in expected[0][:2]]
        # A broken gradient shows in the norm, and changes nothing.
        before = {(kind, name): x.full_tensor() for kind in ("model", "ema") for name, x in engine.tensors()[kind].items()}
        accumulate(engine, job, mesh, 4)
        engine.gradients[0].view(-1)[3] = math.nan
        assert math.isnan(engine.gradient_norm())
        for norm in (math.nan, math.inf):
            with pytest.raises(ValueError, match=f"a gradient of norm {norm} is nothing to update by"):
                engine.update(1e-2, norm, 1)
        assert all(torch.equal(before[kind, name], x.full_tensor()) for kind in ("model", "ema") for name, x in engine.tensors()[kind].items())
        with pytest.raises(CheckpointError, match="can't be read"):
            engine.restore(wan)
        del engine


def test_from_scratch_the_weights_are_those_of_fsdp(wan: Path) -> None:
    drawn = []
    for parallel in (ParallelConfig(), zero_of(3)):
        with open_mesh(parallel, CPU) as mesh:
            engine: Any = make_engine(tiny_job(wan, from_scratch=True, parallel=parallel), mesh)
            drawn.append({name: x.full_tensor() for name, x in engine.tensors()["model"].items()})
            del engine
    assert all(torch.equal(drawn[1][name], x) for name, x in drawn[0].items())


def test_parameters_that_training_never_reaches_are_refused(wan: Path) -> None:
    """AdamW leaves alone what has no gradient; in ZeRO's flat tensors it would be decayed with the rest."""
    for decay in (0.1, 0.0):
        with open_mesh(zero_of(1), CPU) as mesh:
            engine: Any = make_engine(tiny_job(wan, parallel=zero_of(1), optimizer__weight_decay=decay), mesh)
            reached = [p for name, p in engine.parameters.items() if not name.startswith("proj_out.")]
            engine.backward(sum(p.square().sum() for p in reached), last=True)
            if decay:
                with pytest.raises(ConfigError, match=r"train.trainable includes proj_out.bias \(2 such in all\), which training never reaches"):
                    engine.gradient_norm()
            else:
                assert engine.gradient_norm() > 0
            del engine


def test_what_it_can_not_do_is_refused_before_anything_is_loaded(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"train.compile=True is not legal; legal: false with parallel.engine=deepspeed: ZeRO's hooks"):
        make("run", parallel=zero_of(3), train__compile=True)
    monkeypatch.setenv("DS_ACCELERATOR", "")  # is put back
    with pytest.raises(ConfigError, match="DeepSpeed was imported for cpu in this process, and can't run on meta as well"):
        zero.load(torch.device("meta"))
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"parallel.engine=deepspeed needs the package deepspeed \(pip install 'videoqat\[deepspeed\]'\)"):
        zero.load(CPU)


def test_the_trainer_resumes_an_fsdp_run_with_deepspeed(tiny_pipeline: Path, tiny_cache: Path, tmp_path: Path) -> None:
    for name, parts in {"fsdp": [ParallelConfig()], "both": [ParallelConfig(), zero_of(3)]}.items():
        for i, parallel in enumerate(parts):
            count = 4 if i == len(parts) - 1 else 2
            changes = {
                "parallel": parallel,
                "train__steps": count,
                "optimizer__ema_decay": 0.9,
                "train__health_every": 2,
                "train__activation_checkpointing": "keep_attention",
            }
            train(tiny_config(tiny_pipeline, tiny_cache, tmp_path / name, **changes))
    ours, theirs = (read_log(tmp_path / name / "log.jsonl") for name in ("both", "fsdp"))
    for row, expected in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 3])
def test_on_a_gpu(make: Callable[..., Any], tmp_path: Path, stage: int) -> None:
    """In a process of its own: DeepSpeed knows one kind of device, and in this one that is the CPU (conftest.py)."""
    gpu = {"runtime__device": "cuda", "train__compute_dtype": "bfloat16", "optimizer__ema_decay": 0.5, "train__activation_checkpointing": "full"}
    train(make("fsdp", **gpu))
    config = make("zero", parallel=zero_of(stage), **gpu)
    (tmp_path / "zero.yaml").write_text(to_yaml(config))
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, "-m", "videoqat", "train", "--config", str(tmp_path / "zero.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours, theirs = (read_log(tmp_path / name / "log.jsonl") for name in ("zero", "fsdp"))
    for row, expected in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
