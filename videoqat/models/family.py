"""What families answer alike. A family derives from `BaseFamily` and overrides what is different about it."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from videoqat.errors import CheckpointError, ConfigError
from videoqat.models import loading
from videoqat.models.schedules import FlowMatching
from videoqat.models.spec import Condition, ModelFamily, read_model_json


class BaseFamily(ModelFamily):
    """`ModelFamily` for a pipeline of one transformer, `transformer_classes[0]` of diffusers.

    Attributes:
        text_encoders: which parts of the pipeline are needed for prompts alone.
        image_pipeline_class: the one of `pipeline_classes` whose models require a first frame; None: no model takes one.
    """

    has_dynamic_guidance = False
    has_true_cfg = False
    text_encoders: tuple[str, ...] = ("text_encoder",)
    image_pipeline_class: str | None = None

    def components(self, folder: str | Path) -> tuple[str, ...]:
        """("transformer",)."""
        if (read_model_json(folder, "model_index.json").get("transformer") or [None])[0] is None:
            raise CheckpointError(f"{folder}: model_index.json names no transformer")
        return ("transformer",)

    def _require_component(self, folder: str | Path, component: str) -> None:
        present = self.components(folder)
        if component not in present:
            raise CheckpointError(f"{folder} has no {component!r}; it has: {', '.join(present)}")

    def load_transformer(self, folder: str | Path, component: str, *, dtype: torch.dtype, from_scratch: bool = False, seed: int = 0) -> nn.Module:
        """As diffusers has it, on the CPU."""
        self._require_component(folder, component)
        return loading.load_transformer(self._transformer_class(), folder, component, dtype=dtype, from_scratch=from_scratch, seed=seed)

    def build(self, folder: str | Path, component: str) -> nn.Module:
        """As diffusers has it, from its configuration."""
        self._require_component(folder, component)
        return loading.build(self._transformer_class(), folder, component)

    def _transformer_class(self) -> Any:
        import diffusers

        return getattr(diffusers, self.transformer_classes[0])

    def load_encoders(self, folder: str | Path, *, device: str | torch.device, dtype: torch.dtype, text_encoder: bool = True) -> Any:
        """The pipeline without its transformers: what encodes is then exactly what will generate. It keeps its image encoder in any case."""
        left_out = (*self.components(folder), *(() if text_encoder else self.text_encoders))
        return self._pipeline(folder, device, dtype, **dict.fromkeys(left_out))

    def load_pipeline(self, folder: str | Path, *, device: str | torch.device, dtype: torch.dtype) -> Any:
        """The whole pipeline, its transformers loaded strictly."""
        transformers = {name: self.load_transformer(folder, name, dtype=dtype) for name in self.components(folder)}
        return self._pipeline(folder, device, dtype, **transformers)

    @abstractmethod
    def _pipeline(self, folder: str | Path, device: str | torch.device, dtype: torch.dtype, **parts: nn.Module | None) -> Any:
        """The folder's pipeline on `device`, with `parts` in the place of its own."""

    def takes_image(self, folder: str | Path) -> str:
        """`required` where the folder's pipeline is the one for images."""
        for_images = read_model_json(folder, "model_index.json").get("_class_name") == self.image_pipeline_class
        return "required" if for_images else "no"

    def image_pipeline(self, pipeline: Any) -> Any:
        """The folder's own."""
        return pipeline

    def given_frames(self, condition: Condition) -> int:
        """0: the first frame is denoised like the others."""
        return 0

    def batch_conditions(self, conditions: list[Condition], max_tokens: int) -> Condition:
        """Zeros behind each text."""
        batch = {part: torch.stack([condition[part] for condition in conditions]) for part in conditions[0] if part != "text"}
        return batch | {"text": padded([condition["text"] for condition in conditions], max_tokens)}

    def prompt_arguments(self, condition: Condition, negative: Condition | None) -> dict[str, Any]:
        """Embeddings."""
        return {"prompt_embeds": condition["text"], "negative_prompt_embeds": None if negative is None else negative["text"]}

    @torch.no_grad()
    def encode_video(self, encoders: Any, video_BCFHW: Tensor) -> Tensor:
        """mode * scaling_factor, which the pipeline undoes before it decodes."""
        vae = encoders.vae
        return vae.encode(video_BCFHW.to(vae.device, vae.dtype)).latent_dist.mode().float() * vae.config.scaling_factor  # type: ignore[no-any-return]

    def flow_time_range(self, folder: str | Path, component: str) -> tuple[float, float]:
        """(0, 1)."""
        self._require_component(folder, component)
        return (0.0, 1.0)

    def blocks(self, transformer: nn.Module) -> list[nn.Module]:
        """The transformer blocks, in order of execution."""
        return list(transformer.transformer_blocks)  # type: ignore[arg-type]


def padded(texts: list[Tensor], max_tokens: int) -> Tensor:
    """text_BLD: each (L_i, D) with zeros behind it, L = max_tokens in all.

    Raises:
        ConfigError: one is longer.
    """
    longest = max(text_LD.shape[0] for text_LD in texts)
    if longest > max_tokens:
        raise ConfigError(f"a text embedding of {longest} tokens doesn't fit into max_text_tokens={max_tokens}")
    return torch.stack([nn.functional.pad(text_LD, (0, 0, 0, max_tokens - text_LD.shape[0])) for text_LD in texts])


def pictures(image_BCHW: Tensor) -> list[Image.Image]:
    """Images in [-1, 1] as pictures with pixels of 8 bits, which is what an image encoder gets to see when somebody generates."""
    pixels_BHWC = ((image_BCHW.float() + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(pixels_HWC) for pixels_HWC in pixels_BHWC]


def flow_matching(folder: str | Path, shift: Any) -> FlowMatching:
    """With the flow shift that the folder's scheduler has.

    Raises:
        CheckpointError: that is no positive number.
    """
    if not isinstance(shift, int | float) or not shift > 0:
        raise CheckpointError(f"{folder}: the scheduler's flow shift is {shift!r}, which is no positive number")
    return FlowMatching(float(shift))
