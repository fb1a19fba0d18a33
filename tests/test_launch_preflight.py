"""launch/preflight.py on two gloo ranks: what it says when all is well, and for each thing that can be wrong."""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.launching import LAUNCH
from helpers.ranks import outcomes, run_ranks

pytestmark = pytest.mark.dist
GIB = 2**30


def load_preflight() -> ModuleType:
    if "preflight" not in sys.modules:
        spec = importlib.util.spec_from_file_location("preflight", LAUNCH / "preflight.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["preflight"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["preflight"])
    return sys.modules["preflight"]


def spoil(preflight: ModuleType, trick: str, rank: int) -> None:
    """Makes one thing look wrong, on rank 1 unless said otherwise."""
    preflight.FILE_WAIT_S, preflight.WAIT_S = 1.0, 20.0
    if trick == "full disk":
        preflight.shutil = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=2**20), rmtree=preflight.shutil.rmtree)
    if trick == "wrong sum":  # on both
        preflight.dist.all_reduce = lambda tensor: None
    if rank == 0:
        return
    if trick == "version":
        real = preflight.versions()
        preflight.versions = lambda: real | {"torch": "9.9.9"}
    if trick == "gpu":
        preflight.hardware = lambda: {"GPU": "a cheaper one"}
    if trick == "clock":
        preflight.time = SimpleNamespace(time=lambda: time.time() + 5, monotonic=time.monotonic, sleep=time.sleep, time_ns=time.time_ns)
    if trick == "busy gpu":
        torch.cuda.mem_get_info = lambda device: (10 * GIB, 80 * GIB)
        cuda, check = torch.device("cuda", 1), preflight.check_gpu_memory
        preflight.check_gpu_memory = lambda ranks, device: check(ranks, cuda)
    if trick == "no device":
        preflight.local_device = lambda device: (_ for _ in ()).throw(preflight.UserError("2 processes on this host, but 1 GPUs"))
    if trick == "network":
        preflight.dist.init_process_group = lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("NCCL error: no route"))


def on_each_rank(arguments: list[list[str]], folders: list[str], trick: str) -> tuple[int, str]:
    """Exit code and output of preflight on this rank, with its own arguments and current folder."""
    rank = int(os.environ["RANK"])
    os.chdir(folders[rank])
    preflight = load_preflight()
    spoil(preflight, trick, rank)
    if trick == "absent":
        preflight.WAIT_S = 2.0
        if rank == 1:
            time.sleep(4)
            return 1, ""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = preflight.main(arguments[rank])
    return code, said.getvalue()


@pytest.fixture
def arguments(tiny_pipeline: Path, tiny_cache: Path, tmp_path: Path) -> list[str]:
    settings = ["train.steps=2", "train.compute_dtype=float32", "runtime.device=cpu", "recipe=bf16"]
    return [f"model.path={tiny_pipeline}", f"cache={tiny_cache}", f"out={tmp_path / 'run'}", *settings]


def check(arguments: list[str], tmp_path: Path, *, trick: str = "", second: list[str] | None = None, folders: list[Path] | None = None) -> str:
    """What rank 0 said. Both ranks must come to the same verdict as it printed."""
    first, other = run_ranks(on_each_rank, 2, [arguments, second or arguments], [str(f) for f in folders or [tmp_path] * 2], trick)
    code, said = first
    assert other == (code, "")
    assert code == (1 if "FAIL" in said else 0), said
    assert said.splitlines()[-1] == ("preflight: not fit to start" if code else "preflight: all is well")
    return said


def failures(said: str) -> list[str]:
    return [line.removeprefix("FAIL  ") for line in said.splitlines() if line.startswith("FAIL")]


def test_all_is_well(arguments: list[str], tmp_path: Path):
    said = check(arguments, tmp_path)
    names = ["ranks", "configuration", "versions", "layout and data", "clocks", "output folder", "disk", "devices", "GPU memory", "all-reduce"]
    assert [line[6:].split(":")[0] for line in said.splitlines()[:-1]] == names
    assert "ranks: 2 on " in said
    assert "2 = dp_replicate 1 * dp_shard 2 * sp 1" in said
    assert "GB/s bus bandwidth over gloo" in said
    assert list((tmp_path / "run").iterdir()) == []  # nothing is left behind


@pytest.mark.parametrize(
    ("trick", "told"),
    [
        ("version", r'versions: torch: ".*" on rank 0 on .*; "9\.9\.9" on rank 1 on .*one environment'),
        ("gpu", r"versions: .*: .* on rank 0 on .* on rank 1 on .*one environment"),
        ("clock", r"clocks: rank 1 on \S+ is \+5\.0 s off rank 0's clock"),
        ("full disk", r"disk: out=.*: 0\.000977 GiB are free, and 0\.0229 are needed for checkpoints of 0\.00764 GiB"),
        ("busy gpu", r"GPU memory: rank 1 on \S+: 70\.0 GiB of GPU 1 are taken already"),
        ("no device", r"devices: rank 1 on \S+: 2 processes on this host, but 1 GPUs"),
        ("wrong sum", r"all-reduce: rank [01] on \S+: the sum over 2 ranks is wrong"),
    ],
)
def test_what_is_wrong_is_said_with_its_rank(arguments: list[str], tmp_path: Path, trick: str, told: str):
    found = failures(check(arguments, tmp_path, trick=trick))
    assert found
    for line in found:  # that, and nothing else
        assert re.match(told, line), line


