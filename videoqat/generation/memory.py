"""How much GPU memory making a video takes, before anything is loaded.

    weights      of transformers and text encoders in 16 bits, of the VAE in fp32 (as `ModelFamily.load_pipeline` has them)
    denoising    the most that one forward of the transformer has at once beside its weights
    decoding     the most that the VAE has at once beside its weights, without tiling

Both are counted by running the modules on tensors without numbers, at the video's real size, while adding up what lives. What comes on top: CUDA
itself, workspace of convolutions and attention, and what the allocator can't use.
"""

import functools
import json
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
    """Bytes of GPU memory that a video of `size` (frames, height, width) takes in bf16.

    Args:
        folder: a pipeline's; only configurations are read.
        size: in pixels.
        encoders: part -> numbers of its weights, of what encodes text and images.

    Returns:
        encoders, transformer (the larger of a pair), transformers, vae, denoising, decoding: by part, see above. total: the most at a time with
        everything on the GPU. offloaded: with `runtime.offload=model`, where only the part that works is there.
    """
    family = family_of(folder)
    weights, denoising = [], []
    for component in family.components(folder):
        transformer = family.build(folder, component)
        fp32 = kept_in_fp32(transformer)
        weights.append(sum(p.numel() * (4 if p in fp32 else 2) for p in transformer.parameters()))
        denoising.append(_denoising(folder, component, transformer, size))
    vae_config = json.dumps(read_model_json(folder, "vae/config.json"), sort_keys=True)
    vae, decoding = _decoding(vae_config, family.geometry(folder).latent_shape(*size))
    each = [count * (4 if part == "image_encoder" else 2) for part, count in encoders.items()]
    parts = {"encoders": sum(each), "transformer": max(weights), "transformers": sum(weights), "vae": vae}
    return parts | {
        "denoising": max(denoising),
        "decoding": decoding,
        "total": parts["encoders"] + parts["transformers"] + vae + max(*denoising, decoding),
        "offloaded": max(*each, *map(sum, zip(weights, denoising, strict=True)), vae + decoding),
    }


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


@functools.lru_cache(maxsize=32)
@torch.no_grad()
def _decoding(vae_config: str, latents_CFHW: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of a VAE's weights, and the most that it has at once beside them."""
    import diffusers
    from accelerate import init_empty_weights

    config = json.loads(vae_config)
    with init_empty_weights(include_buffers=False):
        vae = getattr(diffusers, config["_class_name"]).from_config(config).eval()
    with FakeTensorMode(allow_non_fake_inputs=True):
        vae.load_state_dict({name: torch.empty(p.shape) for name, p in vae.named_parameters()}, strict=False, assign=True)
        latents_BCFHW = torch.empty(1, *latents_CFHW)
        with _Living(*vae.parameters(), *vae.buffers()) as living:
            vae.decode(latents_BCFHW)
    return 4 * sum(p.numel() for p in vae.parameters()), living.most
