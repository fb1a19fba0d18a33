"""`videoqat bench training`: what a step of training costs, by layout, recipe and checkpointing.

The model has its published shape and random weights, the samples are noise of the right size: neither changes what a step costs. Each case is a
`videoqat train` of its own, so what is timed is what a user gets, data, logging and optimiser included; the numbers are read from its log.
Cases run one after the other on the same machine, in one command.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from videoqat.attention.backends import resolve
from videoqat.config import BenchTrainingConfig, TrainConfig, choice, load, parse_bucket, require, to_dict
from videoqat.console import say
from videoqat.data.synthetic import write_cache
from videoqat.errors import UserError
from videoqat.files import check_writable, writable_folder, write_json
from videoqat.models.install import check_kept_layers
from videoqat.models.published import published, write_folder
from videoqat.models.spec import family_of
from videoqat.parallel.mesh import resolve_layout
from videoqat.provenance import provenance
from videoqat.recipes import get_recipe
from videoqat.training.bench_diffusers import measure_in_a_process
from videoqat.training.runlog import read_log

PROFILED = ("communication_seconds", "communication_exposed_seconds")


def _layout(text: str) -> tuple[int, int, int]:
    replicate, shard, sp = (int(part) for part in text.split("x"))
    return replicate, shard, sp


def _overrides(config: BenchTrainingConfig, layout: str, settings: dict[str, Any]) -> list[str]:
    """`key=value` of the `train` of a case: `settings`, what all cases share, and what was asked for."""
    replicate, shard, sp = _layout(layout)
    common = {
        "parallel.dp_replicate": replicate,
        "parallel.dp_shard": shard,
        "parallel.sp": sp,
        "train.batch_size": config.batch_size,
        "train.health_every": 0,
        "runtime.device": config.runtime.device,
        "runtime.kernel": config.runtime.kernel,
    }
    return [*(f"{key}={value}" for key, value in (common | settings).items()), *config.overrides]


def _train(config: BenchTrainingConfig, name: str, layout: str, settings: dict[str, Any]) -> Path:
    """Runs `videoqat train` on as many processes as `layout` asks for; returns its folder.

    Raises:
        UserError: it failed; the end of what it said is in the message.
    """
    work, processes = Path(config.work), math.prod(_layout(layout))
    name = name.replace("/", "-")  # a recipe may be the path of a file
    out = work / "runs" / name
    settings = {"model.path": work / "model", "cache": work / "cache", "out": out} | settings
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    overrides = _overrides(config, layout, settings)
    say(f"{name}: {processes} process(es)")
    done = subprocess.run([sys.executable, *launcher, "-m", "videoqat", "train", *overrides], capture_output=True, text=True, check=False)
    (work / f"{name}.log").write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        raise UserError(f"case {name} failed with exit code {done.returncode}: {' / '.join(done.stderr.splitlines()[-4:])}")
    return out


def _numbers(rows: list[dict[str, Any]], warmup: int, gpus: int) -> dict[str, Any]:
    """What a case's log says of its steps after the first `warmup`; a traced step tells its communication and isn't timed."""
    counted = [row for row in rows if row["step"] > warmup]
    timed = [row for row in counted if "communication_seconds" not in row] or counted
    result: dict[str, Any] = {"step_time": statistics.median(row["step_time"] for row in timed), "steps_timed": len(timed)}
    result["tokens_per_second_per_gpu"] = statistics.median(row["tokens_per_second"] for row in timed) / gpus
    shares = [row["mfu"] for row in timed if row["mfu"] is not None]
    result["mfu"] = statistics.median(shares) if shares else None
    result["memory_bytes"] = max(row["memory_bytes"] for row in rows)
    for part in ("data", "forward", "backward", "optimizer"):
        result[f"{part}_seconds"] = statistics.median(row[f"{part}_seconds"] for row in timed)
    traced = [row for row in rows if "communication_seconds" in row]
    for key in PROFILED:
        result[key] = traced[-1][key] if traced else None
    result["losses"] = [row["loss"] for row in rows]
    return result


def _case(config: BenchTrainingConfig, layout: str, recipe: str, checkpointing: str, saved: bool) -> dict[str, Any]:
    replicate, shard, sp = _layout(layout)
    gpus, name = replicate * shard * sp, f"{layout}-{recipe}-{checkpointing}"
    settings = {"recipe": recipe, "train.activation_checkpointing": checkpointing, "train.steps": config.steps, "train.profile_every": config.steps}
    settings |= {"train.save_every": config.steps if saved else 0, "train.async_save": False}
    out = _train(config, name, layout, settings)
    rows = read_log(out / "log.jsonl")
    session = json.loads((out / "provenance.json").read_text())["sessions"][-1]
    about = {
        "layout": layout,
        "gpus": gpus,
        "recipe": recipe,
        "checkpointing": checkpointing,
        "samples_per_step": config.batch_size * replicate * shard,
    }
    return about | _numbers(rows, config.warmup, gpus) | {"receipts": session["receipts"], "run": out.name}


def _one_gpu_losses(config: BenchTrainingConfig, cases: list[dict[str, Any]]) -> None:
    """Adds to each case on several GPUs the first losses that one GPU has with the same global batch."""
    found: dict[tuple[str, int], list[float]] = {}
    for case in cases:
        if case["gpus"] == 1:
            found.setdefault((case["recipe"], case["samples_per_step"]), case["losses"])
    for case in cases:
        key = case["recipe"], case["samples_per_step"]
        if case["gpus"] > 1 and key not in found:
            settings = {"recipe": key[0], "train.global_batch_size": key[1], "train.steps": 2, "train.activation_checkpointing": "full"}
            out = _train(config, f"one-gpu-{key[0]}-{key[1]}", "1x1x1", settings | {"train.save_every": 0, "train.profile_every": 0})
            found[key] = [row["loss"] for row in read_log(out / "log.jsonl")]
        if case["gpus"] > 1:
            case["one_gpu_losses"] = found[key]


def _resumed(config: BenchTrainingConfig, first: dict[str, Any]) -> dict[str, Any]:
    """The first case's last checkpoint, resumed for two steps on another layout and on its own: the losses, side by side."""
    checkpoint = Path(config.work) / "runs" / first["run"] / "checkpoints" / f"step-{config.steps:06d}"
    settings = {"recipe": first["recipe"], "train.activation_checkpointing": first["checkpointing"], "train.steps": config.steps + 2}
    settings |= {"train.resume": checkpoint, "train.global_batch_size": first["samples_per_step"], "train.save_every": 0, "train.profile_every": 0}
    losses = {}
    for name, layout in (("same", first["layout"]), ("other", config.resume_onto)):
        out = _train(config, f"resumed-{name}-{layout}", layout, settings)
        losses[name] = [row["loss"] for row in read_log(out / "log.jsonl")]
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses["other"], losses["same"], strict=True))
    return {"from": first["run"], "onto": config.resume_onto, "losses": losses, "loss_difference": difference}


