"""Distilling from the model that training starts from (objective.distill_weight): losses by the formula with plain diffusers models, in every family
and in layouts of two ranks; what a teacher takes and what it leaves alone; resuming; refusals."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from helpers.engines import batch, full_gradients, tiny_job, worst_gradient
from helpers.pipelines import change_weights, enliven
from helpers.ranks import run_ranks
from helpers.training import assert_same_run, tiny_config
from torch import Tensor

from videoqat.config import CompareConfig, ExampleModelConfig, TrainConfig, load
from videoqat.errors import CheckpointError, ConfigError, TrainingDiverged
from videoqat.models.install import install
from videoqat.models.spec import family_of, read_model_json
from videoqat.models.tiny import build_pipeline
from videoqat.parallel.mesh import Layout, open_mesh
from videoqat.training import state, throughput, trainer
from videoqat.training.batches import batches_of, load_batch
from videoqat.training.engines import make_engine
from videoqat.training.job import check
from videoqat.training.memory import memory_per_gpu
from videoqat.training.objective import distilled_losses
from videoqat.training.runlog import read_log
from videoqat.training.teacher import load_teacher
from videoqat.training.trainer import train

LOSSES = ("loss", "denoising_loss", "distill_loss")
CPU = torch.device("cpu")
# A model of each family, and one whose first frame is given, which the losses leave out.
KINDS: dict[str, dict[str, Any]] = {
    "ti2v": {"expand_timesteps": True},
    "cogvideox": {"family": "cogvideox"},
    "hunyuanvideo": {"family": "hunyuanvideo"},
    "hunyuan15": {"family": "hunyuan15"},
}


@pytest.fixture(scope="module")
def alive(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan that predicts something."""
    return enliven(tiny_pipeline, tmp_path_factory.mktemp("distill") / "model")


@pytest.fixture
def run_config(alive: Path, tiny_cache: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A training from these weights."""
    return lambda name, **changes: tiny_config(alive, tiny_cache, tmp_path / name, from_scratch=False, **changes)


def rows_of(config: TrainConfig) -> list[dict[str, Any]]:
    return read_log(Path(config.out) / "log.jsonl")


def by_plain_diffusers(folder: Path, component: str, recipe: str, w: float, inputs: tuple[Any, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Losses of each sample, and the gradient of the mean loss: diffusers' own class twice, once as it is and once with the recipe."""
    family = family_of(folder)
    kind = getattr(diffusers, read_model_json(folder, f"{component}/config.json")["_class_name"])
    student, teacher = (kind.from_pretrained(folder / component) for _ in range(2))
    install(student, recipe, component=component)
    latents, noise, t_B, condition = inputs
    schedule, given = family.noise_schedule(folder), family.given_frames(condition)
    noisy = schedule.add_noise(latents, noise, t_B)
    prediction, taught = (family.forward(model, noisy, t_B, condition) for model in (student, teacher))
    pairs = (prediction, schedule.target(latents, noise, t_B)), (prediction, taught.detach())
    denoising, distill = (torch.stack([((a - b)[i, :, given:] ** 2).mean() for i in range(len(a))]) for a, b in pairs)
    loss = (1 - w) * denoising + w * distill
    loss.mean().backward()
    assert all(p.grad is None for p in teacher.parameters())
    return dict(zip(LOSSES, (loss, denoising, distill), strict=True)), {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["second of a pair", *KINDS])
def test_losses_and_gradients_are_those_of_the_formula(kind: str, tiny_pipeline_pair: Path, tmp_path: Path) -> None:
    if kind == "second of a pair":
        folder, component = enliven(tiny_pipeline_pair, tmp_path / "pair"), "transformer_2"
        change_weights(folder / "transformer_2", {"proj_out.bias": lambda b: b + 1})  # the other one would be noticed
    else:
        build_pipeline(ExampleModelConfig(out=str(tmp_path / "built"), num_layers=2, num_heads=2, head_dim=16, **KINDS[kind]))
        folder, component = enliven(tmp_path / "built", tmp_path / "alive"), "transformer"
    latents, t_B, condition, noise = batch(folder, [0, 1])
    inputs = latents, noise, t_B, condition
    expected, gradients = by_plain_diffusers(folder, component, "attn_qat", 0.3, inputs)
    assert (expected["distill_loss"] > 1e-9).all()  # or the recipe would change nothing here
    job = tiny_job(folder, model__component=component, objective__distill_weight=0.3)
    with open_mesh(job.config.parallel, CPU) as mesh:
        engine, teacher = make_engine(job, mesh), load_teacher(job, mesh)
        found = distilled_losses(job.family, job.family.noise_schedule(folder), engine.transformer, teacher, 0.3, *inputs)
        engine.backward(found["loss"].mean(), last=True)
        reached = full_gradients(engine)
        worst, name = worst_gradient(reached, {name: g for name, g in gradients.items() if name in reached or g.any()})
        assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
        assert not teacher.training
        del engine
    assert tuple(found) == LOSSES
    for key, loss_B in expected.items():
        torch.testing.assert_close(found[key], loss_B, rtol=2e-5, atol=1e-9, msg=key)
    assert worst < 2e-5, name


def expected_rows(config: TrainConfig, steps: int) -> list[dict[str, float]]:
    """The means over all samples of each step, whose weights are those of the folder as long as no step changes them noticeably."""
    job, rows = check(config), []
    for step in range(1, steps + 1):
        parts: dict[str, list[Tensor]] = {key: [] for key in LOSSES}
        for chosen in batches_of(job, step):
            losses, _ = by_plain_diffusers(Path(config.model.path), "transformer", config.recipe, 0.3, load_batch(job, *chosen).inputs)
            for key, loss_B in losses.items():
                parts[key].append(loss_B.detach())
        rows.append({key: torch.cat(values).mean().item() for key, values in parts.items()})
    return rows


LAYOUTS: dict[str, dict[str, Any]] = {
    "shard": {"parallel__dp_shard": 2},
    "replicate": {"parallel__dp_replicate": 2},
    "sp": {"parallel__sp": 2},  # and two micro-batches
    "zero": {"parallel__engine": "deepspeed"},  # the teacher is sharded by FSDP2 there, too
}
STEPS: dict[str, Any] = {
    "train__steps": 2,
    "train__batch_size": 2,
    "train__global_batch_size": 4,
    "train__save_every": 0,
    "optimizer__lr": 1e-9,
    "objective__distill_weight": 0.3,
}


def trainings(ports: list[int], configs: list[TrainConfig]) -> list[int]:
    """On one rank: each training in a mesh of its own; the bytes that its teacher takes here."""
    bytes_of: list[int] = []

    def loading(job: Any, mesh: Any) -> Any:
        teacher = load_teacher(job, mesh)
        bytes_of.append(sum(p.to_local().nbytes for p in teacher.parameters()))
        return teacher

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "load_teacher", loading)
        for port, config in zip(ports, configs, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            train(config)
    return bytes_of


@pytest.mark.dist
def test_layouts_of_two_ranks_have_the_losses_of_plain_diffusers(run_config: Callable[..., TrainConfig]) -> None:
    names = [name for name in LAYOUTS if name != "zero" or importlib.util.find_spec("deepspeed")]
    configs = [run_config(name, **STEPS | LAYOUTS[name]) for name in names]
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in names]
    taken = run_ranks(trainings, 2, [store.port for store in stores], configs)
    train(one := run_config("one", **STEPS))
    expected = expected_rows(one, 2)
    assert expected[0] != expected[1]
    for config in (one, *configs):
        for row, means in zip(rows_of(config), expected, strict=True):
            assert {key: row[key] for key in LOSSES} == pytest.approx(means, rel=2e-5), config.out
    whole = sum(4 * p.numel() for p in family_of(one.model.path).build(one.model.path, "transformer").parameters())
    for name, *by_rank in zip(names, *taken, strict=True):
        assert sum(by_rank) == (2 * whole if name == "replicate" else whole), name
        assert max(by_rank) < 0.6 * sum(by_rank), name


