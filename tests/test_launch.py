"""launch/local.sh, node.sh and meet.py: what is started with which arguments, and how signals and exit codes get through."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers.launching import LAUNCH, Desk, finish, wait_until

AWKWARD = ["--config", "train/tiny", "out=a b/c", 'validation.prompts=[\'it"s\', "two  words"]', "cache=$(exit 9);`x`*?", "é=\\"]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def words(printed: str) -> list[list[str]]:
    return [shlex.split(line) for line in printed.splitlines()]


# Style


def shell_texts() -> dict[str, str]:
    scripts = {path.name: path.read_text() for path in [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"]}
    sky = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    return scripts | {f"skypilot {part}": "#!/bin/bash\n" + sky[part] for part in ("setup", "run")}


@pytest.mark.parametrize("name", shell_texts())
def test_shellcheck_has_nothing_to_say(name: str):
    shellcheck = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run([shellcheck, "--enable=quote-safe-variables", "-"], input=shell_texts()[name], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("script", ["local.sh", "node.sh", "slurm.sbatch"])
def test_help_says_how_and_gives_an_example(script: str, desk: Desk):
    shown = desk.run(script, "-h")
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage: ")
    assert "example" in shown.stdout
    assert "DRY_RUN=1" in shown.stdout
    assert (LAUNCH / script).read_text().count("set -euo pipefail") == 1


def test_the_environment_file_sets_nothing_by_default(desk: Desk):
    lines = (LAUNCH / "env" / "network.env").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == []
    for line in lines:  # uncommented, each is a setting
        assert re.fullmatch(r"#( .*|[A-Z_]+=\S+)?", line) or not line


# Dry runs


def test_a_dry_run_of_one_machine_prints_the_commands_and_runs_nothing(desk: Desk):
    desk.put("torchrun")
    shown = desk.run("local.sh", "--", *AWKWARD, DRY_RUN="1")
    assert shown.returncode == 0, shown.stderr
    assert desk.calls("torchrun") == []
    environment, preflight, train = words(shown.stdout)
    assert environment[0] == "export"
    torchrun = ["torchrun", "--nnodes", "1", "--nproc-per-node", "gpu", "--max-restarts", "0", "--standalone"]
    assert preflight == [*torchrun, str(LAUNCH / "preflight.py"), *AWKWARD]
    assert train[: len(torchrun) + 1] == [*torchrun, str(LAUNCH / "worker.py")]
    assert train[len(torchrun) + 2 :] == ["train", *AWKWARD]
    assert sorted(path.name for path in desk.folder.iterdir()) == ["bin"]


def test_a_dry_run_of_several_machines(desk: Desk):
    shown = desk.run(
        "node.sh", "--hosts=node-a,node-b", "--port", "4711", "--id", "x", "--processes", "8", "--wait", "60", "--", *AWKWARD, DRY_RUN="1"
    )
    _, meet, preflight, again, train = words(shown.stdout)
    assert meet == again == ["python3", str(LAUNCH / "meet.py"), "--hosts", "node-a,node-b", "--port", "4711", "--seconds", "60"]
    for command, name in ((preflight, "preflight"), (train, "train")):
        options = dict(zip(command[1:-1:2], command[2::2], strict=False))
        assert options["--nnodes"] == "2"
        assert options["--nproc-per-node"] == "8"
        assert options["--rdzv-backend"] == "c10d"
        assert options["--rdzv-endpoint"] == "node-a:4711"
        assert options["--rdzv-id"] == f"x-{name}"
        assert "join_timeout=60,read_timeout=60" in options["--rdzv-conf"]
        assert not any("node-rank" in word or "node_rank" in word for word in command)
        assert "--standalone" not in command
    assert train[-len(AWKWARD) :] == AWKWARD


def test_preflight_can_be_left_out(desk: Desk):
    commands = words(desk.run("node.sh", "--no-preflight", "--", "out=x", DRY_RUN="1").stdout)
    assert [command[0] for command in commands] == ["export", "torchrun"]
    assert commands[1][-2:] == ["train", "out=x"]


@pytest.mark.parametrize("dry_run", ["", "0"])
def test_only_1_is_a_dry_run(desk: Desk, dry_run: str):
    desk.put("torchrun")
    assert desk.run("node.sh", "--processes", "2", "--", "out=x", DRY_RUN=dry_run).returncode == 0
    assert len(desk.calls("torchrun")) == 2


# Bad input


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing to train"),
        (["--"], "nothing to train"),
        (["--config", "train/tiny"], "unknown option --config; what is meant for videoqat train comes after --"),
        (["out=run"], "out=run comes before --"),
        (["--port"], "--port needs a value"),
        (["--hosts", "--", "out=x"], "--hosts needs a value"),
        (["--port", "http", "--", "out=x"], "--port http: legal is a whole number from 1 on"),
        (["--port", "70000", "--", "out=x"], "--port 70000: legal is 1 to 65535"),
        (["--processes", "0", "--", "out=x"], "--processes 0"),
        (["--wait", "soon", "--", "out=x"], "--wait soon"),
        (["--id", "a b", "--", "out=x"], "--id a b"),
        (["--hosts", "a, b", "--", "out=x"], "--hosts a, b"),
        (["--env", "nowhere.env", "--", "out=x"], "--env nowhere.env: no such file"),
        (["--env", ".", "--", "out=x"], "--env .: no such file"),
        (["--node-rank", "1", "--", "out=x"], "unknown option --node-rank"),
    ],
)
def test_bad_arguments_are_named(desk: Desk, arguments: list[str], told: str):
    ended = desk.run("node.sh", *arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith("node.sh: ")
    assert told in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_local_is_for_one_machine(desk: Desk):
    ended = desk.run("local.sh", "--hosts", "a,b", "--", "out=x")
    assert ended.returncode == 2
    assert "node.sh" in ended.stderr


def test_what_is_not_installed_is_named(desk: Desk):
    (desk.bin / "bash").symlink_to("/bin/bash")
    for tool in ("dirname", "id", "env"):
        (desk.bin / tool).symlink_to(f"/usr/bin/{tool}")
    ended = desk.run("node.sh", "--processes", "2", "--", "out=x", PATH=str(desk.bin))
    assert ended.returncode == 2
    assert "torchrun is not on PATH" in ended.stderr


@pytest.mark.skipif(Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_wants_a_number(desk: Desk):
    desk.put("torchrun")
    ended = desk.run("local.sh", "--", "out=x")
    assert ended.returncode == 2
    assert "--processes N" in ended.stderr
    assert desk.calls("torchrun") == []


# What really reaches torchrun


def test_arguments_and_environment_reach_torchrun(desk: Desk):
    desk.put("my network.env", "a program of this name is not meant")
    (desk.folder / "my network.env").write_text('NCCL_SOCKET_IFNAME="eth 7"\n')
    desk.put("torchrun", "print({key: os.environ.get(key) for key in ('NCCL_SOCKET_IFNAME', 'TRITON_CACHE_DIR', 'OMP_NUM_THREADS')})")
    ended = desk.run("node.sh", "--processes", "2", "--env", "my network.env", "--", *AWKWARD)
    assert ended.returncode == 0, ended.stderr
    preflight, train = desk.calls("torchrun")
    assert preflight[-len(AWKWARD) - 1 :] == [str(LAUNCH / "preflight.py"), *AWKWARD]
    assert train[-len(AWKWARD) - 1 :] == ["train", *AWKWARD]
    assert "'NCCL_SOCKET_IFNAME': 'eth 7'" in ended.stdout
    assert f"'TRITON_CACHE_DIR': '{desk.folder}/videoqat-triton-" in ended.stdout


def test_no_nccl_variable_is_set_by_default(desk: Desk):
    desk.put("torchrun", "print([key for key in os.environ if key.startswith(('NCCL', 'GLOO', 'TORCH', 'PYTORCH'))])")
    assert desk.run("node.sh", "--processes", "2", "--", "out=x").stdout == "[]\n[]\n"


@pytest.mark.parametrize("code", [1, 3])
def test_without_a_good_preflight_nothing_is_trained(desk: Desk, code: int):
    desk.put("torchrun", f"sys.exit({code})")
    ended = desk.run("node.sh", "--processes", "2", "--", "out=x")
    assert ended.returncode == code
    assert len(desk.calls("torchrun")) == 1
    assert "preflight" in ended.stderr


def test_the_exit_code_of_torchrun_gets_through(desk: Desk):
    desk.put("torchrun", "sys.exit(3)")
    assert desk.run("node.sh", "--no-preflight", "--processes", "2", "--", "out=x").returncode == 3


def test_a_stranger_with_the_number_of_a_worker_that_has_ended_is_left_alone(desk: Desk):
    with subprocess.Popen(["sleep", "60"]) as stranger:
        desk.put("torchrun", f"(Path(arguments[-3]) / '0.pid').write_text('{stranger.pid}')")
        assert desk.run("node.sh", "--no-preflight", "--processes", "1", "--", "out=x").returncode == 0
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("wish", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_training_starts_ends_with_75(desk: Desk, wish: signal.Signals):
    desk.put("torchrun", "time.sleep(60)")
    process = desk.start("node.sh", "--processes", "2", "--", "out=x")
    wait_until(lambda: len(desk.calls("torchrun")) == 1)
    process.send_signal(wish)
    assert finish(process).returncode == 75
    assert len(desk.calls("torchrun")) == 1


def test_a_second_interrupt_ends_at_once(desk: Desk):
    """But schedulers may send SIGTERM by several roads: many of them are one wish."""
    desk.put("torchrun", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\ntime.sleep(60)")
    process = desk.start("node.sh", "--no-preflight", "--processes", "2", "--", "out=x")
    wait_until(lambda: len(desk.calls("torchrun")) == 1)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.returncode == 143
    assert "without saving" in ended.stderr


# With the real torchrun, and a package `videoqat` whose training only waits

TRAINING = """
import json, os, signal, sys, time
from pathlib import Path


