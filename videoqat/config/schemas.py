"""What can be set: one dataclass for each command, and the groups they share. `validate` says what is legal."""

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from videoqat.config.checks import check_frames, check_seeds, check_st_lpips, choice, existing, model_folder, parse_bucket, require
from videoqat.config.groups import (
    GenerationRuntimeConfig,
    ModelConfig,
    ObjectiveConfig,
    RuntimeConfig,
    SamplingConfig,
    VideoParallelConfig,
    model_setting,
)
from videoqat.recipes import get_recipe

VBENCH_SAMPLES = 5  # of each prompt, as VBench's instructions for sampling say (prompts/README.md there)


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
    leave_out: list[str] = field(default_factory=list)  # captions of which there shall be no clip
    workers: int = 1  # processes that draw; how many changes nothing in the clips

    def validate(self) -> None:
        check_frames("num_frames", self.num_frames)
        require(self.num_clips >= 1, "num_clips", self.num_clips, "at least 1")
        require(self.size >= 32 and self.size % 16 == 0, "size", self.size, "a multiple of 16, at least 32")
        require(1 <= self.fps <= 60, "fps", self.fps, "1 to 60")
        choice("split", self.split, ("train", "held_out"))
        require(self.workers >= 1, "workers", self.workers, "at least 1")
        check_seeds("seed", self.seed)
        if self.photos != "embedded":
            existing("photos", self.photos, folder=True)


@dataclass
class ExampleModelConfig:
    """A tiny pipeline of a family, built offline from configuration; or, with `weights=embedded`, the trained one that comes along."""

    out: str = MISSING
    weights: str = "random"  # drawn from the seed; or embedded: the Wan of moving garments (models/assets/garments.md)
    family: str = "wan"
    num_layers: int = 0  # 0: 4, or the embedded weights' own
    num_heads: int = 0  # 0: 2, or their own
    head_dim: int = 0  # 0: 64, or their own
    two_transformers: bool = False
    image_to_video: bool = False  # with wan as Wan 2.1 has it, and with two_transformers as 2.2 A14B; with cogvideox as 5B; with hunyuan15
    expand_timesteps: bool = False  # wan: as Wan 2.2 TI2V-5B, which does with or without a first frame
    seed: int = 0

    def validate(self) -> None:
        choice("weights", self.weights, ("random", "embedded"))
        choice("family", self.family, ("wan", "cogvideox", "hunyuanvideo", "hunyuan15"))
        for key, only in (("family", "wan"), ("two_transformers", False), ("image_to_video", False), ("expand_timesteps", False), ("seed", 0)):
            fits = self.weights == "random" or getattr(self, key) == only
            require(fits, key, getattr(self, key), f"{str(only).lower()} with weights=embedded, which are of one kind")
        pair = self.family == "wan" or not self.two_transformers
        require(pair, "two_transformers", self.two_transformers, f"false with family={self.family}: only Wan 2.2 has two")
        images = self.family != "hunyuanvideo" or not self.image_to_video
        require(images, "image_to_video", self.image_to_video, f"false with family={self.family}")
        timed = not self.expand_timesteps or (self.family == "wan" and not self.two_transformers and not self.image_to_video)
        require(timed, "expand_timesteps", self.expand_timesteps, "false, except with family=wan alone: TI2V is one model for both tasks")
        for key in ("num_layers", "num_heads"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "1 or more, or 0 (what the weights have)")
        check_seeds("seed", self.seed)
        require(self.head_dim >= 0 and self.head_dim % 16 == 0, "head_dim", self.head_dim, "a multiple of 16, or 0 (what the weights have)")


