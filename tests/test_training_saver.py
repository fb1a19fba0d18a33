"""Checkpoints of several ranks, written while training goes on: every part once, all or nothing, and no rank left waiting."""

import json
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import outcomes, run_ranks
from helpers.training import stored
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from videoqat.config import ParallelConfig
from videoqat.errors import CheckpointError
from videoqat.parallel.mesh import Mesh, open_mesh
from videoqat.training import state
from videoqat.training.state import Saver

CPU = torch.device("cpu")


class Toy(nn.Module):
    """Sizes that four ranks can't share evenly; a table with fewer rows than ranks; a layer that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 3, 5))
        self.used, self.unused = nn.Linear(5, 7), nn.Linear(3, 2)


class Training:
    """A toy sharded over a mesh, with its optimiser and average."""

    def __init__(self, mesh: Mesh, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Toy()
        fully_shard(self.model, mesh=mesh.fsdp_mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ema = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def step(self) -> None:
        for name, p in self.model.named_parameters():
            if not name.startswith("unused"):
                p.grad = p.detach().cos()  # type: ignore[assignment]
        self.optimizer.step()
        for name, p in self.model.named_parameters():
            self.ema[name].lerp_(p.detach(), 0.5)

    def tensors(self) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        return {"model": get_model_state_dict(self.model), "optimizer": optimizer, "ema": self.ema}


def flat(tensors: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Nested -> flat keys, as DCP names them, each tensor in full."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def save_on_each(folder: Path) -> dict[str, Tensor]:
    with open_mesh(ParallelConfig(dp_replicate=2), CPU) as mesh, Saver(mesh, folder, 2) as saver:
        training = Training(mesh)
        for _ in range(2):
            training.step()
        saver.start(2, training.tensors(), {"step": 2})
        assert saver.finish() == folder / "step-000002"
        return flat(training.tensors())


def load_on_each(folder: Path) -> dict[str, Tensor]:
    with open_mesh(ParallelConfig(), CPU) as mesh:
        training = Training(mesh, seed=1)
        training.step()  # so that there are moments to load into
        tensors = training.tensors()
        state.load(folder / "step-000002", tensors)
        return flat(tensors)


@pytest.mark.dist
def test_four_ranks_write_every_part_once_and_any_layout_reads_it(tmp_path: Path) -> None:
    expected, *others = run_ranks(save_on_each, 4, tmp_path)
    for other in others:
        assert_equal(other, expected)
    path = tmp_path / "step-000002"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert state.problem(path) is None
    listed = json.loads((path / "COMMITTED").read_text())["files"]
    assert set(listed) == {".metadata", "meta.json", *(f"__{rank}_0.distcp" for rank in range(4))}  # replicas share the work
    assert min(listed.values()) > 0
    # The parts of each tensor together are the tensor: nothing twice, nothing missing, and the average has keys of its own.
    for key, about in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        assert sum(chunk.sizes.numel() for chunk in about.chunks) == about.size.numel(), key
    assert {key.partition(".")[2] for key in expected if key.startswith("ema.")} == dict(Toy().named_parameters()).keys()
    assert not any("unused" in key for key in expected if key.startswith("optimizer."))

    assert_equal(stored(path), expected)  # one process without a group
    assert_equal(load_on_each(tmp_path), expected)  # one process with a group of one
    for found in run_ranks(load_on_each, 2, tmp_path):  # sharded over two instead
        assert_equal(found, expected)


gate = threading.Event()  # while it is shut, this process writes nothing


def behind_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    writing = state.dcp_save

    def waiting(*args: Any, **kwargs: Any) -> Any:
        gate.wait()
        return writing(*args, **kwargs)

    monkeypatch.setattr(state, "dcp_save", waiting)


def train_while_writing(folder: Path) -> int:
    rank = int(os.environ["RANK"])
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        open_mesh(ParallelConfig(step_timeout_s=1), CPU) as mesh,
        Saver(mesh, folder, 2) as saver,
    ):
        behind_the_gate(monkeypatch)
        mesh.steady()
        training = Training(mesh)
        training.step()
        expected = flat(training.tensors())
        saver.start(1, training.tensors(), {"step": 1})
        for _ in range(5):  # the weights change, and ranks talk, while step 1 is being written
            training.step()
            dist.all_reduce(torch.ones(3))
            assert saver.poll() is None
        assert state.whole(folder) == []
        # Rank 1's disk takes longer than parallel.step_timeout_s, and nobody minds.
        threading.Timer(0.0 if rank == 0 else 2.5, gate.set).start()
        polls = 1
        while (path := saver.poll()) is None:
            training.step()
            polls += 1
        assert path == folder / "step-000001"
        assert saver.poll() is None  # told once
        assert_equal(stored_in_full(training, path), expected)

        gate.clear()
        saver.start(2, training.tensors(), {"step": 2})
        assert [state.step_of(p) for p in state.whole(folder)] == [1]
        threading.Timer(0.2, gate.set).start()
        saver.start(3, training.tensors(), {"step": 3})  # waits for 2
        assert {state.step_of(p) for p in state.whole(folder)} >= {2}
        # Leaving the block waits for 3.
    return polls


def stored_in_full(training: Training, path: Path) -> dict[str, Tensor]:
    """As the tests' `stored`, on ranks: into tensors sharded as the training's."""
    tensors = {key: torch.empty_like(value) for key, value in flat(training.tensors()).items()}
    state.load(path, tensors)
    return tensors


@pytest.mark.dist
def test_training_goes_on_while_a_checkpoint_of_the_past_is_written(tmp_path: Path) -> None:
    polls = run_ranks(train_while_writing, 2, tmp_path)
    assert polls[0] == polls[1]  # all ranks learn of it at the same step
    assert [state.step_of(p) for p in state.whole(tmp_path)] == [2, 3]


def fail_on_each(folder: Path) -> list[str]:
    rank, said = int(os.environ["RANK"]), []
    with open_mesh(ParallelConfig(), CPU) as mesh:
        training = Training(mesh)
        training.step()

        def saving(step: int, background: bool, meta: dict[str, Any], where: Path = folder) -> None:
            with Saver(mesh, where, 1, background=background) as saver:
                saver.start(step, training.tensors(), meta)
                while saver.poll() is None:
                    pass

        def failing(*args: Any) -> None:
            with pytest.raises(CheckpointError) as error:
                saving(*args)
            said.append(str(error.value))
            mesh.barrier()
            assert [p.name for p in folder.iterdir()] == ["step-000001"]
            mesh.barrier()

        saving(1, True, {"step": 1})
        for background in (True, False):
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))  # as a full disk does, writing fails in the middle of a file
            failing(2, background, {"step": 2})
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        failing(2, True, {"loss": float("nan")})  # after the tensors, on rank 0 alone
        failing(2, True, {"step": 2}, folder / "step-000001" / "meta.json")
        with pytest.MonkeyPatch.context() as monkeypatch:
            hide_rank_one(monkeypatch)
            failing(2, True, {"step": 2})
        saving(2, True, {"step": 2})  # and when the trouble is over, it works again
        mesh.barrier()
        assert [p.name for p in folder.iterdir()] == ["step-000002"]

        # Bytes that changed without the size, where only one rank reads.
        mesh.barrier()
        if rank == 0:
            damaged = folder / "step-000002/__1_0.distcp"
            damaged.write_bytes(b"x" * damaged.stat().st_size)
        mesh.barrier()
        with pytest.raises(CheckpointError) as error:
            state.load(folder / "step-000002", {"model": {"used.weight": training.model.used.weight}})
        said.append(str(error.value))
    return said


def hide_rank_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if rank 1 wrote to another host's disk: rank 0 doesn't see its file."""
    writing = state.dcp_save

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        written = writing(*args, **kwargs)
        if dist.get_rank() == 0:
            (Path(kwargs["checkpoint_id"]) / "__1_0.distcp").unlink()
        return written

    monkeypatch.setattr(state, "dcp_save", elsewhere)


