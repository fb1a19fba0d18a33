"""What `bench attention` measured, as tables: text for the terminal, Markdown for a page.

    python -m videoqat.attention.bench_table PAGE.md.j2 RESULT.json... > PAGE.md

fills a page's template with the tables of one or several result files. The template may use

    runs                                   date, device, versions and command of each file
    times, memory, rates                   tables of all contenders at all shapes
    ratio(shape, contender, measurement)   a time as a multiple of cuDNN's
    value(shape, contender, *keys)         any number of a contender, such as value("wan-1.3b", "attn_qat", "relative_l2_error", "dq")
"""

from collections.abc import Callable, Iterable
from typing import Any

from videoqat.pages import fill, print_page, run_line

MEASUREMENTS = ("inference", "forward", "backward", "forward_backward")
NONE = ""

Row = list[str]


def text_table(result: dict[str, Any]) -> str:
    """One shape's milliseconds (and in brackets the multiple of torch's first), bytes kept for each token and channel, and largest error."""
    contenders = result["contenders"]
    baseline = next((name for one in contenders for name in one["ratio"]), "")
    timed = [name for name in MEASUREMENTS if any(name in one["milliseconds"] for one in contenders)]
    rows = [[f"ms (x {baseline})" if baseline else "ms", *timed, "kept B", "error"]]
    for one in contenders:
        errors = one.get("relative_l2_error", {}).values()
        error = f"{max(errors):.1e}" if errors else NONE
        rows.append([one["name"], *(_time(one, name, baseline) for name in timed), _number(one, "saved_bytes", form=".2f"), error])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows
    ]
    for one in contenders:
        if "prepass_gb_per_s" in one:
            lines.append(f"{one['name']}: quantising takes {_number(one, 'prepass_milliseconds', 'inference', form='.3f')} ms, {_of_copying(one)}")
    return "\n".join([*lines, *(f"{what}: {why}" for what, why in result["unavailable"].items())])


def render(template: str, files: Iterable[dict[str, Any]]) -> str:
    """A page: `template` (jinja2) filled from what `bench_attention` returned, once or several times.

    Raises:
        jinja2.UndefinedError, KeyError: the template asks for what wasn't measured.
    """
    files = list(files)
    results = [result for one in files for result in one["results"]]

    def value(shape: str, contender: str, *keys: str) -> Any:
        found = [one for result in results if result["shape"]["name"] == shape for one in result["contenders"] if one["name"] == contender]
        if not found:
            raise KeyError(f"{contender} at {shape} was not measured")
        number: Any = found[0]
        for key in keys:
            number = number[key]
        return number

    names = {
        "runs": "\n".join(run_line(one, f"{one['dtype']}, medians of {one['repeats']} runs") for one in files),
        "times": _times(results),
        "memory": _memory(results),
        "rates": _rates(results),
        "value": value,
        "ratio": lambda shape, contender, measurement: value(shape, contender, "ratio", "sdpa_cudnn", measurement),
    }
    return fill(template, names)


def _number(one: dict[str, Any], *keys: str, form: str) -> str:
    found: Any = one
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return NONE if found is None else format(found, form)


def _of_copying(one: dict[str, Any]) -> str:
    """How fast the pre-pass moves its bytes."""
    return f"{one['prepass_gb_per_s']:.0f} GB/s, {one['prepass_gb_per_s'] / one['copy_gb_per_s']:.0%} of a copy's"


def _time(one: dict[str, Any], measurement: str, baseline: str) -> str:
    ratio = _number(one, "ratio", baseline, measurement, form=".2f")
    return _number(one, "milliseconds", measurement, form=".2f") + (f" ({ratio})" if ratio else "")


def _times(results: list[dict[str, Any]]) -> str:
    """Milliseconds, and in brackets the multiple of cuDNN's."""

    def row(one: dict[str, Any]) -> Row:
        cells = [_time(one, name, "sdpa_cudnn") for name in MEASUREMENTS]
        errors = (
            f"{float(error):.1e}" if (error := _number(one, "relative_l2_error", name, form="")) else NONE for name in ("out", "dq", "dk", "dv")
        )
        return [*cells, *errors]

    return _table(results, ["inference ms", "forward ms", "backward ms", "both ms", "error O", "dQ", "dK", "dV"], row)


def _memory(results: list[dict[str, Any]]) -> str:
    def row(one: dict[str, Any]) -> Row:
        peak = (_number(one, "peak_bytes", name, form="") for name in ("inference", "forward_backward"))
        saved = (_number(one, key, form=".2f") for key in ("saved_bytes", "saved_bytes_without_output"))
        return [*saved, *(f"{float(size) / 1e9:.2f}" if size else NONE for size in peak)]

    return _table(results, ["kept for backward, B", "without O, B", "peak of inference, GB", "peak of both, GB"], row)


def _rates(results: list[dict[str, Any]]) -> str:
    def row(one: dict[str, Any]) -> Row:
        rates = [_number(one, kind, name, form=".0f") for name in MEASUREMENTS[:3] for kind in ("tflops", "executed_tflops")]
        for name in ("inference", "forward"):
            share = _number(one, "prepass_share", name, form=".1%")
            moved = f", {_of_copying(one)}" if name == "inference" and "prepass_gb_per_s" in one else NONE
            rates.append(_number(one, "prepass_milliseconds", name, form=".3f") + (f" ({share}{moved})" if share else ""))
        return rates

    heads = [f"{name}{kind}" for name in MEASUREMENTS[:3] for kind in ("", ", executed")]
    return _table(results, [*heads, "pre-pass ms, inference", "pre-pass ms, forward"], row)


def _table(results: list[dict[str, Any]], heads: Row, row: Callable[[dict[str, Any]], Row]) -> str:
    lines = ["| shape | contender | " + " | ".join(heads) + " |", "|---|---|" + "---:|" * len(heads)]
    for result in results:
        shape = result["shape"]
        tokens = f"{shape['num_queries']:,}" + ("" if shape["num_keys"] == shape["num_queries"] else f" to {shape['num_keys']:,}")
        label = f"{shape['name']}: {tokens} x {shape['num_heads']} x {shape['head_dim']}"
        for one in result["contenders"]:
            lines.append(f"| {label} | {one['name']} | " + " | ".join(row(one)) + " |")
            label = NONE
    return "\n".join(lines)


if __name__ == "__main__":
    print_page("videoqat.attention.bench_table", "What `bench attention` measured, as a page.", render)