@dataclass
class PreprocessConfig:
    """Clips and captions to latents and text embeddings, once."""

    model: ModelConfig = field(default_factory=ModelConfig)
    source: str = MISSING
    out: str = MISSING
    buckets: list[str] = field(default_factory=lambda: ["17x64x64"])  # FRAMESxHEIGHTxWIDTH; a clip takes the bucket nearest to its shape
    fps: float = 16.0
    workers: int = 1  # threads of each process that read clips
    batch_size: int = 1  # clips that go through the VAE together: on a GPU, small ones cost the time of the call
    shard_samples: int = 64
    max_text_tokens: int = 0  # to which text is cut and padded; 0: the model's own number
    image_to_video: bool = False  # for a model that can do without (Wan 2.2 TI2V): each clip's first frame is given; others have no choice
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        self.model.validate()
        self.runtime.validate()
        existing("source", self.source, folder=True)
        require(len(self.buckets) > 0, "buckets", self.buckets, "one or more FRAMESxHEIGHTxWIDTH")
        for bucket in self.buckets:
            parse_bucket("buckets", bucket)
        require(0 < self.fps <= 240, "fps", self.fps, "above 0, at most 240")
        for key in ("workers", "batch_size", "shard_samples"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        require(self.max_text_tokens >= 0, "max_text_tokens", self.max_text_tokens, "0 (the model's own) or more")


@dataclass
class ConvertConfig:
    """A pipeline's folder whose transformer comes from one .safetensors file, with diffusers' names or those of its authors."""

    model: str = model_setting()  # a pipeline of the same model, for the rest
    transformer_file: str = MISSING
    component: str = "transformer"
    out: str = MISSING

    def validate(self) -> None:
        model_folder("model", self.model)
        existing("transformer_file", self.transformer_file)
        legal = "a .safetensors file: others can run any program when they are opened, or hold numbers in other formats"
        require(self.transformer_file.endswith(".safetensors"), "transformer_file", self.transformer_file, legal)
        choice("component", self.component, ("transformer", "transformer_2"))
        require(not Path(self.out).exists(), "out", self.out, "a folder that is not there yet")


@dataclass
class GenerateConfig:
    """One video: `prompt="..." out=FILE.mp4`. Or many: `prompts=FILE out=FOLDER`; under torchrun, processes share them out, and with `parallel.sp` or
    `parallel.cfg` divide each among several.

    FILE is .txt (one prompt a line, # starts a comment line), .csv (with a header) or .jsonl. The latter two have `prompt` and, if wanted, seed,
    num_frames, height, width, fps, num_inference_steps, guidance_scale, negative_prompt and flow_shift of each line, which override `sampling.*`;
    and, for an image-to-video model, `image`: a path as seen from FILE's folder.
    FOLDER gets {prompt}-{index}.mp4, a .json beside each, manifest.json and, where some failed, failed.jsonl. The same command again makes what is
    missing. A video's seed is seed + (number of its prompt, from 0) * samples_per_prompt + index; a line's own seed replaces the first two.
    With `compare` each of these recipes has a folder below FOLDER, with the same prompts and seeds, and report.html shows them side by side; the
    first is the reference, and is rendered twice. With `vbench` FOLDER is what VBench's --videos_path wants: five videos of each prompt, named by it
    to the letter.
    """

    model: str = model_setting()  # a diffusers folder, exported by videoqat or not, or org/name[@REVISION] on the hub
    recipe: str = "checkpoint"  # checkpoint: the one in the folder's videoqat.json (bf16 if there is none); else a recipe's name or file
    prompt: str = ""
    prompts: str = ""  # a file of them, instead of one
    image: str = ""  # of one video, for a model that takes one: its first frame, brought to the video's size as the pipeline does
    samples_per_prompt: int = 0  # of a prompt in the file; 0: one, with vbench=true five
    vbench: bool = False
    compare: list[str] = field(default_factory=list)  # recipes, instead of `recipe`
    st_lpips: str = "auto"  # with `compare`: auto (in the report where its weights are installed) | installed | none | a file with its weights
    warm_up: bool = False  # with `prompts`: before the first video of each size one that nobody sees, so that no timing has first costs in it
    seed: int = 0
    out: str = MISSING  # the .mp4 file, beside which a .json with the receipt is written; with `prompts` a folder of such pairs
    overwrite: bool = False
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    runtime: GenerationRuntimeConfig = field(default_factory=GenerationRuntimeConfig)
    parallel: VideoParallelConfig = field(default_factory=VideoParallelConfig)

    @property
    def samples(self) -> int:
        """Videos of each prompt."""
        return self.samples_per_prompt or (VBENCH_SAMPLES if self.vbench else 1)

    def validate(self) -> None:
        model_folder("model", self.model)
        check_seeds("seed", self.seed)
        require(self.samples_per_prompt >= 0, "samples_per_prompt", self.samples_per_prompt, "0 (one, or with vbench=true five) or more")
        if self.prompts:
            require(not self.prompt, "prompt", self.prompt, "nothing where prompts=FILE is given: one of the two")
            require(not self.image, "image", self.image, "nothing where prompts=FILE is given: a column `image` of a .csv or .jsonl")
            existing("prompts", self.prompts)
            choice("prompts: the file's ending", Path(self.prompts).suffix.lower(), (".txt", ".csv", ".jsonl"))
            folder = not self.out.endswith(".mp4") and not Path(self.out).is_file()
            require(folder, "out", self.out, "a folder where prompts=FILE is given")
        else:
            require(bool(self.prompt.strip()), "prompt", self.prompt, "some text, or prompts=FILE with many")
            require(self.samples_per_prompt <= 1, "samples_per_prompt", self.samples_per_prompt, "1 without prompts=FILE")
            for key in ("vbench", "warm_up", "compare"):
                require(not getattr(self, key), key, getattr(self, key), "nothing without prompts=FILE")
            require(self.out.endswith(".mp4"), "out", self.out, "a path that ends in .mp4, or a folder where prompts=FILE is given")
            require(self.overwrite or not Path(self.out).exists(), "out", self.out, "a file that is not there yet, or overwrite=true")
        for recipe in (self.recipe, *self.compare):
            if recipe != "checkpoint":
                get_recipe(recipe)
        check_st_lpips(self.st_lpips)
        require(bool(self.compare) or self.st_lpips == "auto", "st_lpips", self.st_lpips, "auto without compare=[RECIPE,RECIPE]")
        require(not self.compare or self.recipe == "checkpoint", "recipe", self.recipe, "nothing where compare names recipes")
        require(len(self.compare) != 1 and len(set(self.compare)) == len(self.compare), "compare", self.compare, "two or more recipes that differ")
        for part in (self.sampling, self.runtime, self.parallel):
            part.validate()


@dataclass
class CompareEntry:
    """One column of a comparison."""

    name: str = MISSING
    model: str = model_setting()
    recipe: str = "bf16"
    run: str = ""  # the training's output folder, for its loss curve and health; optional


@dataclass
class CompareConfig:
    """The same prompts and seeds under several (checkpoint, recipe) pairs. The first entry is what the others are held against."""

    entries: list[CompareEntry] = field(default_factory=list)
    prompts: str = MISSING  # a .txt file, one prompt a line, # starts a comment; or a .csv or .jsonl with `prompt` and `image` alone
    seeds: list[int] = field(default_factory=lambda: [0])
    validation_cache: str = ""  # what preprocess wrote; empty: no paired validation loss
    validation_samples: int = 64
    validation_timesteps: int = 4
    st_lpips: str = "auto"  # auto (in the report where its weights are installed) | installed (an error where not) | none | a file with its weights
    out: str = MISSING
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    runtime: GenerationRuntimeConfig = field(default_factory=GenerationRuntimeConfig)

    def validate(self) -> None:
        require(len(self.entries) >= 2, "entries", len(self.entries), "two or more (name, model, recipe)")
        names = [entry.name for entry in self.entries]
        require(len(set(names)) == len(names), "entries", names, "names that differ")
        for i, entry in enumerate(self.entries):
            model_folder(f"entries[{i}].model", entry.model)
            get_recipe(entry.recipe)
            if entry.run:
                existing(f"entries[{i}].run", entry.run, folder=True)
        existing("prompts", self.prompts)
        require(len(self.seeds) > 0, "seeds", self.seeds, "one or more integers")
        require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "seeds that differ")
        check_seeds("seeds", self.seeds)
        if self.validation_cache:
            existing("validation_cache", self.validation_cache, folder=True)
        for key in ("validation_samples", "validation_timesteps"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        check_st_lpips(self.st_lpips)
        for part in (self.sampling, self.objective, self.runtime):
            part.validate()


@dataclass
class SensitivityConfig:
    """Where a recipe hurts: each layer's error by itself and at the model's output, on cached clips, and which layers to keep in bf16.

    With one or more of `max_error`, `max_kept` and `min_share` it also writes a recipe that keeps layers accordingly. They can be changed later: the
    same command again measures nothing anew. 0 is no limit.
    """

    model: str = model_setting()
    cache: str = MISSING  # what preprocess wrote with this model: the clips to measure on
    recipe: str = "attn_qat_search"  # what layers are to compute by; layers that it keeps already stay kept. checkpoint: as in videoqat.json
    out: str = MISSING  # a folder
    samples: int = 4  # clips, spread evenly over the cache
    timesteps: int = 4  # flow times of each, stratified
    batch_size: int = 4  # times of one clip that run at once: memory and speed, not the result
    max_error: float = 0.0  # relative L2 error that may remain at the model's output; fewest layers that do it
    max_kept: int = 0  # layers that may be kept, beside those of the recipe
    min_share: float = 0.0  # of attention's arithmetic that must be left in the recipe's formats
    variants: bool = True  # also measure the recipe with Q and K, or P and V, in more bits
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        model_folder("model", self.model)
        existing("cache", self.cache, folder=True)
        if self.recipe != "checkpoint":
            get_recipe(self.recipe)
        for key in ("samples", "timesteps", "batch_size"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        require(self.max_error >= 0, "max_error", self.max_error, "0 (no limit) or more")
        require(self.max_kept >= 0, "max_kept", self.max_kept, "0 (no limit) or more")
        require(0 <= self.min_share <= 1, "min_share", self.min_share, "0 (no limit) to 1")
        for part in (self.objective, self.runtime):
            part.validate()


@dataclass
class DoctorConfig:
    """What this machine can run; with a model, what that needs; with models=true, what every published model needs."""

    model: str = model_setting(
        "", weights=False
    )  # a diffusers folder, org/name[@REVISION] on the hub, or a published model's short name (docs/models.md)
    size: str = ""  # FRAMESxHEIGHTxWIDTH for which tokens and memory are counted; empty: a published model's own, 17x64x64 for a folder
    models: bool = False

    def validate(self) -> None:
        if self.size:
            parse_bucket("size", self.size)
        if "/" in self.model:  # other names are known where models are
            model_folder("model", self.model)
        require(not (self.model and self.models), "models", self.models, "false where model is given")


@dataclass
class DemoConfig:
    """The whole road on the embedded set, from the embedded model, sized for two CPU cores."""

    out: str = "demo_out"
    recipe: str = "attn_qat_search"
    num_clips: int = 96
    num_held_out: int = 20
    tune_steps: int = 32
    num_inference_steps: int = 12
    size: int = 128  # height and width of clips and videos: what the model was trained at; smaller ones are quicker, and show less
    seed: int = 0

    def validate(self) -> None:
        for key in ("num_clips", "num_held_out", "tune_steps", "num_inference_steps"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        require(self.size >= 32 and self.size % 16 == 0, "size", self.size, "a multiple of 16, at least 32")
        check_seeds("seed", self.seed)
        require(get_recipe(self.recipe).is_quantised, "recipe", self.recipe, "a recipe that quantises")
