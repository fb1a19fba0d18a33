"""Runs that go on: on the same layout to the same bits, on another to the same losses, after a kill at a bad moment, and again after that."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import outcomes, run_ranks
from helpers.training import assert_same_run, tiny_config

from videoqat.config import TrainConfig
from videoqat.errors import CheckpointError
from videoqat.training import state, trainer
from videoqat.training.runlog import read_log

pytestmark = pytest.mark.dist

# Four of six samples a step: after step 3 two epochs are over. A checkpoint of every step.
SETTINGS: dict[str, Any] = {
    "recipe": "attn_qat_search",
    "optimizer__ema_decay": 0.8,
    "train__global_batch_size": 4,
    "train__save_every": 1,
    "train__keep_last": 9,
    "train__profile_every": 0,
}


@pytest.fixture(scope="module")
def run_config(tiny_pipeline: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainConfig]:
    """run_config(name, **changes): a training into a folder of that name, which this module's tests share."""
    folder = tmp_path_factory.mktemp("resume")
    return lambda name, **changes: tiny_config(tiny_pipeline, tiny_cache, folder / name, **SETTINGS | changes)


def train(config: TrainConfig) -> dict[str, Any]:
    return trainer.train(config)


def on_ranks(world_size: int, config: TrainConfig) -> Path:
    """Trains on so many gloo ranks; the run's folder."""
    run_ranks(train, world_size, config)
    return Path(config.out)


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_log(run / "log.jsonl")]


@pytest.fixture(scope="module")
def in_one_process(run_config: Callable[..., TrainConfig]) -> Path:
    """Four steps without a stop."""
    return on_ranks(1, run_config("one", train__steps=4))


@pytest.fixture(scope="module")
def two_by_two(run_config: Callable[..., TrainConfig], in_one_process: Path) -> Path:
    """The first two steps, on two replicas of two shards."""
    run = on_ranks(4, run_config("two_by_two", train__steps=2, parallel__dp_replicate=2, parallel__dp_shard=2))
    assert losses(run) == pytest.approx(losses(in_one_process)[:2], rel=1e-5)
    return run


LAYOUTS = {
    "1x2": (2, {"parallel__dp_shard": 2}),
    "2x1": (2, {"parallel__dp_replicate": 2}),
    "1x1, sequence parallel": (2, {"parallel__sp": 2}),
    "1x4": (4, {"parallel__dp_shard": 4}),
    "one process": (1, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout_goes_on_with_the_same_losses(
    run_config: Callable[..., TrainConfig], in_one_process: Path, two_by_two: Path, name: str
) -> None:
    world_size, layout = LAYOUTS[name]
    checkpoint = two_by_two / "checkpoints/step-000002"
    run = on_ranks(world_size, run_config(name, train__steps=4, train__resume=str(checkpoint), **layout))
    assert losses(run) == pytest.approx(losses(in_one_process)[2:], rel=1e-5)
    assert losses(run) != losses(in_one_process)[:2]


def train_and_die(config: TrainConfig, step: int) -> None:
    """Trains until `step` is being saved, in the background; then the last rank is killed -9 in the middle of its file."""
    from torch.distributed.checkpoint import filesystem

    saving, writing, doomed = state.dcp_save, filesystem._write_item, os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    items = iter(range(5))

    def write(*args: Any, **kwargs: Any) -> Any:
        if next(items, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return writing(*args, **kwargs)

    def save(*args: Any, **kwargs: Any) -> Any:
        if doomed and kwargs["checkpoint_id"].name == f".step-{step:06d}.partial":
            filesystem._write_item = write
        return saving(*args, **kwargs)

    state.dcp_save = save
    trainer.train(config)


@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_in_a_save_and_resumed_twice_it_ends_with_the_same_bits(
    run_config: Callable[..., TrainConfig], in_one_process: Path, world_size: int
) -> None:
    whole = in_one_process if world_size == 1 else on_ranks(2, run_config("whole", train__steps=4))
    killed = f"killed {world_size}"
    *others, last = outcomes(train_and_die, world_size, run_config(killed, train__steps=4), 2)
    assert last.exit_code == -signal.SIGKILL
    assert all("another process ended" in other.error for other in others)
    checkpoints = Path(run_config(killed).out) / "checkpoints"
    assert [path.name for path in state.whole(checkpoints)] == ["step-000001"]
    assert (checkpoints / f".step-000002.partial/__{world_size - 1}_0.distcp").stat().st_size > 0

    for steps in (3, 4):  # the second time from an epoch's end
        result, *same = run_ranks(train, world_size, run_config(killed, train__steps=steps))
        assert all(other == result for other in same)
        assert Path(result["resumed_from"]).name == {3: "step-000001", 4: "step-000003"}[steps]
    assert not list(checkpoints.glob(".*"))
    assert_same_run(Path(run_config(killed).out), whole)


def test_another_number_of_ranks_with_the_default_global_batch_is_another_training(run_config: Callable[..., TrainConfig], two_by_two: Path) -> None:
    checkpoint = two_by_two / "checkpoints/step-000002"
    with pytest.raises(CheckpointError, match=r"it has train.global_batch_size=4, not 1 \(.*; train.global_batch_size=4 continues this training\)"):
        trainer.plan(run_config("other", train__global_batch_size=0, train__resume=str(checkpoint)))
    assert trainer.plan(run_config("other", train__resume=str(checkpoint)))["resumed_from"] == str(checkpoint)
