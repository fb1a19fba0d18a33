"""Is attention in 4 bits right? Against the fp64 reference, but for rows whose result the formulas leave open by a step of NVFP4.

The weights p come out of exp2 and sums whose last bits are nobody's promise (docs/numerics.md, section 6: codes of P are the same *given the same
p*). Where a weight lies within those bits of the middle between two codes, or a block's largest one between two scales, either code is right, and
the row moves by a step of 4 bits: up to some percent, if it has few keys. Such rows are found by weighing all p a little more and a little less,
which changes nothing else: the factor cancels in the division by l.
"""

from dataclasses import fields
from types import SimpleNamespace

import torch
from torch import Tensor

from videoqat.attention import reference
from videoqat.attention.metrics import relative_l2

TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 1e-3}
LAST_BITS = 2.0**-21  # of t in log2 units, relative: a few roundings of fp32
ONE_STEP = 0.3  # how far a code or a scale moves a row: of two keys, the lighter one from 4 to 6 parts beside 6


def difficult(batch: int, tokens: int, heads: int, channels: int, dtype: torch.dtype) -> Tensor:
    """(batch, tokens, heads, channels), magnitudes from 2^-14 to 2^12: zeros, subnormal scales and the largest one, ties, NaN, infinities."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn((batch, tokens, heads, channels), generator=generator)
    exponents = torch.randint(-14, 13, (batch, tokens, heads, channels // 16), generator=torch.Generator().manual_seed(tokens))
    x *= torch.exp2(exponents.float()).repeat_interleave(16, dim=3)
    x[0, 1 % tokens] = 0
    x[0, 2 % tokens, 0] = -1e-7
    x[0, 4 % tokens, 0, :8] = torch.tensor([6, 0.25, 0.75, 1.25, -2.5, 3.5, 5, -0.0])
    if tokens > 32:
        x[0, 7, 0, 2], x[0, 20, 0, 3], x[-1, -1, -1, -1] = float("nan"), float("inf"), -float("inf")
    return x.to(dtype)


def reference_and_open_rows(q, k, v, recipe, step: float, **options) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's out (B, Nq, H, d) and lse (B, H, Nq) in fp64, and which rows (B, H, Nq) are open: move by more than `step`, relative, in out,
    or by a hundredth of it in lse (which it can where l is the sum of quantised weights)."""
    out, lse, m, _ = reference.forward(q, k, v, recipe, **options)
    shift = LAST_BITS * max(4.0, m.abs().max().item())
    is_open = torch.zeros_like(lse, dtype=torch.bool)
    for sign in (-1, 1):
        weighed = SimpleNamespace(**{f.name: getattr(recipe, f.name) for f in fields(recipe)})
        weighed.p_gain_log2 = recipe.p_gain_log2 + sign * shift
        moved, moved_lse, _, _ = reference.forward(q, k, v, weighed, **options)
        is_open |= ((moved - out).norm(dim=-1) > step * out.norm(dim=-1)).transpose(1, 2)
        is_open |= (moved_lse - lse).abs() > step / 100 + shift  # which stays in lse where l is the sum of quantised weights
    return out, lse, is_open


def _error(rows: Tensor, expected_rows: Tensor) -> float:
    """Relative L2; 0 where it is no more than what rounding to the rows' dtype takes."""
    error = relative_l2(rows, expected_rows)
    return 0.0 if error <= 1.01 * relative_l2(expected_rows.to(rows.dtype), expected_rows) else error


def assert_right(out: Tensor, lse: Tensor, q, k, v, recipe, lse_tolerance: float = 1e-5, **options) -> int:
    """out and lse are those of q, k, v: relative L2 of all rows within 1e-3 (fp16) or 2e-3 (bf16); or, if open rows are more than that off, of the
    others, and then not more than a tenth may be open. Open rows are at most a step away. (The more keys, the more rows have some weight in the
    middle, and the less it moves them.) A factor doesn't show in a cosine; here it does. Where rounding the exact result to out's dtype alone
    takes more than the tolerance, as it may with bf16 and a row or two, that is the limit. Returns how many rows were open."""
    tolerance = TOLERANCE[out.dtype]
    expected, expected_lse, is_open = reference_and_open_rows(q, k, v, recipe, tolerance / 2, **options)
    what = f"{q.shape[1]} queries, {k.shape[1]} keys"
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert not out.isnan().any()
    seen = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert torch.equal(lse[~seen], expected_lse[~seen].float())
    rows, expected_rows = out.transpose(1, 2), expected.transpose(1, 2)
    assert not rows[~seen].any()
    settled = seen & ~is_open
    if settled.any():
        assert relative_l2(lse[settled], expected_lse[settled]) < lse_tolerance, what
    if seen.any() and _error(rows[seen], expected_rows[seen]) > tolerance:
        assert is_open.sum() <= max(1, 0.1 * is_open.numel()), f"{is_open.sum()} of {is_open.numel()} rows are open, at {what}"
        error = _error(rows[settled], expected_rows[settled]) if settled.any() else 0.0
        assert error <= tolerance, f"relative L2 {error:.2e} at {what}"
    for row, expected_row in zip(rows[is_open], expected_rows[is_open], strict=True):
        assert relative_l2(row, expected_row) < ONE_STEP, what
    return int(is_open.sum())
