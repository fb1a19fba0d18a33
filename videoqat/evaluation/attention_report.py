"""What `compare-attention` measured, as tables in the form of SageAttention3's Tables 1 and 16 (arXiv 2505.11594): text, Markdown and HTML.

The first table holds all recipes. Then come the paper's three questions, each about recipes that differ in one thing alone: which format, how P is
scaled, what is smoothed. A question that fewer than two of the recipes answer is left out.
"""

import datetime
from pathlib import Path
from typing import Any

from videoqat.evaluation import charts
from videoqat.files import atomic_path
from videoqat.pages import run_line

Result = dict[str, Any]
Row = list[str]

NO_CHOICE = "–"
COLUMNS = ("CosSim ↑", "worst", "L1 ↓", "worst", "RMSE ↓", "worst")
ABOUT = (
    "Each layer's attention output under a recipe, against exact attention (fp64) of the same Q, K and V; the mean over layers, and the worst layer. "
    "L1 is sum |O - O'| / sum |O|; RMSE is in the units of V, so it compares recipes, not models. Definitions: SageAttention3, arXiv 2505.11594."
)


def _format(recipe: Result) -> str:
    names = (recipe["qk"].upper(), recipe["pv"].upper())
    searched = ", searched" if len(recipe["scale_divisors"]) > 1 else ""
    across = ", V along head_dim" if recipe.get("v_blocks") == "head_dim" else ""
    twice = f", {' '.join(recipe['twice']).upper()} twice" if recipe.get("twice") else ""
    return (names[0] if names[0] == names[1] else f"{names[0]} / {names[1]}") + searched + across + twice


def _p_scale(recipe: Result) -> str:
    """How P's range is used; only the scales of NVFP4 and FP8, which end somewhere, leave it open."""
    if recipe["two_level_p"]:
        return "two-level"
    if recipe["pv"] not in ("nvfp4", "fp8"):
        return NO_CHOICE
    return f"gain 2^{recipe['p_gain_log2']}" if recipe["p_gain_log2"] else "direct"


def _smoothing(recipe: Result) -> str:
    smoothed = {(False, False): "none", (True, False): "Q", (False, True): "K", (True, True): "Q and K"}[recipe["smooth_q"], recipe["smooth_k"]]
    if not recipe.get("rotate_qk"):
        return smoothed
    return "rotated" if smoothed == "none" else f"{smoothed}, rotated"


ASPECTS = {"format of Q, K / P, V": _format, "P": _p_scale, "smoothing": _smoothing}
QUESTIONS = {
    "Which format (Table 1a)": "format of Q, K / P, V",
    "How P is scaled (Table 1b)": "P",
    "What is smoothed (Table 16)": "smoothing",
}


def _numbers(entry: Result) -> Row:
    cells = []
    for key in ("cosine", "relative_l1", "rmse"):
        for value in (entry["mean"][key], entry["worst"][key]["value"]):
            cells.append(f"{100 * value:.3f} %" if key == "cosine" else f"{value:.4g}")
    return cells


def overall(result: Result) -> list[Row]:
    """Heading and a row for each recipe, in the order in which they were given."""
    rows = [["recipe", *ASPECTS, "layers", *COLUMNS, "worst CosSim in"]]
    for entry in result["recipes"]:
        recipe = entry["recipe"]
        rows.append(
            [
                recipe["name"],
                *(aspect(recipe) for aspect in ASPECTS.values()),
                str(len(entry["layers"])),
                *_numbers(entry),
                entry["worst"]["cosine"]["layer"],
            ]
        )
    return rows


def questions(result: Result) -> dict[str, list[Row]]:
    """Title -> table of recipes that differ in what is asked alone, heading first; the largest such group for each question."""
    tables = {}
    for title, asked in QUESTIONS.items():
        group = max((_differing_in(asked, anchor, result["recipes"]) for anchor in result["recipes"]), key=len)
        if len({ASPECTS[asked](entry["recipe"]) for entry in group}) > 1:
            rows = [[ASPECTS[asked](entry["recipe"]), entry["recipe"]["name"], *_numbers(entry)] for entry in group]
            tables[title] = [[asked, "recipe", *COLUMNS], *rows]
    return tables


def _differing_in(asked: str, anchor: Result, entries: list[Result]) -> list[Result]:
    """Those of `entries` that are like `anchor` in everything else. Formats that leave no choice of P's scale are like any."""

    def alike(entry: Result) -> bool:
        ours, theirs = entry["recipe"], anchor["recipe"]
        same = all(aspect(ours) in (aspect(theirs), NO_CHOICE) for name, aspect in ASPECTS.items() if name != asked)
        return same and list(entry["layers"]) == list(anchor["layers"]) and ours["normalizer"] == theirs["normalizer"]

    return [entry for entry in entries if alike(entry)]


def text_table(result: Result) -> str:
    """All recipes, for the terminal."""
    rows = overall(result)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def markdown_table(rows: list[Row]) -> str:
    """A table of Markdown, heading first."""
    heading, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (heading, ["---"] * len(heading), *rest))


def markdown(result: Result) -> str:
    """The page report.md; its parts stand under headings of the second level, so that it can go into another page."""
    tables = {"All recipes": overall(result), **questions(result)}
    sections = [f"## {title}\n\n{markdown_table(rows)}" for title, rows in tables.items()]
    how = f"{_looked_at(result)}; {result['dtype'].removeprefix('torch.')}"
    return "\n\n".join(["# Attention alone", ABOUT, *sections, "## How it was made", run_line(result, how)]) + "\n"


def _looked_at(result: Result) -> str:
    prompts, seeds, steps = len(result["prompts"]), len(result["seeds"]), ", ".join(map(str, result["steps"]))
    return (
        f"{result['model']}: {result['num_tokens']} video tokens, {prompts} {'prompt' if prompts == 1 else 'prompts'}, "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}, denoising {'step' if len(result['steps']) == 1 else 'steps'} {steps} "
        f"of {result['settings']['sampling']['num_inference_steps']} (from 0)"
    )


def html(result: Result) -> str:
    """The page report.html: self-contained, in the style of `compare`'s."""
    import jinja2

    shown = result["recipes"][: len(charts.COLOURS)]  # a colour of its own for each
    curves = [
        {"name": e["recipe"]["name"], "layers": {name: {"relative_error": found["relative_l1"]} for name, found in e["layers"].items()}}
        for e in shown
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("attention_report.html.j2").render(
        result=result,
        date=datetime.datetime.fromisoformat(result["provenance"]["date"]).strftime("%Y-%m-%d %H:%M UTC"),
        about=ABOUT,
        looked_at=_looked_at(result),
        tables={"All recipes": overall(result), **questions(result)},
        plot=charts.layers(curves),
        plotted=[curve["name"] for curve in curves],
    )


def write_report(result: Result, out: Path) -> dict[str, str]:
    """report.md and report.html in `out`; where they are, by key."""
    pages = {"report_md": (out / "report.md", markdown(result)), "report_html": (out / "report.html", html(result))}
    for path, text in pages.values():
        with atomic_path(path) as aside:
            aside.write_text(text, encoding="utf-8")
    return {key: str(path) for key, (path, _) in pages.items()}
