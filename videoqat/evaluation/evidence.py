"""A table of what 4-bit attention costs and what training wins back, made row by row: train from one base, export, measure; for several seeds.

Everything is done by the commands that a person would type, each in a process of its own, several at a time on each device. A row that is there is
not made again; a training goes on from its checkpoint. What belongs to one training and seed (train, export, its rows) is one chain; chains with the
reference row come first, since the other rows' videos are held against its.

    OUT/trainings/NAME-seed0/run, model     as train and export write them
    OUT/rows/NAME-seed0/result.json         what `evidence measure` found; videos/ beside it
    OUT/evidence.json                       all of them: what the page's tables are made from (`evidence_table`)
"""

import json
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from videoqat.attention.backends import record_receipts
from videoqat.config import EvidenceConfig, MeasureConfig, ObjectiveConfig, Row, SamplingConfig, Training, require, to_dict
from videoqat.console import progress, say
from videoqat.data.video_io import read_video, write_video
from videoqat.evaluation import fidelity
from videoqat.evaluation.judges import CAPTIONS, NUM_FRAMES, Judges, accuracies
from videoqat.files import writable_folder, write_json
from videoqat.generation.engine import Engine, check_recipe, check_sampling
from videoqat.generation.prompts import read_prompts
from videoqat.provenance import provenance
from videoqat.recipes import get_recipe
from videoqat.training import validation
from videoqat.training.objective import resolve as resolve_objective
from videoqat.training.runlog import read_log

RESULT = "result.json"
GRACE_S = 60  # for a training that is told to stop, to save


# --- one row


def measure(config: MeasureConfig) -> dict[str, Any]:
    """One model under one recipe: its loss clip by clip and, with prompts, its videos. Writes `out`/result.json and returns it.

    Returns:
        `clip_losses` (mean over times of each clip; the same clips, noise and times whatever the model: they are paired), `videos` (prompt,
        seed, `flicker`, `fidelity` to the reference's video or, without a reference, to the same video rendered again: the floor; `judged`:
        [garment, direction]), `judged` (`judges.accuracies`; null where a caption is none of the set's), `kernels` that served (losses and
        videos), `config` and `provenance`.

    Raises:
        UserError: bad input. NonFiniteLoss, NonFiniteVideo: what the model gives is no number.
    """
    config.validate()
    recipe = get_recipe(config.recipe)
    cache = validation.check_cache(config.cache, [config.model], "cache")
    prompts = read_prompts(config.prompts) if config.prompts else []
    if prompts:
        check_sampling(config.model, config.sampling)
        check_recipe(config.model, recipe, config.sampling)
    judged = _judged(prompts, config.sampling)
    out = writable_folder("out", config.out)
    engine = Engine(config.model, config.runtime)
    engine.install(recipe)
    with record_receipts() as receipts:
        losses = validation.paired_losses(
            engine.family,
            engine.folder,
            engine.transformers,
            cache,
            resolve_objective(ObjectiveConfig(), engine.family.noise_schedule(config.model)),
            samples=validation.choose_samples(len(cache), config.samples),
            num_times=config.timesteps,
        )
    judges = Judges.load() if judged else None
    videos = [_video(config, engine, judges, place, prompt) for place, prompt in enumerate(progress(prompts, desc="videos", unit="video"))]
    asked, found = [CAPTIONS[p] for p in prompts if judges], [(v["judged"][0], v["judged"][1]) for v in videos if judges]
    result = {
        "clip_losses": losses.mean(axis=1).tolist(),
        "videos": videos,
        "judged": accuracies(asked, found) if judges else None,
        "kernels": sorted({receipt.kernel for receipt in receipts} | {kernel for video in videos for kernel in video.pop("kernels")}),
        "config": to_dict(config),
        "recipe": recipe.to_dict(),
        "provenance": provenance(str(config.runtime.resolve()[0])),
    }
    write_json(out / RESULT, result)
    return {"loss": float(losses.mean()), **result}


def _judged(prompts: list[str], sampling: SamplingConfig) -> bool:
    """Whether there are judges for these videos. Raises ConfigError where all captions are theirs, but videos are of another length."""
    known = bool(prompts) and all(prompt in CAPTIONS for prompt in prompts)
    require(not known or sampling.num_frames == NUM_FRAMES, "sampling.num_frames", sampling.num_frames, f"{NUM_FRAMES}, which the judges look at")
    return known


