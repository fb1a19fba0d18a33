"""The benchmark of training: every case is a real training of a tiny model, on one process and on two. No time is judged."""

import json
from pathlib import Path

import jinja2
import pytest

from videoqat.config import BenchTrainingConfig, RuntimeConfig
from videoqat.errors import ConfigError, UserError
from videoqat.training.bench import bench_training
from videoqat.training.bench_table import render

TEMPLATES = sorted((Path(__file__).resolve().parent.parent / "docs" / "benchmarks").glob("*-training-*.j2"))


def settings(work: Path, **changes) -> BenchTrainingConfig:
    tiny = {"model": "tiny", "size": "5x32x32", "steps": 5, "warmup": 2, "runtime": RuntimeConfig(device="cpu")}
    config = BenchTrainingConfig(work=str(work), **{**tiny, "overrides": ["train.compute_dtype=float32"], **changes})
    config.validate()
    return config


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    work = tmp_path_factory.mktemp("bench") / "work"
    return bench_training(settings(work, layouts=["1x1x2", "1x2x1"], recipes=["attn_qat"], resume_onto="1x1x1"))


@pytest.mark.dist
@pytest.mark.slow
def test_cases(result: dict) -> None:
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert [(case["layout"], case["gpus"], case["samples_per_step"]) for case in result["cases"]] == [("1x1x2", 2, 1), ("1x2x1", 2, 2)]
    for case in result["cases"]:
        assert len(case["losses"]) == 5
        assert case["steps_timed"] == 1  # steps 3 and 5 are traced
        assert case["mfu"] is None
        assert case["communication_seconds"] >= case["communication_exposed_seconds"] >= 0
        assert {receipt["kernel"] for receipt in case["receipts"]} == {"torch", "sdpa"}
        assert len(case["one_gpu_losses"]) >= 2
    assert result["diffusers"]["steps_timed"] == 3
    assert result["resumed"]["onto"] == "1x1x1"
    assert len(result["resumed"]["losses"]["same"]) == 2
    assert result["resumed"]["loss_difference"] < 1e-5


@pytest.mark.dist
@pytest.mark.slow
def test_a_page(result: dict) -> None:
    ends = "{{ case('attn_qat', '1x2x1')['gpus'] }} {{ resumed['onto'] }} {{ difference('attn_qat', '1x2x1') }}"
    page = render("{{ runs }}\n{{ steps }}\n\n{{ parts }}\n" + ends + "\n", [result])
    lines = page.splitlines()
    rows = [line for line in lines if line.startswith("| tiny | 1x1x2 | attn_qat | full | 2 | 1 |")]
    assert len(rows) == 1
    assert f"| {result['cases'][0]['step_time']:.3f} |" in rows[0]
    assert len([line for line in lines if line.startswith("|")]) == 2 * (2 + 2)
    assert lines[-1].startswith("2 1x1x1 ")
    assert float(lines[-1].split()[2]) < 1e-5  # the same samples in every layout
    with pytest.raises(KeyError, match="bf16 on 1x1x1"):
        render("{{ case('bf16') }}", [result])
    with pytest.raises(jinja2.UndefinedError):
        render("{{ nothing }}", [result])


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_pages_are_what_their_templates_and_results_say(template: Path) -> None:
    page = template.with_suffix("")
    results = sorted(page.parent.glob(f"{page.stem}*.json"))
    assert results
    assert render(template.read_text(), [json.loads(path.read_text()) for path in results]) == page.read_text()


def test_a_failed_case_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"case 1x1x1-recipe-attn_qat_rotated-full failed with exit code 2: .*optimizer.warmup_steps=99"):
        bench_training(settings(tmp_path / "work", recipes=["recipe/attn_qat_rotated"], diffusers=False, overrides=["optimizer.warmup_steps=99"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "wan9"}, r"model='wan9' is not legal; legal: wan2\.1-t2v-1\.3b"),
        ({"layouts": ["2x2"]}, "layouts='2x2' is not legal"),
        ({"steps": 2}, "steps=2 is not legal; legal: more than warmup=2"),
        ({"checkpointing": ["some"]}, "checkpointing='some' is not legal"),
    ],
)
def test_bad_settings(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_training(settings(tmp_path / "work", **changes))
