"""What training can be told: optimiser, loop, layout over processes, validation on the way; and export."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from videoqat.config.checks import check_seeds, choice, existing, require
from videoqat.config.groups import ModelConfig, ObjectiveConfig, RuntimeConfig, SamplingConfig
from videoqat.errors import ConfigError
from videoqat.recipes import get_recipe


@dataclass
class TrainingObjectiveConfig(ObjectiveConfig):
    """Also what is minimised: the denoising loss, or in part or whole the distance to what the model gave before training, in bf16."""

    distill_weight: float = 0.0  # w: (1 - w) * denoising loss + w * mean squared difference to the teacher's prediction; 0: no teacher is loaded

    def validate(self) -> None:
        super().validate()
        require(0 <= self.distill_weight <= 1, "objective.distill_weight", self.distill_weight, "0 (no teacher) to 1 (nothing else)")


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
    batch_size: int = 1  # samples that go through the model together on one data-parallel rank
    global_batch_size: int = 0  # samples of an optimiser step over all ranks, whatever the layout; 0: batch_size on each data-parallel rank, once
    seed: int = 0
    trainable: list[str] = field(default_factory=lambda: ["*"])  # patterns of parameter names (fnmatch); the others are frozen
    compute_dtype: str = "bfloat16"  # arithmetic of forward and backward; master weights, gradient sums and moments are fp32 either way
    activation_checkpointing: str = "none"  # none | full | keep_attention (compute all again but attention)
    offload_block_inputs: bool = False  # what checkpointing keeps of each block waits in the host's memory
    compile: bool = False  # torch.compile, block by block
    log_every: int = 1
    save_every: int = 500  # and at the end; 0: never, for measurements
    keep_last: int = 2
    async_save: bool = True  # write in the background while training goes on
    health_every: int = 100  # 0: never
    profile_every: int = 500  # steps between two that are traced for their share of communication; 0: never
    resume: str = "latest"  # latest | never | path of a checkpoint

    def validate(self) -> None:
        for key in ("steps", "batch_size", "log_every", "keep_last"):
            require(getattr(self, key) >= 1, f"train.{key}", getattr(self, key), "at least 1")
        size = self.batch_size
        legal = f"0, or a multiple of train.batch_size={size}"
        require(self.global_batch_size >= 0 and self.global_batch_size % size == 0, "train.global_batch_size", self.global_batch_size, legal)
        for key in ("save_every", "health_every", "profile_every"):
            require(getattr(self, key) >= 0, f"train.{key}", getattr(self, key), "0 (never) or more")
        require(len(self.trainable) > 0, "train.trainable", self.trainable, "one or more patterns of parameter names, such as *.attn1.*")
        check_seeds("train.seed", self.seed)
        choice("train.compute_dtype", self.compute_dtype, ("float32", "bfloat16"))
        choice("train.activation_checkpointing", self.activation_checkpointing, ("none", "full", "keep_attention"))
        kept = self.activation_checkpointing != "none"
        require(kept or not self.offload_block_inputs, "train.offload_block_inputs", True, "false with train.activation_checkpointing=none")
        alone = not (self.offload_block_inputs and self.compile)
        require(alone, "train.offload_block_inputs", True, "false with train.compile=true: compiled blocks hold their inputs themselves")
        if self.resume not in ("latest", "never"):
            existing("train.resume", self.resume, folder=True)


@dataclass
class ParallelConfig:
    """How processes divide the work: world size = dp_replicate * dp_shard * sp, sp innermost (neighbours on one host).

    Weights, gradients and moments are sharded over dp_shard * sp and replicated dp_replicate times; sp is Ulysses sequence parallelism.
    """

    world_size: int = 0  # processes this layout is for, and --dry-run answers for; 0: as many as torchrun starts
    engine: str = "fsdp"  # fsdp (FSDP2) | deepspeed (ZeRO)
    dp_replicate: int = 1
    dp_shard: int = -1  # -1: all processes that dp_replicate and sp leave
    sp: int = 1
    ulysses_wire: str = "auto"  # how q, k, v travel between sequence-parallel ranks: auto | bf16 (as they are) | packed (4-bit codes)
    zero_stage: int = 3  # of engine deepspeed
    start_timeout_s: int = 1800  # for what is slow once: loading, the first step, the first save
    step_timeout_s: int = 300  # for a collective in steady state; then the rank that is missing is given up

    def validate(self) -> None:
        choice("parallel.engine", self.engine, ("fsdp", "deepspeed"))
        choice("parallel.ulysses_wire", self.ulysses_wire, ("auto", "bf16", "packed"))
        for key in ("dp_replicate", "sp", "start_timeout_s", "step_timeout_s"):
            require(getattr(self, key) >= 1, f"parallel.{key}", getattr(self, key), "at least 1")
        require(self.world_size >= 0, "parallel.world_size", self.world_size, "0 (as many as torchrun starts) or more")
        require(self.dp_shard == -1 or self.dp_shard >= 1, "parallel.dp_shard", self.dp_shard, "-1 (what is left) or at least 1")
        require(self.zero_stage in (1, 2, 3), "parallel.zero_stage", self.zero_stage, "1, 2, 3")


@dataclass
class ValidationConfig:
    """Looks at the model on the way: paired validation loss, and sample videos."""

    every: int = 0  # steps; 0: never
    cache: str = ""  # held-out clips, as preprocess wrote them; for the loss under bf16 and under the recipe
    samples: int = 16
    timesteps: int = 4
    prompts: list[str] = field(default_factory=list)  # a video of each, with the recipe's own kernel
    images: list[str] = field(default_factory=list)  # their first frames, one for each prompt, for a model that takes them
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def validate(self) -> None:
        for key in ("samples", "timesteps"):
            require(getattr(self, key) >= 1, f"validation.{key}", getattr(self, key), "at least 1")
        require(self.every >= 0, "validation.every", self.every, "0 (never) or more")
        if self.cache:
            existing("validation.cache", self.cache, folder=True)
        something = bool(self.cache or self.prompts)
        require(something or self.every == 0, "validation.every", self.every, "0, or give validation.cache or validation.prompts")
        require(all(prompt.strip() for prompt in self.prompts), "validation.prompts", self.prompts, "texts")
        legal = f"none, or one for each of the {len(self.prompts)} validation.prompts"
        require(len(self.images) in (0, len(self.prompts)), "validation.images", self.images, legal)
        try:
            self.sampling.validate()
        except ConfigError as error:  # it names its keys as generate has them
            raise ConfigError(f"validation.{error}") from error


@dataclass
class TrainConfig:
    """Fine-tuning with attention quantised by `recipe` (bf16: plain fine-tuning), in one process or, under torchrun, in many.

    SIGTERM, SIGINT or SIGUSR1 let the running step finish and be saved; the exit code is then 75, and the same command continues.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: str = MISSING  # what preprocess wrote
    out: str = MISSING
    recipe: str = "attn_qat_search"
    from_scratch: bool = False  # ignore the folder's transformer weights; initialise from its configuration
    objective: TrainingObjectiveConfig = field(default_factory=TrainingObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        for part in (self.model, self.objective, self.optimizer, self.train, self.parallel, self.validation, self.runtime):
            part.validate()
        legal = "false with parallel.engine=deepspeed: ZeRO's hooks and the casting of weights happen within blocks, and leave nothing to compile"
        require(not (self.train.compile and self.parallel.engine == "deepspeed"), "train.compile", True, legal)
        existing("cache", self.cache, folder=True)
        recipe, weight = get_recipe(self.recipe), self.objective.distill_weight
        legal = "0 with from_scratch=true: the teacher is the model that training starts from, and random weights teach nothing"
        require(weight == 0 or not self.from_scratch, "objective.distill_weight", weight, legal)
        legal = f"below 1 with recipe {recipe.name!r}, which quantises nothing: model and teacher are the same then, and nothing is left to learn"
        require(weight < 1 or recipe.is_quantised, "objective.distill_weight", weight, legal)


@dataclass
class ExportConfig:
    """A training run's checkpoint as a diffusers folder with videoqat.json."""

    run: str = MISSING  # the training's output folder
    checkpoint: str = "latest"  # or the path of one checkpoint
    out: str = MISSING
    weights: str = "auto"  # auto: EMA if the run kept one; ema; raw
    dtype: str = "base"  # of the transformer's weights: base (as in the folder that training started from), float32, bfloat16

    def validate(self) -> None:
        existing("run", self.run, folder=True)
        choice("weights", self.weights, ("auto", "ema", "raw"))
        choice("dtype", self.dtype, ("base", "float32", "bfloat16"))
        if self.checkpoint != "latest":
            existing("checkpoint", self.checkpoint, folder=True)
