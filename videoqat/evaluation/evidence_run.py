"""A table of what 4-bit attention costs and what training wins back, made row by row: train from one base, export, measure; for several seeds.

Everything is done by the commands that a person would type, each in a process of its own, several at a time on each device. A row that is there is
not made again; a training goes on from its checkpoint. A row waits for its weights and, where it has videos, for the reference row of its seed, whose
videos they are held against.

    OUT/trainings/NAME-seed0/run, model     as train and export write them
    OUT/recipes/NAME.yaml                   of rows that change a recipe
    OUT/rows/NAME-seed0/result.json         what `evidence measure` found; videos/ beside it
    OUT/evidence.json                       all of them: what the page's tables are made from (`evidence_table`)
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from videoqat.attention.backends import resolve
from videoqat.config import EvidenceConfig, Row, TrainConfig, Training, load, require, to_dict
from videoqat.config.evidence import name_in_files
from videoqat.console import say
from videoqat.data.dataset import CachedVideos
from videoqat.errors import UserError
from videoqat.evaluation import fidelity, st_lpips
from videoqat.evaluation.evidence import RESULT, check_kernel, check_sources, has_judges, sources
from videoqat.files import atomic_path, check_writable, writable_folder, write_json
from videoqat.generation.engine import check_recipe, check_sampling
from videoqat.generation.prompts import read_prompts
from videoqat.models.hub import check_weights
from videoqat.models.spec import family_of
from videoqat.provenance import provenance
from videoqat.recipes import get_recipe
from videoqat.training import validation
from videoqat.training.runlog import read_log

DEVICE = "runtime.device="  # the word that a job's place completes
GRACE_S = 60  # for a training that is told to stop, to save


@dataclass(frozen=True)
class Job:
    """Commands that one process after the other runs on one device.

    Attributes:
        name: what is told of it where it fails; it stands in the log's folder, too.
        commands: words of each, and where its output goes.
        needs: what must be there before.
    """

    name: str
    commands: tuple[tuple[list[str], Path], ...]
    needs: tuple[Path, ...] = ()


def _slug(name: str, seed: int) -> str:
    return f"{name_in_files(name)}-seed{seed}"


def _row_folder(config: EvidenceConfig, name: str, seed: int) -> Path:
    return Path(config.out) / "rows" / _slug(name, seed)


def _training_folder(config: EvidenceConfig, name: str, seed: int) -> Path:
    return Path(config.out) / "trainings" / _slug(name, seed)


def _recipe_file(config: EvidenceConfig, row: Row) -> Path:
    return Path(config.out) / "recipes" / f"{name_in_files(row.name)}.yaml"


def wanted(config: EvidenceConfig) -> list[tuple[Row, int]]:
    """Rows and seeds, the reference first. Without videos, what the base gives is the same for every seed: the first is enough."""
    reference = config.reference or config.rows[0].name
    rows = sorted(config.rows, key=lambda row: row.name != reference)
    return [(row, seed) for row in rows for seed in config.seeds if row.training or (config.prompts and row.videos) or seed == config.seeds[0]]


def missing(config: EvidenceConfig) -> list[tuple[Row, int]]:
    """Of `wanted`, what is to be measured: what isn't there; what is there of weights that are gone and must be trained again for another row; and
    rows whose videos are held against those of a reference that is itself to be measured.

    No training gives the same weights twice on a GPU, and a row's gap is between measurements of one and the same.
    """
    rows, reference = wanted(config), config.reference or config.rows[0].name
    found = {(row.name, seed) for row, seed in rows if not (_row_folder(config, row.name, seed) / RESULT).is_file()}
    while True:
        needed = {(row.training, seed) for row, seed in rows if row.training and (row.name, seed) in found}
        again = {(name, seed) for name, seed in needed if not (_training_folder(config, name, seed) / "model").exists()}
        shown = {seed for name, seed in found if name == reference} if config.prompts else set()
        more = {(row.name, seed) for row, seed in rows if (row.training, seed) in again or (row.videos and seed in shown)}
        if more <= found:
            return [(row, seed) for row, seed in rows if (row.name, seed) in found]
        found |= more


def jobs(config: EvidenceConfig) -> list[Job]:
    """What is to be done, the most urgent first.

    Rows come before trainings, so that something is there early, and those of the reference before others. Of the other trainings the longest comes
    first, so that all places end at about the same time.
    """
    reference = config.reference or config.rows[0].name
    rows = [_row_job(config, row, seed, reference) for row, seed in missing(config)]
    urgent = {(row.training, seed): row.name == reference for row, seed in reversed(missing(config))}
    trainings = [(training, seed) for training in config.trainings for seed in config.seeds if (training.name, seed) in urgent]
    trainings = [pair for pair in trainings if not (_training_folder(config, pair[0].name, pair[1]) / "model").exists()]
    trainings.sort(key=lambda pair: (not urgent[pair[0].name, pair[1]], -pair[0].steps))
    return [*rows, *(_training_job(config, training, seed) for training, seed in trainings)]


def _row_job(config: EvidenceConfig, row: Row, seed: int, reference: str) -> Job:
    out, first = _row_folder(config, row.name, seed), _row_folder(config, reference, seed)
    model = str(_training_folder(config, row.training, seed) / "model") if row.training else config.base
    recipe = str(_recipe_file(config, row)) if row.keep or row.changes else row.recipe
    words = ["evidence", "measure", f"model={model}", f"recipe={recipe}", f"cache={config.held_out}", f"out={out}"]
    words += [f"{key}={getattr(config, key)}" for key in ("samples", "timesteps", "clips_at_once", "videos_at_once")] + [f"seed={1000 * seed}"]
    # Text is taken as it is typed: with quotation marks around it the negative prompt would be another one.
    words += [f"sampling.{key}={value}" for key, value in to_dict(config.sampling).items()]
    needs = [Path(model)]
    if config.prompts and row.videos:
        words += [f"prompts={config.prompts}", f"st_lpips={config.st_lpips}"]
        if row.name != reference:
            words.append(f"reference={first}")
            needs.append(first / RESULT)
    words += [DEVICE, f"runtime.kernel={config.runtime.kernel}", f"runtime.dtype={config.runtime.dtype}"]
    return Job(out.name, ((words, out / "measure.log"),), tuple(needs))


def _training_job(config: EvidenceConfig, training: Training, seed: int) -> Job:
    folder = _training_folder(config, training.name, seed)
    words = ["train", f"model.path={config.base}", f"cache={config.cache}", f"out={folder / 'run'}", f"recipe={training.recipe}"]
    words += [f"train.steps={training.steps}", f"optimizer.lr={training.lr}", f"train.seed={seed}", DEVICE, f"runtime.kernel={config.runtime.kernel}"]
    export = ["export", f"run={folder / 'run'}", f"out={folder / 'model'}"]
    return Job(folder.name, (([*words, *config.train, *training.settings], folder / "train.log"), (export, folder / "export.log")))


class _Runner:
    """Runs jobs on devices, each as soon as what it needs is there and a device has a place, until the time is over."""

    def __init__(self, config: EvidenceConfig) -> None:
        self.end = time.monotonic() + 60 * config.minutes if config.minutes else None
        device, _ = config.runtime.resolve()
        names = [str(device)] if device.type == "cpu" or device.index is not None else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        self.places = names * config.at_once
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running = 0
        self._problems: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, some: list[Job]) -> list[str]:
        """All of `some` that can be done; returns what went wrong, or isn't finished, a line for each. What needs that is not begun.

        Raises:
            KeyboardInterrupt: by Ctrl-C or SIGTERM. What ran was ended (a training saves first), and nothing more was begun.
        """
        self._waiting, self._problems = list(some), []
        with _sigterm_as_ctrl_c():
            if len(self.places) == 1:
                self._work(self.places[0])
            else:
                with ThreadPoolExecutor(len(self.places)) as pool:
                    try:
                        for done in [pool.submit(self._work, place) for place in self.places]:
                            done.result()
                    except KeyboardInterrupt:  # only this thread hears of it
                        with self._changed:
                            self.end = time.monotonic()
                            running = list(self._processes)
                        _end(running)
                        raise
        return self._problems

    def _work(self, device: str) -> None:
        while (job := self._next()) is not None:
            try:
                self._do(job, device)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def _do(self, job: Job, device: str) -> None:
        for words, log in job.commands:
            log.parent.mkdir(parents=True, exist_ok=True)
            problem = self._command([f"{DEVICE}{device}" if word == DEVICE else word for word in words], log)
            if problem:
                self._problems.append(f"{job.name}: {words[0]} {problem}")
                return

    def _next(self) -> Job | None:
        """The next job whose needs are there; waits for jobs that others run to bring them. None: there is and will be none."""
        with self._changed:
            while True:
                job = next((job for job in self._waiting if all(path.exists() for path in job.needs)), None)
                if job is not None:
                    self._waiting.remove(job)
                    self._running += 1
                if job is not None or not self._running:
                    return job
                self._changed.wait()

    def _command(self, words: list[str], log: Path) -> str | None:
        """Runs `videoqat WORDS`; None, or what is wrong with it."""
        with self._changed:
            left = None if self.end is None else self.end - time.monotonic()
            if left is not None and left <= 0:
                return "was not begun: the time is over"
            with open(log, "a") as output:
                process = subprocess.Popen([sys.executable, "-m", "videoqat", *words], stdout=output, stderr=subprocess.STDOUT)
            self._processes.append(process)
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            _end([process])
            return "was stopped: the time is over"
        except KeyboardInterrupt:
            _end([process])
            raise
        finally:
            self._processes.remove(process)
        if code == 0:
            return None
        lines = log.read_text(errors="replace").strip().splitlines()
        return f"ended with code {code}: {lines[-1] if lines else ''} (see {log})"


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Tells them to stop, and kills those that haven't after a while."""
    for process in processes:
        process.send_signal(signal.SIGTERM)  # a training saves then
    end = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM would end this process alone, and leave those that it started at work, on the very folders that a next run goes on with."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def plan(config: EvidenceConfig) -> dict[str, Any]:
    """What is to be done, as far as can be said without loading a weight: `trainings` and `rows` in all, and which rows are `missing`.

    Raises:
        UserError: whatever `run` would refuse before anything is begun.
    """
    config.validate()
    config.runtime.resolve()
    check_weights(config.base)
    validation.check_cache(config.held_out, [config.base], "held_out")
    if config.prompts:
        has_judges(read_prompts(config.prompts), config.sampling)
        check_sampling(config.base, config.sampling)
        fidelity.check_sizes([(config.sampling.height, config.sampling.width)])
    _about_st_lpips(config)
    rows, left = wanted(config), missing(config)
    for row in config.rows:
        recipe = row.resolve(config.sensitivity)
        check_recipe(config.base, recipe, config.sampling)
        if any(row == other for other, _ in left):  # results can be gathered where nothing could be measured
            check_kernel(config.base, recipe, config.runtime)
    for training in config.trainings:
        _check_settings(config, training, begun=any(row.training == training.name for row, _ in left))
    check_writable("out", config.out)
    _settings(config)
    trainings = {(row.training, seed) for row, seed in rows if row.training}
    return {"trainings": len(trainings), "rows": len(rows), "missing": [str(_row_folder(config, row.name, seed)) for row, seed in left]}


