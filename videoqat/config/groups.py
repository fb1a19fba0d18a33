"""Settings that several commands share."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from videoqat.config.checks import check_frames, choice, model_folder, require

if TYPE_CHECKING:
    import torch


def model_setting(default: str = MISSING, *, weights: bool = True) -> Any:
    """A field that names a model: a diffusers folder, or org/name[@REVISION] on the hub, which becomes one before a command runs (`models.hub`).

    Where `weights` is false, configurations are enough.
    """
    return field(default=default, metadata={"model": True, "weights": weights})


@dataclass
class ModelConfig:
    """A diffusers pipeline (a folder, or org/name[@REVISION] on the hub), and which of its transformers (Wan 2.2 has two) is meant."""

    path: str = model_setting()
    component: str = "transformer"

    def validate(self) -> None:
        model_folder("model.path", self.path)
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
class GenerationRuntimeConfig(RuntimeConfig):
    """Where and how a whole pipeline lives. `offload` and the VAE's tiling save memory and cost time; tiles change pixels a little."""

    offload: str = "none"  # none | model (each part of the pipeline waits in the host's memory for its turn) | sequential (each of its modules)
    vae_tiling: bool = False  # decode in overlapping tiles
    vae_slicing: bool = False  # decode the videos of a batch one by one
    compile: bool = False  # torch.compile of the transformer, block by block: the first video of a size and recipe takes longer, the others less

    def validate(self) -> None:
        super().validate()
        choice("runtime.offload", self.offload, ("none", "model", "sequential"))
        whole = not self.compile or self.offload != "sequential"
        require(whole, "runtime.compile", self.compile, "false with runtime.offload=sequential, which moves weights within blocks")

    def resolve(self) -> "tuple[torch.device, torch.dtype]":
        """As `RuntimeConfig.resolve`; from a CPU nothing can be moved away."""
        device, dtype = super().resolve()
        require(self.offload == "none" or device.type != "cpu", "runtime.offload", self.offload, f"none on device {device}: it is the host's memory")
        return device, dtype


@dataclass
class VideoParallelConfig:
    """How torchrun's processes divide videos: world size = (videos at a time) * cfg * sp, sp innermost (neighbours on one host)."""

    sp: int = 1  # ranks that divide a video's tokens (Ulysses); a divisor of the model's heads
    cfg: int = 1  # 2: the forwards with and without the prompt by two ranks (times sp)
    ulysses_wire: str = "auto"  # how q, k, v travel between ranks that divide tokens: auto | bf16 (as they are) | packed (4-bit codes)

    def validate(self) -> None:
        require(self.sp >= 1, "parallel.sp", self.sp, "at least 1")
        require(self.cfg in (1, 2), "parallel.cfg", self.cfg, "1, 2 (with the prompt, and without)")
        choice("parallel.ulysses_wire", self.ulysses_wire, ("auto", "bf16", "packed"))


@dataclass
class ObjectiveConfig:
    """How training draws times t in [0, 1], from data to noise; how the two are mixed and what is predicted belongs to the model."""

    flow_shift: float = 0.0  # 0: as the folder's scheduler has it, which is none with v-prediction (CogVideoX)
    timestep_sampling: str = "auto"  # auto (logit_normal for flow matching, uniform for v-prediction) | logit_normal | uniform
    logit_mean: float = 0.0
    logit_std: float = 1.0
    caption_dropout: float = 0.1

    def validate(self) -> None:
        require(self.flow_shift >= 0, "objective.flow_shift", self.flow_shift, "0 (the model's own) or above")
        choice("objective.timestep_sampling", self.timestep_sampling, ("auto", "logit_normal", "uniform"))
        require(self.logit_std > 0, "objective.logit_std", self.logit_std, "above 0")
        require(0 <= self.caption_dropout <= 1, "objective.caption_dropout", self.caption_dropout, "0 to 1")


@dataclass
class SamplingConfig:
    """How a video is sampled. Defaults suit the tiny model; the shipped configurations hold each model's own."""

    num_frames: int = 17
    height: int = 64
    width: int = 64
    fps: int = 16
    num_inference_steps: int = 20
    guidance_scale: float = 3.0
    guidance_scale_2: float = 0.0  # of the second of two transformers (Wan 2.2 A14B), which serves low noise; 0: as guidance_scale
    true_cfg_scale: float = 1.0  # HunyuanVideo, which is told guidance_scale: how much the negative prompt guides beside that; 1: not at all
    negative_prompt: str = ""
    dynamic_guidance: bool = False  # CogVideoX: guidance that grows from step to step (its pipeline's use_dynamic_cfg)
    flow_shift: float = 0.0  # 0: as the folder's scheduler has it; it must be 0 where that takes none (CogVideoX's DDIM and DPM)
    max_text_tokens: int = 0  # to which text is padded; 0: as the checkpoint was trained (videoqat.json), else the model's own number

    def validate(self) -> None:
        check_frames("sampling.num_frames", self.num_frames)
        for key in ("height", "width", "num_inference_steps", "fps"):
            require(getattr(self, key) >= 1, f"sampling.{key}", getattr(self, key), "at least 1")
        for key in ("guidance_scale", "guidance_scale_2"):
            require(getattr(self, key) >= 0, f"sampling.{key}", getattr(self, key), "0 or more")
        require(self.true_cfg_scale >= 1, "sampling.true_cfg_scale", self.true_cfg_scale, "1 (no guidance by the negative prompt) or more")
        require(self.flow_shift >= 0, "sampling.flow_shift", self.flow_shift, "0 (the folder's own) or above")
        require(self.max_text_tokens >= 0, "sampling.max_text_tokens", self.max_text_tokens, "0 (as trained) or more")
