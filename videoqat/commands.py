"""The table of commands: what each is called, configured by, and done by.

Nothing heavy is imported until a command runs, so that `videoqat --help` is quick.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from videoqat import config as cfg
from videoqat.console import say


@dataclass(frozen=True)
class Command:
    """One command of the program. `run` and `plan` are `module:function`; each takes the configuration and returns a JSON-able dict.

    `plan` is for --dry-run: it refuses whatever `run` refuses before that loads or writes anything.
    """

    schema: type
    run: str
    help: str
    example: str
    plan: str


COMMANDS: dict[str, Command] = {
    "demo": Command(
        cfg.DemoConfig,
        "videoqat.demo:demo",
        "a video from the embedded model, then the whole road on a small set of real clips, on CPU: fine-tune with 4-bit attention, compare, report",
        "videoqat demo out=demo_out",
        "videoqat.demo:plan",
    ),
    "example-clips": Command(
        cfg.ExampleClipsConfig,
        "videoqat.data.moving_garments:write_clips",
        "write the embedded set of captioned clips as mp4 files with metadata.jsonl",
        "videoqat example-clips out=clips num_clips=64",
        "videoqat.data.moving_garments:plan",
    ),
    "example-model": Command(
        cfg.ExampleModelConfig,
        "videoqat.models.tiny:build_pipeline",
        "build a tiny pipeline (a diffusers folder; Wan, CogVideoX or HunyuanVideo) offline from configuration, or unpack the trained one",
        "videoqat example-model weights=embedded out=garments",
        "videoqat.models.tiny:plan",
    ),
    "preprocess": Command(
        cfg.PreprocessConfig,
        "videoqat.data.precompute:preprocess",
        "turn a folder of captioned clips into latents and text embeddings, once",
        "videoqat preprocess model.path=tiny-wan source=clips out=cache buckets=[17x64x64]",
        "videoqat.data.precompute:plan",
    ),
    "train": Command(
        cfg.TrainConfig,
        "videoqat.training.trainer:train",
        "fine-tune with attention quantised by a recipe (Attn-QAT), or without (recipe=bf16)",
        "videoqat train --config train/tiny model.path=tiny-wan cache=cache out=run recipe=attn_qat train.steps=100",
        "videoqat.training.trainer:plan",
    ),
    "export": Command(
        cfg.ExportConfig,
        "videoqat.training.export:export",
        "write a training checkpoint as a diffusers folder with videoqat.json, and load it back strictly",
        "videoqat export run=run out=tiny-wan-qat",
        "videoqat.training.export:plan",
    ),
    "convert": Command(
        cfg.ConvertConfig,
        "videoqat.models.convert:convert",
        "put a transformer that comes in one .safetensors file into a pipeline's folder, checked strictly",
        "videoqat convert model=tiny-wan transformer_file=finetuned.safetensors out=tiny-wan-finetuned",
        "videoqat.models.convert:plan",
    ),
    "generate": Command(
        cfg.GenerateConfig,
        "videoqat.evaluation.pairs:generate",
        "generate a video, or one for each line of a file, with any recipe; a .json beside each says what ran",
        'videoqat generate model=tiny-wan-qat prompt="a sneaker moves left" out=sneaker.mp4',
        "videoqat.evaluation.pairs:plan",
    ),
    "compare": Command(
        cfg.CompareConfig,
        "videoqat.evaluation.compare:compare",
        "the same prompts and seeds under several (checkpoint, recipe) pairs: videos, latencies, losses, report.html",
        "videoqat compare prompts=prompts.txt out=comparison "
        "'entries=[{name: BF16, model: tiny-wan, recipe: bf16}, {name: FP4, model: tiny-wan, recipe: attn_qat}]'",
        "videoqat.evaluation.compare:plan",
    ),
    "sensitivity": Command(
        cfg.SensitivityConfig,
        "videoqat.evaluation.sensitivity:sensitivity",
        "which layers a recipe hurts, by themselves and at the model's output; which to keep in bf16; a recipe that does, report.html",
        "videoqat sensitivity model=tiny-wan cache=cache out=sensitivity recipe=attn_qat max_kept=1",
        "videoqat.evaluation.sensitivity:plan",
    ),
    "compare-attention": Command(
        cfg.CompareAttentionConfig,
        "videoqat.evaluation.attention_only:compare_attention",
        "what recipes do to attention's output alone, on a model's own Q, K and V (`compare --attention-only` is the same)",
        "videoqat compare-attention --config compare-attention/training-free model=tiny-wan prompts=prompts.txt out=attention",
        "videoqat.evaluation.attention_only:plan",
    ),
    "serve": Command(
        cfg.ServeConfig,
        "app.serve:serve",
        "an HTTP service over a queue of videos, with a worker for each GPU",
        "videoqat serve folder=service port=8000",
        "app.serve:plan",
    ),
    "worker": Command(
        cfg.WorkerConfig,
        "app.serve:work",
        "one worker of a service whose server runs elsewhere",
        "videoqat worker --config service.yaml runtime.device=cuda:0",
        "app.serve:plan_worker",
    ),
    "evidence run": Command(
        cfg.EvidenceConfig,
        "videoqat.evaluation.evidence_run:run",
        "train one base in several ways, with several seeds, and measure each under several recipes: the rows of a table, resumable one by one",
        "videoqat evidence run --config evidence/short base=garments cache=cache held_out=cache_held_out out=evidence",
        "videoqat.evaluation.evidence_run:plan",
    ),
    "evidence measure": Command(
        cfg.MeasureConfig,
        "videoqat.evaluation.evidence:measure",
        "one of its rows: one model under one recipe, its loss on held-out clips, its videos, and whether these show what was asked for",
        "videoqat evidence measure model=tiny-wan recipe=attn_qat cache=cache_held_out out=row",
        "videoqat.evaluation.evidence:plan",
    ),
    "evidence train-judges": Command(
        cfg.TrainJudgesConfig,
        "videoqat.evaluation.judges:train_judges",
        "train the two networks that judge generated videos, on real clips; how often they are right is measured on others",
        "videoqat evidence train-judges out=judges.safetensors",
        "videoqat.evaluation.judges:plan_training",
    ),
    "evidence judge": Command(
        cfg.JudgeConfig,
        "videoqat.evaluation.judges:judge",
        "how many generated videos show the garment and the direction that their captions name",
        "videoqat evidence judge videos=videos --json judged.json",
        "videoqat.evaluation.judges:plan_judging",
    ),
    "bench attention": Command(
        cfg.BenchAttentionConfig,
        "videoqat.attention.bench:bench_attention",
        "time one attention call beside torch's own in the same run",
        "videoqat bench attention recipe=attn_qat num_tokens=2048 num_heads=8 head_dim=64",
        "videoqat.attention.bench:plan",
    ),
    "bench forward": Command(
        cfg.BenchForwardConfig,
        "videoqat.models.bench:bench_forward",
        "time one forward of a model of published size with random weights, beside plain diffusers; the error of each quantised layer",
        "videoqat bench forward model=cogvideox-2b 'recipes=[bf16,attn_qat]' --json forward.json",
        "videoqat.models.bench:plan",
    ),
    "bench generation": Command(
        cfg.BenchGenerationConfig,
        "videoqat.generation.bench:bench_generation",
        "time the stages of whole videos by a Wan of published size with random weights, by recipe, beside plain diffusers",
        "videoqat bench generation model=wan2.1-t2v-1.3b 'recipes=[bf16,attn_qat]' --json generation.json",
        "videoqat.generation.bench:plan",
    ),
    "bench training": Command(
        cfg.BenchTrainingConfig,
        "videoqat.training.bench:bench_training",
        "time training steps of a model of published size with random weights, by layout and recipe, beside plain diffusers",
        "videoqat bench training work=bench-work 'layouts=[1x1x1]' --json training.json",
        "videoqat.training.bench:plan",
    ),
    "doctor": Command(
        cfg.DoctorConfig,
        "videoqat.doctor:doctor",
        "what this machine can run: devices, kernels, versions; and what a model needs",
        "videoqat doctor model=tiny-wan",
        "videoqat.doctor:doctor",  # which loads and writes nothing
    ),
}


def resolve(target: str) -> Callable[[Any], dict[str, Any]]:
    """The function that `module:function` names."""
    module, _, function = target.partition(":")
    found: Callable[[Any], dict[str, Any]] = getattr(importlib.import_module(module), function)
    return found


def execute(name: str, file: str | None, overrides: list[str], *, dry_run: bool = False, show_config: bool = True) -> dict[str, Any]:
    """Loads the configuration of command `name`, prints it (with `show_config`), and runs (or, with `dry_run`, only plans) it.

    Raises:
        UserError: bad configuration or bad input.
    """
    from videoqat.models.hub import resolve_models  # not before a command runs: it imports torch

    command = COMMANDS[name]
    config: Any = resolve_models(cfg.load(command.schema, file, overrides), weights=not dry_run)
    if show_config:
        say(f"# videoqat {name}{' (dry run)' if dry_run else ''}: resolved configuration\n{cfg.to_yaml(config).rstrip()}")
    if not dry_run:
        return resolve(command.run)(config)
    return {"dry_run": True, "command": name, "config": cfg.to_dict(config), **resolve(command.plan)(config)}
