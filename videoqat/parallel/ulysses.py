"""Sequence parallelism by exchange (DeepSpeed-Ulysses, arXiv 2309.14509): tokens are divided among the ranks of a group, but for attention, where
heads are.

    a rank's part of the tokens, all heads    (B, n, H, D)
        -> all-to-all ->
    the whole sequence, its part of the heads (B, N, h, D)    attention runs here, and knows nothing of it
        -> all-to-all back ->
    a rank's part of the tokens, all heads    (B, n, H, D)

So attention sees every token in its place: sequence parallelism changes no block of what is quantised. Where the ranks don't divide N, the parts
are padded with zeros at the tail; padding is cut off before attention and before `gather`, so that it never joins a softmax.

Everything is differentiable. What a rank computes for its own tokens gives the gradients of its own tokens; what all ranks hold alike (text, the
time embedding, every weight) gets a part of its gradient on each, and the parts sum to the whole.

Shapes: B batch, N tokens of the whole sequence, n of one rank's part, L text tokens, H heads, h of one rank's part, D head_dim. P ranks.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from videoqat.attention.coded import BLOCK_TOKENS, packed_obstacle
from videoqat.attention.functional import attention
from videoqat.errors import AttentionError, ConfigError
from videoqat.parallel.exchange import all_to_all
from videoqat.parallel.wire import attend_packed
from videoqat.recipes import AttentionRecipe

WIRES = ("auto", "bf16", "packed")
Observe = Callable[[Tensor, Tensor, Tensor], None]  # q_BNhD, k_BNhD, v_BNhD: the whole sequence, this rank's heads


class _Gather(torch.autograd.Function):
    """All ranks' parts, (P, ...); each rank's gradient is that of its own part alone."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, ulysses: "Ulysses") -> Tensor:
        ctx.rank = ulysses.rank  # type: ignore[attr-defined]
        return ulysses.exchange(x.expand(ulysses.degree, *x.shape), ulysses.group_name)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank], None  # type: ignore[attr-defined]


