"""What training on one sample costs, counted at its real shape without computing anything; and the hardware's peak, to hold it against.

FLOPs are algorithmic: what the model's formulas ask for, not what a kernel happens to execute. A multiplication and an addition are two.

    FLOPs of a sample = (2 + trained share of the weights) * linear + 3.5 * attention, and with a teacher another linear + attention
    MFU = FLOPs of all samples of a step / (step time * GPUs * peak dense bf16 FLOP/s of one)

`linear` are the forward's matrix products and convolutions outside of attention: the backward has as many for the gradients of their inputs, and for
those of the weights that are trained. `attention` are Q K^T and P V: two products forward and five backward (S again, dP, dQ, dK, dV), 3.5 times
the forward in all. What activation checkpointing computes again is not counted, since MFU is to show that it costs something; neither is
elementwise work, nor what emulating 4 bits takes, so that recipes and bf16 are measured by the same numerator.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import videoqat.attention.functional  # noqa: F401 - makes torch.ops.videoqat.attention_forward
from videoqat.config import parse_bucket
from videoqat.models.install import install
from videoqat.models.spec import family_of
from videoqat.parallel.sharding import kept_in_fp32
from videoqat.recipes import RECIPES, AttentionRecipe
from videoqat.training.engines import set_trainable
from videoqat.training.job import Job

# Peak dense bf16 FLOP/s with fp32 accumulators, from NVIDIA's data sheets, by words of a device's name; the first that is found counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100|H200|H800|GH200": 989e12,
    "A100|A800": 312e12,
    "B200|GB200": 2250e12,
    "L40S": 362e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Peak dense bf16 FLOP/s of `device`; None for what `PEAK_FLOPS` doesn't list, and for a slice (MIG) of a GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if "MIG" in name:
        return None
    return next((peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b({words})\b", name)), None)


@dataclass(frozen=True)
class AttentionCall:
    """Attention of queries (B, Nq, H, D) to keys (B, Nk, H_kv, D)."""

    quantised: bool
    q_BNHD: tuple[int, ...]
    k_BNHD: tuple[int, ...]

    @property
    def flops(self) -> int:
        """Of the forward's two products."""
        B, num_queries, H, D = self.q_BNHD
        return 4 * B * H * num_queries * self.k_BNHD[1] * D


@dataclass
class Part:
    """What a part of a forward computes (FLOPs in all, attention's among them), and the bytes that autograd keeps of it, each tensor once."""

    flops: int = 0
    kept_bytes: int = 0
    attention: list[AttentionCall] = field(default_factory=list)


@dataclass
class ForwardCost:
    """What a training forward of one sample computes and keeps for its backward without activation checkpointing.

    Attributes:
        parameters, trained: numbers of weights, in all and without the frozen ones.
        block_parameters: the most in one block.
        outer_parameters: those outside of blocks.
        quantised_layers: names of attention layers that the recipe quantises.
        outer: what runs outside of blocks.
        blocks: what runs in each; their inputs are not in their bytes.
        input_bytes: of all that goes into blocks, each tensor once.
        largest_input_bytes: of each block's largest input, in all.
    """

    parameters: int
    trained: int
    block_parameters: int
    outer_parameters: int
    quantised_layers: list[str]
    outer: Part = field(default_factory=Part)
    blocks: list[Part] = field(default_factory=list)
    input_bytes: int = 0
    largest_input_bytes: int = 0

    @property
    def attention_flops(self) -> int:
        """The forward's, in attention."""
        return sum(call.flops for part in (self.outer, *self.blocks) for call in part.attention)

    @property
    def linear_flops(self) -> int:
        """The forward's, elsewhere."""
        return sum(part.flops for part in (self.outer, *self.blocks)) - self.attention_flops

    @property
    def training_flops(self) -> float:
        """Of forward and backward, by the formula above."""
        return (2 + self.trained / self.parameters) * self.linear_flops + 3.5 * self.attention_flops


def flops_per_sample(job: Job, bucket: str) -> float:
    """Training FLOPs of a sample of `bucket`, a teacher's forward included."""
    cost = job_cost(job, bucket)
    return cost.training_flops + (cost.linear_flops + cost.attention_flops if job.config.objective.distill_weight else 0)


def job_cost(job: Job, bucket: str) -> ForwardCost:
    """What a sample of `bucket` costs in `job`. A bucket's first call takes a second or so."""
    model, loop, text_tokens = job.config.model, job.config.train, job.cache.settings["max_text_tokens"]
    image = job.cache.settings.get("image_to_video", False)
    return forward_cost(model.path, model.component, bucket, text_tokens, job.recipe, loop.compute_dtype, tuple(loop.trainable), image)


