"""report.json and the videos beside it as one self-contained page: report.html makes no request, so it can be mailed or archived as it is."""

import base64
import datetime
import json
from pathlib import Path
from typing import Any

from videoqat.errors import UserError
from videoqat.evaluation import charts
from videoqat.files import atomic_path

SMALL_WIDTH = 256  # videos up to this width are shown enlarged, with their pixels as squares


def _number(value: float | None, digits: int = 3, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def _signed(value: float, digits: int) -> str:
    """With its sign, a true minus, and no sign where it rounds to zero."""
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}".replace("-", "−") if rounded else f"{0:.{digits}f}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


def _psnr(found: dict[str, Any]) -> str:
    """Mean PSNR of one or many videos; identical ones have none."""
    return "identical" if found["psnr_mean"] is None else f"{found['psnr_mean']:.1f} dB"


def _kernels(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The receipts of the entry's own recipe, else (nothing is quantised) all of them."""
    own = [receipt for receipt in entry["receipts"] if receipt["recipe"] == entry["recipe"]["name"]]
    return own or entry["receipts"]


def _plots(entries: list[dict[str, Any]], warmed_up: bool) -> list[dict[str, str]]:
    """Title, SVG and explanation of every plot there is data for."""
    plots = []
    if entries[0]["validation"]:
        found = entries[0]["validation"]
        note = (
            f"Every entry meets the same {found['samples']} clips, noise and {found['times']} times a clip. The point is the mean difference, "
            "the bar its 95 % interval (bootstrap over clips)."
        )
        plots.append({"title": "Validation loss", "svg": charts.validation(entries), "note": note})
    if any(entry["layers"] for entry in entries):
        note = "‖quantised − exact‖ / ‖exact‖ of each quantised layer's attention output, on inputs taken from denoising."
        plots.append({"title": "Error by layer", "svg": charts.layers(entries), "note": note})
    if any(entry["training"] for entry in entries):
        note = "From each run's own log; faint as logged, strong a running mean. Runs that saw other data or steps can't be held side by side."
        plots.append({"title": "Training loss", "svg": charts.training_loss(entries), "note": note})
    if any(entry["training"] and entry["training"]["health"] for entry in entries):
        note = "The same relative error while training; the line is the mean over layers, the band reaches from the best to the worst layer."
        plots.append({"title": "Quantisation error during training", "svg": charts.training_health(entries), "note": note})
    warm_up = (
        "after an untimed warm-up" if warmed_up else "the first of each recipe with whatever is done at first use (warm_up=true leaves that out)"
    )
    plots.append({"title": "Latency", "svg": charts.latency(entries), "note": f"Median over videos, {warm_up}."})
    return plots


def _scenes(report: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """One row of videos for each scene, in the entries' order. Every entry's videos are listed in the same order: two scenes may have prompt and seed
    in common, and begin with other pictures or be of other sizes."""
    rows = []
    shown = [[video for video in report["videos"] if not video["repeat"] and video["entry"] == entry["name"]] for entry in report["entries"]]
    for scene in zip(*shown, strict=True):
        videos = []
        for index, video in enumerate(scene):
            path = out / video["file"]
            if not path.is_file():
                raise UserError(f"{path}, which {out / 'report.json'} lists, is not there; run the comparison again to render it")
            uri = "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
            videos.append({**video, "uri": uri, "colour": charts.colour(index)})
        rows.append({"prompt": scene[0]["prompt"], "seed": scene[0]["seed"], "videos": videos})
    return rows


def _caveats(report: dict[str, Any]) -> list[str]:
    """What a reader must know before drawing conclusions."""
    floor = report["floor"]
    same = "bit for bit the same" if floor["identical_videos"] == floor["videos"] else f"{_psnr(floor)} apart, SSIM {floor['ssim_mean']:.3f}"
    if "st_lpips_mean" in floor and floor["st_lpips_mean"] > 0:
        same += f", ST-LPIPS {floor['st_lpips_mean']:.4f}"
    caveats = [
        f"PSNR and SSIM are no verdicts. They say whether sampling took the same path, not which video is better. The floor: {report['reference']} "
        f"rendered twice is {same}. For scale: over many steps even good 8-bit attention leads to another video.",
    ]
    emulated = [entry["name"] for entry in report["entries"] if any(not receipt["native"] for receipt in entry["receipts"])]
    if emulated:
        caveats.append(
            f"On this device quantised attention is emulated ({', '.join(emulated)}): its numbers are those of the quantised formats, "
            "its latency says nothing about 4-bit hardware."
        )
    if "absent" in report.get("st_lpips", {}):  # reports of earlier versions don't tell
        caveats.append(f"No ST-LPIPS: {report['st_lpips']['absent']}.")
    if report["entries"][0]["validation"] is None:
        caveats.append("No validation loss: the comparison was not given a validation_cache.")
    elif report["entries"][0]["validation"]["ci95"] is None:
        caveats.append("One validation clip gives no interval: the differences of the validation loss may be luck.")
    kept = [entry["name"] for entry in report["entries"] if entry["recipe"].get("keep_first_steps") or entry["recipe"].get("keep_last_steps")]
    if kept and report["entries"][0]["validation"]:
        caveats.append(
            f"Validation loss knows no denoising steps: {', '.join(kept)} is quantised there at all times, also at those of steps that it keeps."
        )
    if report["ranks"] != [1]:
        ranks = " or ".join(map(str, report["ranks"]))
        caveats.append(f"The videos were rendered by {ranks} processes at the same time; latencies are those of each process's own device.")
    if len(report["commits"]) > 1:
        caveats.append(f"The videos were rendered by several versions of the code: {', '.join(report['commits'])}.")
    return caveats


def render(report: dict[str, Any], out: Path) -> str:
    """The page as HTML.

    Args:
        report: what report.json holds.
        out: the folder in which the videos lie that it lists.

    Raises:
        UserError: a video is missing.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": _number, "seconds": _seconds, "signed": _signed, "psnr": _psnr}
    sampling = report["settings"]["sampling"]
    return environment.get_template("report.html.j2").render(
        report=report,
        date=datetime.datetime.fromisoformat(report["provenance"]["date"]).strftime("%Y-%m-%d %H:%M UTC"),
        entries=[{**entry, "colour": charts.colour(i), "kernels": _kernels(entry)} for i, entry in enumerate(report["entries"])],
        sampling=sampling,
        pixelated=sampling["width"] <= SMALL_WIDTH,
        plots=_plots(report["entries"], report["settings"].get("warm_up", True)),  # compare always does
        scenes=_scenes(report, out),
        caveats=_caveats(report),
        warnings=list(dict.fromkeys(warning for entry in report["entries"] for warning in entry["warnings"])),
    )


def write_report(out: str | Path) -> Path:
    """Builds `out`/report.html from `out`/report.json and the videos it lists; returns its path.

    Raises:
        UserError: no report.json there, or a video is missing.
    """
    out = Path(out)
    if not (out / "report.json").is_file():
        raise UserError(f"{out} holds no report.json; legal: the output folder of a comparison")
    html = render(json.loads((out / "report.json").read_text()), out)
    with atomic_path(out / "report.html") as aside:
        aside.write_text(html, encoding="utf-8")
    return out / "report.html"
