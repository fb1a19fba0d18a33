"""What usually goes wrong with many processes, looked for before they load a model.

    torchrun ... launch/preflight.py --config ... key=value ...     (the arguments of `videoqat train`; node.sh does this by itself)
    python launch/preflight.py --config ... key=value ...           (alone, for this process)

Checks that all ranks answer, have the same configuration and versions, and clocks that agree; that the layout is legal for the model and the data
suffice; that the output folder is shared by all and has room for a checkpoint; that GPU memory is free; and that an all-reduce over the training's
own back end gives the right sum, with its bandwidth. Rank 0 prints a line for each: `ok`, or `FAIL` with what is wrong, on which host and rank, and
what to do. Exit code 0 if all is well, else 1. No check waits for ever (WAIT_S). That hosts are known by name and the port is reached is seen
before, by meet.py, without which torchrun could not have started this.
"""

import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from videoqat.cli import build_parser
from videoqat.config import TrainConfig, load, to_dict
from videoqat.errors import UserError
from videoqat.models.spec import family_of
from videoqat.parallel.mesh import local_device
from videoqat.provenance import commit, versions
from videoqat.training import state
from videoqat.training.job import check

WAIT_S = 120.0  # for ranks that don't answer, and for each collective
FILE_WAIT_S = 30.0  # network file systems show another machine's files late
CLOCK_S = 1.0  # how far clocks may be apart
GPU_BUSY = 2 * 2**30  # bytes that may be taken on a GPU: CUDA's own, a display
ALL_REDUCE = {"cuda": 64 * 2**20, "cpu": 2**20}  # fp32 numbers

Report = list[str]  # a check's faults, a line each; none: ok


class Unanswered(Exception):
    """Ranks that did not do their part in time. `str(error)` names them."""


@dataclass
class Ranks:
    """All processes of the run, and the store through which they tell rank 0 what they see: so a process group that doesn't work can be reported."""

    store: Store
    rank: int
    world_size: int
    hosts: list[str]  # of each rank; on rank 0

    def where(self, rank: int) -> str:
        """`rank 3 on node-a`."""
        return f"rank {rank} on {self.hosts[rank]}" if rank < len(self.hosts) else f"rank {rank}"

    def gather(self, what: str, value: Any) -> list[Any]:
        """Each rank's `value`, on rank 0; an empty list elsewhere.

        Raises:
            Unanswered: on rank 0; some rank has not got here within WAIT_S.
        """
        self.store.set(f"{what}/{self.rank}", json.dumps(value))
        if self.rank != 0:
            return []
        deadline = time.monotonic() + WAIT_S
        late = [r for r in range(self.world_size) if not _there(self.store, f"{what}/{r}", deadline - time.monotonic())]
        if late:
            raise Unanswered(f"{', '.join(map(self.where, late))} did not answer within {WAIT_S:.0f} s ({what}); see the log of that host")
        return [json.loads(self.store.get(f"{what}/{r}")) for r in range(self.world_size)]

    def together(self, what: str, value: str = "") -> str:
        """Returns when all ranks are here, on all at nearly the same moment; rank 0's `value`."""
        self.gather(f"{what}/come", None)
        if self.rank == 0:
            self.store.set(f"{what}/go", value)
        elif not _there(self.store, f"{what}/go", 2 * WAIT_S):
            raise Unanswered(f"rank 0 did not answer within {2 * WAIT_S:.0f} s ({what})")
        return self.store.get(f"{what}/go").decode()


def _there(store: Store, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(seconds, 0.1)))
    except (RuntimeError, ValueError):  # torch's own errors for a timeout are RuntimeErrors
        return False
    return True


def join() -> Ranks:
    """The processes that torchrun started; one alone outside it."""
    if "RANK" in os.environ:
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=WAIT_S)))
    else:
        store, rank, world_size = HashStore(), 0, 1
    ranks = Ranks(PrefixStore("preflight", store), rank, world_size, [])
    ranks.hosts = ranks.gather("hosts", socket.gethostname())
    return ranks