def main(arguments):
    rank, folder = os.environ["RANK"], Path(__file__).parent
    heard = []
    (folder / f"start-{rank}").write_text(json.dumps([sys.argv, arguments]))
    if "bad" in arguments:
        return 2
    if "unsaved" in arguments:
        return 130
    if "broken" in arguments:
        if rank == "1":
            raise RuntimeError("it broke")
        time.sleep(60)
    while not (folder / "loaded").exists():
        time.sleep(0.1)
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    (folder / f"trains-{rank}").touch()
    while not heard:
        time.sleep(0.1)
    time.sleep(2.5 if rank == "0" else 0.5)  # ranks need not leave at the same moment
    (folder / f"saved-{rank}").write_text(str(len(heard)))
    return 75
"""


@pytest.fixture
def training(desk: Desk) -> Path:
    folder = desk.folder / "fake" / "videoqat"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "cli.py").write_text(TRAINING)
    desk.env["PYTHONPATH"] = str(folder.parent)
    return folder


def of_all_ranks(folder: Path, name: str) -> bool:
    return all((folder / f"{name}-{rank}").exists() for rank in (0, 1))


@pytest.mark.dist
def test_a_signal_reaches_each_worker_once_as_soon_as_it_listens(desk: Desk, training: Path):
    process = desk.start("local.sh", "--no-preflight", "--processes", "2", "--", *AWKWARD)
    wait_until(lambda: of_all_ranks(training, "start"))
    process.send_signal(signal.SIGUSR1)  # while the workers still load: of a SIGUSR1 now they would die
    process.send_signal(signal.SIGTERM)
    time.sleep(2)  # node.sh looks once a second
    (training / "loaded").touch()
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    for rank in (0, 1):
        assert (training / f"saved-{rank}").read_text() == "1"
        assert json.loads((training / f"start-{rank}").read_text()) == [["videoqat", "train", *AWKWARD], ["train", *AWKWARD]]
    assert "start the same command again" in ended.stderr
    assert not list(desk.folder.glob("videoqat-videoqat.*"))  # tidied up


@pytest.mark.dist
def test_workers_do_not_outlive_a_torchrun_that_is_killed(desk: Desk, training: Path):
    process = desk.start("node.sh", "--no-preflight", "--processes", "2", "--", "out=x")
    (training / "loaded").touch()
    wait_until(lambda: of_all_ranks(training, "trains"))
    workers = [Path("/proc", file.read_text().strip()) for file in desk.folder.glob("videoqat-videoqat.*/*.pid")]
    assert len(workers) == 2
    os.kill(int((workers[0] / "stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)  # their parent
    assert finish(process).returncode == 137
    wait_until(lambda: not any(worker.exists() and (worker / "cmdline").read_text() for worker in workers), 5)


@pytest.mark.dist
@pytest.mark.parametrize(("how", "code", "told"), [("bad", 2, "bad input"), ("unsaved", 130, "nothing was saved"), ("broken", 1, "it broke")])
def test_the_exit_code_of_the_training_gets_through(desk: Desk, training: Path, how: str, code: int, told: str):
    ended = desk.run("node.sh", "--no-preflight", "--processes", "2", "--", how)
    assert ended.returncode == code, ended.stderr
    assert told in ended.stderr
    assert ("from the last checkpoint" in ended.stderr) == (how == "broken")
    if how == "broken":  # torchrun's summary has the traceback
        assert 'RuntimeError("it broke")' in ended.stderr.partition("Root Cause")[2]


@pytest.mark.dist
def test_two_machines_meet_and_leave_together(desk: Desk, training: Path):
    with socket.create_server(("localhost", 0)) as probe:
        port = str(probe.getsockname()[1])
    node = ("node.sh", "--hosts", "localhost,localhost", "--port", port, "--no-preflight", "--processes", "1", "--", "out=x")
    first, second = desk.start(*node), desk.start(*node)
    (training / "loaded").touch()
    wait_until(lambda: of_all_ranks(training, "trains"))
    first.send_signal(signal.SIGUSR1)
    second.send_signal(signal.SIGTERM)
    ended = [finish(first), finish(second)]
    assert [end.returncode for end in ended] == [75, 75], ended[0].stderr + ended[1].stderr
    assert of_all_ranks(training, "saved")


# Meeting


def start_meeting(hosts: str, port: int, seconds: float = 20) -> "subprocess.Popen[str]":
    command = [sys.executable, str(LAUNCH / "meet.py"), "--hosts", hosts, "--port", str(port), "--seconds", str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.fixture
def port() -> int:
    with socket.create_server(("localhost", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for_line(process: "subprocess.Popen[str]", text: str) -> None:
    """Until a line of its standard error holds `text`."""
    assert process.stderr
    assert any(text in line for line in iter(process.stderr.readline, "")), f"it never said {text!r}"


def test_three_machines_meet(port: int):
    ended = [finish(process) for process in [start_meeting("localhost,localhost,localhost", port) for _ in range(3)]]
    assert [end.returncode for end in ended] == [0, 0, 0], ended
    assert sorted(end.stdout for end in ended) == ["guest\n", "guest\n", "host\n"]
    with socket.create_server(("localhost", port)):
        pass  # free for torchrun


def test_a_guest_that_dies_is_no_longer_counted(port: int):
    hosts = "localhost,localhost,localhost"
    host = start_meeting(hosts, port)
    wait_for_line(host, "1 of 3")
    guest = start_meeting(hosts, port)
    wait_for_line(guest, "waiting for the others")
    guest.kill()
    finish(guest)
    second = start_meeting(hosts, port)
    wait_for_line(second, "waiting for the others")
    with pytest.raises(subprocess.TimeoutExpired):
        host.wait(2)  # two are there, not three
    third = start_meeting(hosts, port)
    assert [finish(process).stdout for process in (host, second, third)] == ["host\n", "guest\n", "guest\n"]


def test_a_machine_that_does_not_come_is_named(port: int):
    ended = finish(start_meeting("localhost,127.8.8.8", port, 1))
    assert ended.returncode == 1
    assert f"1 of 2 machines are at localhost:{port}; not yet: 127.8.8.8" in ended.stderr


def test_a_host_without_a_name_is_named(port: int):
    ended = finish(start_meeting("localhost,no-such-host.invalid", port, 1))
    assert ended.returncode == 1
    assert "'no-such-host.invalid' is not known" in ended.stderr


def test_other_hosts_are_refused(port: int):
    host = start_meeting("localhost,localhost", port, 5)
    wait_for_line(host, "1 of 2")
    ended = finish(start_meeting("localhost,127.0.0.1", port, 5))
    assert ended.returncode == 1
    assert "other --hosts" in ended.stderr
    host.kill()
    finish(host)


def test_a_taken_port_is_told():
    with socket.create_server(("localhost", 0)) as other:
        taken = other.getsockname()[1]
        ended = finish(start_meeting("localhost,localhost", taken, 1))
    assert ended.returncode == 1
    assert f"port {taken}" in ended.stderr
    assert "is taken" in ended.stderr


def test_a_host_that_nobody_is_can_not_be_met():
    ended = finish(start_meeting("192.0.2.1,localhost", 29999, 1))
    assert ended.returncode == 1
    assert "can't meet the others at 192.0.2.1:29999" in ended.stderr
