"""`videoqat bench forward`: one forward of a published model at its real size, with random weights, under several recipes.

What is measured, and what it says about real weights:

* Time and peak memory of a forward without gradients. What weights say doesn't change them. All contenders take turns, in one process, after a round
  that isn't timed; `diffusers` is the same transformer with diffusers' own processors.
* In every quantised layer, on the activations of the bf16 model: how far 4-bit attention is from bf16 attention, and how far both are from exact
  attention (fp64) on the last rows. Weights are diffusers' own initialisation, latents and conditions are standard normal, and queries and keys go
  through the model's own norms, so that they have unit variance, as in trained models. But those have outliers and attend to few keys. Here nearly
  all keys get a like share, and outputs are means of thousands of values, so small that relative errors come out larger than in trained models. To
  how many keys a query really attends (`effective_keys`) stands beside the errors.
* In three of those layers: whether the kernel computes what the recipe says (`attention.bench_check`). More than 2 % away ends with exit code 1.
* How far a recipe's output of the whole model is from the bf16 model's.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from videoqat.attention.backends import record_receipts, resolve
from videoqat.attention.bench_check import relative_errors
from videoqat.attention.functional import attention
from videoqat.config import BenchForwardConfig, choice, parse_bucket, to_dict
from videoqat.console import progress, say
from videoqat.models.install import check_kept_layers, install, observe, uninstall
from videoqat.models.published import published, random_transformer, write_folder
from videoqat.models.spec import family_of
from videoqat.provenance import provenance
from videoqat.recipes import AttentionRecipe, get_recipe

LARGEST_ERROR = 0.02  # as in `attention.bench`: beyond it a kernel is wrong
EXACT_ROWS = 128
STOCK = "diffusers"


def plan(config: BenchForwardConfig) -> dict[str, Any]:
    """What would be timed: `size` and `num_tokens`.

    Raises:
        UserError: whatever `bench_forward` refuses before it draws weights.
    """
    choice("model", config.model, published())
    device, dtype = config.runtime.resolve()
    size = parse_bucket("size", config.size or published()[config.model].size)
    with tempfile.TemporaryDirectory() as work:
        folder = write_folder(Path(work) / "model", config.model)
        geometry = family_of(folder).geometry(folder)
    geometry.check_size("size", *size)
    for recipe in map(get_recipe, config.recipes):
        check_kept_layers(recipe, "transformer", geometry.num_layers)
        resolve(recipe, device, dtype, geometry.head_dim, config.runtime.kernel if recipe.is_quantised else "auto")
    return {"size": "x".join(map(str, size)), "num_tokens": geometry.num_tokens(*size)}


def bench_forward(config: BenchForwardConfig) -> dict[str, Any]:
    """Times, memory and errors of the model `config.model`.

    Returns:
        config, provenance, dtype, size, num_tokens, text_tokens, parameters, weight_bytes; `exit_code`;
        `contenders`: name, milliseconds (median) and the rounds, ratio (to diffusers), peak_bytes (weights among them; GPU only), receipts, finite,
        output_error (relative L2 to the bf16 recipe's output; 0 where it is the same bit for bit);
        `layers`: name, q_std, k_std, v_std, num_keys, effective_keys, bf16_error (bf16 against exact attention) and `recipes`, a mapping to
        bf16_distance, exact_error and, where it was looked at, kernel_error.

    Raises:
        UserError: an unknown model, a size that it can't have, or a recipe that can't run on this device.
    """
    planned = plan(config)
    device, dtype = config.runtime.resolve()
    size = parse_bucket("size", planned["size"])
    recipes = [get_recipe(name) for name in config.recipes]
    with tempfile.TemporaryDirectory() as work, torch.no_grad():
        folder = write_folder(Path(work) / "model", config.model)
        family = family_of(folder)
        geometry = family.geometry(folder)
        say(f"{config.model}: drawing weights on {device}")
        transformer = random_transformer(folder, "transformer", device, dtype, config.seed)
        generator = torch.Generator(device).manual_seed(config.seed)
        text_tokens = family.text_tokens(folder)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        x_BCFHW, t_B = noise(1, *geometry.latent_shape(*size)), torch.full((1,), 0.5, device=device)
        parts = {part: noise(*shape) for part, shape in family.condition_shapes(folder, size, text_tokens).items()}
        condition = family.batch_conditions([parts], text_tokens)

        def run() -> Tensor:
            return family.forward(transformer, x_BCFHW, t_B, condition)

        contenders = _times(transformer, run, recipes, config, device)
        layers, wrong = _layers(transformer, run, recipes, config.runtime.kernel)
    weights = list(transformer.parameters())
    result = {
        "config": to_dict(config),
        "provenance": provenance(str(device)),
        "dtype": str(dtype).removeprefix("torch."),
        **planned,
        "text_tokens": text_tokens,
        "parameters": sum(p.numel() for p in weights),
        "weight_bytes": sum(p.numel() * p.element_size() for p in weights),
        "contenders": contenders,
        "layers": layers,
        "exit_code": int(bool(wrong)),
    }
    for one in contenders:
        say(
            f"{one['name']:20} {one['milliseconds']:10.1f} ms  {one['ratio']:6.3f} x diffusers  output differs from bf16 by {one['output_error']:.4f}"
        )
    for what in wrong:
        say(f"WRONG: {what}")
    return result


def _times(
    transformer: nn.Module, run: Callable[[], Tensor], recipes: list[AttentionRecipe], config: BenchForwardConfig, device: torch.device
) -> list[dict[str, Any]]:
    """Every contender once untimed, for what it computes and needs, then in turns."""
    names: list[AttentionRecipe | None] = [None, *recipes]
    bf16_output = _with(transformer, get_recipe("bf16"), "auto", run)
    found = []
    bar = progress(total=len(names) * (1 + config.repeats), desc=config.model, unit="forward")
    with bar:
        for recipe in names:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            with record_receipts() as receipts:
                output = _with(transformer, recipe, config.runtime.kernel, run)
            one: dict[str, Any] = {
                "name": recipe.name if recipe else STOCK,
                "receipts": [receipt.to_dict() for receipt in receipts],
                "milliseconds": [],
            }
            one |= {"output_error": _distance(output, bf16_output), "finite": bool(output.isfinite().all())}
            if device.type == "cuda":
                one["peak_bytes"] = torch.cuda.max_memory_allocated(device)
            found.append(one)
            bar.update()
        for _ in range(config.repeats):
            for recipe, one in zip(names, found, strict=True):
                one["milliseconds"].append(_with(transformer, recipe, config.runtime.kernel, lambda: _milliseconds(run, device)))
                bar.update()
    for one in found:
        one["rounds"] = one["milliseconds"]
        one["milliseconds"] = statistics.median(one["rounds"])
        one["ratio"] = one["milliseconds"] / found[0]["milliseconds"]
    return found


def _with(transformer: nn.Module, recipe: AttentionRecipe | None, kernel: str, run: Callable[[], Any]) -> Any:
    """What `run` returns with `recipe` in the transformer; None: with diffusers' own processors."""
    if recipe is None:
        uninstall(transformer)
    else:
        install(transformer, recipe, kernel=kernel)
    return run()


def _milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(torch.cuda.current_stream(device))
    run()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return float(begin.elapsed_time(end))


def _layers(transformer: nn.Module, run: Callable[[], Tensor], recipes: list[AttentionRecipe], kernel: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Errors in every layer that one of `recipes` quantises, on what the bf16 model sends through it; and which kernels were wrong."""
    quantised = {recipe.name: [layer.name for layer in install(transformer, recipe)] for recipe in recipes if recipe.is_quantised}
    every = list(dict.fromkeys(name for names in quantised.values() for name in names))
    checked = {every[i] for i in (0, len(every) // 2, -1)} if every else set()
    layers: list[dict[str, Any]] = []
    wrong: list[str] = []
    bar = progress(total=len(every), desc="errors", unit="layer")

    def look(layer: str, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> None:
        if layer not in every:
            return
        rows = slice(max(0, q_BNHD.shape[1] - EXACT_ROWS), None)
        exact_BRHD, effective = _exact(q_BNHD[:, rows], k_BNHD, v_BNHD)
        bf16 = attention(q_BNHD, k_BNHD, v_BNHD, "bf16")
        one: dict[str, Any] = {"name": layer, "num_keys": k_BNHD.shape[1], "effective_keys": effective, "recipes": {}}
        one["bf16_error"] = _distance(bf16[:, rows], exact_BRHD)
        one |= {f"{name}_std": float(x.float().std()) for name, x in (("q", q_BNHD), ("k", k_BNHD), ("v", v_BNHD))}
        for recipe in recipes:
            if layer not in quantised.get(recipe.name, ()):
                continue
            out = attention(q_BNHD, k_BNHD, v_BNHD, recipe, kernel=kernel)
            errors = {"bf16_distance": _distance(out, bf16), "exact_error": _distance(out[:, rows], exact_BRHD)}
            if layer in checked:
                errors["kernel_error"] = relative_errors(q_BNHD, k_BNHD, v_BNHD, out, (out,), recipe)["out"]
                if not errors["kernel_error"] <= LARGEST_ERROR:
                    wrong.append(f"{recipe.name} in {layer}: {errors['kernel_error']:.3f} from what the recipe says")
            one["recipes"][recipe.name] = errors
        layers.append(one)
        bar.update()

    install(transformer, "bf16")
    observe(transformer, look)
    with bar:
        run()
    observe(transformer, None)
    return layers, wrong


def _distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, computed in fp32: fp64 would double the memory of tensors that fill a GPU."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def _exact(q_BRHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> tuple[Tensor, float]:
    """Attention of a few rows in fp64, head by head, (B, R, H, D); and exp(entropy) of the weights, averaged: to how many keys a row attends."""
    outputs, entropies = [], []
    for h in range(q_BRHD.shape[2]):
        q_BRD, k_BND, v_BND = (x[:, :, h].double() for x in (q_BRHD, k_BNHD, v_BNHD))
        log_p_BRN = (q_BRD @ k_BND.transpose(1, 2) * q_BRD.shape[2] ** -0.5).log_softmax(dim=2)
        p_BRN = log_p_BRN.exp()
        outputs.append(p_BRN @ v_BND)
        entropies.append(-(p_BRN * log_p_BRN).sum(dim=2))
    return torch.stack(outputs, dim=2), float(torch.stack(entropies).exp().mean())