def _video(config: MeasureConfig, engine: Engine, judges: Judges | None, place: int, prompt: str) -> dict[str, Any]:
    """Renders, writes and looks at one video. Fidelity is between videos as they are on the disk, and so is what judges see."""

    def frames(folder: str, name: str) -> np.ndarray:
        return read_video(Path(folder) / "videos" / name)[0]

    def render(name: str) -> Any:
        made = engine.generate(prompt, config.seed + place, config.sampling, config.recipe)
        write_video(Path(config.out) / "videos" / name, made.frames, config.sampling.fps)
        return made

    name = f"{place:03d}.mp4"
    made = render(name)
    mine = frames(config.out, name)
    if config.reference:
        against = frames(config.reference, name)
    else:
        render(f"{place:03d}-again.mp4")
        against = frames(config.out, f"{place:03d}-again.mp4")
    kernels = [receipt["kernel"] for receipt in made.receipts]
    told = {"prompt": prompt, "seed": config.seed + place, "kernels": kernels, "flicker": fidelity.flicker(mine)}
    kept = ("psnr_mean", "psnr_min", "ssim_mean", "ssim_min", "identical")
    found = fidelity.fidelity(against, mine)
    return told | {"fidelity": {key: found[key] for key in kept}, "judged": list(judges.judge(mine)) if judges else None}


# --- all rows


@dataclass(frozen=True)
class Chain:
    """What is done one after the other: a training (None: the base as it is) with one seed, and its rows."""

    training: Training | None
    rows: tuple[Row, ...]
    seed: int


def _slug(name: str, seed: int) -> str:
    return f"{re.sub(r'[^a-z0-9.+-]+', '-', name.lower())}-seed{seed}"


def chains(config: EvidenceConfig) -> tuple[list[Chain], list[Chain]]:
    """Those with the reference row, and the others."""
    trainings: list[Training | None] = [None, *config.trainings]
    reference = config.reference or config.rows[0].name
    first, rest = [], []
    for seed in config.seeds:
        for training in trainings:
            rows = tuple(row for row in config.rows if row.training == (training.name if training else ""))
            if any(row.name == reference for row in rows):
                # The reference itself leads: its siblings' videos are held against its, too.
                rows = tuple(sorted(rows, key=lambda row: row.name != reference))
                first.append(Chain(training, rows, seed))
            elif rows:
                rest.append(Chain(training, rows, seed))
    return first, rest


class _Runner:
    """Runs chains on devices until the time is over."""

    def __init__(self, config: EvidenceConfig) -> None:
        self.config = config
        self.out = Path(config.out)
        self.end = time.monotonic() + 60 * config.minutes if config.minutes else None
        self.devices: queue.Queue[str] = queue.Queue()
        device, _ = config.runtime.resolve()
        names = [str(device)] if device.type == "cpu" or device.index is not None else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        for _ in range(config.at_once):
            for name in names:
                self.devices.put(name)

    def row(self, row: Row | str, seed: int) -> Path:
        """The row's folder."""
        return self.out / "rows" / _slug(row if isinstance(row, str) else row.name, seed)

    def run(self, some: list[Chain]) -> list[str]:
        """All of `some`, as many at a time as there are places on devices; returns what went wrong, or isn't finished, a line for each chain."""
        places = self.devices.qsize()
        with ThreadPoolExecutor(places) as pool:
            done = pool.map(self._chain, some) if places > 1 else map(self._chain, some)
            return [problem for problem in done if problem]

    def _chain(self, chain: Chain) -> str | None:
        if all((self.row(row, chain.seed) / RESULT).is_file() for row in chain.rows):
            return None  # also where only the results were kept
        device = self.devices.get()
        try:
            for words, done, log in self._commands(chain, device):
                if done.exists():
                    continue
                log.parent.mkdir(parents=True, exist_ok=True)
                problem = self._command(words, log)
                if problem:
                    return f"{log.parent.name}: {' '.join(words[:2])} {problem}"
            return None
        finally:
            self.devices.put(device)

    def _commands(self, chain: Chain, device: str) -> Iterator[tuple[list[str], Path, Path]]:
        """Words of each command, what is there when it has been done, and where its output goes."""
        config, model = self.config, self.config.base
        runtime = [f"runtime.device={device}", f"runtime.kernel={config.runtime.kernel}"]
        if chain.training is not None:
            training, folder = chain.training, self.out / "trainings" / _slug(chain.training.name, chain.seed)
            run, model = folder / "run", str(folder / "model")
            words = ["train", f"model.path={config.base}", f"cache={config.cache}", f"out={run}", f"recipe={training.recipe}"]
            words += [f"train.steps={training.steps}", f"optimizer.lr={training.lr}", f"train.seed={chain.seed}"]
            yield words + runtime + config.train + training.settings, folder / "model", folder / "train.log"
            yield ["export", f"run={run}", f"out={model}"], folder / "model", folder / "export.log"
        reference = config.reference or config.rows[0].name
        for row in chain.rows:
            out = self.row(row, chain.seed)
            words = ["evidence", "measure", f"model={model}", f"recipe={row.recipe}", f"cache={config.held_out}", f"out={out}"]
            words += [f"samples={config.samples}", f"timesteps={config.timesteps}", f"prompts={config.prompts}", f"seed={1000 * chain.seed}"]
            words += [f"sampling.{key}={json.dumps(value)}" for key, value in to_dict(config.sampling).items()]
            if row.name != reference:
                words.append(f"reference={self.row(reference, chain.seed)}")
            yield words + runtime + [f"runtime.dtype={config.runtime.dtype}"], out / RESULT, out / "measure.log"

    def _command(self, words: list[str], log: Path) -> str | None:
        """Runs `videoqat WORDS`; None, or what is wrong with it."""
        left = None if self.end is None else self.end - time.monotonic()
        if left is not None and left <= 0:
            return "was not begun: the time is over"
        with open(log, "a") as output:
            process = subprocess.Popen([sys.executable, "-m", "videoqat", *words], stdout=output, stderr=subprocess.STDOUT)
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)  # a training saves then
                try:
                    process.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                return "was stopped: the time is over"
        if code == 0:
            return None
        lines = log.read_text(errors="replace").strip().splitlines()
        return f"ended with code {code}: {lines[-1] if lines else ''} (see {log})"


