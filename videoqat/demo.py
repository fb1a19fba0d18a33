"""The whole road, small: a first video from the embedded model, in BF16 and in 4 bits; clips, latents, Attn-QAT, a control, and the report.

Every stage is a command that a user could type; the demo prints it before it runs. A stage that is complete is not run again, so an
interrupted demo is started again with the same words.
"""

import json
import shlex
import time
from pathlib import Path
from typing import Any

from videoqat.commands import execute
from videoqat.config import DemoConfig, to_dict
from videoqat.console import say
from videoqat.errors import UserError
from videoqat.files import check_writable, writable_folder, write_json
from videoqat.models.embedded import CAPTIONS, known
from videoqat.recipes import get_recipe


def _settings(config: DemoConfig) -> dict[str, Any]:
    """What the demo is made with, if it can be, and if an earlier demo in its folder had the same.

    Raises:
        UserError: it can't, or hadn't.
    """
    out = Path(config.out)
    check_writable("out", out)
    get_recipe(config.recipe).check_steps(config.num_inference_steps)
    record = out / "demo.json"
    settings = to_dict(config) | {"embedded": known()["sha256"]}
    if record.is_file():
        earlier = json.loads(record.read_text())
        changed = [key for key in settings if earlier.get(key) != settings[key]]
        if changed:
            key = changed[0]
            raise UserError(f"out={config.out!r} holds a demo with {key}={earlier.get(key)!r}, not {settings[key]!r}; choose another out")
    elif out.exists() and any(out.iterdir()):
        raise UserError(f"out={config.out!r} is not empty and holds no demo; choose another out")
    return settings


def _stage(title: str, done: Path, command: str, overrides: list[str], file: str | None = None) -> dict[str, Any]:
    """Runs one command unless `done` is there already."""
    words = ["videoqat", *command.split(), *(["--config", file] if file else []), *overrides]
    say(f"\n=== {title}\n$ {shlex.join(words)}")
    if done.exists():
        say(f"    done before: {done}")
        return {}
    started = time.monotonic()
    result = execute(command, file, overrides, show_config=False)
    say(f"    {time.monotonic() - started:.0f} s")
    return result


def _train(out: Path, title: str, name: str, base: Path, settings: list[str]) -> str:
    """Trains `base` on into `out/runs/NAME` and exports it to `out/models/NAME`; returns that folder."""
    run, exported = out / "runs" / name, out / "models" / name
    if not exported.exists():
        _stage(title, exported, "train", [f"model.path={base}", f"cache={out / 'cache'}", f"out={run}", *settings], "train/garments")
    _stage(f"Export {name}", exported, "export", [f"run={run}", f"out={exported}"])
    return str(exported)


def plan(config: DemoConfig) -> dict[str, Any]:
    """The `recipes` that the demo would show.

    Raises:
        UserError: whatever `demo` would refuse before it begins.
    """
    _settings(config)
    return {"recipes": ["bf16", config.recipe]}


def demo(config: DemoConfig) -> dict[str, Any]:
    """Runs the demo and returns where the report is and what it found. On two CPU cores it takes some minutes.

    Raises:
        UserError: `out` holds something else, or a demo with other settings; a recipe that keeps more denoising steps than there are.
    """
    started = time.monotonic()
    settings = _settings(config)
    out = writable_folder("out", config.out)
    write_json(out / "demo.json", settings)
    base = out / "models" / "base"
    _stage("The embedded model, trained on moving garments", base, "example-model", ["weights=embedded", f"out={base}"])
    sampling = [f"sampling.{key}={config.size}" for key in ("height", "width")] + [f"sampling.num_inference_steps={config.num_inference_steps}"]
    first = {"bf16": "A first video", config.recipe: "The same with 4-bit attention, for which it was not trained"}
    videos = []
    for recipe, title in first.items():
        videos.append(out / "first" / f"{Path(recipe).stem}.mp4")
        arguments = [f"model={base}", f"recipe={recipe}", f"prompt={CAPTIONS[0]}", f"seed={config.seed}", f"out={videos[-1]}", *sampling]
        arguments.append("overwrite=true")  # a video whose record is not there yet is one of a demo that was interrupted
        _stage(title, videos[-1].with_suffix(".json"), "generate", arguments, "generate/garments")
    say(f"\n{CAPTIONS[0]!r}, to look at while the rest is made:")
    for video in videos:
        say(f"    {video.resolve()}")

    for split, count, folder in (("train", config.num_clips, "clips"), ("held_out", config.num_held_out, "clips_held_out")):
        clips, cache = out / folder, out / folder.replace("clips", "cache")
        arguments = [f"out={clips}", f"num_clips={count}", f"split={split}", f"size={config.size}", f"seed={config.seed}"]
        _stage(f"Clips ({split} photos)", clips / "metadata.jsonl", "example-clips", arguments)
        arguments = [f"model.path={base}", f"source={clips}", f"out={cache}", f"buckets=[17x{config.size}x{config.size}]"]
        _stage(f"Latents and text embeddings ({split})", cache / "index.json", "preprocess", arguments, "preprocess/garments")

    tune = [f"train.steps={config.tune_steps}", f"train.save_every={config.tune_steps}", f"train.seed={config.seed}"]
    qat = _train(out, "Attn-QAT: training with 4-bit attention simulated", "attn_qat", base, [*tune, f"recipe={config.recipe}"])
    control = _train(out, "Control: as many BF16 steps", "control", base, [*tune, "recipe=bf16"])

    prompts = out / "prompts.txt"
    prompts.write_text("# the demo's prompts\n" + "\n".join(CAPTIONS) + "\n")
    entries = [
        {"name": "BF16", "model": control, "recipe": "bf16", "run": str(out / "runs" / "control")},
        {"name": "FP4 without QAT", "model": control, "recipe": config.recipe},
        {"name": "FP4 after Attn-QAT", "model": qat, "recipe": config.recipe, "run": str(out / "runs" / "attn_qat")},
        {"name": "base BF16", "model": str(base), "recipe": "bf16"},
    ]
    report = out / "comparison"
    arguments = [f"entries={json.dumps(entries)}", f"prompts={prompts}", f"validation_cache={out / 'cache_held_out'}", f"out={report}", *sampling]
    result = _stage("Compare", report / "report.html", "compare", arguments, "compare/garments")
    minutes = (time.monotonic() - started) / 60
    say(f"\nDone in {minutes:.1f} min.\nThe report: {(report / 'report.html').resolve()}")
    return {"report": str(report / "report.html"), "first": [str(video) for video in videos], "minutes": minutes, "comparison": result}
