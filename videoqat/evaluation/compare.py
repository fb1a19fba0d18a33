"""The same prompts and seeds under several (checkpoint, recipe) pairs, measured and laid side by side.

The first entry is the reference: fidelity and validation loss of the others are differences to it. It is rendered twice, and what separates the
two renderings is the floor beside which the others' PSNR and SSIM are to be read.

The output folder holds `videos/`, `report.json` and `report.html`, and what makes an interrupted comparison go on where it stopped:
`settings.json` (what everything in the folder was made with; a comparison with other settings is refused) and `parts/` (one file for each
finished measurement).

Under torchrun each process renders every world-size-th (prompt, seed) under all entries, so that it has the reference's frames itself, and the
processes share out the forwards of the validation loss. Timings are of each process's own device; the report says how many there were.
"""

import dataclasses
import gc
import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from videoqat.attention.backends import resolve
from videoqat.config import CompareConfig, CompareEntry, ParallelConfig, to_dict
from videoqat.console import progress, say
from videoqat.data.dataset import CachedVideos
from videoqat.data.video_io import write_video
from videoqat.evaluation import fidelity, st_lpips
from videoqat.evaluation.curves import read_curves
from videoqat.evaluation.layers import LayerErrors
from videoqat.evaluation.report import write_report
from videoqat.evaluation.resume import check_out
from videoqat.files import atomic_path, check_writable, file_stats, writable_folder, write_json
from videoqat.generation.engine import Engine, VideoResult, check_recipe, check_sampling, choose_recipe
from videoqat.generation.images import check_image, read_image
from videoqat.generation.prompts import read_prompts_with_images
from videoqat.models.hub import check_weights, origin
from videoqat.models.spec import family_of
from videoqat.parallel.mesh import LONGEST_WAIT_S, Mesh, collective_errors, open_mesh
from videoqat.provenance import commit, device_name, provenance, versions
from videoqat.recipes import get_recipe
from videoqat.training import validation
from videoqat.training.objective import resolve as resolve_objective

WARM_UP_STEPS = 3  # denoising steps of the untimed first video; its attention inputs are where errors per layer are measured


class _Todo(NamedTuple):
    """Videos that are missing, and entries (their indices) whose errors by layer or losses are."""

    videos: list["Task"]
    layers: list[int]
    losses: list[int]


@dataclass(frozen=True)
class Task:
    """One video to render: entry `entry` (its index), prompt `prompt` (its index), `seed`; `repeat` marks the reference's second rendering."""

    entry: int
    prompt: int
    seed: int
    repeat: bool = False

    @property
    def scene(self) -> str:
        """What is equal for all entries: prompt and seed."""
        return f"prompt{self.prompt:03d}-seed{self.seed}"


def _settings(config: CompareConfig, prompts: list[tuple[str, str]]) -> dict[str, Any]:
    """Everything that results depend on, as JSON gives it back. Of prompts and images the content counts, not where their files lie."""
    device, dtype = config.runtime.resolve()
    folders = sorted({entry.model for entry in config.entries} | ({config.validation_cache} if config.validation_cache else set()))
    settings = {
        **{key: value for key, value in to_dict(config).items() if key not in ("out", "prompts")},
        "prompts": [prompt for prompt, _ in prompts],
        "images": [read_image(image)[1] if image else "" for _, image in prompts],
        "st_lpips": _st_lpips(config)[1],
        "recipes": {entry.recipe: get_recipe(entry.recipe).to_dict() for entry in config.entries},
        "files": {folder: file_stats(folder) for folder in folders},
        "device": device_name(str(device)),
        "dtype": str(dtype),
        "versions": versions(),
    }
    loaded: dict[str, Any] = json.loads(json.dumps(settings))
    return loaded


def _st_lpips(config: CompareConfig, device: str | torch.device = "cpu") -> tuple[st_lpips.StLpips | None, dict[str, str]]:
    return st_lpips.load(config.st_lpips, [(config.sampling.height, config.sampling.width)], device)


