"""Watching a run: quantisation health that changes nothing, and a stop with the place where numbers stopped being finite."""

import functools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from videoqat.data.dataset import CachedVideos
from videoqat.errors import TrainingDiverged
from videoqat.training import state, trainer
from videoqat.training.health import first_nonfinite, nonfinite_gradient
from videoqat.training.runlog import read_log
from videoqat.training.step import Run, Step
from videoqat.training.trainer import train


def rows_of(config: Any) -> list[dict[str, Any]]:
    return read_log(Path(config.out) / "log.jsonl")


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_health_is_there_when_it_is_due_finite_and_changes_no_number(make: Any, checkpointing: str, dtype: str) -> None:
    settings = {"train__activation_checkpointing": checkpointing, "train__compute_dtype": dtype, "train__global_batch_size": 2, "train__steps": 5}
    watched, alone = make("watched", train__health_every=3, **settings), make("alone", train__health_every=0, **settings)
    train(watched)
    train(alone)
    rows = rows_of(watched)
    assert [row["step"] for row in rows if "health" in row] == [1, 3]
    assert not any("health" in row for row in rows_of(alone))
    assert [(r["loss"], r["grad_norm"]) for r in rows] == [(r["loss"], r["grad_norm"]) for r in rows_of(alone)]
    for row in (rows[0], rows[2]):
        assert list(row["health"]) == ["blocks.0.attn1", "blocks.1.attn1"]
        for numbers in row["health"].values():
            assert {"relative_error", "scale_zero_share", "scale_saturated_share", "p_mass_lost_share"} <= set(numbers)
            assert all(math.isfinite(value) for value in numbers.values())
            assert 0.005 < numbers["relative_error"] < 0.5  # 4 bits cost something, and not everything
    board = EventAccumulator(str(Path(watched.out) / "tensorboard"))
    board.Reload()
    assert [e.step for e in board.Scalars("health/relative_error/blocks.0.attn1")] == [1, 3]


def test_health_sees_what_is_kept_in_high_precision(make: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"base": "attn_qat", "name": "mine", "keep_layers": [0]}')
    config = make("run", recipe=str(tmp_path / "mine.json"), train__health_every=1, train__steps=1)
    train(config)
    assert list(rows_of(config)[0]["health"]) == ["blocks.1.attn1"]
    plain = make("plain", recipe="bf16", train__health_every=1, train__steps=1)
    train(plain)
    assert "health" not in rows_of(plain)[0]  # nothing is quantised


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor, here all of it."""
    return tensor.detach().to_local()  # type: ignore[attr-defined, no-any-return]


def inject(monkeypatch: pytest.MonkeyPatch, step: int, harm: Any) -> None:
    """Calls harm(run) before `step`."""
    original = trainer.take_step

    def stepping(run: Run, number: int) -> Step:
        if number == step:
            harm(run)
        return original(run, number)

    monkeypatch.setattr(trainer, "take_step", stepping)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_nan_in_a_weight_stops_with_step_layer_and_last_checkpoint(make: Any, monkeypatch: pytest.MonkeyPatch, checkpointing: str) -> None:
    def harm(run: Run) -> None:
        local(run.engine.transformer.get_parameter("blocks.1.ffn.net.2.weight"))[3, 4] = math.nan

    inject(monkeypatch, 3, harm)
    config = make("run", train__save_every=1, train__activation_checkpointing=checkpointing)
    with pytest.raises(TrainingDiverged) as caught:
        train(config)
    message = str(caught.value)
    assert message.startswith("step 3: loss is nan and the gradient norm nan; ")
    assert "in: output of blocks.1.ffn.net.2;" in message
    assert message.endswith(f"last good checkpoint: {config.out}/checkpoints/step-000002")
    assert [row["step"] for row in rows_of(config)] == [1, 2]
    assert [p.name for p in state.whole(Path(config.out) / "checkpoints")] == ["step-000001", "step-000002"]


def test_inf_only_in_a_gradient_names_the_parameter_and_leaves_weights_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before: dict[str, torch.Tensor] = {}
    seen: dict[str, nn.Parameter] = {}

    def harm(run: Run) -> None:
        norm = run.engine.gradient_norm

        def norm_of_harmed() -> float:
            gradient = run.engine.transformer.get_parameter("blocks.0.attn1.to_k.weight").grad
            assert gradient is not None
            local(gradient).mul_(math.inf)
            return norm()

        run.engine.gradient_norm = norm_of_harmed  # type: ignore[method-assign]
        seen.update(run.engine.transformer.named_parameters())
        before.update({name: local(p).clone() for name, p in seen.items()})

    inject(monkeypatch, 2, harm)
    with pytest.raises(
        TrainingDiverged, match=r"^step 2: loss is [\d.]+ and the gradient norm (nan|inf); .*gradient of blocks.0.attn1.to_k.weight; .*none was"
    ):
        train(make("run"))
    assert [row["step"] for row in rows_of(make("run"))] == [1]
    assert seen
    for name, parameter in seen.items():
        assert torch.equal(local(parameter), before[name]), name


def test_nan_that_no_module_made_is_put_at_what_it_goes_into(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def harm(run: Run) -> None:
        run.engine.transformer.get_submodule("blocks.1.attn1.to_out.0").register_forward_pre_hook(lambda module, args: (args[0] * math.nan,))

    inject(monkeypatch, 2, harm)
    with pytest.raises(TrainingDiverged, match=r"step 2: .* in: input of blocks.1.attn1.to_out.0;"):
        train(make("run"))


def test_a_broken_sample_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = CachedVideos.load

    def load(self: CachedVideos, index: int) -> dict[str, torch.Tensor]:
        sample = original(self, index)
        return sample | {"latents": sample["latents"] * (math.inf if index == 4 else 1)}

    config = make("run", train__steps=6)
    name = CachedVideos(config.cache).samples[4].id
    monkeypatch.setattr(CachedVideos, "load", load)
    with pytest.raises(TrainingDiverged, match=f"in: the cache's sample {name};"):
        train(config)


def test_first_nonfinite_names_the_innermost_and_leaves_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    good, bad = torch.zeros(1, 2), torch.full((1, 2), math.nan)
    assert first_nonfinite(model, [functools.partial(model, good)]) is None
    assert first_nonfinite(model, [functools.partial(model, good), functools.partial(model, bad)]) == "input of the transformer"
    with torch.no_grad():
        model[1][0].bias.fill_(math.inf)  # type: ignore[index, union-attr, operator]
    assert first_nonfinite(model, [functools.partial(model, good)]) == "output of 1.0"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert nonfinite_gradient(model) is None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for index in (0, 1):
        next(model[index].parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
    assert nonfinite_gradient(model) == "1.0.weight"


def test_resuming_after_divergence_starts_at_the_last_good_checkpoint(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, 3, lambda run: local(next(run.engine.transformer.parameters())).fill_(math.nan))
    config = make("run", train__save_every=2)
    with pytest.raises(TrainingDiverged):
        train(config)
    monkeypatch.undo()
    assert train(config)["steps"] == 4
    assert [row["step"] for row in rows_of(config)] == [1, 2, 3, 4]
    shutil.rmtree(config.out)