def test_a_teacher_leaves_alone_what_is_drawn_and_the_denoising_loss_in_training_and_validation(
    run_config: Callable[..., TrainConfig], tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without weight there is none. The step is too small to change a weight."""
    looks: dict[str, Any] = {"validation__every": 1, "validation__cache": str(tiny_cache), "validation__samples": 2, "validation__timesteps": 1}
    settings = looks | {"train__steps": 1, "train__save_every": 0, "optimizer__lr": 1e-12}
    plain, distilled = (run_config(name, objective__distill_weight=w, **settings) for name, w in (("plain", 0.0), ("distilled", 1.0)))
    train(distilled)
    monkeypatch.setattr(trainer, "load_teacher", lambda job, mesh: pytest.fail("a teacher was loaded"))
    train(plain)
    (row,), (other,) = rows_of(plain), rows_of(distilled)
    assert {key for key in row if "loss" in key} == {"loss"}
    assert row["loss"] == other["denoising_loss"]
    assert other["loss"] == other["distill_loss"] < 0.1 * row["loss"]
    losses, others = ({name: told["loss"] for name, told in one["validation"].items()} for one in (row, other))
    assert losses == pytest.approx(others, rel=1e-6)


def test_before_the_first_step_the_teacher_is_the_model_in_bf16_bit_for_bit(run_config: Callable[..., TrainConfig]) -> None:
    """So with a bf16 recipe there is nothing to distill yet, in bf16 arithmetic, too; later there is, and it holds the weights near."""
    free, held = (
        run_config(name, recipe="bf16", train__steps=3, train__save_every=0, train__compute_dtype="bfloat16", objective__distill_weight=w)
        for name, w in (("free", 1e-6), ("held", 0.9))
    )
    train(free)
    train(held)
    far, near = ([row["distill_loss"] for row in rows_of(config)] for config in (free, held))
    assert far[0] == near[0] == 0
    assert 0 < near[-1] < 0.9 * far[-1]


def test_a_resumed_run_goes_on_bit_for_bit_and_its_checkpoints_hold_no_teacher(run_config: Callable[..., TrainConfig]) -> None:
    """The schedule is constant, so that a run of fewer steps is the beginning of a longer one."""
    settings: dict[str, Any] = {"objective__distill_weight": 0.5, "optimizer__ema_decay": 0.5}
    train(whole := run_config("whole", **settings, train__steps=2))
    train(run_config("parts", **settings, train__steps=1))
    train(resumed := run_config("parts", **settings, train__steps=2))
    assert_same_run(Path(resumed.out), Path(whole.out))
    assert [row["distill_loss"] for row in rows_of(resumed)] == [row["distill_loss"] for row in rows_of(whole)]
    checkpoint = state.whole(Path(whole.out) / "checkpoints")[-1]
    keys, model = state.tensor_keys(checkpoint), family_of(whole.model.path).build(whole.model.path, "transformer")
    assert {key for key in keys if key.startswith("model.")} == {f"model.{name}" for name in model.state_dict()}
    assert {key.split(".")[0] for key in keys} == {"model", "ema", "optimizer"}
    with pytest.raises(CheckpointError, match=r"objective.distill_weight=0.5, not 0.25"):
        train(run_config("parts", **settings | {"objective__distill_weight": 0.25}, train__steps=3))


def test_checkpoints_from_before_there_were_teachers_go_on_without_one(run_config: Callable[..., TrainConfig]) -> None:
    now = check(run_config("run")).identity
    earlier = {**now, "config": {**now["config"], "objective": dict(now["config"]["objective"])}}
    del earlier["config"]["objective"]["distill_weight"]
    state.check_resumable(Path("step-000001"), earlier, now)
    with pytest.raises(CheckpointError, match=r"objective.distill_weight=0.0, not 0.5"):
        state.check_resumable(Path("step-000001"), earlier, check(run_config("run", objective__distill_weight=0.5)).identity)


def test_memory_and_flops_count_the_teacher(run_config: Callable[..., TrainConfig], alive: Path) -> None:
    plain, distilled = (trainer.plan(run_config("run", objective__distill_weight=w)) for w in (0.0, 0.5))
    weights = plain["parameters"]
    assert plain["memory_bytes"]["teacher"] == 0
    assert distilled["memory_bytes"] == plain["memory_bytes"] | {"teacher": 4 * weights, "total": plain["memory_bytes"]["total"] + 4 * weights}
    cost = throughput.forward_cost(str(alive), "transformer", "5x32x32", 16)
    for bucket, flops in distilled["flops_per_sample"].items():
        assert flops - plain["flops_per_sample"][bucket] == cost.linear_flops + cost.attention_flops
    job = tiny_job(alive, objective__distill_weight=0.5, train__compute_dtype="bfloat16")
    memory = memory_per_gpu(cost, job.recipe, Layout(2, 4, 2), job.config.train, job.config.parallel, ema=False, kernel="torch", teacher=True)
    assert memory["teacher"] == 2 * weights // 8
    with open_mesh(job.config.parallel, CPU) as mesh:
        held = sum(p.to_local().nbytes for p in load_teacher(job, mesh).parameters())
    assert held == pytest.approx(2 * weights, rel=0.2)  # some are kept in fp32: many in so small a model


def test_a_teacher_that_breaks_is_named(run_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: Any, mesh: Any) -> Any:
        teacher = load_teacher(job, mesh)
        next(p for name, p in teacher.named_parameters() if name == "blocks.1.ffn.net.2.bias").to_local().fill_(float("nan"))
        return teacher

    monkeypatch.setattr(trainer, "load_teacher", broken)
    with pytest.raises(TrainingDiverged, match=r"step 1: loss is nan.* is in: output of blocks\.1\.ffn\.net\.2 of the teacher"):
        train(run_config("run", objective__distill_weight=0.5))


@pytest.mark.parametrize(
    ("schema", "settings", "words"),
    [
        (TrainConfig, ["objective.distill_weight=-0.1"], "objective.distill_weight=-0.1 is not legal; legal: 0 (no teacher) to 1"),
        (TrainConfig, ["objective.distill_weight=1.5"], "objective.distill_weight=1.5 is not legal"),
        (TrainConfig, ["objective.distill_weight=0.5", "from_scratch=true"], "legal: 0 with from_scratch=true: the teacher is the model"),
        (TrainConfig, ["objective.distill_weight=1", "recipe=bf16"], "legal: below 1 with recipe 'bf16', which quantises nothing"),
        (CompareConfig, ["objective.distill_weight=0.5"], "unknown key objective.distill_weight"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(schema: type, settings: list[str], words: str, alive: Path, tiny_cache: Path) -> None:
    given = [f"model.path={alive}", f"cache={tiny_cache}", "out=run"] if schema is TrainConfig else []
    with pytest.raises(ConfigError) as error:
        load(schema, None, [*given, *settings])
    assert words in str(error.value)
