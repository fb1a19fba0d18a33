"""What `evidence run` measured, as a page.

    python -m videoqat.evaluation.evidence_table PAGE.md.j2 TABLE... > PAGE.md

A table is what `evidence run` wrote, TABLE/evidence.json or a copy of it as TABLE.json, TABLE being the name of its configuration (main); or
sensitivity.json, what `sensitivity` wrote. The template may use

    measured                names of the tables that are there. Of another, what stands below says by which command it is made
    runs                    date, device, versions and command of each
    losses(name)            losses, gaps to the reference, and what was won back; losses(name, reference, plain): every row held against these two
    videos(name)            videos, and what they show
    shares(name)            share of attention in 4 bits, beside gap and PSNR
    norms(name)             gradient norms of each training: median, 99th percentile, largest
    blocks                  what each block does to the output, from sensitivity.json
    row(name, table)        one row's numbers: `loss`, `gap`, `recovered` (each with mean, sd, low, high over seeds), `seeds`, ...
    recovered(name, reference, plain, table)   what a row wins back of another pair's gap: both of main
    aim(wish, ...)          whether it was met, see `evidence_words`
    claim(table, row, other, quantity, paper)   likewise: how one row stands to another, and whether the paper says so

Losses are paired: every row of a seed meets the same clips, noise and times as the reference of the same seed.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videoqat.errors import UserError
from videoqat.evaluation import evidence_words
from videoqat.evaluation.judges import wilson
from videoqat.pages import fill, run_line

TABLES = ("main", "ablations", "options", "more", "where", "tuning")  # configs/evidence/NAME.yaml
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % of Student's t with 1 to 9 degrees of freedom


def read_tables(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The table's name -> what was measured, from TABLE/evidence.json, TABLE.json or sensitivity.json.

    Raises:
        UserError: a file that is called otherwise, holds no JSON, or is a table that was given before.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in paths:
        name = path.parent.name if path.stem == "evidence" else path.stem
        legal = [*TABLES, "sensitivity"]
        if name not in legal or name in files:
            raise UserError(f"{path}: {name!r} is no table, or given twice; legal: TABLE/evidence.json or TABLE.json, TABLE of {', '.join(legal)}")
        try:
            files[name] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} can't be read: {error}") from error
    return files


def spread(values: list[float]) -> dict[str, float]:
    """Over seeds."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "sd": sd, "low": min(values), "high": max(values)}


def interval(differences_SC: NDArray[np.float64]) -> list[float] | None:
    """95 % interval of the mean of paired differences (seeds, clips), both taken for samples of many; None for a single clip.

    Clips are the same for every seed, so their part is the standard error of the seeds' mean over clips; the seeds' part is Student's t (without
    it for a single seed). The two are independent, and are added in squares.
    """
    seeds, clips = differences_SC.shape
    if clips < 2:
        return None
    half = 1.96 * differences_SC.mean(axis=0).std(ddof=1) / clips**0.5
    if seeds > 1:
        t = STUDENT_T[min(seeds - 2, len(STUDENT_T) - 1)]
        half = np.hypot(half, t * differences_SC.mean(axis=1).std(ddof=1) / seeds**0.5)
    mean = differences_SC.mean()
    return [float(mean - half), float(mean + half)]


