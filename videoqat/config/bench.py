"""What `videoqat bench` can be asked: of attention, shapes by name or by numbers, and recipes; of training, models, layouts and recipes."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from omegaconf import MISSING

from videoqat.config.checks import check_seeds, choice, parse_bucket, require
from videoqat.config.groups import RuntimeConfig
from videoqat.recipes import get_recipe


@dataclass(frozen=True)
class AttentionShape:
    """Queries (batch, num_queries, num_heads, head_dim) over as many samples, heads and channels of num_keys keys."""

    name: str
    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    head_dim: int


def _self(name: str, tokens: int, heads: int, head_dim: int) -> AttentionShape:
    return AttentionShape(name, 1, tokens, tokens, heads, head_dim)


ATTENTION_SHAPES = {
    shape.name: shape
    for shape in (
        _self("wan-1.3b", 32_760, 12, 128),  # 480x832, 81 frames: 21 x 30 x 52 tokens
        _self("wan-14b", 32_760, 40, 128),
        _self("wan-14b-720p", 75_600, 40, 128),  # 720x1280, 81 frames: 21 x 45 x 80
        _self("cogvideox-2b", 17_776, 30, 64),  # 480x720, 49 frames: 13 x 30 x 45, and 226 of text
        _self("hunyuanvideo", 119_056, 24, 128),  # 720x1280, 129 frames: 33 x 45 x 80, and 256 of text
        AttentionShape("wan-1.3b-cross", 1, 32_760, 512, 12, 128),  # to 512 tokens of text
        _self("short", 8_192, 24, 128),  # where launching kernels begins to show
    )
}


@dataclass
class BenchAttentionConfig:
    """Attention calls, each timed beside SDPA in the same run and compared with the fp64 reference.

    `shapes` and `recipes` name several; where one of them is empty, the numbers say the shape, and `recipe` the recipe. Without `backward` only
    inference is timed.
    """

    recipe: str = "attn_qat_search"
    batch: int = 1
    num_tokens: int = 2048
    num_keys: int | None = None  # null: as many as num_tokens
    num_heads: int = 8
    head_dim: int = 64
    shapes: list[str] = field(default_factory=list)
    recipes: list[str] = field(default_factory=list)
    backward: bool = False
    repeats: int = 5
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        for key in ("batch", "num_tokens", "num_heads", "head_dim", "repeats"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        require(self.num_keys is None or self.num_keys >= 1, "num_keys", self.num_keys, "at least 1, or null")
        defaults = {f.name: f.default for f in fields(self)}
        for plural, singular in (("shapes", ("batch", "num_tokens", "num_keys", "num_heads", "head_dim")), ("recipes", ("recipe",))):
            given = getattr(self, plural)
            require(len(set(given)) == len(given), plural, given, "names that differ")
            for key in singular:
                require(not given or getattr(self, key) == defaults[key], key, getattr(self, key), f"either {plural} or {key}")
        for shape in self.shapes:
            choice("shapes", shape, ATTENTION_SHAPES)
        for recipe in self.recipes or [self.recipe]:
            get_recipe(recipe)
        self.runtime.validate()

    def chosen_shapes(self) -> list[AttentionShape]:
        """The shapes asked for, in order."""
        if self.shapes:
            return [ATTENTION_SHAPES[name] for name in self.shapes]
        keys = self.num_tokens if self.num_keys is None else self.num_keys
        return [AttentionShape("by numbers", self.batch, self.num_tokens, keys, self.num_heads, self.head_dim)]


@dataclass
class BenchForwardConfig:
    """One forward of a published model with random weights, by recipes in turns, beside plain diffusers; and the error of each quantised layer."""

    model: str = "wan2.1-t2v-1.3b"  # a name of docs/models.md, or tiny
    size: str = ""  # FRAMESxHEIGHTxWIDTH; empty: the model's own
    recipes: list[str] = field(default_factory=lambda: ["bf16", "attn_qat"])
    repeats: int = 3
    seed: int = 0
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        if self.size:
            parse_bucket("size", self.size)
        require(bool(self.recipes) and len(set(self.recipes)) == len(self.recipes), "recipes", self.recipes, "one or more that differ")
        for recipe in self.recipes:
            get_recipe(recipe)
        require(self.repeats >= 1, "repeats", self.repeats, "at least 1")
        check_seeds("seed", self.seed)
        self.runtime.validate()


@dataclass
class BenchGenerationConfig:
    """Whole videos of a Wan model of published size with random weights: stages timed, by recipes in turns, beside plain diffusers."""

    model: str = "wan2.1-t2v-1.3b"  # a text-to-video Wan of docs/models.md, or tiny
    size: str = ""  # FRAMESxHEIGHTxWIDTH; empty: the model's own
    recipes: list[str] = field(default_factory=lambda: ["bf16", "attn_qat"])
    num_inference_steps: int = 4
    guidance_scale: float = 5.0
    repeats: int = 2  # videos of each that are timed
    seed: int = 0  # of the weights
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        if self.size:
            parse_bucket("size", self.size)
        require(bool(self.recipes) and len(set(self.recipes)) == len(self.recipes), "recipes", self.recipes, "one or more that differ")
        for recipe in self.recipes:
            get_recipe(recipe)
        for key in ("num_inference_steps", "repeats"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        require(self.guidance_scale >= 0, "guidance_scale", self.guidance_scale, "0 or more")
        check_seeds("seed", self.seed)
        self.runtime.validate()


@dataclass
class BenchTrainingConfig:
    """Steps of training at real size with random weights, timed. Each case is a `videoqat train` of its own, under torchrun on several GPUs.

    A layout is written DP_REPLICATExDP_SHARDxSP and takes as many GPUs as their product. Every data-parallel rank has `batch_size` samples in a
    step (weak scaling). Losses are held against those of one GPU with the same global batch.
    """

    work: str = MISSING  # a new folder for weights, samples and runs; may be removed afterwards
    model: str = "wan2.1-t2v-1.3b"  # a name of docs/models.md
    size: str = "81x480x832"
    recipes: list[str] = field(default_factory=lambda: ["bf16", "attn_qat"])
    layouts: list[str] = field(default_factory=lambda: ["1x1x1"])
    checkpointing: list[str] = field(default_factory=lambda: ["full"])
    batch_size: int = 1
    steps: int = 8
    warmup: int = 3  # steps at the start that don't count
    one_gpu_losses: bool = True  # run the first two steps of each global batch on one GPU, too
    diffusers: bool = True  # beside it: forward and backward of plain diffusers, bf16, with gradient checkpointing, without an optimiser
    resume_onto: str = ""  # a layout on which the first case's last checkpoint is resumed for two steps
    overrides: list[str] = field(default_factory=list)  # further settings of train, such as parallel.ulysses_wire=packed
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        parse_bucket("size", self.size)
        require(not Path(self.work).exists(), "work", self.work, "a folder that is not there yet")
        for recipe in self.recipes:
            get_recipe(recipe)
        for key in ("recipes", "layouts", "checkpointing"):
            given = getattr(self, key)
            require(bool(given) and len(set(given)) == len(given), key, given, "one or more that differ")
        for key, layout in [*(("layouts", layout) for layout in self.layouts), *([("resume_onto", self.resume_onto)] if self.resume_onto else [])]:
            require(re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", layout) is not None, key, layout, "DP_REPLICATExDP_SHARDxSP, such as 1x4x2")
        for mode in self.checkpointing:
            choice("checkpointing", mode, ("none", "full", "keep_attention"))
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        require(self.warmup >= 1, "warmup", self.warmup, "at least 1: the first step compiles and allocates")
        require(self.steps > self.warmup, "steps", self.steps, f"more than warmup={self.warmup}")
        require(all("=" in override for override in self.overrides), "overrides", self.overrides, "KEY=VALUE")
        self.runtime.validate()
