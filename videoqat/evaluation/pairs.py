"""`videoqat generate`, which with compare=[RECIPE,RECIPE] makes a folder of videos by each recipe, and a page that shows them side by side.

    out/bf16/           what `generate prompts=... recipe=bf16` writes: the reference
        attn_qat/       the same prompts and seeds
        bf16-again/     the reference rendered once more: how far apart two videos are that ought to be the same
        report.json     the same as of `videoqat compare`, without what only that one measures
        report.html

Each folder is finished and goes on by itself, as `generation.batch` says; the model is loaded once. Frames are compared as they are in the files.
"""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from videoqat.config import GenerateConfig, require, to_dict
from videoqat.console import say
from videoqat.data.video_io import read_video
from videoqat.evaluation import fidelity, st_lpips
from videoqat.evaluation.compare import distinct_receipts, median_latency
from videoqat.evaluation.report import write_report
from videoqat.files import write_json
from videoqat.generation import batch
from videoqat.generation.engine import choose_recipe
from videoqat.generation.prompts import Video
from videoqat.models.hub import origin
from videoqat.parallel.folder import check_ours, sole_user
from videoqat.parallel.mesh import Mesh
from videoqat.provenance import provenance

AGAIN = "-again"
COMMAND = "generate compare=[RECIPE,RECIPE]"


def _folders(config: GenerateConfig) -> dict[str, GenerateConfig]:
    """Name of each folder below `out` -> what fills it; the reference first, and once more at the end.

    Raises:
        ConfigError: recipes of different files are called alike, or as no folder can be.
    """
    reference = config.compare[0]
    asked = [*config.compare, reference]
    names = [choose_recipe(config.model, recipe)[0].name if recipe != "checkpoint" else recipe for recipe in config.compare]
    names.append(names[0] + AGAIN)
    legal = "recipes whose names differ, since each has a folder of its name; and without /"
    require(len(set(names)) == len(names) and not any("/" in name or name in (".", "..") for name in names), "compare", names, legal)
    wanted = dict(zip(names, asked, strict=True))
    alone = dataclasses.replace(config, compare=[], st_lpips="auto")
    return {name: dataclasses.replace(alone, recipe=recipe, out=str(Path(config.out) / name)) for name, recipe in wanted.items()}


def plan(config: GenerateConfig) -> dict[str, Any]:
    """What `generate(config)` would do, checked without loading weights: see `batch.plan`; with `compare`, that of each folder.

    Raises:
        UserError: whatever `generate` would refuse before it loads the model.
    """
    config.validate()
    if not config.compare:
        return batch.plan(config)
    check_ours(Path(config.out), batch.MARK, COMMAND)
    folders = {name: batch.plan(folder) for name, folder in _folders(config).items()}
    sizes = [(size["height"], size["width"]) for size in next(iter(folders.values()))["sizes"]]
    fidelity.check_sizes(sizes)
    st_lpips.load(config.st_lpips, sizes)
    return {"folders": folders}


def generate(config: GenerateConfig) -> dict[str, Any]:
    """`batch.generate`; with `compare`, for each recipe, and then the report.

    Returns:
        What `batch.generate` returns. With `compare`: `folders` (that of each), `report_html`, `report_json`, and `exit_code`: 1 where videos failed,
        which are left out of the report.

    Raises:
        UserError, NonFiniteVideo, WorkerLost: as `batch.generate`.
    """
    if not config.compare:
        return batch.generate(config)
    plan(config)
    folders, out = _folders(config), Path(config.out)
    planned = {name: batch.plan_folder(folder) for name, folder in folders.items()}
    with batch.open_crew(config, config.compare) as crew, sole_user(out, batch.MARK, COMMAND, crew.mesh):
        told = {}
        for name, folder in folders.items():
            say(f"{name}: {folder.out}")
            told[name] = batch.fill_folder(folder, *planned[name], crew)
        found = next(iter(planned.values()))[1]
        html = crew.mesh.on_rank_zero(lambda: _report(config, folders, found, crew.mesh))
    where = {"report_html": html, "report_json": str(out / "report.json")} if html else {}
    return {"folders": told, **where, "exit_code": max(one["exit_code"] for one in told.values())}


