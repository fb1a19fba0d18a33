"""What `bench forward` measured, as a page.

    python -m videoqat.models.bench_table PAGE.md.j2 RESULT.json... > PAGE.md

The template may use

    runs                        date, device, versions and command of each file
    times                       table of all models and contenders
    errors                      table of all models and quantised recipes: medians over layers, and the worst layer
    activations                 table of what the layers were fed
    contender(model, name)[key] any number of a contender; layers(model) all layers of a model
"""

import statistics
from collections.abc import Iterable
from typing import Any

from videoqat.pages import fill, print_page, run_line


def render(template: str, files: Iterable[dict[str, Any]]) -> str:
    """A page: `template` filled from what `bench_forward` returned, once for each model.

    Raises:
        jinja2.UndefinedError, KeyError: the template asks for what wasn't measured.
    """
    by_model = {one["config"]["model"]: one for one in files}

    def contender(model: str, name: str) -> dict[str, Any]:
        for one in by_model[model]["contenders"]:
            if one["name"] == name:
                return dict(one)
        raise KeyError(f"{name} was not measured with {model}")

    names = {
        "runs": "\n".join(run_line(one, f"{model}, {one['size']}, {one['dtype']}") for model, one in by_model.items()),
        "times": _times(by_model),
        "errors": _errors(by_model),
        "activations": _activations(by_model),
        "contender": contender,
        "layers": lambda model: by_model[model]["layers"],
    }
    return fill(template, names)


def _times(by_model: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| model | video + text tokens | weights, GB | contender | forward, ms | x diffusers | peak, GB | kernels | output against bf16 |",
        "|---|---|---:|---|---:|---:|---:|---|---:|",
    ]
    for model, result in by_model.items():
        about = f"| {model} | {result['num_tokens']:,} + {result['text_tokens']} | {result['weight_bytes'] / 1e9:.1f}"
        for one in result["contenders"]:
            peak = f"{one['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in one else ""
            kernels = ", ".join(f"{r['kernel']} ({r['recipe']}, {r['calls']} calls)" for r in one["receipts"])
            error = f"{one['output_error']:.4f}" if one["output_error"] else "the same"
            lines.append(f"{about} | {one['name']} | {one['milliseconds']:,.0f} | {one['ratio']:.3f} | {peak} | {kernels} | {error} |")
    return "\n".join(lines)


def _errors(by_model: dict[str, dict[str, Any]]) -> str:
    heads = ["from bf16 attention", "from exact attention", "bf16 from exact attention", "kernel from its recipe, worst"]
    lines = ["| model | recipe | layers | " + " | ".join(heads) + " | worst layer |", "|---|---|---:|" + "---:|" * len(heads) + "---|"]
    for model, result in by_model.items():
        for recipe in dict.fromkeys(name for layer in result["layers"] for name in layer["recipes"]):
            layers = [layer for layer in result["layers"] if recipe in layer["recipes"]]
            mine = [layer["recipes"][recipe] for layer in layers]
            worst = max(layers, key=lambda layer: layer["recipes"][recipe]["bf16_distance"])
            cells = [
                f"{statistics.median(one['bf16_distance'] for one in mine):.3f}",
                f"{statistics.median(one['exact_error'] for one in mine):.3f}",
                f"{statistics.median(layer['bf16_error'] for layer in layers):.4f}",
                f"{max(one['kernel_error'] for one in mine if 'kernel_error' in one):.1e}",
                f"{worst['name']}: {worst['recipes'][recipe]['bf16_distance']:.3f}",
            ]
            lines.append(f"| {model} | {recipe} | {len(mine)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _activations(by_model: dict[str, dict[str, Any]]) -> str:
    lines = ["| model | layer | q | k | v | keys attended to |", "|---|---|---:|---:|---:|---:|"]
    for model, result in by_model.items():
        layers = result["layers"]
        for layer in (layers[i] for i in sorted({0, len(layers) // 2, len(layers) - 1})):
            deviations = " | ".join(f"{layer[f'{name}_std']:.3f}" for name in "qkv")
            lines.append(f"| {model} | {layer['name']} | {deviations} | {layer['effective_keys']:,.0f} of {layer['num_keys']:,} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print_page("videoqat.models.bench_table", "What `bench forward` measured, as a page.", render)
