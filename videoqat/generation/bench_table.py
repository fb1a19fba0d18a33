"""What `bench generation` measured, as a page.

    python -m videoqat.generation.bench_table PAGE.md.j2 RESULT.json... > PAGE.md

The template may use

    runs                        date, device, versions and command of each file
    stages                      table of all models and contenders, seconds
    contender(model, name)[key] any number of a contender
"""

from collections.abc import Iterable
from typing import Any

from videoqat.pages import fill, print_page, run_line


def render(template: str, files: Iterable[dict[str, Any]]) -> str:
    """A page: `template` filled from what `bench_generation` returned, once for each model.

    Raises:
        jinja2.UndefinedError, KeyError: the template asks for what wasn't measured.
    """
    by_model = {one["config"]["model"]: one for one in files}

    def contender(model: str, name: str) -> dict[str, Any]:
        for one in by_model[model]["contenders"]:
            if one["name"] == name:
                return dict(one)
        raise KeyError(f"{name} was not measured with {model}")

    runs = [run_line(one, f"{model}, {one['size']}, {one['dtype']}") for model, one in by_model.items()]
    return fill(template, {"runs": "\n".join(runs), "stages": _stages(by_model), "contender": contender})


def _stages(by_model: dict[str, dict[str, Any]]) -> str:
    """Seconds of each stage, and the denoising loop as a multiple of plain diffusers'."""
    heads = ["text", "denoising", "VAE", "mp4", "all", "denoising / diffusers", "peak GB", "frames are diffusers'", "kernels"]
    lines = ["| model | video tokens | contender | " + " | ".join(heads) + " |", "|---|---:|---|" + "---:|" * 7 + "---|---|"]
    for model, result in by_model.items():
        for one in result["contenders"]:
            seconds = [f"{one[stage]:.2f}" for stage in ("text_s", "denoise_s", "vae_s", "encode_s", "total_s")]
            peak = "" if one.get("peak_memory_bytes") is None else f"{one['peak_memory_bytes'] / 1e9:.1f}"
            kernels = ", ".join(
                f"{r['kernel']} ({'native' if r['native'] else 'emulated'}, {r['recipe']}, {r['calls']} calls)" for r in one["receipts"]
            )
            cells = [*seconds, f"{one['denoise_ratio']:.3f}", peak, "yes" if one["same_frames"] else "no", kernels]
            lines.append(f"| {model} | {result['num_tokens']:,} | {one['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print_page("videoqat.generation.bench_table", "What `bench generation` measured, as a page.", render)
