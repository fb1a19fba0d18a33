"""Quantised attention once more, by row, in fp64, with nothing masked and nothing padded: what a row doesn't see is cut off before it is used.

Written from docs/numerics.md alone and on purpose unlike `videoqat.attention`: one row at a time, slices instead of masks, vectors quantised
along their last axis, O_hp computed, grouped heads by index. Only the rounding itself is shared with the package (it has its own oracle).
"""

import math

import torch
from torch import Tensor

from videoqat.formats import fake_quantize
from videoqat.recipes import AttentionRecipe

LOG2_E = math.log2(math.e)


def hadamard_matrix(d: int) -> Tensor:
    """(d, d) fp64: Sylvester's matrix, whose sign in row i and column j is the parity of the bits that i and j share, in blocks of the largest
    power of two that divides d."""
    n = max(2**k for k in range(12) if d % 2**k == 0)
    signs = [[(-1) ** bin(i & j).count("1") for j in range(n)] for i in range(n)]
    return torch.block_diag(*[torch.tensor(signs, dtype=torch.float64) / math.sqrt(n)] * (d // n))


def rotate(x: Tensor) -> Tensor:
    """x times that matrix in the one order of evaluation, channel by channel (fp32, to the last bit)."""
    n = max(2**k for k in range(12) if x.shape[-1] % 2**k == 0)
    channels, h = list(x.float().unbind(-1)), 1
    while h < n:
        for i in range(len(channels)):
            if not i & h:
                a, b = channels[i], channels[i + h]
                channels[i], channels[i + h] = a + b, a - b
        h *= 2
    return (torch.stack(channels, dim=-1) * torch.tensor(1 / math.sqrt(n), dtype=torch.float32)).to(x.dtype)


def terms(x: Tensor, format: str, divisors, twice: bool) -> Tensor:
    """x', blocks along the last axis, fp64: N(x), or N(x) + N(x - N(x))."""
    values = fake_quantize(x, format, -1, divisors).double()
    if twice:
        rest = (x.double() - values).float()
        values = values + fake_quantize(rest, format, -1, divisors).double()
    return values


class NaiveAttention:
    """One call: inputs (B, N, H, d) fp32; then `forward()` and `backward(grad_out)`."""

    def __init__(self, q, k, v, recipe: AttentionRecipe, scale=None, kv_len=None, causal=False):
        self.recipe, self.causal = recipe, causal
        self.shape_q, self.shape_k = q.shape, k.shape
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.group = q.shape[2] // k.shape[2]
        self.lengths = [k.shape[1]] * q.shape[0] if kv_len is None else kv_len.tolist()
        self.h = hadamard_matrix(q.shape[-1]) if recipe.rotate_qk else torch.eye(q.shape[-1], dtype=torch.float64)
        if recipe.rotate_qk:
            q, k = rotate(q), rotate(k)
        self.q, self.k, self.v = q.float(), k.float(), v.float()
        self.rows: dict = {}
        self.heads = {(b, h): self._head(b, h) for b in range(q.shape[0]) for h in range(q.shape[2])}

    def visible(self, b: int, i: int) -> int:
        """How many keys row i of sample b sees."""
        n = self.lengths[b]
        return max(0, min(n, n - self.shape_q[1] + i + 1)) if self.causal else n

    def _head(self, b: int, h: int) -> dict:
        """Rotated, smoothed and quantised operands of one query head, fp64, keys cut to their true length."""
        r, n = self.recipe, self.lengths[b]
        q, k, v = self.q[b, :, h], self.k[b, :n, h // self.group], self.v[b, :n, h // self.group]
        mean_k = k.sum(0) / max(n, 1) if r.smooth_k else torch.zeros_like(q[0])
        k = k - mean_k
        mean_q = torch.zeros_like(q)
        if r.smooth_q:
            for start in range(0, len(q), 128):
                mean_q[start : start + 128] = q[start : start + 128].mean(0)
        quantised_q = terms(q - mean_q, r.qk, r.scale_divisors, "q" in r.twice)
        quantised_k = terms(k, r.qk, r.scale_divisors, "k" in r.twice) if n else k
        if n and r.v_blocks == "head_dim":
            quantised_v = terms(v, r.pv, r.scale_divisors, "v" in r.twice)
        else:
            quantised_v = terms(v.T.contiguous(), r.pv, r.scale_divisors, "v" in r.twice).T if n else v
        head = {"q": quantised_q, "k": quantised_k, "v": quantised_v, "mean_q": mean_q, "k_plain": k, "offset": q.double() @ mean_k.double()}
        return {name: x.double() for name, x in head.items()}

    def _quantise_p(self, p: Tensor) -> Tensor:
        p = p.float()
        if not self.recipe.two_level_p:
            return terms(p, self.recipe.pv, (6.0,), "p" in self.recipe.twice)
        parts = []
        for tile in p.split(128):
            s1 = tile.max() * torch.tensor(1 / 2688, dtype=torch.float32)
            scaled = terms(tile * (1 / s1), "nvfp4", (6.0,), "p" in self.recipe.twice) if s1 >= 2**-126 else torch.zeros_like(tile)
            parts.append(scaled.float() * s1)
        return torch.cat(parts).double()

    def _row(self, b: int, h: int, i: int):
        """t, m, p, p', l of one row over the keys that it sees (at least one); kept for the backward."""
        if (b, h, i) in self.rows:
            return self.rows[b, h, i]
        x, n, g = self.heads[b, h], self.visible(b, i), self.recipe.p_gain_log2
        t = LOG2_E * self.scale * (x["k"][:n] @ x["q"][i] + x["k_plain"][:n] @ x["mean_q"][i])
        m = torch.ceil(t.max())
        p = torch.exp2(t - m + g)
        p_quantised = self._quantise_p(p)
        total = (p_quantised if self.recipe.normalizer == "quantised" else p).sum()
        self.rows[b, h, i] = t, m, p, p_quantised, total
        return self.rows[b, h, i]

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """out (B, N, H, d), lse (B, H, N), and which rows are unsure (B, N, H).

        Unsure: some p lies so near to a rounding boundary of its codes that its last bits, in which implementations may differ, decide.
        """
        B, N, H, d = self.shape_q
        out, lse = torch.zeros(B, N, H, d, dtype=torch.float64), torch.full((B, H, N), -math.inf, dtype=torch.float64)
        unsure = torch.zeros(B, N, H, dtype=torch.bool)
        for (b, h), x in self.heads.items():
            for i in range(N):
                if n := self.visible(b, i):
                    t, m, p, p_quantised, total = self._row(b, h, i)
                    out[b, i, h] = p_quantised @ x["v"][:n] / total
                    lse[b, h, i] = math.log(2) * (m - self.recipe.p_gain_log2 + torch.log2(total)) + self.scale * x["offset"][i]
                    slack = 3e-7 * (3 + float(t.abs().max()))  # relative error of p: a few ulp of t, and of exp2
                    unsure[b, i, h] = self.recipe.pv != "bf16" and self._hangs_on_last_bits(p, p_quantised, slack)
        return out, lse, unsure

    def _hangs_on_last_bits(self, p: Tensor, p_quantised: Tensor, slack: float) -> bool:
        """Whether codes change when p changes by `slack`. (A code's or a scale's step is at least 6 % of the number; two levels also pass
        the change itself on, and would hide it if the tile's largest p, which they divide by, moved with the others. Of two terms, the second's
        steps may be much smaller, and there is none that doesn't count.)"""
        largest = torch.cat([tile.max().expand_as(tile) for tile in p.split(128)])
        for factor in (1 - slack, 1 + slack):
            moved = torch.where(p == largest, p, p * factor) if self.recipe.two_level_p else p * factor
            least = 0.0 if "p" in self.recipe.twice else 1e-3
            if ((self._quantise_p(moved) - p_quantised).abs() > least * p_quantised).any():
                return True
        return False

    def backward(self, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK, dV."""
        r = self.recipe
        dq = torch.zeros(self.shape_q, dtype=torch.float64)
        dk, dv = (torch.zeros(self.shape_k, dtype=torch.float64) for _ in range(2))
        for (b, h), x in self.heads.items():
            for i in range(self.shape_q[1]):
                if not (n := self.visible(b, i)):
                    continue
                _, _, p, p_quantised, total = self._row(b, h, i)
                p, p_quantised, do = p / total, p_quantised / total, grad_out[b, i, h].double()
                k, v = x["k"][:n], x["v"][:n]
                dv[b, :n, h // self.group] += torch.outer(p_quantised if r.dv_p == "quantised" else p, do)
                dp = v @ do
                if r.grad_p == "quantised":
                    ds = p_quantised * (dp - do @ (p_quantised @ v))
                elif r.delta == "output":
                    ds = p * (dp - do @ (p_quantised @ v))
                else:
                    ds = p * (dp - do @ (p @ v))
                dq[b, i, h] = self.scale * ds @ k
                dk[b, :n, h // self.group] += self.scale * torch.outer(ds, x["q"][i] + x["mean_q"][i])
        return dq @ self.h.T, dk @ self.h.T, dv


def straight_through_autograd(q, k, v, grad_out, recipe: AttentionRecipe, scale=None):
    """dQ, dK, dV by torch's autograd in fp64 through softmax of fake-quantised operands; for recipes that neither smooth nor rotate.

    Where the formulas of docs/numerics.md are those of plain calculus (D from O_hp, P' in dV), this knows nothing of them and must agree.
    """
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group = q.shape[2] // k.shape[2]

    def straight_through(x, quantised):
        return x + (quantised - x).detach()

    qs, ks, vs = (x.transpose(1, 2) for x in leaves)
    ks, vs = (x.repeat_interleave(group, dim=1) for x in (ks, vs))
    qs = straight_through(qs, fake_quantize(qs.detach(), recipe.qk, -1, recipe.scale_divisors))
    ks = straight_through(ks, fake_quantize(ks.detach(), recipe.qk, -1, recipe.scale_divisors))
    columns = vs.detach() if recipe.v_blocks == "head_dim" else vs.detach().transpose(-1, -2).contiguous()
    columns = fake_quantize(columns, recipe.pv, -1, recipe.scale_divisors)
    vs = straight_through(vs, columns if recipe.v_blocks == "head_dim" else columns.transpose(-1, -2))
    t = LOG2_E * (q.shape[-1] ** -0.5 if scale is None else scale) * qs @ ks.transpose(-1, -2)
    p = torch.softmax(t * math.log(2), dim=-1)
    plain = torch.exp2(t.detach() - t.detach().amax(-1, keepdim=True).ceil() + recipe.p_gain_log2)
    p = straight_through(p, fake_quantize(plain, recipe.pv, -1) / plain.sum(-1, keepdim=True))
    return torch.autograd.grad((p @ vs).transpose(1, 2), leaves, grad_out.double())
