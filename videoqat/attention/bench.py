"""Times recipes' attention beside SDPA, in turns, in one process, and checks what it timed against the fp64 reference.

For each shape every contender gets the same inputs (standard normal, laid out (B, N, H, d) as models have them). What is measured:

    inference           the forward without gradients
    forward             the forward that keeps what a backward needs
    backward            dQ, dK, dV, by the backward that follows that forward
    forward_backward    both, from the first kernel's start to the last one's end

in milliseconds, as medians of `repeats` runs, by CUDA events (on the CPU by the clock). One round is run before, untimed; then each round
runs every contender once, so that a GPU that slows down as it gets warm slows all of them. FLOP count both numbers of a multiply-add:

    algorithmic   products * 2 * B * H * Nq * Nk * d, products being 2 forward (S, O) and 5 backward (S again, dP, dV, dQ, dK)
    executed      the same with the products that our kernel runs and the channels it pads d to (but not its last tiles' padding)
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from videoqat.attention.backends import KERNELS, record_receipts, resolve
from videoqat.attention.bench_check import relative_errors
from videoqat.attention.bench_table import text_table
from videoqat.attention.cuda_backend import CudaKernel
from videoqat.attention.functional import attention
from videoqat.config import AttentionShape, BenchAttentionConfig
from videoqat.console import say
from videoqat.errors import AttentionError
from videoqat.provenance import provenance
from videoqat.recipes import AttentionRecipe, get_recipe

LARGEST_ERROR = 0.02  # five times what a right kernel's gradients are allowed; a wrong axis, scale or tile is far above
PREPASS_CALLS = 10
PRODUCTS = {"inference": (1, 0), "forward": (1, 0), "backward": (0, 1), "forward_backward": (1, 1)}  # passes in each measurement


@dataclass
class Contender:
    """One way to compute attention. `run(q, k, v)` -> out (B, Nq, H, d); `recipe` is None for torch's own."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    recipe: AttentionRecipe | None = None
    training: bool = True
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)