def plan(config: BenchTrainingConfig) -> dict[str, Any]:
    """The `cases` that would be timed.

    Raises:
        UserError: a model that isn't known, a size or a layout that it can't have, fewer GPUs than a layout asks for,
            `overrides` that `train` doesn't take, a recipe that no kernel serves.
    """
    choice("model", config.model, published())
    device, _ = config.runtime.resolve()
    for key, layout in [*(("layouts", layout) for layout in config.layouts), *([("resume_onto", config.resume_onto)] if config.resume_onto else [])]:
        wanted = math.prod(_layout(layout))
        there = torch.cuda.device_count() if device.type == "cuda" else wanted
        require(wanted <= there, key, layout, f"layouts of at most {there} processes, one for each GPU here")
    check_writable("work", config.work)
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(Path(place) / "model", config.model)
        geometry = family_of(folder).geometry(folder)
        geometry.check_size("size", *parse_bucket("size", config.size))
        for layout in filter(None, (*config.layouts, config.resume_onto)):
            given = load(TrainConfig, None, _overrides(config, layout, {"model.path": folder, "cache": place, "out": config.work}))
            resolve_layout(given.parallel, math.prod(_layout(layout)), geometry.num_heads)
            for recipe in map(get_recipe, config.recipes):
                check_kept_layers(recipe, "transformer", geometry.num_layers)
                resolve(recipe, device, getattr(torch, given.train.compute_dtype), geometry.head_dim, config.runtime.kernel, training=True)
    return {"cases": [f"{layout}-{recipe}-{mode}" for layout in config.layouts for mode in config.checkpointing for recipe in config.recipes]}


def bench_training(config: BenchTrainingConfig) -> dict[str, Any]:
    """Runs all cases and returns their numbers.

    Returns:
        `cases`: for each layout, recipe and checkpointing the medians `step_time` (s), `tokens_per_second_per_gpu`, `mfu`, seconds by part, and
        `memory_bytes` (the most on any GPU), `losses`, and on several GPUs `one_gpu_losses`;
        `diffusers`: the plain model's forward and backward; `resumed`; `config`; `provenance`.

    Raises:
        UserError: a model that isn't known, fewer GPUs than a layout asks for, or a case that failed.
    """
    plan(config)
    device, _ = config.runtime.resolve()
    work = writable_folder("work", config.work)
    write_folder(work / "model", config.model, random_on=str(device))
    samples = 4 * config.batch_size * max(math.prod(_layout(layout)[:2]) for layout in config.layouts)
    write_cache(work / "cache", work / "model", parse_bucket("size", config.size), samples, family_of(work / "model").text_tokens(work / "model"))

    result: dict[str, Any] = {"config": to_dict(config), "provenance": provenance(str(device)), "diffusers": None, "resumed": None, "cases": []}
    if config.diffusers:
        result["diffusers"] = measure_in_a_process(work / "model", config, str(device))
        say(f"plain diffusers: {result['diffusers']['step_time']:.3f} s for forward and backward")
    for layout in config.layouts:
        for checkpointing in config.checkpointing:
            for recipe in config.recipes:
                case = _case(config, layout, recipe, checkpointing, saved=bool(config.resume_onto) and not result["cases"])
                result["cases"].append(case)
                say(f"{case['run']}: {case['step_time']:.3f} s a step, {case['memory_bytes'] / 1e9:.1f} GB")
                write_json(work / "result.json", result)  # a later case may fail; what was measured stays
    if config.one_gpu_losses:
        _one_gpu_losses(config, result["cases"])
    if config.resume_onto:
        result["resumed"] = _resumed(config, result["cases"][0])
    return result
