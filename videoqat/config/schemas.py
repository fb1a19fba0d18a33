"""What can be set: one dataclass for each command, and the groups they share. `validate` says what is legal."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import MISSING

from videoqat.config.checks import check_frames, choice, existing, parse_bucket, require
from videoqat.recipes import get_recipe

if TYPE_CHECKING:
    import torch


@dataclass
class ModelConfig:
    """A diffusers pipeline folder, and which of its transformers (Wan 2.2 has two) is meant."""

    path: str = MISSING
    component: str = "transformer"

    def validate(self) -> None:
        existing("model.path", self.path, folder=True)
        choice("model.component", self.component, ("transformer", "transformer_2"))


@dataclass
class RuntimeConfig:
    """Where and how tensors live. `auto`: the GPU if there is one. `kernel: auto` lets the resolver choose; a name insists."""

    device: str = "auto"
    dtype: str = "auto"
    kernel: str = "auto"

    def validate(self) -> None:
        legal = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        require(legal, "runtime.device", self.device, "auto, cpu, cuda, cuda:N")
        choice("runtime.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))

    def resolve(self) -> "tuple[torch.device, torch.dtype]":
        """The device and dtype meant here. dtype `auto`: float32 on CPU (bf16 is slow there), bfloat16 on a GPU.

        Raises:
            ConfigError: a GPU is asked for that this machine doesn't have.
        """
        import torch

        name = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        device = torch.device(name)
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
        there = device.type == "cpu" or (device.index or 0) < len(gpus)
        require(there, "runtime.device", self.device, ", ".join(["auto", "cpu", *gpus]) + " (what this machine has)")
        if self.dtype != "auto":
            return device, getattr(torch, self.dtype)
        return device, torch.float32 if device.type == "cpu" else torch.bfloat16


@dataclass
class ExampleClipsConfig:
    """The embedded set: garments that move over a textured canvas, written as mp4 files with metadata.jsonl."""

    out: str = MISSING
    num_clips: int = 256
    num_frames: int = 17
    size: int = 64
    fps: int = 16
    seed: int = 0
    photos: str = "embedded"  # or the path of a folder with Fashion-MNIST's idx files
    split: str = "train"  # which photos: train or held_out

    def validate(self) -> None:
        check_frames("num_frames", self.num_frames)
        require(self.num_clips >= 1, "num_clips", self.num_clips, "at least 1")
        require(self.size >= 32 and self.size % 16 == 0, "size", self.size, "a multiple of 16, at least 32")
        require(1 <= self.fps <= 60, "fps", self.fps, "1 to 60")
        choice("split", self.split, ("train", "held_out"))
        if self.photos != "embedded":
            existing("photos", self.photos, folder=True)


@dataclass
class ExampleModelConfig:
    """The tiny Wan pipeline, built offline from configuration."""

    out: str = MISSING
    num_layers: int = 4
    num_heads: int = 2
    head_dim: int = 64
    two_transformers: bool = False
    seed: int = 0

    def validate(self) -> None:
        require(self.num_layers >= 1, "num_layers", self.num_layers, "at least 1")
        require(self.num_heads >= 1, "num_heads", self.num_heads, "at least 1")
        require(self.head_dim >= 16 and self.head_dim % 16 == 0, "head_dim", self.head_dim, "a multiple of 16")


@dataclass
class PreprocessConfig:
    """Clips and captions to latents and text embeddings, once."""

    model: ModelConfig = field(default_factory=ModelConfig)
    source: str = MISSING
    out: str = MISSING
    buckets: list[str] = field(default_factory=lambda: ["17x64x64"])  # FRAMESxHEIGHTxWIDTH; a clip takes the bucket nearest to its shape
    fps: float = 16.0
    workers: int = 1
    shard_samples: int = 64
    max_text_tokens: int = 512
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        self.model.validate()
        self.runtime.validate()
        existing("source", self.source, folder=True)
        require(len(self.buckets) > 0, "buckets", self.buckets, "one or more FRAMESxHEIGHTxWIDTH")
        for bucket in self.buckets:
            parse_bucket("buckets", bucket)
        require(0 < self.fps <= 240, "fps", self.fps, "above 0, at most 240")
        require(self.workers >= 1, "workers", self.workers, "at least 1")
        require(self.shard_samples >= 1, "shard_samples", self.shard_samples, "at least 1")
        require(self.max_text_tokens >= 1, "max_text_tokens", self.max_text_tokens, "at least 1")


@dataclass
class ObjectiveConfig:
    """Flow matching: x_t = (1 - t) x_0 + t noise, target noise - x_0."""

    flow_shift: float = 3.0
    timestep_sampling: str = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    caption_dropout: float = 0.1

    def validate(self) -> None:
        require(self.flow_shift > 0, "objective.flow_shift", self.flow_shift, "above 0")
        choice("objective.timestep_sampling", self.timestep_sampling, ("logit_normal", "uniform"))
        require(self.logit_std > 0, "objective.logit_std", self.logit_std, "above 0")
        require(0 <= self.caption_dropout <= 1, "objective.caption_dropout", self.caption_dropout, "0 to 1")


@dataclass
class OptimizerConfig:
    """AdamW and its schedule. `schedule` runs from the end of warm-up to the last step."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    warmup_steps: int = 0
    schedule: str = "constant"
    final_lr_ratio: float = 0.0
    clip_norm: float = 1.0
    ema_decay: float = 0.0  # 0: no EMA

    def validate(self) -> None:
        require(self.lr > 0, "optimizer.lr", self.lr, "above 0")
        for key in ("beta1", "beta2"):
            require(0 <= getattr(self, key) < 1, f"optimizer.{key}", getattr(self, key), "0 to below 1")
        require(self.eps > 0, "optimizer.eps", self.eps, "above 0")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "0 or more")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "0 or more")
        choice("optimizer.schedule", self.schedule, ("constant", "cosine", "linear"))
        require(0 <= self.final_lr_ratio <= 1, "optimizer.final_lr_ratio", self.final_lr_ratio, "0 to 1")
        require(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "above 0")
        require(0 <= self.ema_decay < 1, "optimizer.ema_decay", self.ema_decay, "0 to below 1")


