"""One video from one prompt.

An `Engine` holds a diffusers pipeline and puts one recipe after another into its transformers; the sampling loop stays diffusers' own, so
that with recipe `bf16` the frames are those of the stock pipeline, bit for bit. Stages are timed from outside, by wrapping the pipeline's
`encode_prompt` and its VAE's `decode` for the length of one call.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from videoqat.attention.backends import record_receipts
from videoqat.config import GenerationRuntimeConfig, RuntimeConfig, SamplingConfig, require
from videoqat.console import say
from videoqat.errors import CheckpointError, NonFiniteVideo
from videoqat.generation.division import Division, is_guided
from videoqat.generation.images import check_taken, stretched
from videoqat.generation.meter import Mark, Stopwatch, peak_memory, reset_peak_memory, watched
from videoqat.models.install import check_policy, divided_by, install, installed_recipe, shard_sequence, stepping
from videoqat.models.spec import AttentionLayer, Condition, family_of, read_model_json, read_recipe
from videoqat.models.weights import check_complete
from videoqat.parallel.checkpointing import compile_blocks
from videoqat.recipes import AttentionRecipe, get_recipe


@dataclass
class VideoResult:
    """One generated video.

    Attributes:
        frames: uint8 (frames, height, width, 3).
        timings: seconds, on a GPU by its own events. `text_s`: prompts to embeddings; `image_s`: a first frame to latents and
            embedding; `steps_s`: each denoising step (the first includes drawing the noise); `denoise_s`: their sum; `vae_s`: latents to pixels;
            `total_s`: from prompt to uint8 frames on the host.
        receipts: which attention kernels ran, and whether natively or emulated (`attention.backends.Receipt.to_dict`), with the calls of each recipe:
            layers and steps that the recipe keeps count as calls of `bf16`.
        recipe: what was installed.
        warnings: what a person should know before trusting this video; empty if nothing.
        peak_memory_bytes: see `meter.peak_memory`; None where the system doesn't tell, or the pipeline is in training.
    """

    frames: NDArray[np.uint8]
    timings: dict[str, Any]
    receipts: list[dict[str, Any]]
    recipe: AttentionRecipe
    warnings: list[str]
    peak_memory_bytes: int | None = None


def choose_recipe(folder: str | Path, recipe: str | AttentionRecipe) -> tuple[AttentionRecipe, list[str]]:
    """The recipe to install for the model in `folder`, and a warning if the checkpoint was trained for another one.

    Args:
        folder: a diffusers folder, with videoqat.json if videoqat exported it.
        recipe: a recipe, its name or file, or `checkpoint`: the one in videoqat.json, `bf16` where there is none.
    """
    trained_for = read_recipe(folder)
    if recipe == "checkpoint":
        return trained_for or get_recipe("bf16"), []
    chosen = get_recipe(recipe)
    if trained_for is None or trained_for == chosen:
        return chosen, []
    detail = "" if trained_for.name != chosen.name else " (the same name, but other settings)"
    return chosen, [f"{folder} was trained for recipe {trained_for.name} and runs here with recipe {chosen.name}{detail}"]


def check_sampling(folder: str | Path, sampling: SamplingConfig) -> dict[str, Any]:
    """Checks how a video is to be sampled against the model in `folder` from its configuration alone, and says what its size comes to.

    Returns:
        `family`, `latent_shape` (C, F, H, W), `num_tokens` (video tokens in the transformer), `head_dim`.

    Raises:
        ConfigError: a size that the VAE and the patching can't take (legal neighbours are named), a number of text tokens, a flow shift or a
            guidance that this model doesn't know.
    """
    family = family_of(folder)
    size = (sampling.num_frames, sampling.height, sampling.width)
    geometries = [family.geometry(folder, component) for component in family.components(folder)]
    for geometry in geometries:
        geometry.check_size("sampling", *size)
    text_tokens(folder, sampling)
    schedule = family.noise_schedule(folder)
    own = schedule.flow_shift is not None or not sampling.flow_shift
    require(own, "sampling.flow_shift", sampling.flow_shift, f"0 for {folder}, whose noise schedule ({schedule.name}) takes no flow shift")
    dynamic = family.has_dynamic_guidance or not sampling.dynamic_guidance
    require(dynamic, "sampling.dynamic_guidance", sampling.dynamic_guidance, f"false for {folder}: pipelines of {family.name} have none")
    second = len(geometries) == 2 or not sampling.guidance_scale_2
    require(second, "sampling.guidance_scale_2", sampling.guidance_scale_2, f"0 for {folder}, which has one transformer for all noise")
    true_cfg = family.has_true_cfg or sampling.true_cfg_scale == 1
    require(
        true_cfg, "sampling.true_cfg_scale", sampling.true_cfg_scale, f"1 for {folder}, which is guided by the negative prompt with guidance_scale"
    )
    first = geometries[0]
    return {
        "family": family.name,
        "latent_shape": list(first.latent_shape(*size)),
        "num_tokens": first.num_tokens(*size),
        "head_dim": first.head_dim,
    }


def check_recipe(folder: str | Path, recipe: AttentionRecipe, sampling: SamplingConfig) -> None:
    """Requires that the model in `folder`, sampled so, has every transformer, layer and denoising step that `recipe` keeps in bf16.

    Raises:
        ConfigError: it lacks one.
    """
    check_policy(recipe, folder)
    recipe.check_steps(sampling.num_inference_steps)


def text_tokens(folder: str | Path, sampling: SamplingConfig) -> int:
    """To how many tokens the text is padded. Attention sees the padding, so it has to be as many as in training.

    `sampling.max_text_tokens` where it isn't 0; else what videoqat.json says the checkpoint was trained with; else the model's own number.

    Raises:
        ConfigError: a number that this model can't be given.
    """
    training = read_model_json(folder, "videoqat.json").get("training", {}) if (Path(folder) / "videoqat.json").is_file() else {}
    wanted = sampling.max_text_tokens or int(training.get("max_text_tokens", 0))
    return family_of(folder).text_tokens(folder, wanted, "sampling.max_text_tokens")


def with_flow_shift(scheduler: Any, flow_shift: float) -> Any:
    """A scheduler like `scheduler` (diffusers), its timesteps shifted towards noise by `flow_shift`: t -> s t / (1 + (s - 1) t); 0: by its own.

    Raises:
        CheckpointError: a scheduler to which a flow shift means nothing, such as DDIM.
    """
    config = scheduler.config
    if not flow_shift:
        return type(scheduler).from_config(config)
    if "flow_shift" in config and config.get("use_flow_sigmas"):
        return type(scheduler).from_config(config, flow_shift=flow_shift, use_dynamic_shifting=False)
    if "shift" in config:
        return type(scheduler).from_config(config, shift=flow_shift, use_dynamic_shifting=False)
    raise CheckpointError(
        f"the folder's scheduler {type(scheduler).__name__} takes no flow shift; legal: FlowMatchEulerDiscreteScheduler, "
        "or UniPCMultistepScheduler (and its like) with use_flow_sigmas"
    )


def doubts_about(frames_FHWC: NDArray[np.uint8]) -> list[str]:
    """Warnings about finite frames that show nothing: all black, or one flat colour."""
    flat = (frames_FHWC == frames_FHWC[:, :1, :1]).all(axis=(1, 2, 3))
    black = frames_FHWC.max(axis=(1, 2, 3)) <= 1
    found = []
    if black.any():
        found.append(f"{int(black.sum())} of {len(frames_FHWC)} frames are black")
    if (flat & ~black).any():
        found.append(f"{int((flat & ~black).sum())} of {len(frames_FHWC)} frames are one flat colour")
    return found


@contextlib.contextmanager
def _leaving_the_device(pipeline: Any) -> Iterator[None]:
    """Parts that are offloaded are in the host's memory again when the block ends.

    A pipeline sees to that itself at the end of a call, but not of one that is cut short; and one made for a single call knows of no offloading.
    """
    try:
        yield
    finally:
        pipeline.maybe_free_model_hooks()


class Engine:
    """A pipeline in memory that renders one video at a time, under any recipe, without being loaded again.

    Args:
        folder: a diffusers pipeline folder.
        runtime: device, dtype and kernel.
        pipeline: of that folder, in memory already, its transformers in training maybe; None: it is loaded.
        division: the ranks that render each video together; all of them make every call, and get the same frames.

    Raises:
        CheckpointError: the folder is torn, or of a family that isn't supported.
        ConfigError: a device that isn't there.
    """

    def __init__(self, folder: str | Path, runtime: RuntimeConfig, pipeline: Any = None, division: Division | None = None) -> None:
        self.folder = Path(folder)
        self.division = division or Division()
        self.runtime = runtime
        self.device, self.dtype = runtime.resolve()
        self.family = family_of(folder)
        self.has_folders_weights = pipeline is None
        self.pipeline = self._load() if pipeline is None else pipeline
        self.pipeline.set_progress_bar_config(disable=True)
        self.transformers: dict[str, torch.nn.Module] = {name: getattr(self.pipeline, name) for name in self.family.components(folder)}
        self._scheduler = self.pipeline.scheduler
        self._said: set[str] = set()

    def _load(self) -> Any:
        """The folder's pipeline, where and how `runtime` wants it.

        Raises:
            CheckpointError: a part or one of its files is missing, or torn.
            ConfigError: its VAE can't be tiled or sliced.
        """
        check_complete(self.folder)
        how = self.runtime if isinstance(self.runtime, GenerationRuntimeConfig) else GenerationRuntimeConfig()
        pipeline = self.family.load_pipeline(self.folder, device="cpu" if how.offload != "none" else self.device, dtype=self.dtype)
        for wanted, name in ((how.vae_tiling, "tiling"), (how.vae_slicing, "slicing")):
            if wanted:
                able = hasattr(pipeline.vae, f"enable_{name}")
                require(able, f"runtime.vae_{name}", True, f"false for {self.folder}: its {type(pipeline.vae).__name__} has no {name}")
                getattr(pipeline.vae, f"enable_{name}")()
        for name in self.family.components(self.folder) if how.compile else ():
            compile_blocks(self.family.blocks(getattr(pipeline, name)))
        # diffusers' own hooks bring a part (or a module) to the device when it is called, and with it our processors, which hold no tensors.
        if how.offload == "model":
            pipeline.enable_model_cpu_offload(device=self.device)
        elif how.offload == "sequential":
            pipeline.enable_sequential_cpu_offload(device=self.device)
        return pipeline

    def install(self, recipe: AttentionRecipe) -> dict[str, list[str]]:
        """Puts `recipe` into every transformer; where it is in already, it stays, and with it whoever observes.

        Returns:
            Component -> names of the layers that the recipe quantises.
        """
        for name, transformer in self.transformers.items():
            if installed_recipe(transformer) != recipe:
                install(transformer, recipe, kernel=self.runtime.kernel, family=self.family, component=name)
            if self.division.ulysses is not None and divided_by(transformer) is None:
                shard_sequence(transformer, self.division.ulysses, family=self.family)
        return {name: [layer.name for layer in layers] for name, layers in self._quantised(recipe).items()}

    def _quantised(self, recipe: AttentionRecipe) -> dict[str, list[AttentionLayer]]:
        layers = {name: self.family.attention_layers(transformer) for name, transformer in self.transformers.items()}
        return {name: [layer for layer in found if recipe.covers(layer.kind, layer.index, name)] for name, found in layers.items()}

    def _warn(self, warnings: list[str]) -> None:
        for warning in warnings:
            if warning not in self._said:
                self._said.add(warning)
                say(f"warning: {warning}")

    def _cut_texts(self, texts: dict[str, str], max_tokens: int) -> list[str]:
        """A warning for each text that is longer than what the text encoder is given of it."""
        counts = self.family.count_tokens(self.pipeline, list(texts.values()))
        return [
            f"the {name} has {count} tokens, of which the model sees the first {max_tokens}: {text!r}"
            for (name, text), count in zip(texts.items(), counts, strict=True)
            if count > max_tokens
        ]

    def generate(self, prompt: str, seed: int, sampling: SamplingConfig, recipe: str | AttentionRecipe, **options: Any) -> VideoResult:
        """Renders one video; see `generate_together`."""
        return self.generate_together([prompt], [seed], sampling, recipe, **options)[0]

    def generate_together(
        self,
        prompts: list[str],
        seeds: list[int],
        sampling: SamplingConfig,
        recipe: str | AttentionRecipe,
        *,
        image: Image.Image | None = None,
        on_step: Callable[[int, int], None] | None = None,
        condition: tuple[Condition, Condition] | None = None,
        agree: Callable[[bool], bool] | None = None,
    ) -> list[VideoResult]:
        """Renders several videos in one batch, each from its own noise: those of `generate` but for rounding. Times and memory are the batch's.

        Args:
            prompts: what to show.
            seeds: of each one's initial noise, which is drawn on the CPU so that it is the same for every device and recipe.
            sampling, recipe: size, steps, guidance, flow shift; a recipe, its name or file, or `checkpoint` (see `choose_recipe`).
            image: the first frame of a single video, for a model that takes one, of any size: the pipeline stretches or crops it.
            on_step: called with (steps done, steps in all) after each denoising step. What it raises, such as `GenerationCancelled`, ends the call,
                and the device is free. Ranks that render together must raise it all.
            condition: of a single video, what `ModelFamily.encode_prompts` made of prompt and negative prompt, batches of one, where the pipeline
                has no text encoder; on its device.
            agree: whether something is so on any of the ranks that render at the same time with the same sharded weights: `NonFiniteVideo` must end
                the call on all of them. None: on any of those that render this video together.

        Raises:
            ConfigError: sizes the model can't do, an image that it doesn't take or lacks, an unknown recipe, or one that keeps layers or steps that
                there aren't.
            AttentionError: the recipe can't run on this device, or not with the kernel asked for.
            NonFiniteVideo: NaN or inf in latents or pixels.
        """
        check_sampling(self.folder, sampling)
        check_taken(self.folder, image is not None)
        num_text_tokens = text_tokens(self.folder, sampling)
        chosen, warnings = choose_recipe(self.folder, recipe) if self.has_folders_weights else (get_recipe(recipe), [])
        one = len(prompts) == 1
        if not one and (image is not None or condition is not None):
            raise ValueError("an image or a condition is that of a single prompt")
        agree = agree or self.division.any
        cuts: list[list[str]] = [[] for _ in prompts]
        if condition is None:
            negative = {"negative prompt": sampling.negative_prompt} if is_guided(self.family, sampling) else {}
            cuts = [self._cut_texts({"prompt": prompt} | negative, num_text_tokens) for prompt in prompts]
        check_recipe(self.folder, chosen, sampling)
        warnings = warnings + (stretched(image, sampling.height, sampling.width) if image is not None else [])
        self._warn([*warnings, *(cut for own in cuts for cut in own)])
        self.install(chosen)
        # A scheduler keeps state between steps, so each video gets one of its own.
        self.pipeline.scheduler = with_flow_shift(self._scheduler, sampling.flow_shift)
        pipeline = self.pipeline if image is None else self.family.image_pipeline(self.pipeline)
        pipeline.set_progress_bar_config(disable=True)

        watch = Stopwatch(self.device)
        spans: dict[str, list[tuple[Mark, Mark]]] = {"text": [], "image": [], "step": [], "vae": []}
        if self.has_folders_weights:
            reset_peak_memory(self.device)
        asked = [f"prompt {prompt!r}, seed {seed}" for prompt, seed in zip(prompts, seeds, strict=True)]
        where = f"{self.folder} with recipe {chosen.name}, {'; '.join(asked)}"
        step_start = started = watch.mark()

        def after_text(start: Mark, end: Mark, _: Any) -> None:
            nonlocal step_start
            spans["text"].append((start, end))
            step_start = end

        def after_image(_: Mark, end: Mark, __: Any) -> None:
            nonlocal step_start
            spans["image"].append((step_start, end))
            step_start = end

        def after_step(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            nonlocal step_start
            spans["step"].append((step_start, watch.mark()))
            self.division.end_step()
            if agree(not torch.isfinite(tensors["latents"]).all()):
                raise NonFiniteVideo(f"latents became NaN or inf in denoising step {step + 1} of {sampling.num_inference_steps}: {where}")
            if on_step is not None:
                on_step(step + 1, sampling.num_inference_steps)
            begin_step((step + 1) // self.pipeline.scheduler.order)  # a second-order scheduler goes through the loop twice for one step
            step_start = watch.mark()
            return {}

        def after_decode(start: Mark, end: Mark, decoded: Any) -> None:
            spans["vae"].append((start, end))
            pixels = decoded[0] if isinstance(decoded, tuple) else decoded.sample
            if agree(not torch.isfinite(pixels).all()):
                raise NonFiniteVideo(f"the VAE decoded finite latents to NaN or inf: {where}")

        with (
            _leaving_the_device(self.pipeline),
            record_receipts() as receipts,
            stepping([layer for layers in self._quantised(chosen).values() for layer in layers], chosen, sampling.num_inference_steps) as begin_step,
            self.division.dividing_guidance(self.transformers),
            watched(pipeline, "encode_prompt", after_text, watch.mark),
            watched(pipeline.vae, "encode", after_image, watch.mark),
            watched(pipeline.vae, "decode", after_decode, watch.mark),
        ):
            if condition is None:
                text: dict[str, Any] = {"prompt": prompts, "negative_prompt": [sampling.negative_prompt] * len(prompts)}
            else:
                text = self.family.prompt_arguments(*condition)
            generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
            begin_step(0)
            output = pipeline(
                **text,
                **({} if image is None else {"image": image}),
                height=sampling.height,
                width=sampling.width,
                num_frames=sampling.num_frames,
                num_inference_steps=sampling.num_inference_steps,
                guidance_scale=sampling.guidance_scale,
                **({"guidance_scale_2": sampling.guidance_scale_2} if sampling.guidance_scale_2 else {}),
                **({"true_cfg_scale": sampling.true_cfg_scale} if sampling.true_cfg_scale > 1 else {}),
                generator=generators[0] if one else generators,
                callback_on_step_end=after_step,
                max_sequence_length=num_text_tokens,
                **({"use_dynamic_cfg": True} if sampling.dynamic_guidance else {}),
                output_type="np",
            )
        frames_BFHWC = np.rint(np.asarray(output.frames) * 255).astype(np.uint8)
        total_s = watch.seconds(started, watch.mark())
        text_s, image_s, steps_s, vae_s = ([watch.seconds(*span) for span in spans[stage]] for stage in ("text", "image", "step", "vae"))
        timings = {
            "text_s": sum(text_s),
            "image_s": sum(image_s),
            "denoise_s": sum(steps_s),
            "steps_s": steps_s,
            "vae_s": sum(vae_s),
            "total_s": total_s,
        }
        peak = peak_memory(self.device) if self.has_folders_weights else None
        results = []
        for frames_FHWC, own, cut in zip(frames_BFHWC, asked, cuts, strict=True):
            doubts = [f"{doubt}: {self.folder} with recipe {chosen.name}, {own}" for doubt in doubts_about(frames_FHWC)]
            self._warn(doubts)
            results.append(VideoResult(frames_FHWC, timings, [receipt.to_dict() for receipt in receipts], chosen, [*warnings, *cut, *doubts], peak))
        return results
