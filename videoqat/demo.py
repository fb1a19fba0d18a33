"""The whole road, small: clips, latents, a base model, 4-bit attention without training, Attn-QAT, a control, and the report.

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
from videoqat.files import writable_folder, write_json

PROMPTS = ("a sneaker moves left", "a dress moves right", "a bag moves up", "an ankle boot moves down")


def _settings_match(out: Path, config: DemoConfig) -> None:
    """Records the demo's settings in `out`, or checks that an earlier demo there had the same."""
    record = out / "demo.json"
    settings = to_dict(config)
    if record.is_file():
        earlier = json.loads(record.read_text())
        changed = [key for key in settings if earlier.get(key) != settings[key]]
        if changed:
            key = changed[0]
            raise UserError(f"out={config.out!r} holds a demo with {key}={earlier.get(key)!r}, not {settings[key]!r}; choose another out")
    elif any(out.iterdir()):
        raise UserError(f"out={config.out!r} is not empty and holds no demo; choose another out")
    write_json(record, settings)


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


def _train(out: Path, title: str, name: str, model: str, settings: list[str]) -> str:
    """Trains `model` into `out/runs/NAME` and exports it to `out/models/NAME`; returns that folder."""
    run, exported = out / "runs" / name, out / "models" / name
    if not exported.exists():
        _stage(title, exported, "train", [f"model.path={model}", f"cache={out / 'cache'}", f"out={run}", *settings], "train/tiny")
    _stage(f"Export {name}", exported, "export", [f"run={run}", f"out={exported}"])
    return str(exported)


def demo(config: DemoConfig) -> dict[str, Any]:
    """Runs the demo and returns where the report is and what it found. On two CPU cores it takes some minutes.

    Raises:
        UserError: `out` holds something else, or a demo with other settings.
    """
    started = time.monotonic()
    out = writable_folder("out", config.out)
    _settings_match(out, config)
    tiny = out / "models" / "tiny"
    _stage("A tiny Wan pipeline", tiny, "example-model", [f"out={tiny}", f"seed={config.seed}"])
    for split, count, folder in (("train", config.num_clips, "clips"), ("held_out", config.num_held_out, "clips_held_out")):
        clips, cache = out / folder, out / folder.replace("clips", "cache")
        arguments = [f"out={clips}", f"num_clips={count}", f"split={split}", f"seed={config.seed}"]
        _stage(f"Clips ({split} photos)", clips / "metadata.jsonl", "example-clips", arguments)
        arguments = [f"model.path={tiny}", f"source={clips}", f"out={cache}"]
        _stage(f"Latents and text embeddings ({split})", cache / "index.json", "preprocess", arguments, "preprocess/tiny")

    steps = [f"train.steps={config.base_steps}", f"train.save_every={config.base_steps}", f"train.seed={config.seed}"]
    steps += [f"optimizer.warmup_steps={min(20, config.base_steps // 10)}"]
    base = _train(out, "Base model: BF16 from scratch", "base", str(tiny), [*steps, "from_scratch=true", "recipe=bf16"])
    tune = [f"train.steps={config.tune_steps}", f"train.save_every={config.tune_steps}", f"train.seed={config.seed + 1}"]
    tune += ["optimizer.lr=3e-4", "optimizer.warmup_steps=0"]
    qat = _train(out, "Attn-QAT: training with 4-bit attention simulated", "attn_qat", base, [*tune, f"recipe={config.recipe}"])
    control = _train(out, "Control: as many BF16 steps more", "control", base, [*tune, "recipe=bf16"])

    prompts = out / "prompts.txt"
    prompts.write_text("# the demo's prompts\n" + "\n".join(PROMPTS) + "\n")
    entries = [
        {"name": "BF16", "model": control, "recipe": "bf16", "run": str(out / "runs" / "control")},
        {"name": "FP4 without QAT", "model": control, "recipe": config.recipe},
        {"name": "FP4 after Attn-QAT", "model": qat, "recipe": config.recipe, "run": str(out / "runs" / "attn_qat")},
        {"name": "base BF16", "model": base, "recipe": "bf16", "run": str(out / "runs" / "base")},
    ]
    report = out / "comparison"
    arguments = [f"entries={json.dumps(entries)}", f"prompts={prompts}", f"validation_cache={out / 'cache_held_out'}", f"out={report}"]
    arguments += [f"sampling.num_inference_steps={config.num_inference_steps}"]
    result = _stage("Compare", report / "report.html", "compare", arguments, "compare/tiny")
    minutes = (time.monotonic() - started) / 60
    say(f"\nDone in {minutes:.1f} min.\nThe report: {(report / 'report.html').resolve()}")
    return {"report": str(report / "report.html"), "minutes": minutes, "comparison": result}