@dataclass
class LoopConfig:
    """How long, how much at once, and what is written when."""

    steps: int = 1000
    batch_size: int = 1
    accumulation: int = 1
    seed: int = 0
    activation_checkpointing: str = "none"
    autocast: str = "bfloat16"
    log_every: int = 1
    save_every: int = 500
    keep_last: int = 2
    health_every: int = 100  # 0: never
    resume: str = "latest"  # latest | never | path of a checkpoint

    def validate(self) -> None:
        for key in ("steps", "batch_size", "accumulation", "log_every", "save_every", "keep_last"):
            require(getattr(self, key) >= 1, f"train.{key}", getattr(self, key), "at least 1")
        require(self.health_every >= 0, "train.health_every", self.health_every, "0 (never) or more")
        choice("train.activation_checkpointing", self.activation_checkpointing, ("none", "full"))
        choice("train.autocast", self.autocast, ("none", "bfloat16"))
        if self.resume not in ("latest", "never"):
            existing("train.resume", self.resume, folder=True)


@dataclass
class TrainConfig:
    """Fine-tuning with attention quantised by `recipe` (bf16: plain fine-tuning).

    SIGTERM, SIGINT or SIGUSR1 let the running step finish and be saved; the exit code is then 75, and the same command continues.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: str = MISSING  # what preprocess wrote
    out: str = MISSING
    recipe: str = "attn_qat_search"
    from_scratch: bool = False  # ignore the folder's transformer weights; initialise from its configuration
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        for part in (self.model, self.objective, self.optimizer, self.train, self.runtime):
            part.validate()
        existing("cache", self.cache, folder=True)
        get_recipe(self.recipe)


@dataclass
class ExportConfig:
    """A training run's checkpoint as a diffusers folder with videoqat.json."""

    run: str = MISSING  # the training's output folder
    checkpoint: str = "latest"  # or the path of one checkpoint
    out: str = MISSING
    weights: str = "auto"  # auto: EMA if the run kept one; ema; raw

    def validate(self) -> None:
        existing("run", self.run, folder=True)
        choice("weights", self.weights, ("auto", "ema", "raw"))
        if self.checkpoint != "latest":
            existing("checkpoint", self.checkpoint, folder=True)