@functools.lru_cache(maxsize=32)
def forward_cost(
    folder: str,
    component: str,
    bucket: str,
    text_tokens: int,
    recipe: AttentionRecipe = RECIPES["bf16"],
    compute_dtype: str = "bfloat16",
    trainable: tuple[str, ...] = ("*",),
    image: bool = False,
) -> ForwardCost:
    """What a sample costs: a video of `bucket` (such as `81x480x832`) with text padded to `text_tokens`, and with a first frame given, if `image` or
    the model requires it. No weights are needed.

    Transformer and samples are fake tensors: shapes and dtypes pass through torch's own code, while numbers and memory there are none.
    Attention counts as the CPU's kernels keep it; `memory.py` knows what a GPU's do.

    Raises:
        ConfigError: a pattern of `trainable` matches no parameter.
    """
    family = family_of(folder)
    geometry = family.geometry(folder, component)
    transformer = family.build(folder, component).train()
    set_trainable(transformer, list(trainable))
    layers = install(transformer, recipe, family=family, component=component)
    with FakeTensorMode(allow_non_fake_inputs=True):  # buffers are real
        fp32, dtype = kept_in_fp32(transformer), getattr(torch, compute_dtype)
        weights = {name: torch.empty(p.shape, dtype=torch.float32 if p in fp32 else dtype) for name, p in transformer.named_parameters()}
        transformer.load_state_dict(weights, strict=False, assign=True)
        ledger = _Ledger(transformer, family.blocks(transformer), [layer.name for layer in layers])
        size = parse_bucket("bucket", bucket)
        x_BCFHW = torch.empty(1, *geometry.latent_shape(*size))
        parts = {part: torch.empty(shape) for part, shape in family.condition_shapes(folder, size, text_tokens, image=image).items()}
        condition = family.batch_conditions([parts], text_tokens)
        with ledger.counter, torch.autograd.graph.saved_tensors_hooks(ledger.keep, lambda kept: kept):
            family.forward(transformer, x_BCFHW, torch.empty(1), condition)
    cost = ledger.cost
    cost.outer.flops = ledger.counter.get_total_flops() - ledger.flops_in_blocks
    return cost


class _Ledger:
    """Writes a `ForwardCost` while a transformer runs. Of blocks that are alike only the first runs; the others cost the same."""

    def __init__(self, transformer: nn.Module, blocks: list[nn.Module], quantised_layers: list[str]) -> None:
        in_blocks = [sum(p.numel() for p in block.parameters()) for block in blocks]
        parameters = sum(p.numel() for p in transformer.parameters())
        trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
        self.cost = ForwardCost(parameters, trained, max(in_blocks), parameters - sum(in_blocks), quantised_layers)
        self.flops_in_blocks = 0
        self.counter = FlopCounterMode(
            display=False,
            custom_mapping={
                torch.ops.videoqat.attention_forward: functools.partial(self._attention, True),
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: functools.partial(self._attention, False),
            },
        )
        self._part = self.cost.outer
        self._known: dict[Any, tuple[Part, Any]] = {}
        self._seen: dict[int, Tensor] = {}  # by storage; holding the tensors keeps later ones from getting their addresses
        for parameter in transformer.parameters():
            self._new_bytes(parameter)
        for block in blocks:
            block.forward = functools.partial(self._run, _kind(block), block.forward)  # type: ignore[method-assign]

    def keep(self, tensor: Tensor) -> Tensor:
        """Of a tensor that autograd keeps."""
        self._part.kept_bytes += self._new_bytes(tensor)
        return tensor

    def _new_bytes(self, tensor: Tensor) -> int:
        """Its bytes, if its storage is seen for the first time."""
        storage = tensor.untyped_storage()
        new = storage._cdata not in self._seen
        self._seen[storage._cdata] = tensor
        return storage.nbytes() if new else 0

    def _attention(self, quantised: bool, q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
        shapes = (tuple(shape) if quantised else (shape[0], shape[2], shape[1], shape[3]) for shape in (q, k))  # SDPA takes (B, H, N, D)
        call = AttentionCall(quantised, *shapes)
        self._part.attention.append(call)
        return call.flops

    def _run(self, kind: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        self.cost.input_bytes += sum(map(self._new_bytes, inputs))
        self.cost.largest_input_bytes += max(x.untyped_storage().nbytes() for x in inputs)
        key = (kind, *((x.shape, x.dtype, x.requires_grad) for x in inputs))
        if key not in self._known:
            part = self._part = Part()
            before = self.counter.get_total_flops()
            outputs = forward(*args, **kwargs)
            part.flops = self.counter.get_total_flops() - before
            self.flops_in_blocks += part.flops
            self._known[key] = part, outputs
            self._part = self.cost.outer
        part, outputs = self._known[key]
        self.cost.blocks.append(part)
        return tree_map_only(Tensor, lambda x: torch.empty_like(x, requires_grad=x.requires_grad), outputs)


def _kind(block: nn.Module) -> Any:
    """Equal for blocks that cost the same on equal inputs."""
    parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters())
    modules: Iterator[Any] = block.modules()
    return type(block), parameters, tuple(module.processor.recipe for module in modules if hasattr(module, "processor"))