def plan(config: CompareConfig) -> dict[str, Any]:
    """What `compare(config)` would do, checked without loading weights.

    Returns:
        `entries` (name, model, recipe, the kernel that would serve it, warnings), `prompts`, `seeds`, `videos` (how many), `device`, `dtype`.

    Raises:
        UserError: whatever `compare` would refuse before it loads a model.
    """
    config.validate()
    prompts = read_prompts_with_images(config.prompts)
    device, dtype = config.runtime.resolve()
    fidelity.check_sizes([(config.sampling.height, config.sampling.width)])
    entries = []
    for entry in config.entries:
        check_weights(entry.model)
        size = check_sampling(entry.model, config.sampling)
        for prompt, image in prompts:
            check_image(entry.model, image, f"prompts={config.prompts!r}, {prompt!r}: image")
        recipe, warnings = choose_recipe(entry.model, entry.recipe)
        check_recipe(entry.model, recipe, config.sampling)
        kernel = config.runtime.kernel if recipe.is_quantised else "auto"
        receipt = resolve(recipe, device, dtype, size["head_dim"], kernel).to_dict()
        if entry.run:
            read_curves(entry.run)
        entries.append({"name": entry.name, "model": entry.model, "recipe": recipe.name, **size, "receipt": receipt, "warnings": warnings})
    if config.validation_cache:
        validation.check_cache(config.validation_cache, [entry.model for entry in config.entries])
        for entry in config.entries:
            resolve_objective(config.objective, family_of(entry.model).noise_schedule(entry.model))
    check_out(Path(config.out), _settings(config, prompts), "comparison")
    check_writable("out", config.out)
    videos = (len(config.entries) + 1) * len(prompts) * len(config.seeds)
    said = [prompt for prompt, _ in prompts]
    return {"entries": entries, "prompts": said, "seeds": list(config.seeds), "videos": videos, "device": str(device), "dtype": str(dtype)}


