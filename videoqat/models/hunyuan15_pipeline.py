"""diffusers' pipelines of HunyuanVideo 1.5, called as those of all other models are.

They differ in how they are asked, not in what they compute: guidance is set on a guider and not in the call, the number of text tokens is an
attribute, nobody is told of a step, and a video's size follows from its first frame. The subclasses here take `guidance_scale`,
`max_sequence_length`, `callback_on_step_end`, `height` and `width` like other pipelines, and leave the rest to diffusers.

They also leave away padding that never mattered, since the transformer masks it: glyphs are padded to the longest.
"""

from collections.abc import Callable
from typing import Any

from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts, format_text_input
from torch import Tensor

from videoqat.console import say

Steps = Callable[[Any, int, Any, dict[str, Any]], Any]  # pipeline, number of the step, time, {"latents": (B, C, F, H, W)}


class _CalledLikeOthers:
    """What both pipelines have in common; before diffusers' class in the order of bases."""

    def __call__(
        self: Any,
        *,
        guidance_scale: float,
        max_sequence_length: int,
        height: int,
        width: int,
        callback_on_step_end: Steps | None = None,
        **arguments: Any,
    ) -> Any:
        """As diffusers' call.

        Args:
            guidance_scale: more than 1: guided by the negative prompt.
            max_sequence_length: to how many tokens a prompt is cut and padded.
            height, width: of the video in pixels.
            callback_on_step_end: told of each step.
            arguments: as diffusers has them.
        """
        self.guider = self.guider.new(guidance_scale=guidance_scale, enabled=guidance_scale > 1)
        self.tokenizer_max_length = max_sequence_length
        scheduler, steps = self.scheduler, 0
        step = scheduler.step

        def told(prediction: Tensor, time: Any, latents: Tensor, **options: Any) -> Any:
            nonlocal steps
            result = step(prediction, time, latents, **options)
            if callback_on_step_end is not None:
                callback_on_step_end(self, steps, time, {"latents": result[0]})
            steps += 1
            return result

        scheduler.step = told
        try:
            return self._call_sized(height, width, **arguments)
        finally:
            del scheduler.step

    def encode_prompt(self: Any, prompt: Any = None, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """As diffusers', glyphs padded to the longest, to one token at least."""
        for text in [prompt] if isinstance(prompt, str) else prompt or []:
            glyphs = extract_glyph_texts(text)
            count = 0 if glyphs is None else len(self.tokenizer_2(glyphs).input_ids)
            if count > self.tokenizer_2_max_length:
                say(f"warning: quoted text has {count} tokens, of which the model sees the first {self.tokenizer_2_max_length}: {text!r}")
        embeds, mask, embeds_2, mask_2 = super().encode_prompt(prompt, *args, **kwargs)  # type: ignore[misc]
        longest = max(1, int(mask_2.sum(1).max()))
        return embeds, mask, embeds_2[:, :longest], mask_2[:, :longest]

    def count_tokens(self: Any, prompts: list[str]) -> list[int]:
        """How many tokens the encoder is given of each prompt, marks behind it included and the template before it not; nothing cut off."""
        filled = format_text_input(prompts, self.system_message)
        ids = self.tokenizer.apply_chat_template(filled, add_generation_prompt=True, tokenize=True, return_dict=True).input_ids
        return [len(each) - self.prompt_template_encode_start_idx for each in ids]


class TextToVideo(_CalledLikeOthers, HunyuanVideo15Pipeline):
    """`HunyuanVideo15Pipeline`."""

    def _call_sized(self, height: int, width: int, **arguments: Any) -> Any:
        return HunyuanVideo15Pipeline.__call__(self, height=height, width=width, **arguments)


class ImageToVideo(_CalledLikeOthers, HunyuanVideo15ImageToVideoPipeline):
    """`HunyuanVideo15ImageToVideoPipeline`; the image is resized and cropped to the video's size, whatever its shape."""

    def _call_sized(self, height: int, width: int, **arguments: Any) -> Any:
        processor = self.video_processor
        processor.calculate_default_height_width = lambda **_: (height, width)
        try:
            return HunyuanVideo15ImageToVideoPipeline.__call__(self, **arguments)
        finally:
            del processor.calculate_default_height_width
