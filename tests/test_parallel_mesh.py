"""Layouts, process groups, and what happens when ranks disagree, die or stay away."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import outcomes, run_ranks

from videoqat import cli
from videoqat.config import ParallelConfig
from videoqat.console import is_rank_zero
from videoqat.errors import ConfigError, UserError, WorkerLost
from videoqat.parallel import watch
from videoqat.parallel.mesh import Layout, collective_errors, local_device, open_mesh, resolve_layout, shared_device, world_size_from_launcher

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "world_size", "layout"),
    [
        ({}, 1, (1, 1, 1)),
        ({}, 8, (1, 8, 1)),
        ({"sp": 2}, 8, (1, 4, 2)),
        ({"dp_replicate": 8, "dp_shard": 4, "sp": 2}, 64, (8, 4, 2)),
        ({"dp_replicate": 4}, 4, (4, 1, 1)),
        ({"engine": "deepspeed", "sp": 4}, 4, (1, 1, 4)),
    ],
)
def test_the_degree_left_out_is_what_the_others_leave(settings: dict, world_size: int, layout: tuple[int, int, int]) -> None:
    resolved = resolve_layout(ParallelConfig(**settings), world_size, num_heads=12)
    assert resolved == Layout(*layout)
    assert resolved.world_size == world_size
    assert resolved.dp == layout[0] * layout[1]


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        (
            {"dp_replicate": 3, "dp_shard": 2, "sp": 2},
            8,
            "parallel: world size 8 = dp_replicate * dp_shard * sp does not hold for dp_replicate 3 * dp_shard 2 * sp 2; "
            "legal: dp_replicate * sp one of 1, 2, 4, 8, and dp_shard=-1",
        ),
        (
            {"dp_shard": 3, "sp": 2},
            8,
            "parallel: world size 8 = dp_replicate * dp_shard * sp does not hold for dp_replicate 1 * dp_shard 3 * sp 2; "
            "legal: parallel.dp_shard=4 or -1 with this dp_replicate and sp, or dp_replicate * sp one of 1, 2, 4, 8, and dp_shard=-1",
        ),
        ({"dp_replicate": 2, "sp": 2}, 2, "world size 2 = dp_replicate * dp_shard * sp does not hold for dp_replicate 2 * dp_shard (what is left)"),
        ({"sp": 8}, 8, "parallel.sp=8 does not divide the model's 12 heads; legal for 8 processes: 1, 2, 4"),
        ({"engine": "deepspeed", "dp_replicate": 2}, 4, "parallel.dp_replicate=2 is not legal; legal: 1 with parallel.engine=deepspeed"),
    ],
)
def test_what_does_not_divide_is_told_with_the_equation(settings: dict, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_layout(ParallelConfig(**settings), world_size, num_heads=12)
    assert message in str(error.value)


def test_a_launcher_without_local_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world_size_from_launcher() == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE=4 is set, but not LOCAL_RANK; start the processes with torchrun"):
        world_size_from_launcher()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert world_size_from_launcher() == 4
    assert not is_rank_zero()
    monkeypatch.setenv("RANK", "0")
    assert is_rank_zero()


def test_each_process_of_a_host_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_device(torch.device("cuda:1")) == torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert local_device(torch.device("cuda")) == torch.device("cuda:1")
    assert local_device(CPU) == CPU
    with pytest.raises(ConfigError, match=r"runtime.device=cuda:0 is not legal for 2 processes on this host"):
        local_device(torch.device("cuda:0"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 processes on this host, but 2 GPUs"):
        local_device(torch.device("cuda"))


def test_processes_that_only_share_out_work_may_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert shared_device(torch.device("cuda")) == torch.device("cuda:1")
    assert shared_device(torch.device("cuda:0")) == torch.device("cuda:0")
    assert shared_device(CPU) == CPU


def _place(config: ParallelConfig) -> tuple:
    with open_mesh(config, CPU, num_heads=4) as mesh:
        mesh.steady()
        value = torch.tensor([10.0**mesh.dp_rank])
        partners = [] if mesh.sp_group is None else dist.get_process_group_ranks(mesh.sp_group)
        numbers = (mesh.sum_over_dp(value).item(), value.item())
        told = (mesh.any(False), mesh.any(mesh.rank == 1), mesh.gather_objects(mesh.rank))
        mesh.agree({"equal": 1})
        mesh.barrier()
        return (
            (mesh.rank, mesh.dp_rank, mesh.sp_rank),
            partners,
            numbers,
            told,
            tuple(mesh.fsdp_mesh.shape),
            dist.get_process_group_ranks(mesh.cpu_group),
        )


def test_one_process_needs_no_launcher_and_may_do_it_again() -> None:
    for _ in range(3):
        assert _place(ParallelConfig()) == ((0, 0, 0), [], (1.0, 1.0), (False, False, [0]), (1,), [0])
        assert not dist.is_initialized()
    with open_mesh(ParallelConfig(), CPU), pytest.raises(RuntimeError, match="has a process group already"), open_mesh(ParallelConfig(), CPU):
        pass
    with pytest.raises(ZeroDivisionError), open_mesh(ParallelConfig(), CPU):
        raise ZeroDivisionError
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match=r"parallel.sp=3 does not divide the model's 4 heads"), open_mesh(ParallelConfig(sp=3), CPU, num_heads=4):
        pass


@pytest.mark.dist
def test_sp_is_innermost_and_each_position_counts_once() -> None:
    everybody = [0, 1, 2, 3]
    told = (False, True, everybody)
    assert run_ranks(_place, 4, ParallelConfig(dp_replicate=2, sp=2)) == [
        ((0, 0, 0), [0, 1], (11.0, 1.0), told, (2, 2), everybody),
        ((1, 0, 1), [0, 1], (11.0, 1.0), told, (2, 2), everybody),
        ((2, 1, 0), [2, 3], (11.0, 10.0), told, (2, 2), everybody),
        ((3, 1, 1), [2, 3], (11.0, 10.0), told, (2, 2), everybody),
    ]
    first, *_, last = run_ranks(_place, 4, ParallelConfig())
    assert first == ((0, 0, 0), [], (1111.0, 1.0), told, (4,), everybody)
    assert last[0] == (3, 3, 0)


def _disagree(per_rank: list[dict]) -> str:
    with open_mesh(ParallelConfig(), CPU) as mesh:
        try:
            mesh.agree(per_rank[mesh.rank])
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.dist
def test_ranks_that_differ_are_named_on_every_rank() -> None:
    same = {"torch": "2.13.0", "train.steps": 10}
    message = "ranks differ in train.steps: 20 on rank 1, 10 on rank 0; all must be started alike"
    assert run_ranks(_disagree, 2, [same, same | {"train.steps": 20}]) == [message] * 2
    message = "ranks differ in more: 1 on rank 1, 'nothing' on rank 0; all must be started alike"
    assert run_ranks(_disagree, 2, [same, same | {"more": 1}]) == [message] * 2


def _lose_one(how: str) -> str:
    """Rank 1 leaves before the third step; what rank 0 is told."""
    with open_mesh(ParallelConfig(step_timeout_s=3 if how == "silent" else 60, start_timeout_s=60), CPU) as mesh:
        mesh.steady()
        for step in range(1, 100):
            if mesh.rank == 1 and step == 3:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "failed":
                    raise ValueError("a sample that can't be read")
                time.sleep(6)
                return "slept"
            with collective_errors(f"step {step}"):
                mesh.sum_over_dp(torch.ones(1000))
    return ""


@pytest.mark.dist
@pytest.mark.parametrize("how", ["killed", "failed", "silent"])
def test_a_lost_rank_ends_the_others_with_the_reason(how: str) -> None:
    survivor, lost = outcomes(_lose_one, 2, how, timeout=60)
    assert survivor.exit_code == 1
    assert "WorkerLost: step 3: another process ended or stopped answering (" in survivor.error
    assert "the same command, started again, continues from the last checkpoint" in survivor.error
    assert lost.exit_code == {"killed": -signal.SIGKILL, "failed": 1, "silent": 0}[how]
    assert {"killed": not lost.error, "failed": "can't be read" in lost.error, "silent": lost.result == "slept"}[how]
    assert ("(Timed out waiting 3000ms" if how == "silent" else "by peer") in survivor.error  # closed or reset, as it comes
    assert survivor.ended_at <= lost.ended_at or how != "silent"


def _wait_where_nothing_is_heard(said: Path) -> str:
    """Waits as one does for a GPU: outside of gloo, for ever."""
    watch.GRACE_S = 1.0
    os.dup2(os.open(said / os.environ["RANK"], os.O_CREAT | os.O_WRONLY), 2)
    with open_mesh(ParallelConfig(), CPU) as mesh:
        mesh.barrier()
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
    return ""


@pytest.mark.dist
def test_a_dead_rank_is_noticed_by_one_that_waits_elsewhere(tmp_path: Path) -> None:
    ended = outcomes(_wait_where_nothing_is_heard, 3, tmp_path, timeout=100)
    assert [outcome.exit_code for outcome in ended] == [1, -signal.SIGKILL, 1]
    assert "videoqat [rank 0]: rank 1 has ended, and this process, which waits for it, ends, too." in (tmp_path / "0").read_text()
    assert "videoqat [rank 2]: rank 0 has ended" in (tmp_path / "2").read_text()


def _end_by(error: str) -> str:
    with open_mesh(ParallelConfig(), CPU) as mesh:
        mesh.barrier()
        if mesh.rank == 1:
            time.sleep(2)  # rank 0 is gone by then
        raise UserError(error)


@pytest.mark.dist
def test_ranks_that_end_by_the_same_error_each_say_it() -> None:
    for outcome in outcomes(_end_by, 2, "all alike"):
        assert "UserError: all alike" in outcome.error


SAME_ERROR = """
import torch
from videoqat.config import ParallelConfig
from videoqat.errors import UserError
from videoqat.parallel.mesh import open_mesh
try:
    with open_mesh(ParallelConfig(), torch.device("cpu")) as mesh:
        mesh.barrier()
        raise UserError("all alike")
