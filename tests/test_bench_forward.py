"""The benchmark of a forward: every family, two blocks of it, on a CPU. No time is judged."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch

from videoqat.attention.functional import attention
from videoqat.config import BenchForwardConfig, RuntimeConfig
from videoqat.errors import ConfigError
from videoqat.models import bench, published
from videoqat.models.bench_table import render

PAGES = sorted((Path(__file__).resolve().parent.parent / "docs" / "benchmarks").glob("*-forward-*.md"))
SMALL = {
    "num_layers": 2,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "ffn_dim": 64,
    "text_dim": 32,
    "text_embed_dim": 32,
    "text_embed_2_dim": 16,
    "pooled_projection_dim": 16,
    "time_embed_dim": 32,
}
MODELS = [name for name in ("wan2.1-t2v-1.3b", "cogvideox-2b", "hunyuanvideo", "hunyuanvideo1.5-480p-t2v") if name in published.published()]


def shrink(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The published model `name`, its attention heads as wide as ever, but few and in few layers."""
    model = published.published()[name]
    small = {key: value for key, value in SMALL.items() if key in model.transformer}
    monkeypatch.setitem(published.published(), name, dataclasses.replace(model, transformer=model.transformer | small))


def settings(**changes: Any) -> BenchForwardConfig:
    config = BenchForwardConfig(**{"model": "tiny", "size": "5x32x32", "repeats": 1, "runtime": RuntimeConfig(device="cpu"), **changes})
    config.validate()
    return config


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = {}
        for name in MODELS:
            shrink(monkeypatch, name)
            found[name] = bench.bench_forward(settings(model=name, size="9x32x48" if "cog" not in name else "9x32x32"))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_measured(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["exit_code"] == 0
    stock, bf16, quantised = result["contenders"]
    assert [one["name"] for one in result["contenders"]] == ["diffusers", "bf16", "attn_qat"]
    assert stock["receipts"] == []
    assert {receipt["kernel"] for receipt in bf16["receipts"]} == {"sdpa"}
    assert "torch" in {receipt["kernel"] for receipt in quantised["receipts"]}
    # Masks that diffusers gives torch round otherwise than key lengths; where there is none, it is the same, bit for bit.
    assert stock["output_error"] < 1e-5
    assert bf16["output_error"] == 0 < quantised["output_error"] < 0.2
    assert all(one["milliseconds"] > 0 and one["finite"] for one in result["contenders"])
    assert len(result["layers"]) == sum(receipt["calls"] for receipt in quantised["receipts"] if receipt["kernel"] == "torch")
    for layer in result["layers"]:
        for what in "qk":  # neither vanished nor exploded
            assert 0.3 < layer[f"{what}_std"] < 3
        assert layer["v_std"] > 0.01
        assert 1 < layer["effective_keys"] < layer["num_keys"]
        assert layer["bf16_error"] < 1e-5 < layer["recipes"]["attn_qat"]["bf16_distance"]
        # In fp32 bf16's own attention is exact: the two distances differ by the rows that they look at.
        assert layer["recipes"]["attn_qat"]["exact_error"] == pytest.approx(layer["recipes"]["attn_qat"]["bf16_distance"], rel=0.3)
    assert sum("kernel_error" in layer["recipes"]["attn_qat"] for layer in result["layers"]) == min(3, len(result["layers"]))


def test_a_wrong_kernel_ends_in_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def forgetful(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Any, **options: Any) -> torch.Tensor:
        out = attention(q, k, v, recipe, **options)
        return out if recipe == "bf16" else 1.03 * out

    monkeypatch.setattr(bench, "attention", forgetful)
    assert bench.bench_forward(settings(recipes=["attn_qat"]))["exit_code"] == 1
    assert "WRONG: attn_qat in blocks.0.attn1: 0.0" in capsys.readouterr().err


def test_exact_rows_are_attention() -> None:
    q, k, v = (torch.randn(1, n, 3, 16, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (7, 40, 41))
    out, effective = bench._exact(q, k, v[:, :40])
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v[:, :40]))).transpose(1, 2)
    assert torch.allclose(out, expected, rtol=1e-12)
    assert 1 < effective < 40
    assert bench._exact(torch.zeros_like(q), k, k)[1] == pytest.approx(40)


def test_a_page(results: dict[str, dict[str, Any]]) -> None:
    template = "{{ runs }}\n{{ times }}\n\n{{ errors }}\n\n{{ activations }}\n{{ contender('" + MODELS[0] + "', 'attn_qat')['ratio'] }}\n"
    page = render(template, results.values())
    first = results[MODELS[0]]
    assert f"| {MODELS[0]} | attn_qat | {len(first['layers'])} |" in page
    assert page.splitlines()[-1] == str(first["contenders"][2]["ratio"])
    assert "| diffusers |" in page
    with pytest.raises(KeyError, match="sage3 was not measured"):
        render("{{ contender('" + MODELS[0] + "', 'sage3') }}", results.values())
    with pytest.raises(jinja2.UndefinedError):
        render("{{ nothing }}", results.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_are_what_their_templates_and_results_say(page: Path) -> None:
    measured = sorted(page.parent.glob(f"{page.stem}*.json"))
    assert measured
    assert render(page.with_suffix(".md.j2").read_text(), [json.loads(path.read_text()) for path in measured]) == page.read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "wan9"}, r"model='wan9' is not legal; legal: wan2\.1-t2v-1\.3b"),
        ({"size": "5x32x40"}, "size: width 40 doesn't fit this model"),
        ({"recipes": ["bf16", "bf16"]}, "recipes="),
        ({"repeats": 0}, "repeats=0 is not legal"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.bench_forward(settings(**changes))


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODELS:
        shrink(monkeypatch, name)
        result = bench.bench_forward(settings(model=name, size="9x64x96" if "cog" not in name else "9x64x64", runtime=RuntimeConfig(device="cuda")))
        assert result["exit_code"] == 0
        assert result["contenders"][2]["peak_bytes"] > result["weight_bytes"]
        assert "triton" in {receipt["kernel"] for receipt in result["contenders"][2]["receipts"]}
