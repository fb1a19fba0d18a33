"""What `evidence run` measured, as a page.

    python -m videoqat.evaluation.evidence_table PAGE.md.j2 EVIDENCE.json... > PAGE.md

The template may use

    runs                    date, device, versions and command of each file
    main(n), videos(n)      tables of file n (from 0): losses and what was won back; videos and what they show
    row(name, n)            one row's numbers: `loss`, `gap`, `recovered` (each a dict with mean, sd, low, high over seeds), `seeds`, ...
    norms(n)                gradient norms of each training: median, 99th percentile, largest

Losses are paired: every row of a seed meets the same clips, noise and times as the reference of the same seed.
"""

import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

from videoqat.evaluation.judges import wilson
from videoqat.pages import fill, print_page, run_line
from videoqat.training import validation


def _spread(values: list[float]) -> dict[str, float]:
    """Over seeds."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "sd": sd, "low": min(values), "high": max(values)}


def summarise(one: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of the table for each name, over its seeds, in the configuration's order; rows that have no seed with the reference are left out.

    `gap` is the loss above the reference's, `relative` that as a share, `ci95` its interval over clips (from the lowest bound of the seeds' intervals
    to the highest; None for a single clip), `recovered` the share of the plain row's gap that is won back: 1 - gap / plain gap, seed by seed. None
    where a seed has no plain row, or one without a gap.
    """
    names = [row["name"] for row in one["config"]["rows"]]
    found = {(row["name"], row["seed"]): row for row in one["rows"]}
    table = []
    for asked in one["config"]["rows"]:
        name = asked["name"]
        reference = asked["reference"] or one["config"]["reference"] or names[0]
        plain = asked["plain"] or one["config"]["plain"] or names[1]
        seeds = [seed for seed in one["config"]["seeds"] if (name, seed) in found and (reference, seed) in found]
        if not seeds:
            continue
        losses, gaps, relative, recovered, intervals = [], [], [], [], []
        for seed in seeds:
            paired = {key: np.array(found[key, seed]["clip_losses"])[:, None] for key in {name, reference, plain} if (key, seed) in found}
            told = validation.summarise(paired, reference)
            losses.append(told[name]["loss"])
            gaps.append(told[name]["difference"])
            relative.append(told[name]["relative"])
            intervals.append(told[name]["ci95"])
            if told.get(plain, {"difference": 0.0})["difference"] > 0:
                recovered.append(1 - told[name]["difference"] / told[plain]["difference"])
        mine = [found[name, seed] for seed in seeds]
        table.append(
            {
                "name": name,
                "training": mine[0]["training"],
                "recipe": mine[0]["recipe"]["name"],
                "reference": reference,
                "seeds": seeds,
                "clips": len(mine[0]["clip_losses"]),
                "loss": _spread(losses),
                "gap": _spread(gaps),
                "relative": _spread(relative),
                "ci95": [min(low for low, _ in intervals), max(high for _, high in intervals)] if None not in intervals else None,
                "recovered": _spread(recovered) if len(recovered) == len(seeds) and name not in (reference, plain) else None,
                **_videos(mine),
            }
        )
    return table


def _videos(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over all videos of all seeds (PSNR: of those that differ, where it is finite); accuracies with their intervals, of all together."""
    videos = [video for row in rows for video in row["videos"]]

    def mean(values: list[float | None]) -> float | None:
        some = [value for value in values if value is not None]
        return statistics.fmean(some) if some else None

    result: dict[str, Any] = {
        "videos": len(videos),
        "psnr": mean([video["fidelity"]["psnr_mean"] for video in videos]),
        "ssim": mean([video["fidelity"]["ssim_mean"] for video in videos]),
        "flicker": mean([video["flicker"] for video in videos]),
    }
    judged = [row["judged"] for row in rows if row["judged"]]
    for kind in ("garment", "direction"):
        right, trials = sum(one[kind]["right"] for one in judged), sum(one["videos"] for one in judged)
        result[kind] = {"share": right / trials, "interval": wilson(right, trials)} if judged else None
    return result


def render(template: str, files: Iterable[dict[str, Any]]) -> str:
    """A page: `template` filled from what `evidence run` gathered, once or several times.

    Raises:
        jinja2.UndefinedError, KeyError: the template asks for what wasn't measured.
    """
    files = list(files)
    tables = [summarise(one) for one in files]

    def row(name: str, n: int = 0) -> dict[str, Any]:
        for one in tables[n]:
            if one["name"] == name:
                return one
        raise KeyError(f"{name!r} was not measured")

    names = {
        "runs": "\n".join(run_line(one, f"{len(one['rows'])} rows") for one in files),
        "main": lambda n=0: _main(tables[n]),
        "videos": lambda n=0: _video_table(tables[n]),
        "norms": lambda n=0: _norms(files[n]["trainings"]),
        "row": row,
    }
    return fill(template, names)


def _lines(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


def _main(table: list[dict[str, Any]]) -> str:
    """Losses, gaps and what is won back. Spread is the standard deviation over seeds."""
    heads = ["", "weights", "attention", "seeds", "loss", "held against", "gap", "gap, share of the loss", "95 % of the gap over clips", "won back"]
    rows = []
    for one in table:
        loss, gap, relative, won = one["loss"], one["gap"], one["relative"], one["recovered"]
        cells = [one["name"], one["training"] or "base", one["recipe"], str(len(one["seeds"])), f"{loss['mean']:.5f} ± {loss['sd']:.5f}"]
        interval = f"{one['ci95'][0]:+.5f} to {one['ci95'][1]:+.5f}" if one["ci95"] else ""
        cells += [one["reference"], f"{gap['mean']:+.5f} ± {gap['sd']:.5f}", f"{relative['mean']:+.2%}", interval]
        rows.append([*cells, "" if won is None else f"{won['mean']:.0%} ({won['low']:.0%} to {won['high']:.0%})"])
    return _lines(heads, rows)


def _video_table(table: list[dict[str, Any]]) -> str:
    def accuracy(found: dict[str, Any] | None) -> str:
        return "" if found is None else f"{found['share']:.1%} ({found['interval'][0]:.0%} to {found['interval'][1]:.0%})"

    def number(value: float | None, digits: int) -> str:
        return "identical" if value is None else f"{value:.{digits}f}"

    heads = ["", "videos", "PSNR dB", "SSIM", "garment right", "direction right", "flicker"]
    rows = []
    for one in table:
        if one["videos"]:
            cells = [one["name"], str(one["videos"]), number(one["psnr"], 2), number(one["ssim"], 4)]
            rows.append([*cells, accuracy(one["garment"]), accuracy(one["direction"]), number(one["flicker"], 2)])
    return _lines(heads, rows)


def _norms(trainings: list[dict[str, Any]]) -> str:
    heads = ["training", "recipe", "seed", "steps", "lr", "median gradient norm", "99th percentile", "largest"]
    rows = []
    for one in trainings:
        norms = np.array(one["grad_norm"])
        if len(norms):
            cells = [one["name"], one["recipe"], str(one["seed"]), str(one["steps"]), f"{one['lr']:g}"]
            rows.append([*cells, f"{np.median(norms):.3f}", f"{np.percentile(norms, 99):.3f}", f"{norms.max():.3f}"])
    return _lines(heads, rows)


if __name__ == "__main__":
    print_page("videoqat.evaluation.evidence_table", "What `evidence run` measured, as a page.", render)