@pytest.mark.dist
def test_what_fails_on_one_rank_fails_on_all_and_older_checkpoints_stay(tmp_path: Path) -> None:
    here, there = run_ranks(fail_on_each, 2, tmp_path)
    assert here == there
    expected = [
        *["step-000002 can't be written: File too large (rank 1); older checkpoints are untouched"] * 2,
        "Out of range float values are not JSON compliant",
        "Not a directory (rank 0)",
        "__1_0.distcp is missing (all processes must see the same folder) (rank 0)",
        "step-000002 can't be read",
    ]
    assert len(here) == len(expected)
    for message, part in zip(here, expected, strict=True):
        assert part in message
    assert here[-1].endswith("(rank 1)")


def die_on_each(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as monkeypatch, open_mesh(ParallelConfig(), CPU) as mesh:
        training = Training(mesh)
        training.step()
        saver = Saver(mesh, folder, 2)
        saver.start(1, training.tensors(), {"step": 1})
        saver.finish()
        if mesh.rank == 1:
            die_while_writing(monkeypatch)
        saver.start(2, training.tensors(), {"step": 2})
        try:
            saver.finish()
        except RuntimeError as error:  # of communication: its text is gloo's
            return str(error)
        raise AssertionError("a checkpoint without rank 1's part")


def die_while_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 in the middle of this rank's file."""
    from torch.distributed.checkpoint import filesystem

    writing, items = filesystem._write_item, iter(range(3))

    def dying(*args: Any, **kwargs: Any) -> Any:
        if next(items, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return writing(*args, **kwargs)

    monkeypatch.setattr(filesystem, "_write_item", dying)


@pytest.mark.dist
def test_a_rank_killed_while_it_writes_holds_nobody_up_and_its_checkpoint_never_is(tmp_path: Path) -> None:
    survivor, killed = outcomes(die_on_each, 2, tmp_path, timeout=60)
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.result is not None, survivor.error
    assert "closed" in survivor.result.lower() or "reset" in survivor.result.lower()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".step-000002.partial", "step-000001"]
    assert (tmp_path / ".step-000002.partial" / "__1_0.distcp").stat().st_size > 0
    assert [p.name for p in state.whole(tmp_path)] == ["step-000001"]
    state.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.gpu
def test_from_a_gpu_what_is_written_is_the_past_and_buffers_serve_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_mesh(ParallelConfig(), torch.device("cuda")) as mesh, Saver(mesh, tmp_path, 9) as saver:
        training, expected, buffers = Training(mesh), {}, []
        behind_the_gate(monkeypatch)
        for step in (1, 2, 3):
            if step == 3:  # a parameter gets its first gradient: there is more to save, in other buffers
                training.optimizer.state[training.model.unused.weight] = {"exp_avg": training.model.unused.weight.detach() + 1}
            training.step()
            gate.clear()
            expected[step] = {key: value.cpu() for key, value in flat(training.tensors()).items()}
            saver.start(step, training.tensors(), {"step": step})
            training.step()
            gate.set()
            saver.finish()
            buffers.append(saver._copy(training.tensors())["model"]["used.weight"].to_local())
    assert all(buffer.is_pinned() for buffer in buffers)
    assert buffers[0].data_ptr() == buffers[1].data_ptr()
    assert expected[3].keys() > expected[2].keys()
    for step, tensors in expected.items():
        assert_equal(stored(tmp_path / f"step-{step:06d}"), tensors)


@pytest.fixture
def mesh() -> Any:
    with open_mesh(ParallelConfig(), CPU) as mesh:
        yield mesh


def test_without_background_it_is_on_the_disk_when_start_returns(mesh: Mesh, tmp_path: Path) -> None:
    with Saver(mesh, tmp_path, 1, background=False) as saver:
        saver.start(1, {"model": {"a": torch.ones(3)}}, {"step": 1})
        assert [p.name for p in state.whole(tmp_path)] == ["step-000001"]
        assert saver.poll() == tmp_path / "step-000001"
        assert saver.poll() is None


def test_what_is_being_written_is_kept_when_training_fails(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.clear()
    behind_the_gate(monkeypatch)
    with pytest.raises(ArithmeticError), Saver(mesh, tmp_path, 1) as saver:
        saver.start(1, {"model": {"a": torch.ones(3)}}, {"step": 1})
        threading.Timer(0.1, gate.set).start()
        raise ArithmeticError("diverged")
    assert [p.name for p in state.whole(tmp_path)] == ["step-000001"]


def test_a_failed_save_does_not_hide_why_training_failed(mesh: Mesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArithmeticError), Saver(mesh, tmp_path, 1) as saver:
        saver.start(1, {"model": {"a": torch.ones(3)}}, {"loss": float("inf")})
        raise ArithmeticError("diverged")
    assert "WARNING: checkpoint" in capsys.readouterr().err


def test_what_there_is_to_save_may_change(mesh: Mesh, tmp_path: Path) -> None:
    with Saver(mesh, tmp_path, 9) as saver:
        saver.start(1, {"optimizer": {"a": {"exp_avg": torch.ones(3)}}}, {"step": 1})
        saver.start(2, {"optimizer": {"a": {"exp_avg": torch.zeros(3)}, "b": {"exp_avg": torch.ones(4)}}}, {"step": 2})
    assert {key: value.sum() for key, value in stored(tmp_path / "step-000002").items()} == {"optimizer.a.exp_avg": 0, "optimizer.b.exp_avg": 4}


def test_an_error_of_an_earlier_save_comes_out_of_the_next_start(mesh: Mesh, tmp_path: Path) -> None:
    tensors = {"model": {"a": torch.ones(3)}}
    with Saver(mesh, tmp_path, 1) as saver:
        saver.start(1, tensors, {"loss": float("inf")})
        with pytest.raises(CheckpointError, match="step-000001 can't be written"):
            saver.start(2, tensors, {"step": 2})
        saver.start(2, tensors, {"step": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]


def endless(folder: Path, said: int) -> None:
    """Saves for ever; says each number once its checkpoint is known to be safe."""
    with open_mesh(ParallelConfig(), CPU) as mesh, Saver(mesh, folder, 2) as saver:
        for step in range(1, 10**6):
            saver.start(step, {"model": {"a": torch.full((30_000,), float(step)), "b": torch.full((7,), float(step))}}, {"step": step})
            while saver.poll() is None:
                pass
            os.write(said, b"%d\n" % step)


def kill_many(folder: Path, count: int) -> list[list[int]]:
    """Runs `endless` in forks, kills each -9 some time after its first word; all that each said."""
    heard = []
    for i in range(count):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            endless(folder / str(i), write)
        os.close(write)
        with os.fdopen(read, "rb") as words:
            first = words.readline()
            threading.Timer(0.02 + 0.0137 * i, os.kill, (child, signal.SIGKILL)).start()
            heard.append([int(word) for word in (first + words.read()).split()])
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    return heard


def check_after_kill(folder: Path, said: int) -> bool:
    """The newest checkpoint is the last that was told to be safe, or the one after it, with every number in it; whether a save was cut short."""
    newest = state.whole(folder)[-1]
    step = state.step_of(newest)
    assert step in (said, said + 1)  # there may have been no time left to tell
    assert state.torn(folder) == {}
    assert len(state.whole(folder)) <= 3  # one more than wanted, where it was killed before it could remove it
    for key, tensor in stored(newest).items():
        assert torch.equal(tensor, torch.full_like(tensor, step)), key
    interrupted = bool(list(folder.glob(".*.partial")))
    state.remove_leftovers(folder)
    assert not list(folder.glob(".*"))
    return interrupted


@pytest.mark.dist
def test_killed_at_any_moment_nothing_that_was_committed_is_lost(tmp_path: Path) -> None:
    (heard,) = run_ranks(kill_many, 1, tmp_path, 12)
    interrupted = [check_after_kill(tmp_path / str(i), said[-1]) for i, said in enumerate(heard)]
    assert any(interrupted)  # or the moments were badly chosen


def endless_on_each(folder: Path, seconds: float) -> None:
    said = os.open(folder / f"said-{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY)
    with open_mesh(ParallelConfig(), CPU) as mesh, Saver(mesh, folder, 2) as saver:
        for step in range(1, 10**6):
            saver.start(step, {"model": {"a": distribute_tensor(torch.full((30_001,), float(step)), mesh.fsdp_mesh, [Shard(0)])}}, {"step": step})
            while saver.poll() is None:
                pass
            os.write(said, b"%d\n" % step)
            if step == 1:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()  # all ranks together: a node that goes down


@pytest.mark.dist
@pytest.mark.parametrize("seconds", [0.01, 0.08, 0.15])
def test_a_node_that_goes_down_while_two_ranks_save(tmp_path: Path, seconds: float) -> None:
    assert [ended.exit_code for ended in outcomes(endless_on_each, 2, tmp_path, seconds)] == [-signal.SIGKILL] * 2
    check_after_kill(tmp_path, max(int((tmp_path / f"said-{rank}").read_text().split()[-1]) for rank in range(2)))