def test_another_configuration_on_a_rank(arguments: list[str], tmp_path: Path):
    found = failures(check(arguments, tmp_path, second=[*arguments, "optimizer.lr=0.5"]))
    assert len(found) == 1
    assert found[0].startswith("configuration: optimizer.lr: ")
    assert "0.5 on rank 1 on " in found[0]


def test_a_folder_that_is_missing_on_a_rank(arguments: list[str], tmp_path: Path):
    found = failures(check(arguments, tmp_path, second=[*arguments, "model.path=nowhere"]))
    assert len(found) == 1
    assert "model.path='nowhere'" in found[0]
    assert "(rank 1 on " in found[0]


def test_an_illegal_layout(arguments: list[str], tmp_path: Path):
    [found] = failures(check([*arguments, "parallel.dp_replicate=3"], tmp_path))
    assert found.startswith("layout and data: parallel: world size 2 = dp_replicate * dp_shard * sp does not hold")


def test_too_little_data_for_a_step(arguments: list[str], tmp_path: Path):
    [found] = failures(check([*arguments, "train.global_batch_size=100"], tmp_path))
    assert "is too small for one step" in found


def test_a_folder_that_is_not_shared(arguments: list[str], tmp_path: Path):
    """The same relative path on two machines, but each has its own."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    [found] = failures(check([*arguments, "out=run"], tmp_path, folders=folders))
    assert found.startswith("output folder: rank 1 on ")
    assert "does not see rank 0's file" in found
    assert "mount one file system" in found


@pytest.mark.parametrize("where", [[1], [0], [0, 1]])
def test_a_folder_that_can_not_be_written(arguments: list[str], tmp_path: Path, where: list[int]):
    folders = [tmp_path / "a", tmp_path / "b"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        if rank in where:
            (folder / "run").write_text("a file")
    found = [line for line in failures(check([*arguments, "out=run"], tmp_path, folders=folders)) if "can't be written" in line]
    assert [line.split(" on ")[0] for line in found] == [f"output folder: rank {rank}" for rank in where]


def test_a_folder_that_can_not_be_made(arguments: list[str], tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    found = failures(check([*arguments, f"out={tmp_path}/file/run"], tmp_path))
    assert [line.split(" on ")[0] for line in found] == ["output folder: rank 0", "output folder: rank 1"]
    assert all("can't be written to (Not a directory)" in line for line in found)


def test_a_rank_that_does_not_answer_is_named(arguments: list[str], tmp_path: Path):
    (code, said), _ = run_ranks(on_each_rank, 2, [arguments] * 2, [str(tmp_path)] * 2, "absent")
    assert code == 1
    assert "rank 1 did not answer within 2 s" in said


def hang(arguments: list[str], folder: str) -> None:
    """Rank 1 never joins the all-reduce, and leaves some seconds later."""
    rank, preflight = os.environ["RANK"], load_preflight()
    with open(Path(folder) / f"said-{rank}", "w") as file:
        os.dup2(file.fileno(), 1)
    check_all_reduce = preflight.check_all_reduce

    def impatient(ranks: object, device: torch.device) -> object:
        preflight.WAIT_S = 2.0
        if rank == "1":
            time.sleep(6)
            return [], ""
        return check_all_reduce(ranks, device)

    preflight.check_all_reduce = impatient
    preflight.main(arguments)


def test_an_all_reduce_that_hangs_is_ended(arguments: list[str], tmp_path: Path):
    first, _ = outcomes(hang, 2, arguments, str(tmp_path))
    assert first.exit_code == 1
    said = (tmp_path / "said-0").read_text()
    assert "FAIL  all-reduce: rank 0 on " in said
    assert "still waited after 2 s" in said


def test_a_back_end_that_fails_on_one_rank(arguments: list[str], tmp_path: Path):
    """Its reason is in the report, with what to do."""
    preflight = load_preflight()
    store = preflight.HashStore()
    ranks = preflight.Ranks(store, 0, 1, ["node-a"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight.dist, "init_process_group", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no route to host")))
        report, _ = preflight.check_all_reduce(ranks, torch.device("cpu"))
    assert report[0].startswith("rank 0 on node-a: no route to host; ")
    assert "network.env" in report[0]


def test_alone(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert load_preflight().main(arguments) == 0
    said = capsys.readouterr().out
    assert "ok    ranks: 1 on " in said
    assert said.endswith("ok    all-reduce: one process, nothing to send\npreflight: all is well\n")


def test_under_torchrun(arguments: list[str]):
    """As node.sh starts it."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(LAUNCH.parent), str(LAUNCH.parent / "kernels")])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(LAUNCH / "preflight.py"), *arguments]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ok    ranks: 2 on " in ended.stdout
    assert ended.stdout.count("ok    ") == 10
