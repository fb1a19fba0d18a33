"""How much GPU memory making a video takes, before anything is loaded.

    weights      of transformers and text encoders in 16 bits, of the VAE in fp32 (as `ModelFamily.load_pipeline` has them)
    denoising    the most that one forward of the transformer has at once beside its weights
    decoding     the most that the VAE has at once beside its weights, without tiling (but for `ALWAYS_TILED`)

Both are counted by running the modules on tensors without numbers, at the video's real size, while adding up what lives. What comes on top: CUDA
itself, workspace of convolutions and attention, and what the allocator can't use.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from videoqat.models.install import install
from videoqat.models.spec import family_of, read_model_json
from videoqat.parallel.sharding import kept_in_fp32
from videoqat.recipes import RECIPES

ALWAYS_TILED = ("AutoencoderKLHunyuanVideo15",)  # attends by a mask of all its latents by all: without tiling that alone would fill a GPU
TOGETHER = {"cogvideox": 2}  # its pipeline denoises with and without the prompt in one batch; the others one after the other


class _Living(TorchDispatchMode):
    """Adds up the bytes of tensors made within it, as long as they live; views of what was there before, such as weights, don't count."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return outputs

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def generation_memory(folder: str, size: tuple[int, int, int], encoders: dict[str, int]) -> dict[str, int]:
    """Bytes of GPU memory that denoising a video of `size` (frames, height, width) takes in bf16. Decoding it: `decoding_memory`.

    Args:
        folder: a pipeline's; only configurations are read.
        size: in pixels.
        encoders: part -> numbers of its weights, of what encodes text and images.

    Returns:
        encoders, transformers (both of a pair), denoising: by part, see above. total: with everything on the GPU. offloaded: the most at a time with
        `runtime.offload=model`, where only the part that works is there.
    """
    family = family_of(folder)
    weights, denoising = [], []
    for component in family.components(folder):
        transformer = family.build(folder, component)
        fp32 = kept_in_fp32(transformer)
        weights.append(sum(p.numel() * (4 if p in fp32 else 2) for p in transformer.parameters()))
        denoising.append(_denoising(folder, component, transformer, size))
    each = [count * (4 if part == "image_encoder" else 2) for part, count in encoders.items()]
    parts = {"encoders": sum(each), "transformers": sum(weights), "denoising": max(denoising)}
    return parts | {"total": sum(parts.values()), "offloaded": max(*each, *map(sum, zip(weights, denoising, strict=True)))}


@torch.no_grad()
def _denoising(folder: str, component: str, transformer: torch.nn.Module, size: tuple[int, int, int]) -> int:
    family = family_of(folder)
    install(transformer, RECIPES["bf16"], family=family)
    batch, text_tokens = TOGETHER.get(family.name, 1), family.text_tokens(folder)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fp32 = kept_in_fp32(transformer)
        dtypes = {name: torch.float32 if p in fp32 else torch.bfloat16 for name, p in transformer.named_parameters()}
        transformer.load_state_dict(
            {name: torch.empty(p.shape, dtype=dtypes[name]) for name, p in transformer.named_parameters()}, strict=False, assign=True
        )
        x_BCFHW = torch.empty(batch, *family.geometry(folder, component).latent_shape(*size))
        shapes = family.condition_shapes(folder, size, text_tokens)
        condition = family.batch_conditions([{part: torch.empty(shape) for part, shape in shapes.items()} for _ in range(batch)], text_tokens)
        _run_first_of_each_kind(family.blocks(transformer))
        with _Living(*transformer.parameters(), *transformer.buffers()) as living:
            family.forward(transformer, x_BCFHW, torch.empty(batch), condition)
    return living.most


def _run_first_of_each_kind(blocks: list[torch.nn.Module]) -> None:
    """Blocks of one kind need the same memory, one after the other: the later ones only hand over tensors of the first one's shapes."""
    made: dict[type, Callable[[], Any]] = {}

    def forward(kind: type, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kind in made:
            return made[kind]()
        outputs = original(*args, **kwargs)
        leaves, tree = tree_flatten(outputs)
        shapes = [(x.shape, x.dtype) for x in leaves]  # not the tensors: those would live on
        made[kind] = lambda: tree_unflatten([torch.empty(shape, dtype=dtype) for shape, dtype in shapes], tree)
        return outputs

    for block in blocks:
        block.forward = functools.partial(forward, type(block), block.forward)  # type: ignore[method-assign]


@torch.no_grad()
def decoding_memory(folder: str, size: tuple[int, int, int]) -> dict[str, int]:
    """Bytes that making pixels of latents takes: vae (weights), decoding (see above), total. Takes seconds: VAEs go through a video bit by bit."""
    import diffusers

    config = read_model_json(folder, "vae/config.json")
    with torch.device("meta"):
        vae = getattr(diffusers, config["_class_name"]).from_config(config).eval()
        if config["_class_name"] in ALWAYS_TILED:
            vae.enable_tiling()
        with _Living(*vae.parameters(), *vae.buffers()) as living:
            vae.decode(torch.empty(1, *family_of(folder).geometry(folder).latent_shape(*size)))
    parts = {"vae": 4 * sum(p.numel() for p in vae.parameters()), "decoding": living.most}
    return parts | {"total": sum(parts.values())}