@dataclass
class Inputs:
    """q (B, Nq, H, d), k, v (B, Nk, H, d), which want gradients, and grad_out of q's shape."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


def plan(config: BenchAttentionConfig) -> dict[str, Any]:
    """What would be timed: `shapes`, and `receipts` of the kernels that would serve each of them, recipe by recipe.

    Raises:
        UserError: a device that isn't there, or a shape, dtype or kernel that attention can't serve.
    """
    device, dtype = config.runtime.resolve()
    shapes, recipes = config.chosen_shapes(), [get_recipe(name) for name in config.recipes or [config.recipe]]
    receipts = [[resolve(recipe, device, dtype, shape.head_dim, config.runtime.kernel).to_dict() for recipe in recipes] for shape in shapes]
    return {"shapes": [asdict(shape) for shape in shapes], "receipts": receipts}


def bench_attention(config: BenchAttentionConfig) -> dict[str, Any]:
    """Times, memory, FLOP and errors of every recipe and of SDPA (on a GPU: cuDNN and flash) at every shape.

    Returns:
        dtype, backward, repeats, provenance, and results: a list with, for each shape, `shape`, `algorithmic_flop` by measurement,
        `unavailable` {what: why}, which also names a recipe whose result is wrong (no time stands without a check), and `contenders`, dicts with

            name; receipts of what ran (none for torch's own)
            milliseconds, tflops (algorithmic): by measurement
            ratio: {SDPA's name: {measurement: this contender's time / SDPA's}}
            peak_bytes: by measurement, beyond the inputs (GPU only)
            saved_bytes, saved_bytes_without_output: kept for the backward, for each token (of q) and channel (heads * head_dim)
            relative_l2_error: {out, dq, dk, dv} against the fp64 reference, on what `bench_check` says       (recipes)
            executed_tflops, prepass_milliseconds and prepass_share of the forward, by measurement     (recipes on our GPU kernels)
            prepass_gb_per_s, and copy_gb_per_s of a copy that moves as many bytes                     (recipes on the CUDA kernels)

        exit_code is 1 if a recipe that should run was wrong, by more than 2 %, or failed.

    Raises:
        AttentionError: shape, dtype or kernel that attention can't serve.
    """
    plan(config)  # before the first shape takes its time
    device, dtype = config.runtime.resolve()
    recipes = [get_recipe(name) for name in config.recipes or [config.recipe]]
    results: list[dict[str, Any]] = []
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for shape in config.chosen_shapes():
            say(f"{shape.name}: {shape.batch} x {shape.num_queries} queries, {shape.num_keys} keys, {shape.num_heads} heads of {shape.head_dim}")
            results.append(_bench_shape(shape, recipes, device, dtype, config))
            say(text_table(results[-1]))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "backward": config.backward,
        "repeats": config.repeats,
        "results": results,
        "exit_code": int(any(recipe.name in result["unavailable"] for result in results for recipe in recipes)),
        "provenance": provenance(str(device)),
    }


def _bench_shape(
    shape: AttentionShape, recipes: list[AttentionRecipe], device: torch.device, dtype: torch.dtype, config: BenchAttentionConfig
) -> dict[str, Any]:
    kernel = config.runtime.kernel
    unavailable: dict[str, str] = {}
    contenders = [_of_recipe(recipe, kernel) for recipe in recipes]
    for one in contenders:
        assert one.recipe is not None
        if config.backward:
            try:
                resolve(one.recipe, device, dtype, shape.head_dim, kernel, training=True)
            except AttentionError as error:
                one.training, unavailable[f"{one.name}, backward"] = False, str(error)
    inputs = _inputs(shape, device, dtype)
    everyone = []
    for one in [*contenders, *_of_torch(device)]:
        one.training = one.training and config.backward
        try:
            _examine(one, inputs)
            everyone.append(one)
        except RuntimeError as error:  # what torch raises where a backend can't serve this shape or GPU
            unavailable[one.name] = str(error).splitlines()[0]
    baselines = [one for one in everyone if one.recipe is None]
    for _ in range(config.repeats):
        for one in everyone:
            _time_once(one, inputs)

    flop = {name: _flop(shape, 2 * forward + 5 * backward, shape.head_dim) for name, (forward, backward) in PRODUCTS.items()}
    medians = {one.name: {name: statistics.median(values) for name, values in one.milliseconds.items()} for one in everyone}
    for one in everyone:
        times = medians[one.name]
        one.result |= {"milliseconds": times, "tflops": {name: flop[name] / ms / 1e9 for name, ms in times.items()}}
        one.result["ratio"] = {
            other.name: {name: ms / medians[other.name][name] for name, ms in times.items()} for other in baselines if other is not one
        }
        if one.recipe is None or one.recipe.qk == "int8":  # SageBwd's kernels are others
            continue
        kernels = {receipt["kernel"] for receipt in one.result["receipts"]}
        if kernels == {"triton"}:
            one.result |= _inside_triton(one.recipe, inputs, shape, times)
        elif len(kernels) == 1 and isinstance(chosen := KERNELS[kernels.pop()], CudaKernel):
            one.result |= _inside_cuda(chosen.product, one.recipe, inputs, shape, times["inference"])
    return {
        "shape": asdict(shape),
        "algorithmic_flop": flop if config.backward else {"inference": flop["inference"]},
        "unavailable": unavailable,
        "contenders": [{"name": one.name, **one.result} for one in everyone],
    }


def _inputs(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    lengths = (shape.num_queries, shape.num_keys, shape.num_keys, shape.num_queries)
    tensors = [
        torch.randn((shape.batch, length, shape.num_heads, shape.head_dim), generator=generator, device=device, dtype=dtype) for length in lengths
    ]
    for x in tensors[:3]:
        x.requires_grad_()
    return Inputs(*tensors)


def _of_recipe(recipe: AttentionRecipe, kernel: str) -> Contender:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, recipe, kernel=kernel)

    return Contender(recipe.name, run, recipe)


def _of_torch(device: torch.device) -> list[Contender]:
    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    def by(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return sdpa(q, k, v)

        return run

    if device.type == "cpu":
        return [Contender("sdpa", sdpa)]
    return [Contender("sdpa_cudnn", by(SDPBackend.CUDNN_ATTENTION)), Contender("sdpa_flash", by(SDPBackend.FLASH_ATTENTION))]


def _infer(one: Contender, x: Inputs) -> Tensor:
    with torch.no_grad():
        return one.run(x.q, x.k, x.v)


def _train(one: Contender, x: Inputs) -> tuple[Tensor, ...]:
    out = one.run(x.q, x.k, x.v)
    return out.detach(), *torch.autograd.grad(out, (x.q, x.k, x.v), x.grad_out)


def _examine(one: Contender, x: Inputs) -> None:
    """The untimed round: what ran, whether it is right, peak memory, and what is kept. It compiles and warms up, too."""
    peak: dict[str, int] = {}
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with record_receipts() as receipts:
        out, peak["inference"] = _with_peak(lambda: _infer(one, x), x.q.device)
        outputs: tuple[Tensor, ...] = (out,)
        if one.training:
            _train(one, x)  # so that what compiling and planning need does not count as memory
            outputs, peak["forward_backward"] = _with_peak(lambda: _train(one, x), x.q.device)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
                out = one.run(x.q, x.k, x.v)
            size = sum(kept.values())
            without = size - kept.get(out.untyped_storage().data_ptr(), 0)
            one.result |= {"saved_bytes": size / x.q.numel(), "saved_bytes_without_output": without / x.q.numel()}
    del out
    one.result["receipts"] = [receipt.to_dict() for receipt in receipts]
    if x.q.is_cuda:
        one.result["peak_bytes"] = peak
    if one.recipe is not None:
        errors = relative_errors(x.q.detach(), x.k.detach(), x.v.detach(), x.grad_out, outputs, one.recipe)
        wrong = {name: error for name, error in errors.items() if not error <= LARGEST_ERROR}
        if wrong:
            raise RuntimeError(f"wrong: relative L2 error {wrong} against the fp64 reference")
        one.result["relative_l2_error"] = errors


def _with_peak(run: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """What `run` returns, and the most bytes that the GPU held for it at once."""
    if device.type == "cpu":
        return run(), 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    return result, torch.cuda.max_memory_allocated(device) - before


def _mark(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(begin: Any, end: Any) -> float:
    """Milliseconds between two marks."""
    if isinstance(begin, float):
        return float(end - begin) * 1e3
    end.synchronize()
    return float(begin.elapsed_time(end))


def _milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    begin = _mark(device)
    run()
    return _between(begin, _mark(device))


def _time_once(one: Contender, x: Inputs) -> None:
    device = x.q.device

    def note(name: str, milliseconds: float) -> None:
        one.milliseconds.setdefault(name, []).append(milliseconds)

    note("inference", _milliseconds(lambda: _infer(one, x), device))
    if one.training:
        begin = _mark(device)
        out = one.run(x.q, x.k, x.v)
        middle = _mark(device)
        torch.autograd.grad(out, (x.q, x.k, x.v), x.grad_out)
        end = _mark(device)
        note("forward", _between(begin, middle))
        note("backward", _between(middle, end))
        note("forward_backward", _between(begin, end))


def _flop(shape: AttentionShape, products: int, channels: int) -> int:
    return products * 2 * shape.batch * shape.num_heads * shape.num_queries * shape.num_keys * channels


def _inside_triton(recipe: AttentionRecipe, x: Inputs, shape: AttentionShape, times: dict[str, float]) -> dict[str, Any]:
    """FLOP/s by what our kernels multiply, and the quantisation pre-pass by itself."""
    from videoqat_kernels.triton_ops.attention import products, quantise_operands
    from videoqat_kernels.triton_ops.quantize import padded_channels

    forward, backward = products(recipe)
    channels = padded_channels(shape.head_dim)
    executed = {name: _flop(shape, forward * PRODUCTS[name][0] + backward * PRODUCTS[name][1], channels) for name in times}

    def quantise(keep_codes: bool) -> None:
        quantise_operands(x.q, x.k, x.v, None, recipe, shape.head_dim**-0.5, keep_codes)

    passes = [name for name in ("inference", "forward") if name in times]
    prepass = {name: _prepass_milliseconds(partial(quantise, name == "forward"), x.q.device) for name in passes}
    return {
        "executed_flop": executed,
        "executed_tflops": {name: flop / times[name] / 1e9 for name, flop in executed.items()},
        "prepass_milliseconds": prepass,
        "prepass_share": {name: ms / times[name] for name, ms in prepass.items()},
    }


def _inside_cuda(product: str, recipe: AttentionRecipe, x: Inputs, shape: AttentionShape, inference_ms: float) -> dict[str, Any]:
    """The same of the CUDA kernels, which only infer; and how fast the pre-pass moves its bytes: q, k and v read once, the operands written once."""
    from videoqat_kernels.cuda.attention import maximum_first, quantise_inputs

    def quantise() -> Any:
        return quantise_inputs(product, x.q, x.k, x.v, None, recipe)

    flop = _flop(shape, 3 if maximum_first(recipe) else 2, shape.head_dim)
    with torch.no_grad():
        operands = quantise()
        moved = sum(tensor.nbytes for tensor in (x.q, x.k, x.v, operands.q, operands.kv))
        source = torch.zeros(moved // 2, dtype=torch.uint8, device=x.q.device)
        target = torch.empty_like(source)
    prepass = _prepass_milliseconds(quantise, x.q.device)
    return {
        "executed_flop": {"inference": flop},
        "executed_tflops": {"inference": flop / inference_ms / 1e9},
        "prepass_milliseconds": {"inference": prepass},
        "prepass_share": {"inference": prepass / inference_ms},
        "prepass_gb_per_s": moved / prepass / 1e6,
        "copy_gb_per_s": moved / _prepass_milliseconds(lambda: target.copy_(source), x.q.device) / 1e6,
    }


def _prepass_milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Of one call, of several in a row, so that the GPU never waits for a launch."""

    def calls() -> None:
        with torch.no_grad():
            for _ in range(PREPASS_CALLS):
                run()

    calls()
    return statistics.median(_milliseconds(calls, device) for _ in range(5)) / PREPASS_CALLS