def _check_settings(config: EvidenceConfig, training: Training, *, begun: bool) -> None:
    """Requires that `train` takes the settings and, if it is to be `begun`, gets a kernel: its process would find out hours later.

    Raises:
        UserError: it doesn't; names the training.
    """
    (words, _), _ = _training_job(config, training, config.seeds[0]).commands
    try:
        given = load(TrainConfig, None, [f"{DEVICE}{config.runtime.device}" if word == DEVICE else word for word in words[1:]])
        head_dim, dtype = family_of(config.base).geometry(config.base, given.model.component).head_dim, getattr(torch, given.train.compute_dtype)
        if begun:
            resolve(get_recipe(training.recipe), given.runtime.resolve()[0], dtype, head_dim, given.runtime.kernel, training=True)
    except UserError as error:
        raise type(error)(f"trainings: {training.name!r}: {error}") from error


def _about_st_lpips(config: EvidenceConfig) -> dict[str, str] | None:
    """Which weights it has, or why it is absent; None for a table without videos."""
    if not config.prompts or not any(row.videos for row in config.rows):
        return None
    return st_lpips.load(config.st_lpips, [(config.sampling.height, config.sampling.width)])[1]


def run(config: EvidenceConfig) -> dict[str, Any]:
    """Makes all rows that are missing and gathers what there is in `out`/evidence.json.

    Returns:
        What evidence.json holds (`gather`); and `problems`, with exit code 1 where there are any.

    Raises:
        UserError: bad input, before anything is begun; `out` with rows of other settings.
    """
    plan(config)
    out = writable_folder("out", config.out)
    write_json(out / "settings.json", _settings(config))
    for row, seed in missing(config):
        (_row_folder(config, row.name, seed) / RESULT).unlink(missing_ok=True)  # of other weights
        if row.keep or row.changes:
            with atomic_path(_recipe_file(config, row)) as aside:
                aside.write_text(yaml.safe_dump(row.resolve(config.sensitivity).to_dict(), sort_keys=False))
    problems = _Runner(config).run(jobs(config))
    for problem in problems:
        say(f"WARNING: {problem}")
    gathered = gather(config)
    write_json(out / "evidence.json", gathered)
    say(f"{out / 'evidence.json'}: {len(gathered['rows'])} rows, {len(problems)} problems")
    return gathered | {"problems": problems, "exit_code": 1 if problems else 0}