@dataclass
class SamplingConfig:
    """How a video is sampled. Defaults suit the tiny model; the shipped configurations hold each model's own."""

    num_frames: int = 17
    height: int = 64
    width: int = 64
    fps: int = 16
    num_inference_steps: int = 20
    guidance_scale: float = 3.0
    negative_prompt: str = ""
    flow_shift: float = 3.0
    max_text_tokens: int = 0  # to which text is padded; 0: as the checkpoint was trained (videoqat.json), else 512

    def validate(self) -> None:
        check_frames("sampling.num_frames", self.num_frames)
        for key in ("height", "width", "num_inference_steps", "fps"):
            require(getattr(self, key) >= 1, f"sampling.{key}", getattr(self, key), "at least 1")
        require(self.guidance_scale >= 0, "sampling.guidance_scale", self.guidance_scale, "0 or more")
        require(self.flow_shift > 0, "sampling.flow_shift", self.flow_shift, "above 0")
        require(self.max_text_tokens >= 0, "sampling.max_text_tokens", self.max_text_tokens, "0 (as trained) or more")


@dataclass
class GenerateConfig:
    """One video."""

    model: str = MISSING  # a diffusers folder, exported by videoqat or not
    recipe: str = "checkpoint"  # checkpoint: the one in the folder's videoqat.json (bf16 if there is none); else a recipe's name or file
    prompt: str = MISSING
    seed: int = 0
    out: str = MISSING  # the .mp4 file; a .json with the receipt is written beside it
    overwrite: bool = False
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        existing("model", self.model, folder=True)
        require(bool(self.prompt.strip()), "prompt", self.prompt, "some text")
        require(self.out.endswith(".mp4"), "out", self.out, "a path that ends in .mp4")
        require(self.overwrite or not Path(self.out).exists(), "out", self.out, "a file that is not there yet, or overwrite=true")
        if self.recipe != "checkpoint":
            get_recipe(self.recipe)
        self.sampling.validate()
        self.runtime.validate()


@dataclass
class CompareEntry:
    """One column of a comparison."""

    name: str = MISSING
    model: str = MISSING
    recipe: str = "bf16"
    run: str = ""  # the training's output folder, for its loss curve and health; optional


@dataclass
class CompareConfig:
    """The same prompts and seeds under several (checkpoint, recipe) pairs. The first entry is what the others are held against."""

    entries: list[CompareEntry] = field(default_factory=list)
    prompts: str = MISSING  # a text file, one prompt a line, # starts a comment
    seeds: list[int] = field(default_factory=lambda: [0])
    validation_cache: str = ""  # what preprocess wrote; empty: no paired validation loss
    validation_samples: int = 64
    validation_timesteps: int = 4
    out: str = MISSING
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        require(len(self.entries) >= 2, "entries", len(self.entries), "two or more (name, model, recipe)")
        names = [entry.name for entry in self.entries]
        require(len(set(names)) == len(names), "entries", names, "names that differ")
        for i, entry in enumerate(self.entries):
            existing(f"entries[{i}].model", entry.model, folder=True)
            get_recipe(entry.recipe)
            if entry.run:
                existing(f"entries[{i}].run", entry.run, folder=True)
        existing("prompts", self.prompts)
        require(len(self.seeds) > 0, "seeds", self.seeds, "one or more integers")
        require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "seeds that differ")
        if self.validation_cache:
            existing("validation_cache", self.validation_cache, folder=True)
        for key in ("validation_samples", "validation_timesteps"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        for part in (self.sampling, self.objective, self.runtime):
            part.validate()


@dataclass
class DoctorConfig:
    """What this machine can run; with a model, what that needs."""

    model: str = ""  # a diffusers folder; optional
    size: str = "17x64x64"  # FRAMESxHEIGHTxWIDTH for which the model's tokens are counted

    def validate(self) -> None:
        parse_bucket("size", self.size)
        if self.model:
            existing("model", self.model, folder=True)


@dataclass
class DemoConfig:
    """The whole road on the embedded set, sized for two CPU cores."""

    out: str = "demo_out"
    recipe: str = "attn_qat_search"
    num_clips: int = 256
    num_held_out: int = 48
    base_steps: int = 600
    tune_steps: int = 100
    num_inference_steps: int = 20
    seed: int = 0

    def validate(self) -> None:
        for key in ("num_clips", "num_held_out", "base_steps", "tune_steps", "num_inference_steps"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        require(get_recipe(self.recipe).is_quantised, "recipe", self.recipe, "a recipe that quantises")
