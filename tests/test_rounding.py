"""E2M1 and E4M3 rounding against a search through the table of values, at every value, every tie and their fp32 neighbours."""

import math

import pytest
import torch
from helpers.naive_formats import e2m1_table, e4m3_table, nearest_code

from videoqat.errors import AttentionError
from videoqat.formats import round_e2m1, round_e4m3

GRIDS = {"e2m1": (round_e2m1, e2m1_table()), "e4m3": (round_e4m3, e4m3_table())}


def interesting(table: list[float]) -> torch.Tensor:
    """Every value, every tie, where saturation begins, and the fp32 numbers next to each, of both signs."""
    values = torch.tensor(table)
    next_step = values[-1] + (values[-1] - values[-2])
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, next_step[None], ((values[-1] + next_step) / 2)[None], 2 * next_step[None]])
    points = torch.cat([points, torch.tensor([1e-45, 1e-38, 1e-20, 1e20, 3.4e38, math.inf])])
    points = torch.cat([points, torch.nextafter(points, torch.tensor(0.0)), torch.nextafter(points, torch.tensor(math.inf))])
    return torch.cat([points, -points])


@pytest.mark.parametrize("grid", GRIDS)
def test_every_value_tie_and_neighbour(grid):
    rounding, table = GRIDS[grid]
    x = interesting(table)
    expected = torch.tensor([math.copysign(table[nearest_code(abs(v), table)], v) for v in x.tolist()])
    assert torch.equal(rounding(x).view(torch.int32), expected.view(torch.int32)), "values and signs of zeros, bit by bit"


@pytest.mark.parametrize("grid", GRIDS)
def test_every_bfloat16_number(grid):
    rounding, table = GRIDS[grid]
    x = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    values = torch.tensor(table, dtype=torch.float64)
    lower = torch.searchsorted(values, x.double(), right=True).sub(1).clamp(max=len(table) - 2)
    below, above = x.double() - values[lower], values[lower + 1] - x.double()
    expected = values[torch.where((below < above) | ((below == above) & (lower % 2 == 0)), lower, lower + 1)].float()
    assert torch.equal(rounding(x), expected)
    assert torch.equal(rounding(-x), -expected)


def test_the_ties_of_e2m1_in_plain_sight():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("grid", GRIDS)
def test_nan_stays_nan_and_inf_saturates(grid):
    rounding, table = GRIDS[grid]
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf])
    out = rounding(x)
    assert out[:2].isnan().all()
    assert out[2:].tolist() == [table[-1], -table[-1]]


@pytest.mark.parametrize("grid", GRIDS)
def test_strided_input_is_not_changed(grid):
    rounding, _ = GRIDS[grid]
    x = torch.randn(6, 10, 4)
    view = x.permute(2, 0, 1)[:, ::2]
    before = x.clone()
    assert torch.equal(rounding(view), rounding(view.contiguous()))
    assert torch.equal(x, before)


@pytest.mark.parametrize("grid", GRIDS)
def test_other_dtypes_are_refused(grid):
    with pytest.raises(AttentionError, match=r"float32.*bfloat16"):
        GRIDS[grid][0](torch.zeros(2, dtype=torch.bfloat16))
