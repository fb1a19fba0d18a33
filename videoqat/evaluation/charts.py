"""The report's plots, as SVG to be put into the page itself.

Axes and text are drawn in the page's own colour (`currentColor`), so that they suit a light and a dark page; the entries' colours are the
same in every plot and in the table.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

# Okabe and Ito's colours, told apart by colour-blind readers, without the yellow and black that vanish on white or on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
INK = "#123456"  # stands for the page's text colour until the SVG is written
STAGES = (("text_s", "text", 1.0), ("denoise_s", "denoising", 0.7), ("vae_s", "VAE decode", 0.4))
MOST_POINTS = 300  # of a curve: more can't be seen, and make the page heavy


def colour(index: int) -> str:
    """The colour of entry `index`."""
    return COLOURS[index % len(COLOURS)]


def _figure(height: float = 3.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Any, name: str, description: str) -> str:
    """The figure as an `<svg>` element that stands in a page beside others: no XML head, no outside names, ids of its own."""
    import matplotlib as mpl
    from matplotlib.spines import Spine
    from matplotlib.text import Text

    for artist in figure.findobj(lambda artist: isinstance(artist, Text | Spine)):
        artist.set_color(INK)
    for axes in figure.axes:
        axes.tick_params(colors=INK, which="both")
        axes.patch.set_visible(False)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg, count=2)
    svg = re.sub(r'\b(id|xlink:href)="(#?)', rf'\1="\2{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace(INK, "currentColor")
    # The page sets the size: only the viewBox stays.
    svg = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?)\sheight="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)


def as_file(svg: str) -> str:
    """A plot as a file of its own, for pages that can only refer to it: dark ink on white, whatever the page's colours are."""
    return svg.replace(
        "<svg", '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" color="#1e293b" style="background:#fff"', 1
    )


def _legend(axes: Any, **options: Any) -> None:
    axes.legend(frameon=False, fontsize=9, **options)


