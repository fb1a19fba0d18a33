"""launch/slurm.sbatch with stand-ins for Slurm; the manifests for Kubernetes and SkyPilot; the container; the README's commands."""

import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.launching import LAUNCH, Desk, finish, wait_until
from packaging.requirements import Requirement

ROOT = LAUNCH.parent
TRAIN = ["--config", "train/tiny", "out=the run", "cache=a'b"]


# Slurm

SCONTROL = """
state = Path({folder!r}) / "state"
if arguments[:2] == ["show", "hostnames"]:
    names = dict(zip(["", "node[a-b]"], ["", "node-a\\nnode-b\\n"]))[arguments[2]]
    if not names:
        sys.exit("scontrol: error: host list is empty")
    print(names, end="")
elif arguments[:2] == ["show", "job"]:
    print("JobId=42 JobName=videoqat\\n   JobState=" + state.read_text() + " Reason=None\\n   Command={script} --id x -- out=run")
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Desk:
    """Slurm with job 42 on node-a and node-b. What srun does: see `srun`."""
    desk = Desk(tmp_path)
    (tmp_path / "state").write_text("RUNNING")
    desk.put("scontrol", SCONTROL.format(folder=str(tmp_path), script=str(LAUNCH / "slurm.sbatch")))
    desk.env |= {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[a-b]", "SLURM_JOB_NUM_NODES": "2"}
    return desk


def srun(desk: Desk, code: int, *, step: int | None = None) -> None:
    """srun ends with `code`; with `step` a checkpoint is there by then."""
    save = ""
    if step is not None:
        save = f"folder = Path('the run/checkpoints/step-{step:06d}')\nfolder.mkdir(parents=True)\n(folder / 'COMMITTED').touch()\n"
    desk.put("srun", f"{save}sys.exit({code})")


def requeued(desk: Desk) -> int:
    return sum(call[0] == "requeue" for call in desk.calls("scontrol"))


def test_each_node_runs_node_sh_once_with_all_arguments(slurm: Desk):
    srun(slurm, 0)
    ended = slurm.run("slurm.sbatch", "--env", "my file", "--", *TRAIN)
    assert ended.returncode == 0, ended.stderr
    [call] = slurm.calls("srun")
    node = call.index(str(LAUNCH / "node.sh"))
    options, ours = call[:node], call[node + 1 :]
    assert options[options.index("--ntasks-per-node") + 1] == "1"
    assert options[options.index("--nodes") + 1] == "2"
    assert ours[: ours.index("--env")] == ["--hosts", "node-a,node-b", "--port", "20042", "--id", "42.0"]
    assert ours[ours.index("--env") :] == ["--env", "my file", "--", *TRAIN]
    assert requeued(slurm) == 0


def test_a_dry_run_prints_what_srun_would_get(slurm: Desk):
    srun(slurm, 0)
    shown = slurm.run("slurm.sbatch", "--", *TRAIN, DRY_RUN="1")
    assert slurm.calls("srun") == []
    dry = shlex.split(shown.stdout)
    slurm.run("slurm.sbatch", "--", *TRAIN)
    assert dry == ["srun", *slurm.calls("srun")[0]]
    inside = slurm.run("node.sh", *dry[dry.index(str(LAUNCH / "node.sh")) + 1 :], DRY_RUN="1")  # and node.sh can read it
    assert inside.returncode == 0
    assert "--rdzv-endpoint node-a:20042" in inside.stdout


def test_no_hosts_is_an_error(slurm: Desk):
    srun(slurm, 0)
    ended = slurm.run("slurm.sbatch", "--", *TRAIN, SLURM_JOB_NODELIST="")
    assert ended.returncode == 2
    assert "no host for SLURM_JOB_NODELIST=''" in ended.stderr
    assert slurm.calls("srun") == []


@pytest.mark.parametrize(("arguments", "told"), [(["--", "cache=x"], "out=FOLDER"), ([], "out=FOLDER")])
def test_out_must_be_given(slurm: Desk, arguments: list[str], told: str):
    ended = slurm.run("slurm.sbatch", *arguments)
    assert ended.returncode == 2
    assert told in ended.stderr


def test_outside_slurm_it_says_so(tmp_path: Path):
    ended = Desk(tmp_path).run("slurm.sbatch", "--", *TRAIN)
    assert ended.returncode == 2
    assert "SLURM_JOB_ID is not set" in ended.stderr


def test_the_copy_that_sbatch_runs_finds_node_sh(slurm: Desk):
    srun(slurm, 0)
    spool = slurm.folder / "spool"
    spool.mkdir()
    shutil.copy(LAUNCH / "slurm.sbatch", spool / "slurm_script")
    assert slurm.run(spool / "slurm_script", "--", *TRAIN).returncode == 0
    assert str(LAUNCH / "node.sh") in slurm.calls("srun")[0]


@pytest.mark.parametrize("code", [0, 1, 2, 137])
def test_only_75_is_requeued(slurm: Desk, code: int):
    srun(slurm, code)
    assert slurm.run("slurm.sbatch", "--", *TRAIN).returncode == code
    assert requeued(slurm) == 0


def test_75_is_requeued(slurm: Desk):
    srun(slurm, 75, step=3)
    ended = slurm.run("slurm.sbatch", "--", *TRAIN)
    assert ended.returncode == 0
    assert slurm.calls("scontrol")[-1] == ["requeue", "42"]
    assert "step-000003" in ended.stderr


def test_a_cancelled_job_stays_cancelled(slurm: Desk):
    srun(slurm, 75)
    (slurm.folder / "state").write_text("CANCELLED")
    ended = slurm.run("slurm.sbatch", "--", *TRAIN)
    assert ended.returncode == 75
    assert requeued(slurm) == 0
    assert "CANCELLED" in ended.stderr


def test_the_warning_before_the_time_limit_reaches_srun(slurm: Desk):
    """Also if by then the limit has passed: it was ours to requeue."""
    slurm.put("srun", "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\nPath('up').touch()\ntime.sleep(60)")
    process = slurm.start("slurm.sbatch", "--", *TRAIN)
    wait_until((slurm.folder / "up").exists)
    process.send_signal(signal.SIGTERM)  # Slurm's own; doesn't end the script
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    (slurm.folder / "state").write_text("TIMEOUT")
    process.send_signal(signal.SIGUSR1)
    assert finish(process).returncode == 0
    assert requeued(slurm) == 1


def test_requeues_without_a_new_checkpoint_end(slurm: Desk):
    srun(slurm, 75)
    codes = [slurm.run("slurm.sbatch", "--", *TRAIN).returncode for _ in range(4)]
    assert codes == [0, 0, 0, 75]
    assert requeued(slurm) == 3
    assert slurm.run("slurm.sbatch", "--", *TRAIN).returncode == 0  # submitted again by a person: it counts anew


def test_a_new_checkpoint_starts_the_count_again(slurm: Desk):
    srun(slurm, 75)
    for _ in range(3):
        slurm.run("slurm.sbatch", "--", *TRAIN)
    srun(slurm, 75, step=7)
    assert slurm.run("slurm.sbatch", "--", *TRAIN).returncode == 0
    srun(slurm, 75)
    assert [slurm.run("slurm.sbatch", "--", *TRAIN).returncode for _ in range(3)] == [0, 0, 75]


def test_a_refused_requeue_is_told(slurm: Desk):
    srun(slurm, 75)
    slurm.put("scontrol", SCONTROL.format(folder=str(slurm.folder), script="x") + "\nif arguments[0] == 'requeue': sys.exit(1)")
    ended = slurm.run("slurm.sbatch", "--", *TRAIN)
    assert ended.returncode == 75
    assert "scontrol requeue failed" in ended.stderr


def test_what_slurm_is_asked_for():
    asked = set(re.findall(r"^#SBATCH (\S+)", (LAUNCH / "slurm.sbatch").read_text(), flags=re.MULTILINE))
    assert {"--requeue", "--open-mode=append", "--ntasks-per-node=1", "--signal=B:USR1@600"} <= asked


# Kubernetes and SkyPilot


def manifests() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all((LAUNCH / "k8s" / "job.yaml").read_text())}


def test_the_pods_of_the_job_find_each_other(tmp_path: Path):
    service, job = manifests()["Service"], manifests()["Job"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    hosts = ",".join(f"{name}-{index}.{pod['subdomain']}" for index in range(spec["completions"]))
    assert container["args"][0] == f"--hosts={hosts}"
    assert container["command"] == ["/opt/videoqat/launch/node.sh"]
    shown = Desk(tmp_path).run("node.sh", *container["args"], DRY_RUN="1")
    assert shown.returncode == 0
    assert f"--rdzv-endpoint {name}-0.{name}:{service['spec']['ports'][0]['port']} " in shown.stdout
    assert f"--nnodes {spec['completions']} " in shown.stdout


def test_the_job_survives_what_should_be_survived():
    spec = manifests()["Job"]["spec"]
    pod = spec["template"]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert by_code == {75: "Ignore", 2: "FailJob"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {pod["containers"][0]["name"]}
    assert [rule["action"] for rule in rules if "onPodConditions" in rule] == ["Ignore"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert spec["podReplacementPolicy"] == "Failed"
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] >= 600


def test_the_pod_has_shared_memory_and_a_local_scratch_folder():
    pod = manifests()["Job"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/tmp"]]["emptyDir"] == {}
    assert "persistentVolumeClaim" in volumes[mounts["/data"]]
    assert "env" not in pod["containers"][0]


@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot_starts_node_sh_on_every_machine(tmp_path: Path, nodes: int):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert task["num_nodes"] == 2
    addresses = ["10.0.0.4", "10.0.0.5"][:nodes]
    env = Desk(tmp_path).env | {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_NUM_GPUS_PER_NODE": "8", "DRY_RUN": "1"}
    shown = subprocess.run(["bash", "-euc", task["run"]], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    train = shlex.split(shown.stdout.splitlines()[-1])
    assert train[train.index("--nnodes") + 1] == str(nodes)
    assert train[train.index("--nproc-per-node") + 1] == "8"
    assert ("10.0.0.4:29500" in train) == (nodes == 2)


# The container and its versions


def test_what_the_image_copies_exists():
    copied = re.findall(r"^COPY (.+) \S+$", (LAUNCH / "env" / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert copied
    for path in " ".join(copied).split():
        assert (ROOT / path).exists(), path


def test_the_pinned_versions_are_those_that_are_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["deepspeed"]]]
    lines = (LAUNCH / "env" / "constraints.txt").read_text().splitlines()
    pinned = {name: version for name, _, version in (line.partition("==") for line in lines if not line.startswith("#"))}
    for requirement in allowed:
        assert requirement.specifier.contains(pinned[requirement.name]), requirement


# README


def test_every_command_of_the_readme_is_one(tmp_path: Path):
    """Those of our scripts are run as dry runs; the others must name files that exist."""
    text = (LAUNCH / "README.md").read_text()
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL) for line in block.splitlines()]
    assert len(lines) >= 6
    desk = Desk(tmp_path)
    for line in lines:
        program, *rest = shlex.split(line)
        if program.startswith("launch/"):
            shown = desk.run(ROOT / program, *rest, DRY_RUN="1")
            assert shown.returncode == 0, line + shown.stderr
        elif program == "sbatch":
            assert "launch/slurm.sbatch" in rest
            assert rest[rest.index("launch/slurm.sbatch") + 1] == "--"
        else:
            assert program in ("kubectl", "sky")
            assert all((ROOT / word).exists() for word in rest if word.startswith("launch/")), line
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert all((LAUNCH / link).resolve().exists() for link in links)
    assert not re.search("TO" + "DO|FIX" + "ME", "".join(path.read_text() for path in LAUNCH.rglob("*") if path.is_file() and path.suffix != ".pyc"))