except UserError:
    raise SystemExit(2)
"""


@pytest.mark.dist
def test_exit_codes_survive_the_end_of_the_interpreter() -> None:
    """A whole process, since a thread that comes back from C++ while Python shuts down aborts it; `run_ranks` ends its processes before that."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        launched = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **launched}
        processes.append(subprocess.Popen([sys.executable, "-c", SAME_ERROR], env=environment, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], said


def _stay_away() -> str:
    if os.environ["RANK"] == "1":
        time.sleep(10)
        return "never came"
    with open_mesh(ParallelConfig(start_timeout_s=2), CPU):
        return ""


@pytest.mark.dist
def test_a_rank_that_never_comes_is_not_waited_for_longer_than_said() -> None:
    waiting, away = outcomes(_stay_away, 2, timeout=60)
    assert "WorkerLost: meeting the other processes: another process ended or stopped answering (" in waiting.error
    assert away.result == "never came"
    assert waiting.ended_at <= away.ended_at


def test_errors_of_other_kinds_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError), collective_errors("step 1"):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="mat1 and mat2") as error, collective_errors("step 1"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not isinstance(error.value, WorkerLost)


def test_the_command_line_tells_a_lost_worker_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def lose(*_: object, **__: object) -> dict:
        raise WorkerLost("step 3: another process ended")

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(cli, "execute", lose)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "videoqat doctor [rank 3]: step 3: another process ended\n"
