"""What the documents quote of measurements is what was measured: numbers beside their JSON, or beside the computation they come from."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from videoqat.attention.output_error import output_errors
from videoqat.models.tiny_vae import ASSET
from videoqat.recipes import RECIPES

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "docs" / "benchmarks"


def told(document: str, pattern: str) -> list[float]:
    """The numbers in a document's one place that reads like `pattern`, whose spaces stand for any."""
    found = re.findall(pattern, " ".join((ROOT / document).read_text().split()))
    assert len(found) == 1, f"{document}: {pattern!r} is there {len(found)} times"
    return [float(number.replace(",", "")) for number in ([found[0]] if isinstance(found[0], str) else found[0])]


def contenders(page: str) -> list[tuple[dict, dict]]:
    """(Shape, contender) of a benchmark's results."""
    return [(one["shape"], each) for one in json.loads((BENCHMARKS / f"{page}.json").read_text())["results"] for each in one["contenders"]]


def test_how_long_attention_for_training_takes() -> None:
    measured = [*contenders("2026-11-attention-h200-core"), *contenders("2026-11-attention-h200-long")]
    ratios = [
        each["ratio"]["sdpa_cudnn"]["forward_backward"]
        for shape, each in measured
        if each["name"].startswith("attn_qat") and each["name"] != "attn_qat_paper" and shape["num_queries"] == shape["num_keys"] > 10_000
    ]
    assert len(ratios) == 8
    low, high = told("README.md", r"`attn_qat`'s forward and backward together take ([\d.]+) to ([\d.]+) times as long as cuDNN's")
    assert (low, high) == (pytest.approx(min(ratios), abs=0.01), pytest.approx(max(ratios), abs=0.01))


def test_how_fast_the_quantisers_are() -> None:
    shares: dict[str, list[float]] = {"attn_qat": [], "attn_qat_search": []}
    for _, each in contenders("2026-11-attention-cuda-h200"):
        if each["name"] in shares:
            shares[each["name"]].append(round(100 * each["prepass_gb_per_s"] / each["copy_gb_per_s"]))
    numbers = told("docs/kernels.md", r"h200.md\): (\d+) to (\d+) % with one divisor, (\d+) to (\d+) % with four")
    assert numbers == [limit(shares[name]) for name in shares for limit in (min, max)]


def test_how_well_the_tiny_vae_reconstructs() -> None:
    measured = json.loads(ASSET.with_suffix(".json").read_text())
    card = "videoqat/models/assets/tiny_vae.md"
    assert measured["sha256"] == hashlib.sha256(ASSET.read_bytes()).hexdigest()
    assert f"| sha256 | `{measured['sha256']}` |" in (ROOT / card).read_text()
    assert told(card, r"of ([\d,]+) weights") == [measured["parameters"]]
    assert told(card, r"training clips \| ([\d,]+) of") == [measured["clips"][0]]
    assert told(card, r"reconstruction, held out \| ([\d.]+) dB") == [round(measured["psnr_held_out_db"], 2)]
    assert told(card, r"reconstruction, first (\d+) training clips \| ([\d.]+) dB") == [measured["held_out"][0], round(measured["psnr_train_db"], 2)]


def test_what_4_bits_do_to_unit_normal_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1024, 4, 128, generator=generator) for _ in range(3))
    plain = RECIPES["attn_qat"]
    found = [error.cosine for error in output_errors(q, k, v, [plain, RECIPES["qk_nvfp4"], RECIPES["pv_nvfp4"]])]
    numbers = told("docs/numerics.md", r"is ([\d.]+) with all operands in NVFP4, ([\d.]+) with Q and K only, and ([\d.]+) with P and V only")
    assert numbers == pytest.approx(found, abs=0.0006)
    k_off = k + 2 * torch.randn(128, generator=generator)
    off, smoothed = (error.cosine for error in output_errors(q, k_off, v, [plain, replace(plain, name="smoothed", smooth_k=True)]))
    assert off < found[0] - 0.01
    assert smoothed == pytest.approx(found[0], abs=0.001)
