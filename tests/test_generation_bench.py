"""The benchmark of whole videos, of a model small enough for a CPU. No time is judged."""

import dataclasses
import json
from pathlib import Path

import pytest

from videoqat.config import BenchGenerationConfig, RuntimeConfig
from videoqat.errors import ConfigError
from videoqat.generation.bench import STAGES, bench_generation
from videoqat.generation.bench_table import render
from videoqat.models.published import published

PAGES = sorted((Path(__file__).resolve().parent.parent / "docs" / "benchmarks").glob("*-generation-*.md"))


def test_stages_of_each_contender_and_a_page_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = published()["tiny"]
    monkeypatch.setitem(published(), "tiny", dataclasses.replace(tiny, vae=tiny.vae | {"base_dim": 4, "num_res_blocks": 1}))
    config = BenchGenerationConfig(
        model="tiny", size="5x32x32", num_inference_steps=2, repeats=1, recipes=["bf16", "attn_qat"], runtime=RuntimeConfig(device="cpu")
    )
    config.validate()
    result = bench_generation(config)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    by_name = {one["name"]: one for one in result["contenders"]}
    assert list(by_name) == ["diffusers", "bf16", "attn_qat"]
    assert [one["same_frames"] for one in by_name.values()] == [True, True, False]  # the recipe was in the model, and out of it again
    assert {receipt["kernel"] for receipt in by_name["attn_qat"]["receipts"]} == {"torch", "sdpa"}
    assert by_name["diffusers"]["receipts"] == []
    for one in by_name.values():
        assert len(one["rounds"]) == 1
        assert all(one[stage] > 0 for stage in STAGES)
        assert one["total_s"] >= one["denoise_s"] + one["vae_s"] + one["encode_s"]
    page = render("{{ runs }}\n{{ stages }}\n{{ '%.3f' % contender('tiny', 'bf16')['denoise_ratio'] }}\n", [result])
    rows = [line for line in page.splitlines() if line.startswith("| tiny | 8 | attn_qat |")]
    assert len(rows) == 1
    assert f"| {by_name['attn_qat']['vae_s']:.2f} |" in rows[0]
    assert "torch (emulated, attn_qat, " in rows[0]


def test_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model='wan2.2-t2v-a14b'.*wan2.1-t2v-1.3b"):
        bench_generation(BenchGenerationConfig(model="wan2.2-t2v-a14b"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_are_what_their_results_say(page: Path) -> None:
    results = [json.loads(path.read_text()) for path in sorted(page.parent.glob(f"{page.stem}*.json"))]
    assert render(page.with_suffix(".md.j2").read_text(), results) == page.read_text()