def summarise(one: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of the table for each name, over its seeds, in the configuration's order; rows that have no seed with the reference are left out.

    `gap` is the loss above the reference's, `relative` that as a share, `ci95` its `interval`; `recovered` and `recovered_ci95` what `won_back` says
    of the plain row's gap, None where nothing is in 4 bits. All of these are None for rows whose recipe keeps denoising steps: a loss has none.
    """
    names = [row["name"] for row in one["config"]["rows"]]
    found = {(row["name"], row["seed"]): row for row in one["rows"]}
    held = _held(one)
    table = []
    for asked in one["config"]["rows"]:
        name = asked["name"]
        reference = asked["reference"] or one["config"]["reference"] or names[0]
        plain = asked["plain"] or one["config"]["plain"] or names[1]
        seeds = [seed for seed in one["config"]["seeds"] if (name, seed) in found and (reference, seed) in held]
        if not seeds:
            continue
        mine = [found[name, seed] for seed in seeds]
        table.append(
            {
                "name": name,
                "training": mine[0]["training"],
                "recipe": mine[0]["recipe"],
                "attention": _told(asked, mine[0]["recipe"]["name"]),
                "kept": asked["keep"],
                "reference": reference,
                "seeds": seeds,
                "four_bit_share": mine[0]["four_bit_share"],
                **_losses(held, name, reference, plain if mine[0]["four_bit_share"] else "", seeds),
                **_videos(mine),
                "psnr_above": _above(held, name, plain, seeds, lambda video: video["fidelity"]["psnr_mean"]),
                "flicker_above": _above(held, name, reference, seeds, lambda video: video["flicker"]),
            }
        )
    return table


def _told(asked: dict[str, Any], recipe: str) -> str:
    """The recipe's name; a changed one, which goes by its row's name, by what was changed."""
    changes = ", ".join(f"{field} {value}" for field, value in asked.get("changes", {}).items())
    return f"{recipe.partition(', ')[0]}, {changes}" if changes else recipe


def _held(one: dict[str, Any]) -> dict[tuple[str, int], Any]:
    """(Name, seed) -> row. What the base gives on the same clips, noise and times is the same for every seed: without videos it is measured once."""
    of_base = {row["name"]: row for row in reversed(one["rows"]) if not row["training"]}
    found = {(row["name"], row["seed"]): row for row in one["rows"]}
    return {(name, seed): row for name, row in of_base.items() for seed in one["config"]["seeds"]} | found


def _clips(held: Mapping[tuple[str, int], Any], name: str, seeds: list[int]) -> NDArray[np.float64] | None:
    """Losses (seeds, clips); None where a seed has none."""
    losses = [held[name, seed]["clip_losses"] if (name, seed) in held else None for seed in seeds]
    return None if None in losses else np.array(losses)


def won_back(
    mine_SC: NDArray[np.float64], reference_SC: NDArray[np.float64], plain_SC: NDArray[np.float64]
) -> tuple[dict[str, float] | None, list[float] | None]:
    """The share of the gap between `plain` and `reference` that is gone, 1 - gap / plain gap: spread over seeds, and the 95 % interval, which takes
    clips and seeds for samples of many (`interval`, of the ratio to first order). None where plain 4 bits cost a seed nothing.
    """
    gap_SC, cost_SC = mine_SC - reference_SC, plain_SC - reference_SC
    if not (cost_SC.mean(axis=1) > 0).all():
        return None, None
    left = gap_SC.mean() / cost_SC.mean()
    around_nought = interval((gap_SC - left * cost_SC) / cost_SC.mean())
    ci95 = None if around_nought is None else [float(1 - left + bound) for bound in around_nought]
    return spread((1 - gap_SC.mean(axis=1) / cost_SC.mean(axis=1)).tolist()), ci95


def _losses(held: Mapping[tuple[str, int], Any], name: str, reference: str, plain: str, seeds: list[int]) -> dict[str, Any]:
    mine_SC, reference_SC, plain_SC = (_clips(held, one, seeds) for one in (name, reference, plain))
    if mine_SC is None or reference_SC is None:
        return dict.fromkeys(("loss", "gap", "relative", "ci95", "recovered", "recovered_ci95"))
    gap_SC = mine_SC - reference_SC
    known = plain_SC is not None and name not in (reference, plain)
    recovered, recovered_ci95 = won_back(mine_SC, reference_SC, plain_SC) if known and plain_SC is not None else (None, None)
    return {
        "loss": spread(mine_SC.mean(axis=1).tolist()),
        "gap": spread(gap_SC.mean(axis=1).tolist()),
        "relative": spread((gap_SC.mean(axis=1) / reference_SC.mean(axis=1)).tolist()),
        "ci95": interval(gap_SC),
        "recovered": recovered,
        "recovered_ci95": recovered_ci95,
    }


def _above(
    held: Mapping[tuple[str, int], Any], name: str, other: str, seeds: list[int], value: Callable[[dict[str, Any]], float | None]
) -> dict[str, Any] | None:
    """The mean difference of videos to those of the same caption and noise by another row, and its `interval`; None where there is none."""
    if name == other or any((one, seed) not in held or not held[one, seed]["videos"] for one in (name, other) for seed in seeds):
        return None
    mine, others = ([[value(video) for video in held[one, seed]["videos"]] for seed in seeds] for one in (name, other))
    if any(one is None for row in (*mine, *others) for one in row):  # videos that are identical have no PSNR
        return None
    differences_SV = np.array(mine, dtype=np.float64) - np.array(others, dtype=np.float64)
    return {"mean": float(differences_SV.mean()), "ci95": interval(differences_SV)}


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
        "st_lpips": mean([video["fidelity"].get("st_lpips_mean") for video in videos]),
        "st_lpips_absent": next((row["st_lpips"]["absent"] for row in rows if "absent" in (row.get("st_lpips") or {})), None),
        "flicker": mean([video["flicker"] for video in videos]),
    }
    judged = [row["judged"] for row in rows if row["judged"]]
    for kind in ("garment", "direction"):
        right, trials = sum(one[kind]["right"] for one in judged), sum(one["videos"] for one in judged)
        result[kind] = {"share": right / trials, "interval": wilson(right, trials), "videos": trials} if judged else None
    result["real_clips"] = judged[0]["real_clips"] if judged else None
    return result


def render(template: str, files: Mapping[str, dict[str, Any]]) -> str:
    """A page: `template` filled from `files`, what was measured by the table's name.

    Raises:
        jinja2.UndefinedError, KeyError: the template asks for what is no table, or of a table that is there for a row that it lacks.
    """
    tables = {name: summarise(one) for name, one in files.items() if name != "sensitivity"}

    def of(make: Any) -> Any:
        def made(name: str, *held_against: str) -> str:
            if name not in TABLES:
                raise KeyError(f"{name!r} is no table; legal: {', '.join(TABLES)}")
            return str(make(name, *held_against)) if name in files else f"Not measured yet: `videoqat evidence run --config evidence/{name}` will."

        return made

    def losses(name: str, reference: str = "", plain: str = "") -> str:
        table = tables[name]
        if reference:
            one = files[name]
            asked = [{**each, "reference": reference, "plain": plain} for each in one["config"]["rows"]]
            table = summarise({**one, "config": {**one["config"], "rows": asked}})
        return _loss_table(table) + _absent(files[name])

    def row(name: str, table: str = "main") -> dict[str, Any]:
        for one in tables[table]:
            if one["name"] == name:
                return one
        raise KeyError(f"{name!r} was not measured in {table}")

    def recovered(name: str, reference: str, plain: str, table: str = "main") -> dict[str, Any]:
        held, others = _held(files[table]), _held(files["main"])
        seeds = row(name, table)["seeds"]
        mine, reference_SC, plain_SC = _clips(held, name, seeds), _clips(others, reference, seeds), _clips(others, plain, seeds)
        if mine is None or reference_SC is None or plain_SC is None:
            raise KeyError(f"{name!r} of {table}, {reference!r} and {plain!r} of main: not all were measured with seeds {seeds}")
        share, ci95 = won_back(mine, reference_SC, plain_SC)
        if share is None:
            raise KeyError(f"{plain!r} costs nothing against {reference!r}")
        return {"recovered": share, "recovered_ci95": ci95}

    names = {
        "measured": sorted(files),
        "runs": "\n".join(run_line(one, name if name == "sensitivity" else f"{name}: {len(one['rows'])} rows") for name, one in files.items()),
        "losses": of(losses),
        "videos": of(lambda name: _video_table(tables[name])),
        "shares": of(lambda name: _share_table(tables[name]) + _absent(files[name])),
        "norms": of(lambda name: _norms(files[name]["trainings"])),
        "blocks": _blocks(files["sensitivity"]) if "sensitivity" in files else "Not measured yet: `videoqat sensitivity` will.",
        "row": row,
        "recovered": recovered,
        "aim": evidence_words.aim,
        "claim": lambda table, name, other, quantity, paper="": evidence_words.claim(
            files[table], row(name, table), row(other, table), quantity, paper
        ),
    }
    return fill(template, names)


def _lines(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


def _loss_table(table: list[dict[str, Any]]) -> str:
    """± is the standard deviation over seeds, if there are several."""
    heads = ["", "weights", "attention", "in 4 bits", "seeds", "loss", "held against", "gap (95 %)", "of the loss", "won back (seeds)", "95 %"]
    rows = []
    for one in table:
        if one["loss"] is None:
            continue
        gap, won, several = one["gap"], one["recovered"], len(one["seeds"]) > 1
        loss = f"{one['loss']['mean']:.5f}" + (f" ± {one['loss']['sd']:.5f}" if several else "")
        cells = [one["name"], one["training"] or "base", one["attention"], f"{one['four_bit_share']:.0%}", str(len(one["seeds"])), loss]
        if one["reference"] == one["name"]:  # it is what others are held against
            rows.append([*cells, *[""] * 5])
            continue
        bounds = f" ({one['ci95'][0]:+.5f} to {one['ci95'][1]:+.5f})" if one["ci95"] else ""
        cells += [one["reference"], f"{gap['mean']:+.5f}{bounds}", f"{one['relative']['mean']:+.2%}"]
        over_seeds = f" ({won['low']:.0%} to {won['high']:.0%})" if won and several else ""
        cells += [f"{won['mean']:.0%}{over_seeds}", _percents(one["recovered_ci95"])] if won else ["", ""]
        rows.append(cells)
    return _lines(heads, rows)


def _absent(one: dict[str, Any]) -> str:
    """A sentence that names the rows that are still to be measured, if any."""
    found = {(row["name"], row["seed"]) for row in one["rows"]}
    told = []
    for row in one["config"]["rows"]:
        once = not row["training"] and not (row["videos"] and one["config"]["prompts"])  # what the base gives is the same for every seed
        seeds = one["config"]["seeds"][:1] if once else one["config"]["seeds"]
        there = sum((row["name"], seed) in found for seed in seeds)
        if there < len(seeds):
            told.append(row["name"] + (f" ({there} of {len(seeds)} seeds)" if there else ""))
    return f"\n\nNot measured yet: {', '.join(told)}." if told else ""


def _percents(bounds: list[float] | None) -> str:
    return f"{bounds[0]:.0%} to {bounds[1]:.0%}" if bounds else ""


def _number(value: float | None, digits: int) -> str:
    return "identical" if value is None else f"{value:.{digits}f}"


def _video_table(table: list[dict[str, Any]]) -> str:
    def accuracy(found: dict[str, Any] | None) -> str:
        return "" if found is None else f"{found['share']:.1%} ({_percents(list(found['interval']))})"

    shown = [one for one in table if one["videos"]]
    perceptual = any(one["st_lpips"] is not None for one in shown)

    def above(found: dict[str, Any] | None) -> str:
        bounds = f" ({found['ci95'][0]:+.2f} to {found['ci95'][1]:+.2f})" if found and found["ci95"] else ""
        return f"{found['mean']:+.2f}{bounds}" if found else ""

    heads = ["", "videos", "PSNR dB", "above plain 4 bits (95 %)", "SSIM", *(["ST-LPIPS"] if perceptual else [])]
    heads += ["garment right", "direction right", "flicker", "above BF16's (95 %)"]
    rows = []
    for one in shown:
        cells = [one["name"], str(one["videos"]), _number(one["psnr"], 2), above(one["psnr_above"]), _number(one["ssim"], 4)]
        cells += [("" if one["st_lpips"] is None else f"{one['st_lpips']:.4f}")] if perceptual else []
        flicker = ["" if one["flicker"] is None else f"{one['flicker']:.2f}", above(one["flicker_above"])]
        rows.append([*cells, accuracy(one["garment"]), accuracy(one["direction"]), *flicker])
    real = next((one["real_clips"] for one in shown if one["real_clips"]), None)
    if real:
        share = {kind: f"{real[kind]['share']:.1%} ({_percents(list(real[kind]['interval']))})" for kind in ("garment", "direction")}
        blank = [""] * (4 if perceptual else 3)
        rows.append(["*real clips, by the same judges*", str(real["videos"]), *blank, share["garment"], share["direction"], "", ""])
    absent = next((one["st_lpips_absent"] for one in shown if one["st_lpips_absent"]), None)
    return _lines(heads, rows) + (f"\n\nST-LPIPS is missing: {absent}." if absent else "")


def _share_table(table: list[dict[str, Any]]) -> str:
    heads = ["", "attention in 4 bits", "gap", "gap, share of the loss", "95 % of the gap", "won back", "PSNR dB"]
    rows = []
    for one in table:
        cells = [one["name"], f"{one['four_bit_share']:.0%}"]
        if one["gap"] is None:
            cells += ["", "", "", ""]
        else:
            bounds = f"{one['ci95'][0]:+.5f} to {one['ci95'][1]:+.5f}" if one["ci95"] else ""
            won = "" if one["recovered"] is None else f"{one['recovered']['mean']:.0%}"
            cells += [f"{one['gap']['mean']:+.5f}", f"{one['relative']['mean']:+.2%}", bounds, won]
        rows.append([*cells, _number(one["psnr"], 2) if one["videos"] else ""])
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


def _blocks(found: dict[str, Any]) -> str:
    rows = [
        [
            str(one["index"]),
            str(one["rank"]),
            *(f"{one[which]['relative_error']:.2%}" for which in ("only", "without")),
            f"{one['only']['loss_change']:+.2%}",
        ]
        for one in found["layers"]
    ]
    return _lines(["block", "rank", "error at the output, it alone in 4 bits", "all but it", "loss, it alone"], rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m videoqat.evaluation.evidence_table", description="What `evidence run` measured, as a page.")
    parser.add_argument("template", type=Path, help="a page's template")
    parser.add_argument("tables", type=Path, nargs="+", help=f"TABLE/evidence.json or TABLE.json, of {', '.join(TABLES)}; sensitivity.json")
    arguments = parser.parse_args()
    try:
        print(render(arguments.template.read_text(), read_tables(arguments.tables)), end="")
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