def plan(config: EvidenceConfig) -> dict[str, Any]:
    """What is to be done, as far as can be said without loading a weight: `trainings` and `rows` in all, and how many of them are `missing`."""
    config.validate()
    validation.check_cache(config.held_out, [config.base], "held_out")
    if config.prompts:
        _judged(read_prompts(config.prompts), config.sampling)
        check_sampling(config.base, config.sampling)
    runner = _Runner(config)
    some = [chain for part in chains(config) for chain in part]
    missing = [str(runner.row(row, c.seed)) for c in some for row in c.rows if not (runner.row(row, c.seed) / RESULT).is_file()]
    return {"trainings": sum(c.training is not None for c in some), "rows": sum(len(c.rows) for c in some), "missing": missing}


def run(config: EvidenceConfig) -> dict[str, Any]:
    """Makes all rows that are missing and gathers what there is in `out`/evidence.json.

    Returns:
        What evidence.json holds: `rows` (name, training, seed and what `measure` found; those that are there), `trainings` (name, recipe, seed,
        steps, lr, and every tenth step's `loss` and `grad_norm`), `config`, `provenance`; and `problems`, with exit code 1 where there are any.

    Raises:
        UserError: bad input, before anything is begun; `out` with rows of other settings.
    """
    plan(config)
    out = writable_folder("out", config.out)
    _agree_with_earlier(config, out / "settings.json")
    runner = _Runner(config)
    first, rest = chains(config)
    problems = runner.run(first)
    problems += runner.run(rest)
    for problem in problems:
        say(f"WARNING: {problem}")
    gathered = gather(config)
    write_json(out / "evidence.json", gathered)
    say(f"{out / 'evidence.json'}: {len(gathered['rows'])} rows, {len(problems)} problems")
    return gathered | {"problems": problems, "exit_code": 1 if problems else 0}


def _agree_with_earlier(config: EvidenceConfig, record: Path) -> None:
    """Rows, trainings and seeds may be added to what is there; what a name stands for, and all that rows share, must stay.

    Raises:
        ConfigError: it doesn't; the setting and its earlier value are named.
    """
    given = to_dict(config)
    settings = {key: value for key, value in given.items() if key not in ("out", "rows", "trainings", "seeds", "at_once", "minutes")}
    settings |= {f"{kind} {one['name']!r}": one for kind in ("rows", "trainings") for one in given[kind]}
    earlier = json.loads(record.read_text()) if record.is_file() else {}
    for key, value in settings.items():
        require(earlier.get(key, value) == value, key, value, f"{earlier.get(key)!r}, as in {record.parent}; or another out")
    write_json(record, earlier | settings)


def gather(config: EvidenceConfig) -> dict[str, Any]:
    """What there is in `config.out`, as one JSON-able dict (see `run`)."""
    runner, rows, trainings = _Runner(config), [], []
    for chain in [chain for part in chains(config) for chain in part]:
        for row in chain.rows:
            result = runner.row(row, chain.seed) / RESULT
            if result.is_file():
                rows.append({"name": row.name, "training": row.training, "seed": chain.seed, **json.loads(result.read_text())})
        if chain.training is not None:
            log = read_log(runner.out / "trainings" / _slug(chain.training.name, chain.seed) / "run" / "log.jsonl")
            tenth = [entry for entry in log if entry["step"] % 10 == 0 or entry["step"] == 1]
            about = {key: getattr(chain.training, key) for key in ("name", "recipe", "steps", "lr", "settings")}
            trainings.append(about | {"seed": chain.seed, **{key: [entry[key] for entry in tenth] for key in ("step", "loss", "grad_norm")}})
    return {"config": to_dict(config), "rows": rows, "trainings": trainings, "provenance": provenance(str(config.runtime.resolve()[0]))}