@contextmanager
def time_limit(ranks: Ranks, what: str, advice: str) -> Iterator[None]:
    """Ends the process, with a line that says where, if the block takes longer than WAIT_S: a collective that hangs can't be interrupted."""

    def give_up() -> None:
        print(f"FAIL  {what}: rank {ranks.rank} on {socket.gethostname()} still waited after {WAIT_S:.0f} s; {advice}", flush=True)
        os._exit(1)

    timer = threading.Timer(WAIT_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def differences(ranks: Ranks, rows: list[dict[str, Any]], advice: str) -> Report:
    """A line for each key that isn't equal on all ranks that have it: which value is where."""
    report = []
    for key in dict.fromkeys(key for row in rows for key in row):
        having = defaultdict(list)
        for rank, row in enumerate(rows):
            if key in row:
                having[json.dumps(row[key])].append(rank)
        if len(having) > 1:
            # The few that differ are named one by one, the many by their number.
            parts = [f"{value} on {named(ranks, found)}" for value, found in sorted(having.items(), key=lambda item: len(item[1]))]
            report.append(f"{key}: {'; '.join(parts)}. {advice}")
    return report


def named(ranks: Ranks, found: list[int]) -> str:
    """`rank 3 on node-a`, or, of more than four, the first and how many others."""
    shown = ", ".join(map(ranks.where, found[:4]))
    return shown + (f" and {len(found) - 4} other ranks" if len(found) > 4 else "")


def read_config(arguments: list[str]) -> TrainConfig:
    """The configuration as `videoqat train` reads it.

    Raises:
        UserError: it can't be used, for instance since a folder isn't there on this host.
    """
    parsed = build_parser().parse_args(["train", *arguments])
    return load(TrainConfig, parsed.config, parsed.overrides)


def hardware() -> dict[str, str]:
    """Driver and GPU of this rank."""
    driver = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", driver.read_text()) if driver.is_file() else None
    gpu = torch.cuda.get_device_name(int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "none"
    return {"NVIDIA driver": found[0] if found else "none", "GPU": gpu, "CUDA": str(torch.version.cuda)}


def check_config(ranks: Ranks, arguments: list[str]) -> tuple[Report, TrainConfig | None]:
    """Every rank can read the configuration, and reads the same. The configuration, if this rank can."""
    config, wrong = None, ""
    try:
        config = read_config(arguments)
    except UserError as error:
        wrong = str(error)
    rows = ranks.gather("configuration", {"wrong": wrong, "settings": dict(state.flat(to_dict(config))) if config else {}})
    faults = defaultdict(list)
    for rank, row in enumerate(rows):
        if row["wrong"]:
            faults[row["wrong"]].append(rank)
    report = [f"{wrong} ({named(ranks, found)})" for wrong, found in faults.items()]
    if not report:
        report = differences(ranks, [row["settings"] for row in rows], "Start all hosts with the same arguments")
    return report, config


def check_versions(ranks: Ranks) -> Report:
    """Python, libraries, this program, driver and GPU are equal everywhere."""
    row = versions() | hardware()
    if os.environ.get("LOCAL_RANK", "0") == "0" and (known := commit()) != "unknown":  # asking git takes a while: once a host, and it may not tell
        row["commit"] = known
    rows = ranks.gather("versions", row)
    return differences(ranks, rows, "Use one environment (or container image) on all hosts")


def check_job(ranks: Ranks, config: TrainConfig) -> tuple[Report, str]:
    """What `videoqat train --dry-run` would say: a legal layout for the number of processes and the model's heads, data enough for a step, ..."""
    if ranks.rank != 0:
        return [], ""
    try:
        job = check(config, ranks.world_size)
    except UserError as error:
        return [str(error)], ""
    return [], f"{job.layout}; {job.accumulation} micro-batches of {config.train.batch_size} a step on each"


def check_clocks(ranks: Ranks) -> Report:
    """All clocks show the same within a second: logs of different hosts are read side by side, and file systems compare times."""
    rounds = []
    for attempt in range(3):
        ranks.together(f"clock {attempt}")
        rounds.append(ranks.gather(f"time {attempt}", time.time()))
    report = []
    for rank, times in enumerate(zip(*rounds, strict=True)):
        off = min((theirs - row[0] for theirs, row in zip(times, rounds, strict=True)), key=abs)  # the least: a busy machine may wake up late
        if abs(off) > CLOCK_S:
            report.append(f"{ranks.where(rank)} is {off:+.1f} s off rank 0's clock; start NTP (chrony) there")
    return report


def check_folder(ranks: Ranks, out: Path) -> Report:
    """Rank 0's file is seen by all, and a file of each rank by rank 0."""
    folder = Path(ranks.together("folder", str(out / f".preflight-{time.time_ns()}")))
    mine, wrong = folder / f"rank-{ranks.rank}", ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine.write_text(folder.name)
    except OSError as error:
        wrong = f"out={str(out)!r} can't be written to ({error.strerror})"
    sees = wait_for(folder, [0])
    rows = ranks.gather("seen", {"wrong": wrong, "sees": bool(sees), "real": str(out.resolve())})
    seen = wait_for(folder, [rank for rank, row in enumerate(rows) if not row["wrong"]])
    report = []
    for rank, row in enumerate(rows):
        if row["wrong"]:
            report.append(f"{ranks.where(rank)}: {row['wrong']}; see to its rights, its space and that it is mounted")
        elif not rows[0]["wrong"] and not (row["sees"] and rank in seen):
            way = f"the file of {ranks.where(rank)} is not seen by rank 0" if row["sees"] else f"{ranks.where(rank)} does not see rank 0's file"
            report.append(f"{way}: {row['real']} is not the same folder there; mount one file system on all hosts")
    ranks.together("folder done")
    shutil.rmtree(folder, ignore_errors=True)
    return report


def wait_for(folder: Path, ranks: list[int]) -> set[int]:
    """Those of `ranks` whose file is in `folder` with the right content, within FILE_WAIT_S."""
    deadline, seen = time.monotonic() + FILE_WAIT_S, set[int]()
    while True:
        for rank in ranks:
            with suppress(OSError):
                if (folder / f"rank-{rank}").read_text() == folder.name:
                    seen.add(rank)
        if len(seen) == len(ranks) or time.monotonic() > deadline:
            return seen
        time.sleep(0.1)


def check_disk(ranks: Ranks, config: TrainConfig) -> Report:
    """There is room for the checkpoints that will stand beside each other: the kept ones and the one that is being written."""
    if ranks.rank != 0:
        return []
    try:
        transformer = family_of(config.model.path).build(config.model.path, config.model.component)
    except UserError as error:
        return [str(error)]
    # fp32: weights and two moments of what is trained (at most all), and the moving average.
    size = sum(parameter.numel() for parameter in transformer.parameters()) * 4 * (4 if config.optimizer.ema_decay else 3)
    there = len(state.whole(Path(config.out) / "checkpoints"))
    needed, free = size * max(1, config.train.keep_last + 1 - there), shutil.disk_usage(config.out).free
    if free >= needed:
        return []
    rest = f"{free / 2**30:.3g} GiB are free, and {needed / 2**30:.3g} are needed for checkpoints of {size / 2**30:.3g} GiB"
    return [f"out={config.out!r}: {rest} (train.keep_last={config.train.keep_last} and one being written); make room or choose another out"]


def check_gpu_memory(ranks: Ranks, device: torch.device) -> Report:
    """Nobody else holds the GPUs."""
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    report = []
    for rank, (index, taken) in enumerate(ranks.gather("memory", (device.index or 0, total - free))):
        if taken > GPU_BUSY:
            report.append(f"{ranks.where(rank)}: {taken / 2**30:.1f} GiB of GPU {index} are taken already; nvidia-smi shows by whom")
    return report


def check_all_reduce(ranks: Ranks, device: torch.device) -> tuple[Report, str]:
    """The sum over all ranks is right. Its bus bandwidth: 2 (n - 1) / n * bytes / time."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    advice = f"the hosts' networks don't reach each other over {backend}: name the interface in launch/env/network.env (NCCL_DEBUG=INFO tells more)"
    n, wrong, elapsed = ranks.world_size, "", 0.0
    try:
        with time_limit(ranks, "all-reduce", advice):
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(backend, store=PrefixStore("all-reduce", ranks.store), rank=ranks.rank, world_size=n)
            pattern = torch.arange(ALL_REDUCE[device.type], device=device, dtype=torch.float32) % 7
            for _ in range(4):  # the first one connects
                numbers = pattern + ranks.rank
                started = time.monotonic()
                dist.all_reduce(numbers)
                total = numbers[-1].item()  # waits for the GPU
                elapsed = min(elapsed or 1e9, time.monotonic() - started)
            if not torch.equal(numbers, pattern * n + n * (n - 1) / 2):
                wrong = f"the sum over {n} ranks is wrong (last element {total}); run nccl-tests on these hosts, and a memory test on this one"
            dist.destroy_process_group()
    except RuntimeError as error:
        wrong = f"{' '.join(str(error).split())[:300]}; {advice}"
    rows = ranks.gather("all-reduce", {"wrong": wrong, "elapsed": elapsed})
    report = [f"{ranks.where(rank)}: {row['wrong']}" for rank, row in enumerate(rows) if row["wrong"]]
    slowest = max((row["elapsed"] for row in rows), default=1.0) or 1.0
    bandwidth = 2 * (n - 1) / n * 4 * ALL_REDUCE[device.type] / slowest
    return report, f"{bandwidth / 1e9:.2f} GB/s bus bandwidth over {backend}" if n > 1 else "one process, nothing to send"


def run(ranks: Ranks, arguments: list[str]) -> bool:
    """All checks; whether all is well. Rank 0 prints."""
    well = True

    def tell(what: str, report: Report, detail: str = "") -> None:
        nonlocal well
        well = well and not report
        if ranks.rank == 0:
            lines = [f"FAIL  {what}: {line}" for line in report] or [f"ok    {what}" + (f": {detail}" if detail else "")]
            print("\n".join(lines), flush=True)

    hosts = list(dict.fromkeys(ranks.hosts))
    tell("ranks", [], f"{ranks.world_size} on {', '.join(hosts)}")
    report, config = check_config(ranks, arguments)
    tell("configuration", report)
    if ranks.together("configuration", "" if well else "wrong") or config is None:
        return False  # nothing else can be asked without it
    tell("versions", check_versions(ranks))
    tell("layout and data", *check_job(ranks, config))
    tell("clocks", check_clocks(ranks))
    report = check_folder(ranks, Path(config.out))
    tell("output folder", report, config.out)
    if not report:  # else there may be no folder whose disk could be looked at
        tell("disk", check_disk(ranks, config))
    device, report = torch.device("cpu"), []
    try:
        device = local_device(config.runtime.resolve()[0])
    except UserError as error:
        report = [str(error)]
    wrong = ranks.gather("device", report)
    tell("devices", [f"{ranks.where(rank)}: {line}" for rank, lines in enumerate(wrong) for line in lines], str(device.type))
    if ranks.together("device", "" if well else "wrong"):
        return False  # an all-reduce among ranks of which some have no device would only hang
    tell("GPU memory", check_gpu_memory(ranks, device))
    tell("all-reduce", *check_all_reduce(ranks, device))
    return ranks.together("verdict", "well" if well else "") == "well"


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    try:
        ranks = join()
        well = run(ranks, arguments)
    except Unanswered as error:
        print(f"FAIL  {error}", flush=True)
        return 1
    if ranks.rank == 0:
        print("preflight: " + ("all is well" if well else "not fit to start"), flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
