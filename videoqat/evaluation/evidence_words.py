"""Sentences on the evidence's page that follow from its numbers: whether an aim was met, and whether one training did better than another.

Nothing here is a verdict that could be typed otherwise: with other numbers the words are others.
"""

from typing import Any

import numpy as np


def aim(wish: str, value: float, at_least: float, low: float | None = None, high: float | None = None) -> str:
    """Whether `value` reaches `at_least`, with bounds (of seeds, or an interval) that say how sure that is.

    Args:
        wish: what was aimed at; begins the sentence.
        value: what was measured.
        at_least: the aim.
        low, high: bounds of `value`; None: there are none.
    """
    found = f"{value:.1%}" + ("" if low is None or high is None else f" ({low:.1%} to {high:.1%})")
    if value < at_least:
        verdict = "**Not met**" if high is None or high < at_least else "**Not met**, though within reach of the bounds"
    else:
        verdict = "**Met**" if low is None or low >= at_least else "**Met**, but not by the lower bound"
    return f"{wish}, at least {at_least:.0%}: {found}. {verdict}."


def compared(mine: list[float], other: list[float]) -> str:
    """`higher` or `lower` where every seed says so, else `not told apart`. Seeds are paired.

    A single seed can tell nothing apart.
    """
    signs = {float(np.sign(a - b)) for a, b in zip(mine, other, strict=True)}
    if len(mine) < 2 or signs not in ({1.0}, {-1.0}):
        return "not told apart"
    return "higher" if signs == {1.0} else "lower"


QUANTITIES = ("loss", "median gradient norm", "largest gradient norm")
EXPECTED = {"higher": ("higher",), "lower": ("lower",), "not lower": ("higher", "not told apart"), "not higher": ("lower", "not told apart")}


def claim(one: dict[str, Any], row: dict[str, Any], other: dict[str, Any], quantity: str, paper: str = "") -> str:
    """How a row stands to another one over the seeds that both have and, where the paper says something, whether that is so: a single seed
    neither agrees nor contradicts.

    Args:
        one: what `evidence run` gathered.
        row, other: of `evidence_table.summarise`.
        quantity: one of `QUANTITIES`; gradient norms are those of the row's training.
        paper: one of `EXPECTED`, or empty.

    Raises:
        KeyError: no such quantity or expectation.
    """
    if quantity not in QUANTITIES or paper not in ("", *EXPECTED):
        raise KeyError(f"{quantity!r}, {paper!r}; legal: {', '.join(QUANTITIES)}; {', '.join(EXPECTED)}")
    seeds = [seed for seed in row["seeds"] if seed in other["seeds"]]
    if quantity == "loss":
        found = {(each["name"], each["seed"]): each["clip_losses"] for each in one["rows"]}
        keys = row["name"], other["name"]
    else:
        found = {(each["name"], each["seed"]): each["grad_norm"] for each in one["trainings"]}
        keys = row["training"], other["training"]
    of = np.max if quantity == "largest gradient norm" else np.median if quantity == "median gradient norm" else np.mean
    seeds = [seed for seed in seeds if all(found[key, seed] for key in keys)]
    if not seeds:
        return f"{quantity}: not recorded"
    mine, others = ([float(of(found[key, seed])) for seed in seeds] for key in keys)
    verdict, digits = compared(mine, others), 5 if quantity == "loss" else 3
    told = f"{quantity} {np.mean(mine):.{digits}f} against {np.mean(others):.{digits}f} of {other['name']}"
    told += f": {verdict} in {len(seeds)} seeds" if len(seeds) > 1 else ", of a single seed, which tells nothing apart"
    if not paper:
        return told
    if verdict in EXPECTED[paper] and len(seeds) > 1:
        return f"{told}; the paper: {paper}. **Agrees**"
    return f"{told}; the paper: {paper}. " + ("**Not seen here**" if verdict == "not told apart" else "**Contradicts the paper**")