def _report(config: GenerateConfig, folders: dict[str, GenerateConfig], found: list[Video], mesh: Mesh) -> str:
    """On rank 0: writes the report of those videos that every folder has. Returns the page's path, or nothing where there is none to show."""
    out, (reference, *others, again) = Path(config.out), folders
    manifests = [json.loads((out / name / batch.MANIFEST).read_text(encoding="utf-8")) for name in folders]
    finished = [{video["video"] for video in manifest["videos"]} for manifest in manifests]
    whole = [video for video in found if all(f"{video.name}.mp4" in names for names in finished)]
    if not whole:
        say(f"{out}: no video is there under every recipe, so there is no report")
        return ""
    network, about = st_lpips.load(config.st_lpips, [(video.sampling.height, video.sampling.width) for video in found], mesh.device)
    videos: list[dict[str, Any]] = []
    for video in whole:
        truth, _ = read_video(out / reference / f"{video.name}.mp4")
        for name in folders:
            file = Path(name) / f"{video.name}.mp4"
            frames, _ = read_video(out / file)
            made = json.loads((out / file).with_suffix(".json").read_text(encoding="utf-8"))
            told = {key: made[key] for key in ("timings", "receipts", "warnings", "peak_memory_bytes", "parallel")}
            videos.append(
                {
                    **told,
                    "entry": name if name != again else reference,
                    "prompt": video.prompt,
                    "seed": video.seed,
                    "repeat": name == again,
                    "file": str(file),
                    "flicker": fidelity.flicker(frames),
                    "fidelity": None if name == reference else fidelity.fidelity(truth, frames, network),
                    "commit": made["provenance"]["commit"],
                    "dtype": made["dtype"],
                    "recipe": made["recipe"],
                }
            )
    entries = [
        _entry(config, name, [video for video in videos if (video["entry"], video["repeat"]) == (name, False)]) for name in (reference, *others)
    ]
    report = {
        "reference": reference,
        "prompts": list(dict.fromkeys(video.prompt for video in whole)),
        "seeds": sorted({video.seed for video in whole}),
        "entries": entries,
        "floor": fidelity.summarise([video["fidelity"] for video in videos if video["repeat"]]),
        "st_lpips": about,
        "videos": videos,
        "frames": "as they are in the mp4 files",
        "settings": {
            "sampling": to_dict(config.sampling),
            "dtype": videos[0]["dtype"],
            "parallel": to_dict(config.parallel),
            "warm_up": config.warm_up,
        },
        "provenance": provenance(str(config.runtime.resolve()[0])),
        "commits": sorted({video["commit"] for video in videos}),
        "ranks": [mesh.world_size],
    }
    write_json(out / "report.json", report)
    html = write_report(out)
    say(f"report: {html}")
    return str(html)


def _entry(config: GenerateConfig, name: str, mine: list[dict[str, Any]]) -> dict[str, Any]:
    flickers = [video["flicker"] for video in mine if video["flicker"] is not None]
    compared = [video["fidelity"] for video in mine if video["fidelity"] is not None]
    return {
        "name": name,
        "model": config.model,
        "model_origin": origin(config.model),
        "recipe": mine[0]["recipe"],
        "receipts": distinct_receipts([receipt for video in mine for receipt in video["receipts"]]),
        "latency": median_latency(mine),
        "validation": None,
        "fidelity": fidelity.summarise(compared) if compared else None,
        "flicker": statistics.fmean(flickers) if flickers else None,
        "layers": {},
        "training": None,
        "warnings": list(dict.fromkeys(warning for video in mine for warning in video["warnings"])),
    }