def _settings(config: EvidenceConfig) -> dict[str, Any]:
    """What goes to settings.json. Rows, trainings and seeds may be added; what a name stands for, and all that rows share, must stay.

    Raises:
        ConfigError: it doesn't, or base or held-out clips aren't what rows were measured with; the setting and its earlier value are named.
    """
    record, given = Path(config.out) / "settings.json", to_dict(config)
    free = ("out", "rows", "trainings", "seeds", "at_once", "minutes", "sensitivity", "st_lpips")
    settings = {key: value for key, value in given.items() if key not in free}
    about_lpips = _about_st_lpips(config)  # the hash of its weights, wherever the file lies
    settings |= {"st_lpips": about_lpips} if about_lpips else {}
    settings |= {f"{kind} {one['name']!r}": one for kind in ("rows", "trainings") for one in given[kind]}
    # Files of recipes can change under their names, and so can what a sensitivity says.
    settings |= {f"recipe of row {row.name!r}": row.resolve(config.sensitivity).to_dict() for row in config.rows}
    settings |= {f"recipe of training {training.name!r}": get_recipe(training.recipe).to_dict() for training in config.trainings}
    now, left = sources(config.base, CachedVideos(config.held_out)), missing(config)
    check_sources(record, now, base=config.base, held_out=config.held_out)
    for row, seed in [pair for pair in wanted(config) if pair not in left]:
        of_base = {} if row.training else {"base": config.base}
        check_sources(_row_folder(config, row.name, seed) / RESULT, now, held_out=config.held_out, **of_base)
    settings["sources"] = now
    earlier = json.loads(record.read_text()) if record.is_file() else {}
    for key, value in settings.items():
        require(earlier.get(key, value) == value, key, value, f"{earlier.get(key)!r}, as in {record.parent}; or another out")
    return earlier | settings


