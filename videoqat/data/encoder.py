"""What encodes clips, captions and first frames for a cache."""

import functools
from typing import Any

import numpy as np
import torch

from videoqat.errors import CheckpointError
from videoqat.models.spec import Condition, Geometry, ModelFamily


class Encoder:
    """VAE and text encoder, loaded when the first clip needs them: a run that finds everything in the cache loads nothing."""

    def __init__(
        self, folder: str, settings: dict[str, Any], family: ModelFamily, geometry: Geometry, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.folder, self.max_text_tokens, self.gives_images = folder, settings["max_text_tokens"], settings["image_to_video"]
        self.family, self.geometry, self.device, self.dtype = family, geometry, device, dtype
        self.cut_captions: set[str] = set()
        self._prompt = functools.lru_cache(maxsize=1024)(self._encode_prompt)  # captions repeat

    @functools.cached_property
    def encoders(self) -> Any:
        return self.family.load_encoders(self.folder, device=self.device, dtype=self.dtype)

    def video(self, clips: list[np.ndarray]) -> list[torch.Tensor]:
        """Latents (C, F, H, W) float32 on the CPU of each of `clips`, frames (F, H, W, 3) uint8 of one shape."""
        if not clips:
            return []
        video_BCFHW = torch.from_numpy(np.stack(clips)).to(self.device).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        latents_BCFHW = self.family.encode_video(self.encoders, video_BCFHW).float().cpu()
        expected = self.geometry.latent_shape(*clips[0].shape[:3])
        if tuple(latents_BCFHW.shape[1:]) != expected:
            raise CheckpointError(f"{self.folder}: the VAE gives latents {tuple(latents_BCFHW.shape[1:])} where the configuration says {expected}")
        return list(latents_BCFHW)

    def image(self, frames: np.ndarray) -> Condition:
        """What depends on the first of frames (F, H, W, 3) uint8 in a sample's condition, on the CPU; empty where none is given."""
        if not self.gives_images:
            return {}
        image_BCHW = torch.from_numpy(frames[:1]).to(self.device).permute(0, 3, 1, 2).float() / 127.5 - 1
        return {part: tensor.cpu() for part, tensor in self.family.encode_image(self.encoders, image_BCHW, len(frames))[0].items()}

    def prompt(self, caption: str) -> Condition:
        """What depends on the caption in a sample's condition, on the CPU, in the encoder's dtype."""
        return self._prompt(caption)

    def _encode_prompt(self, caption: str) -> Condition:
        if self.family.count_tokens(self.encoders, [caption])[0] > self.max_text_tokens:
            self.cut_captions.add(caption)
        condition = self.family.encode_prompts(self.encoders, [caption], self.max_text_tokens)[0]
        return {part: tensor.cpu() for part, tensor in condition.items()}