class Comparison:
    """The work of one `compare` call: what there is to do, what is done already (on disk), and how to do it."""

    def __init__(self, config: CompareConfig, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.out = Path(config.out)
        prompts = read_prompts_with_images(config.prompts)
        self.settings = _settings(config, prompts)
        self.prompts = [prompt for prompt, _ in prompts]
        self.images = [read_image(image)[0] if image else None for _, image in prompts]
        self.cache = CachedVideos(config.validation_cache) if config.validation_cache else None
        first = config.entries[0].model
        self._schedule = family_of(first).noise_schedule(first)  # the times of every entry's losses: they are paired
        scenes = [(prompt, seed) for prompt in range(len(self.prompts)) for seed in config.seeds]
        self.tasks = [Task(i, prompt, seed) for i in range(len(config.entries)) for prompt, seed in scenes]
        self.tasks += [Task(0, prompt, seed, repeat=True) for prompt, seed in scenes]
        self.mine = {Task(0, prompt, seed).scene for prompt, seed in scenes[mesh.rank :: mesh.world_size]}
        self.st_lpips, _ = _st_lpips(config, mesh.device)
        self.bar: Any = None

    def _slug(self, index: int) -> str:
        return f"{index}-" + re.sub(r"[^a-z0-9]+", "-", self.config.entries[index].name.lower()).strip("-")

    def _part(self, name: str) -> Path:
        return self.out / "parts" / name

    def video(self, task: Task) -> Path:
        """Where the task's video goes."""
        return self.out / "videos" / f"{self._slug(task.entry)}-{task.scene}{'-again' if task.repeat else ''}.mp4"

    def record(self, task: Task) -> Path:
        """Where the task's timings and figures go; written last, so its presence says that the task is done."""
        return self._part(self.video(task).with_suffix(".json").name)

    def _reference(self, task: Task) -> Path:
        return self._part(f"reference-{task.scene}.npz")

    def _done(self, task: Task) -> bool:
        return self.record(task).is_file() and self.video(task).is_file()

    def missing(self) -> list[Task]:
        """Videos still to be rendered. Fidelity needs the reference's frames as they were before compression, so it is rendered
        again where another entry of its scene is missing and these frames aren't there."""
        missing = [task for task in self.tasks if not self._done(task)]
        scenes = {task.scene for task in missing}
        again = [task for task in self.tasks if task.entry == 0 and not task.repeat and task.scene in scenes and not self._reference(task).is_file()]
        return [task for task in self.tasks if task in missing or task in again]

    def _layers(self, index: int) -> Path:
        return self._part(f"{self._slug(index)}-layers.json")

    def _losses(self, index: int) -> Path:
        return self._part(f"{self._slug(index)}-losses.json")

    def _todo(self) -> _Todo:
        entries = range(len(self.config.entries))
        layers = [index for index in entries if not self._layers(index).is_file()]
        losses = [index for index in entries if self.cache is not None and not self._losses(index).is_file()]
        return _Todo(self.missing(), layers, losses)

    def run(self) -> None:
        """Renders and measures all that is missing. Each model folder is loaded once; the reference's comes first. Collective."""
        todo = self.mesh.on_rank_zero(self._todo)  # on one rank, since others may already have finished something when this one looks
        if len(todo.videos) < len(self.tasks):
            say(f"{len(self.tasks) - len(todo.videos)} of {len(self.tasks)} videos are there already under the same settings")
        tasks = [task for task in todo.videos if task.scene in self.mine]
        layers = todo.layers if self.mesh.rank == 0 else []
        folders: dict[str, list[int]] = {}
        for index, entry in enumerate(self.config.entries):
            if index in layers or index in todo.losses or any(task.entry == index for task in tasks):
                folders.setdefault(entry.model, []).append(index)
        if not folders:
            return
        with progress(total=len(tasks) * self.config.sampling.num_inference_steps, desc="videos", unit="step") as self.bar:
            for folder, indices in folders.items():
                say(f"loading {folder}")
                engine = Engine(folder, dataclasses.replace(self.config.runtime, device=str(self.mesh.device)))
                for index in indices:
                    self._render_entry(engine, index, [task for task in tasks if task.entry == index], index in layers)
                    if index in todo.losses:
                        self._measure_losses(engine, index)
                del engine
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def _render_entry(self, engine: Engine, index: int, tasks: list[Task], layers: bool) -> None:
        entry = self.config.entries[index]
        if tasks or layers:
            self.bar.set_description(f"{entry.name}: warm-up")
            errors = self._warm_up(engine, entry)
            if layers:
                write_json(self._layers(index), errors)
        for task in tasks:
            self.bar.set_description(f"{entry.name}: prompt {task.prompt + 1} of {len(self.prompts)}, seed {task.seed}")
            prompt, image, sampling = self.prompts[task.prompt], self.images[task.prompt], self.config.sampling
            result = engine.generate(prompt, task.seed, sampling, entry.recipe, image=image, on_step=lambda *_: self.bar.update())
            self._keep(task, result)

    def _measure_losses(self, engine: Engine, index: int) -> None:
        """Collective: every rank computes its part of the entry's losses."""
        entry = self.config.entries[index]
        assert self.cache is not None
        engine.install(get_recipe(entry.recipe))
        values = validation.paired_losses(
            engine.family,
            engine.folder,
            engine.transformers,
            self.cache,
            resolve_objective(self.config.objective, self._schedule),
            samples=validation.choose_samples(len(self.cache), self.config.validation_samples),
            num_times=self.config.validation_timesteps,
            mesh=self.mesh,
            desc=f"{entry.name}: validation loss",
        )
        if self.mesh.rank == 0:
            write_json(self._losses(index), values.tolist())

    def _warm_up(self, engine: Engine, entry: CompareEntry) -> dict[str, dict[str, float]]:
        """A short untimed video, so that first-use costs (kernels, caches) are in no latency; meanwhile each quantised layer's error is measured."""
        errors = LayerErrors(engine, get_recipe(entry.recipe))
        steps = max(WARM_UP_STEPS, errors.recipe.keep_first_steps + errors.recipe.keep_last_steps + 1)  # at least one that is quantised
        sampling = dataclasses.replace(self.config.sampling, num_inference_steps=steps)
        with errors.watching():
            engine.generate(self.prompts[0], self.config.seeds[0], sampling, errors.recipe, image=self.images[0])
        return errors.means()

    def _keep(self, task: Task, result: VideoResult) -> None:
        if task.entry == 0 and not task.repeat:
            with atomic_path(self._reference(task)) as aside:
                np.savez_compressed(aside, frames=result.frames)
            against_first = None
        else:
            reference_FHWC: NDArray[np.uint8] = np.load(self._reference(task))["frames"]
            against_first = fidelity.fidelity(reference_FHWC, result.frames, self.st_lpips)
        write_video(self.video(task), result.frames, self.config.sampling.fps)
        record = {
            "entry": self.config.entries[task.entry].name,
            "prompt": self.prompts[task.prompt],
            "image_sha256": self.settings["images"][task.prompt],
            "seed": task.seed,
            "repeat": task.repeat,
            "file": str(self.video(task).relative_to(self.out)),
            "timings": result.timings,
            "receipts": result.receipts,
            "warnings": result.warnings,
            "flicker": fidelity.flicker(result.frames),
            "fidelity": against_first,
            "commit": commit(),
            "ranks": self.mesh.world_size,
        }
        write_json(self.record(task), record)

    def report(self) -> dict[str, Any]:
        """All measurements of a finished comparison as one JSON-able dict: what report.json holds."""
        records = [json.loads(self.record(task).read_text()) for task in self.tasks]
        names = [entry.name for entry in self.config.entries]
        losses = {}
        if self.cache is not None:
            losses = {name: np.array(json.loads(self._losses(i).read_text())) for i, name in enumerate(names)}
        summaries = validation.summarise(losses, names[0]) if losses else {}
        entries = []
        for index, entry in enumerate(self.config.entries):
            mine = [r for r in records if r["entry"] == entry.name and not r["repeat"]]
            flickers = [r["flicker"] for r in mine if r["flicker"] is not None]
            entries.append(
                {
                    "name": entry.name,
                    "model": entry.model,
                    "model_origin": origin(entry.model),
                    "recipe": get_recipe(entry.recipe).to_dict(),
                    "receipts": distinct_receipts([receipt for r in mine for receipt in r["receipts"]]),
                    "latency": median_latency(mine),
                    "validation": {**summaries[entry.name], "losses": losses[entry.name].tolist()} if losses else None,
                    "fidelity": fidelity.summarise([r["fidelity"] for r in mine]) if index else None,
                    "flicker": statistics.fmean(flickers) if flickers else None,
                    "layers": json.loads(self._layers(index).read_text()),
                    "training": read_curves(entry.run) if entry.run else None,
                    "warnings": list(dict.fromkeys(warning for r in mine for warning in r["warnings"])),
                }
            )
        device, _ = self.config.runtime.resolve()
        return {
            "reference": names[0],
            "prompts": self.prompts,
            "seeds": list(self.config.seeds),
            "entries": entries,
            "floor": fidelity.summarise([r["fidelity"] for r in records if r["repeat"]]),
            "st_lpips": self.settings["st_lpips"],
            "videos": records,
            "settings": {key: value for key, value in self.settings.items() if key != "files"},
            "provenance": provenance(str(device)),
            "commits": sorted({r["commit"] for r in records}),
            "ranks": sorted({r.get("ranks", 1) for r in records}),  # records of earlier versions don't tell
        }


def median_latency(records: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds over videos, by stage; `step_s` is the median over all denoising steps of all of them."""
    timings = [record["timings"] for record in records]
    stages = {stage: statistics.median(timing[stage] for timing in timings) for stage in ("text_s", "denoise_s", "vae_s", "total_s")}
    return {**stages, "step_s": statistics.median(step for timing in timings for step in timing["steps_s"])}


def distinct_receipts(receipts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Receipts without their counts, each once."""
    bare = [{key: value for key, value in receipt.items() if key != "calls"} for receipt in receipts]
    return list({json.dumps(receipt, sort_keys=True): receipt for receipt in bare}.values())


def compare(config: CompareConfig) -> dict[str, Any]:
    """Renders, measures and reports; goes on where an interrupted comparison with the same settings stopped. Under torchrun processes share the work.

    Returns:
        What report.json holds (see `Comparison.report`), and `report_html`, `report_json`: where the two are.

    Raises:
        UserError: bad configuration or input, or `out` holds something else; nothing is overwritten.
        NonFiniteVideo: an entry yields NaN or inf; what is finished stays.
        WorkerLost: under torchrun, another process ended; what is finished stays, and the same command goes on from there.
    """
    plan(config)
    patient = ParallelConfig(start_timeout_s=LONGEST_WAIT_S)
    with open_mesh(patient, config.runtime.resolve()[0]) as mesh, collective_errors("compare"):
        comparison = Comparison(config, mesh)
        sizes = {folder: {name: size for name, (size, _) in stats.items()} for folder, stats in comparison.settings["files"].items()}
        mesh.agree(comparison.settings | {"files": sizes})  # their times may differ where each host has its own copy
        mesh.on_rank_zero(lambda: write_json(writable_folder("out", config.out) / "settings.json", comparison.settings))
        comparison.run()
        mesh.barrier()
        return mesh.on_rank_zero(lambda: _report(comparison))


def _report(comparison: Comparison) -> dict[str, Any]:
    out = comparison.out
    report = comparison.report()
    write_json(out / "report.json", report)
    html = write_report(out)
    for reference in (out / "parts").glob("reference-*.npz"):
        reference.unlink()
    say(f"report: {html}")
    return {**report, "report_html": str(html), "report_json": str(out / "report.json")}