def gather(config: EvidenceConfig) -> dict[str, Any]:
    """What there is in `config.out`.

    Returns:
        JSON-able: `rows` (name, training, seed and what `measure` found, without its configuration; those that are there), `trainings` (name, recipe,
        steps, lr, settings, seed; `step` and `loss` of every tenth step; `grad_norm` of every step that was logged; where the log is gone, as they
        were gathered before), `config`, `provenance`. Numbers have seven digits.
    """
    rows, trainings = [], []
    before = Path(config.out) / "evidence.json"
    known = json.loads(before.read_text())["trainings"] if before.is_file() else []
    gathered = {(one["name"], one["seed"]): one for one in known}
    for row, seed in wanted(config):
        result = _row_folder(config, row.name, seed) / RESULT
        if result.is_file():
            found = json.loads(result.read_text())
            rows.append({"name": row.name, "training": row.training, "seed": seed, **{key: found[key] for key in found if key != "config"}})
    for training in config.trainings:
        for seed in config.seeds:
            log = read_log(_training_folder(config, training.name, seed) / "run" / "log.jsonl")
            if not log and (training.name, seed) in gathered:
                trainings.append(gathered[training.name, seed])
                continue
            tenth = [entry for entry in log if entry["step"] % 10 == 0 or entry["step"] == 1]
            about = {key: getattr(training, key) for key in ("name", "recipe", "steps", "lr", "settings")}
            about |= {"seed": seed} | {key: [entry[key] for entry in tenth] for key in ("step", "loss")}
            trainings.append(about | {"grad_norm": [entry["grad_norm"] for entry in log]})
    told = {"config": to_dict(config), "rows": rows, "trainings": trainings, "provenance": provenance(str(config.runtime.resolve()[0]))}
    rounded: dict[str, Any] = json.loads(json.dumps(told), parse_float=lambda digits: float(f"{float(digits):.7g}"))
    return rounded
