"""What `bench training` measured, as a page.

    python -m videoqat.training.bench_table PAGE.md.j2 RESULT.json... > PAGE.md

The template may use

    runs                                        date, device, versions and command of each file
    steps, parts                                tables of all cases
    case(recipe, layout, checkpointing)[key]    any number of a case; the layout is 1x1x1 and the checkpointing full unless given
    difference(recipe, layout, checkpointing)   how far its losses are from one GPU's, relatively; None if that wasn't measured
    diffusers[key]                              of the first file that measured plain diffusers
    resumed                                     of the first file that resumed onto another layout
"""

from collections.abc import Iterable
from typing import Any

from videoqat.pages import fill, print_page, run_line


def render(template: str, files: Iterable[dict[str, Any]]) -> str:
    """A page: `template` filled from what `bench_training` returned, once or several times.

    Raises:
        jinja2.UndefinedError, KeyError: the template asks for what wasn't measured.
    """
    files = list(files)
    cases = [case for one in files for case in one["cases"]]

    def case(recipe: str, layout: str = "1x1x1", checkpointing: str = "full") -> dict[str, Any]:
        for one in cases:
            if (one["recipe"], one["layout"], one["checkpointing"]) == (recipe, layout, checkpointing):
                return one
        raise KeyError(f"{recipe} on {layout} with {checkpointing} checkpointing was not measured")

    names = {
        "runs": "\n".join(run_line(one, f"{one['config']['model']}, {one['config']['size']}") for one in files),
        "steps": _steps(files),
        "parts": _parts(files),
        "case": case,
        "difference": lambda *which: _difference(files, case(*which)),
        "diffusers": next((one["diffusers"] for one in files if one["diffusers"]), None),
        "resumed": next((one["resumed"] for one in files if one["resumed"]), None),
    }
    return fill(template, names)


def _difference(files: list[dict[str, Any]], case: dict[str, Any]) -> float | None:
    """How far, relatively, a case's losses are from those of one GPU with the same samples in a step; None if those weren't measured."""
    one_gpu = case.get("one_gpu_losses")
    if one_gpu is None:
        baseline = _baseline(files, case)
        if case["gpus"] == 1 or baseline is None or baseline["samples_per_step"] != case["samples_per_step"]:
            return None
        one_gpu = baseline["losses"]
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(case["losses"], one_gpu, strict=False))


def _rows(files: list[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], str]]:
    for one in files:
        for case in one["cases"]:
            yield case, f"| {one['config']['model']} | {case['layout']} | {case['recipe']} | {case['checkpointing']} |"


def _baseline(files: list[dict[str, Any]], case: dict[str, Any]) -> dict[str, Any] | None:
    """The same recipe and checkpointing on one GPU, if it was measured for the same model."""
    for one in files:
        if case in one["cases"]:
            model = one["config"]["model"]
    for one in files:
        for other in one["cases"]:
            alike = all(other[key] == case[key] for key in ("recipe", "checkpointing"))
            if one["config"]["model"] == model and other["gpus"] == 1 and alike:
                return other
    return None


def _steps(files: list[dict[str, Any]]) -> str:
    """Step time, rate, and how much faster than one GPU."""
    heads = ["GPUs", "samples a step", "step s", "tokens/s a GPU", "speed of one GPU", "MFU", "peak GB", "loss differs by"]
    lines = ["| model | layout | recipe | checkpointing | " + " | ".join(heads) + " |", "|---|---|---|---|" + "---:|" * len(heads)]
    for case, label in _rows(files):
        one_gpu = _baseline(files, case)
        speed = "" if one_gpu is None else f"{case['tokens_per_second_per_gpu'] * case['gpus'] / one_gpu['tokens_per_second_per_gpu']:.2f} x"
        mfu = "" if case["mfu"] is None else f"{case['mfu']:.1%}"
        apart = _difference(files, case)
        difference = "" if apart is None else f"{apart:.0e}"
        numbers = [case["gpus"], case["samples_per_step"], f"{case['step_time']:.3f}", f"{case['tokens_per_second_per_gpu']:,.0f}", speed, mfu]
        lines.append(f"{label} " + " | ".join(str(cell) for cell in [*numbers, f"{case['memory_bytes'] / 1e9:.1f}", difference]) + " |")
    return "\n".join(lines)


def _parts(files: list[dict[str, Any]]) -> str:
    """Seconds of a step by part, and of communication (from a traced step)."""
    parts = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "communication_seconds", "communication_exposed_seconds")
    heads = " | ".join(part.removesuffix("_seconds").replace("_", ", ") for part in parts)
    lines = [f"| model | layout | recipe | checkpointing | {heads} |", "|---|---|---|---|" + "---:|" * len(parts)]
    for case, label in _rows(files):
        lines.append(f"{label} " + " | ".join("" if case[part] is None else f"{case[part]:.3f}" for part in parts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print_page("videoqat.training.bench_table", "What `bench training` measured, as a page.", render)
