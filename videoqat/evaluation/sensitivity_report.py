"""sensitivity.json as one self-contained page, report.html."""

import datetime
import json
from pathlib import Path
from typing import Any

from videoqat.evaluation import charts
from videoqat.files import atomic_path

MOST_HEADS = 10  # worst ones, in the table


def _per_cent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _signed(value: float) -> str:
    """A change in per cent, with its sign and a true minus."""
    return f"{100 * value:+.2g} %".replace("-", "−") if value else "0 %"


def _kept(kept: dict[str, list[int]]) -> str:
    """Such as `3, 17`, or, of a pair, `transformer: 3; transformer_2: 0, 17`."""
    if len(kept) == 1:
        return ", ".join(map(str, *kept.values())) or "none"
    return "; ".join(f"{component}: {', '.join(map(str, layers))}" for component, layers in kept.items() if layers) or "none"


def _worst_heads(result: dict[str, Any]) -> list[dict[str, Any]]:
    found = [
        {"component": row["component"], "layer": row["layer"], "head": head, **numbers}
        for row in result["attention"]
        for head, numbers in enumerate(row["heads"])
    ]
    return sorted(found, key=lambda head: -head["relative_error"])[:MOST_HEADS]


def _plots(result: dict[str, Any]) -> list[dict[str, str]]:
    """Title, SVG and explanation of every plot."""
    proposal = result["proposal"] or {}
    chosen = proposal["count"] if proposal.get("recipe") else None
    kept = {(step["added"]["component"], step["added"]["index"]) for step in result["path"][1 : (chosen or 0) + 1]}
    plots = [
        {
            "title": "What each block does to the output",
            "svg": charts.blocks(result["layers"], kept, result["all"]["relative_error"]),
            "note": "‖output − output in bf16‖ / ‖output in bf16‖ of the block's transformer. The higher a block stands alone, and the lower without "
            "it, the more it is worth keeping.",
        },
        {
            "title": "What keeping blocks buys",
            "svg": charts.kept_path(result["path"], chosen, result["limits"].get("max_error", 0.0)),
            "note": "Every point was measured. The next block to be kept is the one that does most to the output alone: that is greedy, and "
            "another set of that size may do better.",
        },
    ]
    for component in result["components"]:
        rows = [row for row in result["attention"] if row["component"] == component]
        if rows:
            where = f", {component}" if len(result["components"]) > 1 else ""
            note = "Each head's own error, on the activations of a bf16 run."
            plots.append({"title": f"Attention by layer and head{where}", "svg": charts.heads(rows, f"heads-{component}"), "note": note})
    note = "All blocks by the recipe, each clip at its times. Errors where a video begins decide what it shows, errors at the end its detail."
    return [*plots, {"title": "Error by time", "svg": charts.by_time(result["times"]), "note": note}]


def _caveats(result: dict[str, Any]) -> list[str]:
    """What a reader must know before drawing conclusions."""
    clips, times = len(result["clips"]), result["settings"]["timesteps"]
    caveats = [
        f"Measured on {clips} {'clip' if clips == 1 else 'clips'} at {times} {'time' if times == 1 else 'times'} each. The error at the output "
        "says how far a prediction is from bf16's, not how bad a video looks.",
    ]
    if any(not receipt["native"] for receipt in result["receipts"]):
        caveats.append("Quantised attention is emulated on this device: the numbers are those of the formats; the share of attention is no time.")
    if result["all"]["loss_change_ci95"] is None:
        caveats.append("One clip gives no interval: changes of the validation loss may be luck.")
    return caveats


def render(result: dict[str, Any]) -> str:
    """The page as HTML, of what sensitivity.json holds."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"per_cent": _per_cent, "signed": _signed, "kept": _kept}
    return environment.get_template("sensitivity.html.j2").render(
        result=result,
        date=datetime.datetime.fromisoformat(result["provenance"]["date"]).strftime("%Y-%m-%d %H:%M UTC"),
        blocks=sorted(result["layers"], key=lambda row: -row["only"]["relative_error"]),
        several=len(result["components"]) > 1,
        worst_heads=_worst_heads(result),
        plots=_plots(result),
        caveats=_caveats(result),
    )


def write_report(out: Path) -> Path:
    """Builds `out`/report.html from `out`/sensitivity.json; returns its path."""
    html = render(json.loads((out / "sensitivity.json").read_text()))
    with atomic_path(out / "report.html") as aside:
        aside.write_text(html, encoding="utf-8")
    return out / "report.html"