def _thin(x: Sequence[float], y: Sequence[float]) -> tuple[Any, Any]:
    """Means over neighbouring points, at most `MOST_POINTS` of them."""
    size = -(-len(x) // MOST_POINTS)
    starts = np.arange(0, len(x), size)
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(np.asarray(x, float), starts) / counts, np.add.reduceat(np.asarray(y, float), starts) / counts


def _smooth(y: Any) -> Any:
    """A running mean over a twentieth of the curve, shorter at its ends."""
    half = max(1, len(y) // 40)
    sums = np.concatenate([[0.0], np.cumsum(y)])
    low, high = np.maximum(np.arange(len(y)) - half, 0), np.minimum(np.arange(len(y)) + half + 1, len(y))
    return (sums[high] - sums[low]) / (high - low)


def latency(entries: list[dict[str, Any]]) -> str:
    """Median seconds a video by stage: one stacked bar an entry."""
    figure, axes = _figure(0.9 + 0.45 * len(entries))
    rows = np.arange(len(entries))
    left = np.zeros(len(entries))
    for stage, label, alpha in STAGES:
        widths = np.array([entry["latency"][stage] for entry in entries])
        axes.barh(rows, widths, left=left, height=0.6, color=[colour(i) for i in range(len(entries))], alpha=alpha, label=label)
        left += widths
    axes.set_yticks(rows, [entry["name"] for entry in entries], parse_math=False)
    axes.invert_yaxis()
    axes.grid(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds a video (text, denoising, VAE decode: from full to faint)")
    for row, total in zip(rows, left, strict=True):
        axes.annotate(f"{total:.3g}", (total, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.margins(x=0.1)
    return _svg(figure, "latency", "Median latency by stage")


def validation(entries: list[dict[str, Any]]) -> str:
    """Paired difference of the validation loss to the first entry, in per cent, with its 95 % interval."""
    figure, axes = _figure(0.9 + 0.45 * (len(entries) - 1))
    base = entries[0]["validation"]["loss"]
    for row, entry in enumerate(entries[1:]):
        found = entry["validation"]
        if found["ci95"]:
            axes.plot(
                [100 * bound / base for bound in found["ci95"]], [row, row], color=colour(row + 1), linewidth=3, alpha=0.45, solid_capstyle="round"
            )
        axes.plot(100 * found["relative"], row, "o", color=colour(row + 1), markersize=8)
        axes.annotate(
            f"{100 * found['relative']:+.2g} %", (100 * found["relative"], row), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=9
        )
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(range(len(entries) - 1), [entry["name"] for entry in entries[1:]], parse_math=False)
    axes.set_ylim(len(entries) - 1.5, -0.7)
    axes.grid(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.15)
    axes.set_xlabel("validation loss against the reference, per cent (right: worse)")
    return _svg(figure, "validation", "Paired differences of the validation loss")


def layers(entries: list[dict[str, Any]]) -> str:
    """Relative error of the attention output of each quantised layer."""
    figure, axes = _figure()
    names = list(dict.fromkeys(layer for entry in entries for layer in entry["layers"]))
    for index, entry in enumerate(entries):
        mine = [(names.index(layer), 100 * found["relative_error"]) for layer, found in entry["layers"].items()]
        if mine:
            axes.plot(*zip(*mine, strict=True), "o-", color=colour(index), markersize=4, linewidth=1.4, label=entry["name"])
    shown = names if len(names) <= 8 else names[:: -(-len(names) // 8)]
    axes.set_xticks([names.index(name) for name in shown], shown, rotation=20 if len(shown) > 4 else 0, ha="right" if len(shown) > 4 else "center")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("relative error, per cent")
    _legend(axes)
    return _svg(figure, "layers", "Quantisation error by layer")


def training_loss(entries: list[dict[str, Any]]) -> str:
    """Training loss over steps, smoothed, for entries that name a run."""
    figure, axes = _figure()
    for index, entry in enumerate(entries):
        if entry["training"]:
            step, loss = _thin(entry["training"]["step"], entry["training"]["loss"])
            axes.plot(step, loss, color=colour(index), linewidth=0.7, alpha=0.25)
            axes.plot(step, _smooth(loss), color=colour(index), linewidth=1.8, label=entry["name"])
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    _legend(axes)
    return _svg(figure, "training", "Training loss")


def training_health(entries: list[dict[str, Any]]) -> str:
    """Relative error of quantised attention during training: the mean over layers, and the range between best and worst layer."""
    figure, axes = _figure()
    for index, entry in enumerate(entries):
        health = entry["training"] and entry["training"]["health"]
        if health:
            errors = 100 * np.array([[np.nan if value is None else value for value in values] for values in health["layers"].values()], dtype=float)
            axes.fill_between(health["step"], np.nanmin(errors, axis=0), np.nanmax(errors, axis=0), color=colour(index), alpha=0.15, linewidth=0)
            axes.plot(health["step"], np.nanmean(errors, axis=0), "o-", color=colour(index), markersize=3, linewidth=1.6, label=entry["name"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("relative error, per cent")
    _legend(axes)
    return _svg(figure, "health", "Quantisation error during training")


def blocks(rows: list[dict[str, Any]], kept: set[tuple[str, int]], everywhere: float) -> str:
    """Error at the output with one block alone by the recipe, and with all but it; rows as in sensitivity.json's `layers`, `kept` marked."""
    figure, axes = _figure()
    components = list(dict.fromkeys(row["component"] for row in rows))
    for at, component in enumerate(components):
        mine = [row for row in rows if row["component"] == component]
        suffix = f", {component}" if len(components) > 1 else ""
        index = [row["index"] for row in mine]
        only, without = ([100 * row[name]["relative_error"] for row in mine] for name in ("only", "without"))
        axes.plot(index, only, "o-", color=colour(2 * at), markersize=4, linewidth=1.6, label=f"this block alone{suffix}")
        axes.plot(index, without, "o-", color=colour(2 * at + 1), markersize=3, linewidth=1.2, alpha=0.7, label=f"all but this block{suffix}")
        marked = [(i, value) for i, value in zip(index, only, strict=True) if (component, i) in kept]
        if marked:
            axes.plot(*zip(*marked, strict=True), "o", color=colour(2 * at), markersize=11, fillstyle="none", label=f"proposed to be kept{suffix}")
    axes.axhline(100 * everywhere, color=INK, linewidth=1, linestyle=":", label="all blocks")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("block")
    axes.set_ylabel("error at the output, per cent")
    _legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)  # above: curves may be anywhere
    return _svg(figure, "blocks", "Error at the output by block")


def heads(rows: list[dict[str, Any]], name: str) -> str:
    """Relative error of each head's attention in each layer, as a map; rows as in sensitivity.json's `attention`."""
    figure, axes = _figure(max(2.0, 0.9 + 0.09 * len(rows)))
    errors_LH = np.full((len(rows), max(len(row["heads"]) for row in rows)), np.nan)
    for at, row in enumerate(rows):
        errors_LH[at, : len(row["heads"])] = [100 * head["relative_error"] for head in row["heads"]]
    picture = axes.pcolormesh(np.arange(errors_LH.shape[1] + 1), np.arange(len(rows) + 1), errors_LH, cmap="cividis", vmin=0)
    figure.colorbar(picture, ax=axes, label="relative error, per cent").solids.set_rasterized(False)  # drawn, not a picture within the picture
    shown = [range(0, size, -(-size // 12)) for size in errors_LH.shape]
    axes.set_yticks([at + 0.5 for at in shown[0]], [rows[at]["layer"] for at in shown[0]])
    axes.set_xticks([at + 0.5 for at in shown[1]], [str(at) for at in shown[1]])
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xlabel("head")
    return _svg(figure, name, "Attention error by layer and head")


def kept_path(path: list[dict[str, Any]], chosen: int | None, max_error: float) -> str:
    """Error at the output against the share of attention that is quantised, as more blocks are kept; `chosen` of them proposed."""
    figure, axes = _figure()
    share, error = ([100 * step[key] for step in path] for key in ("share", "error"))
    axes.plot(share, error, "o-", color=colour(0), markersize=4, linewidth=1.6)
    for step in path[:: -(-len(path) // 12)]:
        axes.annotate(
            str(step["count"]), (100 * step["share"], 100 * step["error"]), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    if chosen is not None:
        axes.plot(share[chosen], error[chosen], "o", color=colour(1), markersize=11, fillstyle="none", label=f"proposed: {chosen} kept")
    if max_error:
        axes.axhline(100 * max_error, color=colour(1), linewidth=1, linestyle=":", label="max_error")
    if chosen is not None or max_error:
        _legend(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of attention's arithmetic that is quantised, per cent (numbers: blocks kept)")
    axes.set_ylabel("error at the output, per cent")
    return _svg(figure, "path", "Error against share of quantised attention")


def by_time(rows: list[dict[str, Any]]) -> str:
    """Error at the output at each clip's flow times."""
    figure, axes = _figure()
    for at, component in enumerate(dict.fromkeys(row["component"] for row in rows)):
        mine = [row for row in rows if row["component"] == component]
        times, errors = [row["t"] for row in mine], [100 * row["relative_error"] for row in mine]
        axes.plot(times, errors, "o", color=colour(at), markersize=5, alpha=0.7, label=component)
    axes.set_ylim(0, 1.15 * max(100 * row["relative_error"] for row in rows) or 1)
    axes.set_xlim(0, 1)
    axes.set_xlabel("flow time (0 data, 1 noise: where a video begins)")
    axes.set_ylabel("error at the output, per cent")
    _legend(axes)
    return _svg(figure, "times", "Error by flow time")


def gaps(rows: list[dict[str, Any]]) -> str:
    """Loss above that of BF16, of every row of the evidence that has one, with its 95 % interval; in per cent.

    Rows without anything in 4 bits are of another colour. The axis ends a little beyond the second row's gap, that of plain 4 bits: what is worse by
    far stands at its edge.

    Args:
        rows: of `evidence_table.summarise`, the reference first and plain 4 bits second.
    """
    shown = [row for row in rows if row["gap"] is not None and row["name"] != row["reference"]]
    figure, axes = _figure(0.9 + 0.24 * len(shown))
    edge = 125 * abs(rows[1]["relative"]["mean"])
    for at, row in enumerate(shown):
        gap, loss = 100 * row["relative"]["mean"], row["loss"]["mean"] - row["gap"]["mean"]
        tone = colour(0 if row["four_bit_share"] else 1)
        if row["ci95"] and gap < edge:
            axes.plot([100 * bound / loss for bound in row["ci95"]], [at, at], color=tone, linewidth=3, alpha=0.45, solid_capstyle="round")
        axes.plot(min(gap, edge), at, "o" if gap < edge else ">", color=tone, markersize=5)
        axes.annotate(f"{gap:+.2g} %", (edge * 1.04, at), va="center", fontsize=8, annotation_clip=False)
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_xlim(min(0.0, *(100 * row["relative"]["mean"] for row in shown)) - 0.05 * edge, 1.02 * edge)
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown], fontsize=8, parse_math=False)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("loss above that of BF16 trained as long, per cent", fontsize=9)
    return _svg(figure, "gaps", "What 4 bits cost, and what is left of it")


def four_bit_share(rows: list[dict[str, Any]]) -> str:
    """What 4 bits cost against the share of attention that is computed in them: loss above BF16's, and PSNR to its videos.

    Args:
        rows: of `evidence_table.summarise`, the reference first. Those with `kept` blocks are joined, from all blocks in 4 bits (the second row)
            to none; every other row stands by itself.
    """
    figure, (above, below) = _figures(2, 1, 6.6)
    for axes, key, scale in ((above, "relative", 100.0), (below, "psnr", 1.0)):
        points = [(row, 100 * row["four_bit_share"], scale * _mean(row[key])) for row in rows if row[key] is not None]
        joined = [point for at, point in enumerate(points) if point[0]["kept"] or point[0] is rows[1] or point[0] is rows[0]]
        joined.sort(key=lambda point: -point[1])
        axes.plot(
            [x for _, x, _ in joined],
            [y for _, _, y in joined],
            "o-",
            color=colour(0),
            markersize=5,
            linewidth=1.6,
            label="worst blocks kept in BF16",
        )
        for row, x, y in joined:
            axes.annotate(
                str(row["kept"]) if row["kept"] else row["name"], (x, y), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8
            )
        others = [point for point in points if point not in joined]
        axes.plot([x for _, x, _ in others], [y for _, _, y in others], "s", color=colour(1), markersize=4, label="other recipes")
        low, high = axes.get_ylim()
        for x in sorted({x for _, x, _ in others}):
            column = sorted((point for point in others if point[1] == x), key=lambda point: point[2])
            ats = _apart([y for _, _, y in column], (high - low) / 17)
            low, high = min(low, *ats), max(high, *ats)
            for (row, _, y), at in zip(column, ats, strict=True):
                axes.annotate(row["name"], (x, y), xytext=(x + 1.5, at), textcoords="data", va="center", fontsize=7)
        axes.set_ylim(low, high)
        axes.set_xlim(-6, 124)
        axes.set_xticks(range(0, 101, 20))
    above.set_ylabel("loss above BF16's, per cent")
    below.set_ylabel("PSNR to BF16's video, dB")
    below.set_xlabel("share of attention's products in 4 bits, per cent (numbers: blocks kept)")
    _legend(above, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return _svg(figure, "share", "What 4 bits cost, by how much of attention is computed in them")


def _apart(heights: list[float], step: float) -> list[float]:
    """Ascending heights, moved so that each stands at least `step` above the one before, and their mean stays."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + step) if moved else height)
    shift = (sum(heights) - sum(moved)) / len(heights)
    return [height + shift for height in moved]


def _mean(value: Any) -> float:
    return float(value["mean"] if isinstance(value, dict) else value)


def _figures(rows: int, columns: int, height: float) -> tuple[Any, Any]:
    """Like `_figure`, with several plots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 if columns == 1 else 9.0, height), layout="constrained")
    several = figure.subplots(rows, columns, sharex=True, sharey=columns > 1, squeeze=False).flatten()
    for axes in several:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    return figure, several


def gradient_norms(trainings: list[dict[str, Any]], first: str) -> str:
    """Gradient norms over steps, a plot for each training and a line for each seed, before those of the training `first` in grey.

    Of 50 stretches of a curve the largest norm is drawn: means would hide what these curves are looked at for.

    Args:
        trainings: name, seed, `grad_norm` of every step; those without are left out. One beside `first` has them.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    names = list(dict.fromkeys(one["name"] for one in trainings if one["grad_norm"] and one["name"] != first))
    figure, several = _figures(-(-len(names) // 3), 3, 0.5 + 1.7 * -(-len(names) // 3))
    for axes, name in zip(several, names, strict=False):
        for one in trainings:
            if one["name"] in (name, first) and one["grad_norm"]:
                size = -(-len(one["grad_norm"]) // 50)
                starts = np.arange(0, len(one["grad_norm"]), size)
                largest = np.maximum.reduceat(np.asarray(one["grad_norm"], float), starts)
                own = one["name"] == name
                axes.plot(starts + 1, largest, color=colour(1) if own else INK, alpha=0.8 if own else 0.3, linewidth=0.9, zorder=2 if own else 1)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_title(name, fontsize=9, parse_math=False)
    for axes in several[len(names) :]:
        axes.set_visible(False)
    figure.supxlabel("step", fontsize=9, color=INK)
    figure.supylabel(f"largest gradient norm of 2 % of the steps (grey: {first})", fontsize=9, color=INK)
    return _svg(figure, "gradients", "Gradient norms of trainings")