class Ulysses:
    """The ranks that share one sequence, and how it is divided among them.

    Args:
        group: the ranks; all of them build this object, and run every forward together.
        wire: how q, k and v travel: `bf16` (as they are), `packed` (4-bit codes) or `auto`; see `packs`.
        exchange: the all-to-all, by the interface of `videoqat.parallel.exchange.all_to_all`.

    Attributes:
        degree, rank: number of ranks, and this one's number.
        num_tokens: N of the sequence that is on its way; the model's sharding hook sets it at each forward.

    Raises:
        ConfigError: no such wire.
    """

    def __init__(self, group: dist.ProcessGroup, wire: str = "auto", exchange: Callable[[Tensor, str], Tensor] = all_to_all) -> None:
        if wire not in WIRES:
            raise ConfigError(f"parallel.ulysses_wire={wire!r} is not one of {', '.join(WIRES)}")
        self.group_name: str = group.group_name
        self.degree: int = group.size()
        self.rank: int = group.rank()
        self.wire = wire
        self.exchange = exchange
        self.num_tokens = 0
        self._may_pack = wire == "packed" or (wire == "auto" and _spans_hosts(group))

    def packs(self, recipe: AttentionRecipe) -> bool:
        """Whether q, k and v of layers that attend by `recipe` travel as codes. Layers that quantise nothing have none.

        `auto` packs where the ranks are on several hosts: 16 bits a number are little for NVLink, and much for a network.

        Raises:
            ConfigError: the wire is `packed`, and codes can't stand for what this recipe quantises.
        """
        obstacle = packed_obstacle(recipe) if recipe.is_quantised else None
        if self.wire == "packed" and obstacle is not None:
            raise ConfigError(f"parallel.ulysses_wire=packed is not possible with recipe {recipe.name!r}: {obstacle}; legal: auto, bf16")
        return self._may_pack and recipe.is_quantised and obstacle is None

    def describe(self, recipe: AttentionRecipe) -> dict[str, Any]:
        """What happens to q, k and v of layers that attend by `recipe`, for logs and results."""
        return {"degree": self.degree, "wire": "packed" if self.packs(recipe) else "bf16", "asked_for": self.wire}

    @property
    def part_size(self) -> int:
        """n: tokens of each rank's part, padding included."""
        return self._part_size_of(self.num_tokens)

    def _part_size_of(self, num_tokens: int) -> int:
        step = BLOCK_TOKENS if self._may_pack else 1
        return -(-num_tokens // (self.degree * step)) * step

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's n of the `num_tokens` along `dim`, padded at the tail with zeros. A view where there is nothing to pad."""
        if x.shape[dim] != self.num_tokens:
            raise AttentionError(f"a sequence of {x.shape[dim]} tokens can't be divided as one of {self.num_tokens}")
        first = min(self.rank * self.part_size, self.num_tokens)
        part = x.narrow(dim, first, min(self.part_size, self.num_tokens - first))
        return self._pad(part, dim, self.part_size)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `shard`: the whole sequence, without padding, on every rank. The gradient is that of the own part alone."""
        if x.shape[dim] != self.part_size:
            raise AttentionError(f"a part of {x.shape[dim]} tokens is none of {self.degree} of a sequence of {self.num_tokens}")
        parts: Tensor = _Gather.apply(x.movedim(dim, 0), self)
        return parts.flatten(0, 1)[: self.num_tokens].movedim(0, dim)

    def to_heads(self, *xs_BnHD: Tensor) -> list[Tensor]:
        """(B, n, H, D) each -> (B, N, h, D), in one exchange. H may differ, for grouped queries; P divides each."""
        self.check_parts(*xs_BnHD)
        send_PBnhD = torch.cat([x.unflatten(2, (self.degree, -1)).permute(2, 0, 1, 3, 4) for x in xs_BnHD], dim=3)
        received_PBnhD = self.exchange(send_PBnhD, self.group_name)
        whole_BNhD = received_PBnhD.transpose(0, 1).flatten(1, 2)[:, : self.num_tokens]
        return list(whole_BNhD.split([x.shape[2] // self.degree for x in xs_BnHD], dim=2))

    def to_tokens(self, *xs_BNhD: Tensor) -> list[Tensor]:
        """The inverse of `to_heads`: (B, N, h, D) each -> (B, n, H, D), zeros in the padding."""
        together = torch.cat(xs_BNhD, dim=2) if len(xs_BNhD) > 1 else xs_BNhD[0]
        padded = self._pad(together, 1, self.degree * self._part_size_of(together.shape[1]))
        received_PBnhD = self.exchange(padded.unflatten(1, (self.degree, -1)).transpose(0, 1), self.group_name)
        parts = received_PBnhD.split([x.shape[2] for x in xs_BNhD], dim=3)
        return [part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in parts]

    def check_parts(self, *xs_BnHD: Tensor) -> None:
        """Requires parts that can be exchanged.

        Raises:
            AttentionError: not a part's number of tokens, or heads that the ranks don't divide.
        """
        for x in xs_BnHD:
            if x.ndim != 4 or x.shape[1] != self.part_size or x.shape[2] % self.degree:
                raise AttentionError(
                    f"q, k or v of shape {tuple(x.shape)} can't be exchanged among {self.degree} ranks; legal: (batch, tokens, heads, head_dim) with "
                    f"{self.part_size} tokens, a part of {self.num_tokens}, and a multiple of {self.degree} heads"
                )

    def own_heads(self, x_BLHD: Tensor) -> Tensor:
        """This rank's heads (B, L, h, D) of what all ranks hold."""
        if x_BLHD.shape[2] % self.degree:
            raise AttentionError(f"{x_BLHD.shape[2]} heads can't be divided among {self.degree} ranks")
        return x_BLHD.unflatten(2, (self.degree, -1))[:, :, self.rank]

    def all_heads(self, x_BLhD: Tensor) -> Tensor:
        """The inverse of `own_heads`: (B, L, H, D) on every rank. Its gradient sums what each rank has of it."""
        received_PBLhD = self.exchange(x_BLhD.expand(self.degree, *x_BLhD.shape), self.group_name)
        return received_PBLhD.permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    def _pad(x: Tensor, dim: int, size: int) -> Tensor:
        missing = size - x.shape[dim]
        return F.pad(x, (0, 0) * (x.ndim - 1 - dim % x.ndim) + (0, missing)) if missing else x


def attend(
    q_BnHD: Tensor,
    k_BnHD: Tensor,
    v_BnHD: Tensor,
    recipe: AttentionRecipe,
    *,
    kernel: str,
    ulysses: Ulysses | None,
    kv_len: Tensor | None = None,
    observer: Observe | None = None,
) -> Tensor:
    """Self-attention of a sequence that is divided among `ulysses`' ranks; plain `attention` without it.

    Args:
        q_BnHD, k_BnHD, v_BnHD: this rank's part; k and v may have fewer heads (grouped queries).
        recipe, kernel: as for `attention`.
        kv_len: (B,) how many keys of the whole sequence are real; None: all N.
        observer: is shown q, k and v as they go into attention, without padding (with kv_len once for each sample), which then travel as they are
            (the result is the same). All ranks have one, or none has.

    Returns:
        (B, n, H, D) in q's dtype; zeros in the padding.
    """
    if ulysses is None:
        return _observed((q_BnHD, k_BnHD, v_BnHD), recipe, kernel, kv_len, observer)
    if observer is None and ulysses.packs(recipe):
        video = [q_BnHD, k_BnHD, v_BnHD]
        out = attend_packed(video, [], recipe, text_first=False, kernel=kernel, ulysses=ulysses, kv_len=kv_len)
    else:
        out = _observed(ulysses.to_heads(q_BnHD, k_BnHD, v_BnHD), recipe, kernel, kv_len, observer)
    return ulysses.to_tokens(out)[0]


def attend_joint(
    q_BnHD: Tensor,
    k_BnHD: Tensor,
    v_BnHD: Tensor,
    q_text_BLHD: Tensor,
    k_text_BLHD: Tensor,
    v_text_BLHD: Tensor,
    recipe: AttentionRecipe,
    *,
    text_first: bool,
    kernel: str,
    ulysses: Ulysses | None,
    kv_len: Tensor | None = None,
    observer: Observe | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of text and video tokens together: video is divided among `ulysses`' ranks, text is whole on each.

    Each rank takes its heads of the text, and text and video meet after the exchange in the model's own order: every block of P and V is what it
    is without sequence parallelism.

    Args:
        text_first: whether text stands before video (CogVideoX) or behind it (HunyuanVideo).
        kv_len: (B,) how many keys of the joint sequence are real: what stands behind them, such as a text's padding, has no influence.

    The rest is as for `attend`.

    Returns:
        (B, n, H, D) for the video tokens and (B, L, H, D) for the text, the same on all ranks, whose gradient sums over them.
    """
    video, text = [q_BnHD, k_BnHD, v_BnHD], [q_text_BLHD, k_text_BLHD, v_text_BLHD]
    num_tokens, num_text = video[0].shape[1] if ulysses is None else ulysses.num_tokens, q_text_BLHD.shape[1]
    if ulysses is not None:
        text = [ulysses.own_heads(x) for x in text]
    if ulysses is not None and observer is None and ulysses.packs(recipe):
        out = attend_packed(video, text, recipe, text_first=text_first, kernel=kernel, ulysses=ulysses, kv_len=kv_len)
    else:
        if ulysses is not None:
            video = ulysses.to_heads(*video)
        together = [torch.cat((y, x) if text_first else (x, y), dim=1) for x, y in zip(video, text, strict=True)]
        out = _observed(together, recipe, kernel, kv_len, observer)
    if text_first:
        out_text, out_video = out.split((num_text, num_tokens), dim=1)
    else:
        out_video, out_text = out.split((num_tokens, num_text), dim=1)
    if ulysses is None:
        return out_video, out_text
    return ulysses.to_tokens(out_video)[0], ulysses.all_heads(out_text)


def _observed(qkv: Sequence[Tensor], recipe: AttentionRecipe, kernel: str, kv_len: Tensor | None, observer: Observe | None) -> Tensor:
    q, k, v = qkv
    if observer is not None:
        for part in _real(q, k, v, kv_len):
            observer(*part)
    return attention(q, k, v, recipe, kv_len=kv_len, kernel=kernel)


def _real(q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What an observer is shown: all of it, or where samples are padded, each sample's real tokens by themselves."""
    if kv_len is None:
        yield q, k, v
        return
    for i, length in enumerate(kv_len.tolist()):
        own = slice(i, i + 1)
        yield q[own, :length] if q.shape[1] == k.shape[1] else q[own], k[own, :length], v[own, :length]


def _spans_hosts(group: dist.ProcessGroup) -> bool:
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return len(set(hosts)) > 1
