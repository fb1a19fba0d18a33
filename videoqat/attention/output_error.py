"""How far the output of attention by a recipe is from exact attention of the same Q, K and V: SageAttention3's three numbers.

With O the exact output and O' the recipe's, over all elements of both (arXiv 2505.11594, section 5; the same as in SageAttention, 2410.02367):

    CosSim = sum O O' / (sqrt(sum O^2) sqrt(sum O'^2))      L1 = sum |O - O'| / sum |O|      RMSE = sqrt(mean (O - O')^2)
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from videoqat.attention import reference, sagebwd
from videoqat.attention.rotation import rotated
from videoqat.recipes import AttentionRecipe


@dataclass(frozen=True)
class OutputError:
    """Of one call of attention.

    Attributes:
        cosine: 1 is best. Blind to a wrong factor.
        relative_l1: 0 is best; without unit.
        rmse: in the units of V.
    """

    cosine: float
    relative_l1: float
    rmse: float


@dataclass
class _Sums:
    exact_ours: float = 0.0
    exact_exact: float = 0.0
    ours_ours: float = 0.0
    absolute: float = 0.0
    absolute_exact: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, ours: Tensor, exact: Tensor) -> None:
        error = ours - exact
        self.exact_ours += float((exact * ours).sum())
        self.exact_exact += float(exact.square().sum())
        self.ours_ours += float(ours.square().sum())
        self.absolute += float(error.abs().sum())
        self.absolute_exact += float(exact.abs().sum())
        self.squares += float(error.square().sum())
        self.count += exact.numel()

    def result(self) -> OutputError:
        sizes = (self.exact_exact * self.ours_ours) ** 0.5
        both_zero = self.exact_exact == 0 and self.ours_ours == 0
        cosine = self.exact_ours / sizes if sizes else float(both_zero)
        relative_l1 = self.absolute / self.absolute_exact if self.absolute_exact else 0.0 if both_zero else float("inf")
        return OutputError(cosine, relative_l1, (self.squares / self.count) ** 0.5)


@torch.no_grad()
def output_errors(
    q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, recipes: list[AttentionRecipe], *, scale: float | None = None, max_queries: int = 256
) -> list[OutputError]:
    """Each recipe's error, over all samples and heads, on at most `max_queries` queries of each, evenly spread; they meet all keys.

    The exact output is computed in fp64 from Q, K and V as they are; the recipe's by the formulas of `reference`, in fp32, which is what every kernel
    is tested against. So it costs about as much on any device, whether or not a fast kernel serves the recipe there.

    Args:
        q_BNHd, k_BNHd, v_BNHd: as for `attention`; without padding (what observers are shown has none).
        scale: factor on the logits; 1 / sqrt(d) if None.
    """
    factor = q_BNHd.shape[3] ** -0.5 if scale is None else scale
    num_queries, num_heads, num_kv_heads = q_BNHd.shape[1], q_BNHd.shape[2], k_BNHd.shape[2]
    q, k, v = (reference.rows_first(x, num_kv_heads) for x in (q_BNHd, k_BNHd, v_BNHd))
    rows = torch.arange(q.shape[1], device=q.device).view(-1, num_queries)[:, :: -(-num_queries // max_queries)].flatten()
    exact_XRd = torch.stack([_exact(*operands, factor) for operands in zip(q[:, rows], k, v, strict=True)])
    errors = []
    with torch.autocast(q.device.type, enabled=False):
        for recipe in recipes:
            sums = _Sums()
            for head, ours_Rd in enumerate(_by_recipe(q_BNHd, k_BNHd, v_BNHd, recipe, factor, rows, num_heads // num_kv_heads)):
                sums.add(ours_Rd.double(), exact_XRd[head])
            errors.append(sums.result())
    return errors


def _exact(q_Rd: Tensor, k_Kd: Tensor, v_Kd: Tensor, scale: float) -> Tensor:
    q, k, v = q_Rd.double(), k_Kd.double(), v_Kd.double()
    return (q @ k.T * scale).softmax(dim=-1) @ v


def _by_recipe(q: Tensor, k: Tensor, v: Tensor, recipe: AttentionRecipe, scale: float, rows_R: Tensor, group: int) -> list[Tensor]:
    """O of the rows `rows_R` of each head's (group * N) rows, (R, d) each. Whole operands are quantised: blocks of Q may hold other rows."""
    if recipe.qk == "int8":
        x = sagebwd.prepare(q, k, v, recipe, scale=scale, kv_len_B=None, causal=False).operands  # each query head is padded at its end
        rows_R = rows_R + rows_R // q.shape[1] * (x.q_XRd.shape[1] // group - q.shape[1])
    else:
        q, k = rotated(q, recipe), rotated(k, recipe)
        x = reference.prepare(q, k, v, recipe, scale=scale, kv_len_B=None, causal=False)
    mean_q, limit = (None if y is None else y[:, rows_R] for y in (x.mean_q_XRd, x.limit_XR))
    x = replace(x, q_XRd=x.q_XRd[:, rows_R], mean_q_XRd=mean_q, limit_XR=limit, lse_offset_XR=None)
    found = []
    for head in range(x.q_XRd.shape[0]):  # one at a time: the weights of all heads may be gigabytes
        heads, rows = slice(head, head + 1), slice(None)
        if recipe.qk == "int8":
            out_1Rd = sagebwd.forward_rows(x, heads, rows)[0]
        else:
            out_1Rd = reference.forward_rows(x, recipe, heads, rows, [torch.empty(1, x.k_XKd.shape[1], len(rows_R), device=q.device)])[0]
        found.append(out_1Rd[0])
    return found
