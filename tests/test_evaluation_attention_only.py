"""Recipes side by side on attention alone: the three numbers against their definitions, what is captured, tables and pages, the command line."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler
from helpers.naive_attention import NaiveAttention
from helpers.naive_sagebwd import NaiveSageBwd
from torch import Tensor

from videoqat import config as cfg
from videoqat.attention.output_error import output_errors
from videoqat.cli import build_parser, main
from videoqat.config import ExampleModelConfig, RuntimeConfig, SamplingConfig
from videoqat.errors import ConfigError, UserError
from videoqat.evaluation.attention_only import compare_attention, plan
from videoqat.evaluation.attention_report import html, markdown, overall, questions, text_table
from videoqat.generation.engine import Engine
from videoqat.models.install import observe
from videoqat.models.tiny import build_pipeline
from videoqat.recipes import RECIPES, get_recipe

VARIANTS = ["sage3_mxfp4", "sage3_direct_p", "sage3_gain_p", "sage3_no_smoothing", "sage3_smooth_q", "sage3_smooth_k", "sage3_search", "mxfp8"]
SAMPLING = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=4, guidance_scale=3.0, max_text_tokens=16)


# The numbers


def draw(num_queries: int, num_keys: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 32, generator=generator) for n, h in ((num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads)))
    return q + 0.5, k + torch.randn(32, generator=generator), v


def by_definition(ours: Any, exact: Any) -> tuple[float, float, float]:
    """CosSim, L1 and RMSE as arXiv 2505.11594 writes them, in numpy."""
    a, b = np.asarray(exact, np.float64).ravel(), np.asarray(ours, np.float64).ravel()
    cosine = (a * b).sum() / (np.sqrt((a**2).sum()) * np.sqrt((b**2).sum()))
    return float(cosine), float(np.abs(a - b).sum() / np.abs(a).sum()), float(np.sqrt(((a - b) ** 2).mean()))


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.double().repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@pytest.mark.parametrize("name", ["attn_qat", "attn_qat_paper", "sage3", "b200_mxfp8_fp8", "sagebwd", *(f"recipe/{name}" for name in VARIANTS)])
def test_the_numbers_are_those_of_the_definitions(name: str) -> None:
    """Against a recipe's output row by row in fp64, for two blocks of smoothed queries and an odd number of keys; heads share keys."""
    q, k, v = draw(134, 73, 2, 1)
    recipe = get_recipe(name)
    ours = NaiveSageBwd(q, k, v).forward()[0] if recipe.qk == "int8" else NaiveAttention(q, k, v, recipe).forward()[0]
    (found,) = output_errors(q, k, v, [recipe])
    expected = by_definition(ours, exact_attention(q, k, v))
    # Codes that hang on the last bits of p move single rows; a recipe with anything else about it is off by far more.
    np.testing.assert_allclose((1 - found.cosine, found.relative_l1, found.rmse), (1 - expected[0], *expected[1:]), rtol=5e-3)


@pytest.mark.parametrize("name", ["attn_qat", "sage3", "sagebwd"])
def test_fewer_queries_are_every_nth_one(name: str) -> None:
    """Quantised as part of the whole: means of 128 queries and blocks of 64 are not those of a selection."""
    q, k, v = draw(134, 73, 2, 1)
    recipe = get_recipe(name)
    ours = NaiveSageBwd(q, k, v).forward()[0] if recipe.qk == "int8" else NaiveAttention(q, k, v, recipe).forward()[0]
    (found,) = output_errors(q, k, v, [recipe], max_queries=50)
    expected = by_definition(ours[:, ::3], exact_attention(q, k, v)[:, ::3])
    np.testing.assert_allclose((1 - found.cosine, found.relative_l1, found.rmse), (1 - expected[0], *expected[1:]), rtol=5e-3)


def test_the_numbers_of_nothing_and_of_a_wrong_factor() -> None:
    zeros = torch.zeros(1, 16, 1, 16)
    (found,) = output_errors(zeros, zeros, zeros, [RECIPES["attn_qat"]])
    assert (found.cosine, found.relative_l1, found.rmse) == (1.0, 0.0, 0.0)
    q, k, v = draw(20, 20, 1, 1)
    recipes = [RECIPES["attn_qat"], RECIPES["mxfp4"], get_recipe("recipe/mxfp8")]
    found_4, found_mx4, found_8 = output_errors(q, k, v, recipes)
    assert found_8.cosine > found_4.cosine > found_mx4.cosine
    assert found_8.relative_l1 < found_4.relative_l1 < found_mx4.relative_l1
    assert output_errors(q, k, 2 * v, recipes)[0].rmse == pytest.approx(2 * found_4.rmse, rel=1e-6)


# What is captured


@pytest.fixture(scope="module")
def cogvideox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attention_only") / "cogvideox"
    build_pipeline(ExampleModelConfig(out=str(folder), family="cogvideox", num_layers=2, head_dim=32))
    return folder


def settings(model: Path, tmp_path: Path, **changes: Any) -> cfg.CompareAttentionConfig:
    (tmp_path / "prompts.txt").write_text("a sneaker moves left\na bag moves up\n")
    given = {"recipes": ["sage3", "recipe/sage3_direct_p", "mxfp4"], "sampling": SAMPLING, "out": str(tmp_path / "out"), "max_queries": 16}
    return cfg.CompareAttentionConfig(model=str(model), prompts=str(tmp_path / "prompts.txt"), **given | changes)


def captured(model: Path, prompts: list[str], seeds: list[int], steps: list[int], sampling: SamplingConfig) -> dict[str, list[tuple[Tensor, ...]]]:
    """Q, K and V of these denoising steps by layer, of whole videos."""
    engine = Engine(model, RuntimeConfig())
    engine.install(RECIPES["bf16"])
    found: dict[str, list[tuple[Tensor, ...]]] = defaultdict(list)
    done = [0]
    for transformer in engine.transformers.values():
        observe(transformer, lambda name, *qkv: found[name].append(tuple(x.clone() for x in qkv)) if done[0] in steps else None)
    for prompt in prompts:
        for seed in seeds:
            done[0] = 0
            engine.generate(prompt, seed, sampling, "bf16", on_step=lambda step, _: done.__setitem__(0, step))
    return found


@pytest.mark.parametrize("family", ["wan", "cogvideox"])
def test_what_is_reported_is_of_the_models_own_inputs(family: str, tiny_pipeline: Path, cogvideox: Path, tmp_path: Path) -> None:
    model = tiny_pipeline if family == "wan" else cogvideox
    sampling = SAMPLING if family == "wan" else replace(SAMPLING, num_frames=9, max_text_tokens=0)
    config = settings(model, tmp_path, sampling=sampling, steps=[1, 3], seeds=[7], max_queries=1000)
    result = compare_attention(config)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == {k: v for k, v in result.items() if not k.startswith("report_")}
    assert (result["steps"], result["seeds"], result["prompts"]) == ([1, 3], [7], ["a sneaker moves left", "a bag moves up"])
    inputs = captured(model, result["prompts"], [7], [1, 3], sampling)
    layers = [name for name in inputs if name.endswith("attn1")]
    for entry in result["recipes"]:
        recipe = get_recipe(entry["recipe"]["name"] if entry["recipe"]["name"] in RECIPES else f"recipe/{entry['recipe']['name']}")
        assert entry["recipe"] == recipe.to_dict()
        assert list(entry["layers"]) == layers
        assert entry["calls"] == sum(len(inputs[name]) for name in layers)
        for name in layers:
            errors = [output_errors(*qkv, [recipe], max_queries=1000)[0] for qkv in inputs[name]]
            for key in ("cosine", "relative_l1", "rmse"):
                assert entry["layers"][name][key] == pytest.approx(fmean(getattr(error, key) for error in errors), rel=1e-9)
        for key, worst in (("cosine", min), ("relative_l1", max), ("rmse", max)):
            values = [entry["layers"][name][key] for name in layers]
            assert entry["mean"][key] == pytest.approx(fmean(values))
            assert entry["worst"][key]["value"] == worst(values) == entry["layers"][entry["worst"][key]["layer"]][key]


def test_steps_layers_and_a_pair_of_transformers(tiny_pipeline_pair: Path, tmp_path: Path) -> None:
    """By default the first, the middle and the last step; each transformer sees those that it serves. The last step ends the video, undecoded."""
    result = compare_attention(settings(tiny_pipeline_pair, tmp_path, layers=[1], recipes=["attn_qat"]))
    assert result["steps"] == [0, 2, 3]
    layers = result["recipes"][0]["layers"]
    assert list(layers) == ["transformer.blocks.1.attn1", "transformer_2.blocks.1.attn1"]
    assert result["recipes"][0]["calls"] == 2 * 3 * 2  # prompts, steps, guidance


def test_nothing_is_decoded(tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    generate = Engine.generate

    def counted(self: Engine, *args: Any, on_step: Any, **options: Any) -> Any:
        return generate(self, *args, on_step=lambda done, total: (steps.append(done), on_step(done, total)), **options)

    monkeypatch.setattr(Engine, "generate", counted)
    monkeypatch.setattr("diffusers.AutoencoderKLWan.decode", lambda *_, **__: pytest.fail("decoded"))
    compare_attention(settings(tiny_pipeline, tmp_path, steps=[1]))
    assert steps == [1, 2, 1, 2]


def test_both_forwards_of_a_second_order_scheduler_belong_to_one_step(tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = Engine.__init__

    def with_heun(self: Engine, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._scheduler = FlowMatchHeunDiscreteScheduler()

    monkeypatch.setattr(Engine, "__init__", with_heun)
    result = compare_attention(settings(tiny_pipeline, tmp_path, steps=[1], layers=[0], sampling=replace(SAMPLING, guidance_scale=1.0)))
    assert [entry["calls"] for entry in result["recipes"]] == [2 * 2] * 3  # prompts, forwards


def test_a_recipe_whose_transformer_serves_other_steps_is_refused(tiny_pipeline_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "low.yaml").write_text("base: attn_qat\nname: low\nkeep_components: [transformer]\n")
    with pytest.raises(ConfigError, match=r"recipe 'low' covers none of the layers that run in steps=\[0\]"):
        compare_attention(settings(tiny_pipeline_pair, tmp_path, steps=[0], recipes=["attn_qat", str(tmp_path / "low.yaml")]))
    assert list((tmp_path / "out").iterdir()) == []


# Tables and pages


def result_of(**cosines: float) -> dict[str, Any]:
    """A result of these recipes, with L1 and RMSE made of the cosine."""
    entries = []
    for name, cosine in cosines.items():
        recipe = RECIPES.get(name) or get_recipe(f"recipe/{name}")
        numbers = {"cosine": cosine, "relative_l1": 1 - cosine, "rmse": (1 - cosine) / 2}
        worst = {key: {"value": value, "layer": "blocks.7.attn1"} for key, value in numbers.items()}
        entries.append({"recipe": recipe.to_dict(), "calls": 3, "layers": {"blocks.7.attn1": numbers}, "mean": numbers, "worst": worst})
    about = {"date": "2026-11-30T12:00:00+00:00", "device": "a CPU", "versions": {"torch": "2.13.0"}, "commit": "unknown", "command": "videoqat <x>"}
    said = {"settings": {"sampling": {"num_inference_steps": 20}}, "prompts": ["a <b> cat"], "seeds": [0], "steps": [0, 10, 19], "num_tokens": 320}
    return {"model": "tiny", "recipes": entries, "dtype": "torch.float32", "provenance": about, **said}


ALL = ["sage3", *VARIANTS, "attn_qat_paper", "attn_qat", "attn_qat_search", "mxfp4", "b200_nvfp4_bf16", "b200_nvfp4_fp8", "b200_mxfp8_fp8"]


def test_questions_are_about_recipes_that_differ_in_one_thing() -> None:
    tables = questions(result_of(**{name: 0.9 + 0.001 * i for i, name in enumerate(ALL)}))
    asked = {title: {row[1]: row[0] for row in rows[1:]} for title, rows in tables.items()}
    assert asked["How P is scaled (Table 1b)"] == {"sage3": "two-level", "sage3_direct_p": "direct", "sage3_gain_p": "gain 2^11"}
    assert asked["What is smoothed (Table 16)"] == {
        "sage3": "Q and K", "sage3_no_smoothing": "none", "sage3_smooth_q": "Q", "sage3_smooth_k": "K",
    }  # fmt: skip
    assert asked["Which format (Table 1a)"] == {
        "attn_qat": "NVFP4", "attn_qat_search": "NVFP4, searched", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "b200_nvfp4_bf16": "NVFP4 / BF16",
    }  # fmt: skip
    few = questions(result_of(sage3=0.996, sage3_mxfp4=0.98, attn_qat=0.9))
    assert {title: [row[1] for row in rows[1:]] for title, rows in few.items()} == {"Which format (Table 1a)": ["sage3", "sage3_mxfp4"]}


def test_one_table_of_all_as_text_markdown_and_html() -> None:
    result = result_of(sage3=0.99521, attn_qat_paper=0.9332)
    rows = overall(result)
    assert rows[1] == [
        "sage3",
        "NVFP4",
        "two-level",
        "Q and K",
        "1",
        "99.521 %",
        "99.521 %",
        "0.00479",
        "0.00479",
        "0.002395",
        "0.002395",
        "blocks.7.attn1",
    ]
    assert [row[:4] for row in rows[2:]] == [["attn_qat_paper", "NVFP4", "direct", "none"]]
    lines = text_table(result).splitlines()
    assert len(lines) == 3
    assert len({line.index("blocks.7") for line in lines[1:]} | {lines[0].index("worst CosSim in")}) == 1
    page = markdown(result)
    assert "| sage3 | NVFP4 | two-level | Q and K | 1 | 99.521 % |" in page
    assert "arXiv 2505.11594" in page
    assert "`videoqat <x>`" in page
    assert "denoising steps 0, 10, 19 of 20" in page
    web = html(result)
    assert all(text in web for text in ("99.521 %", "<svg", "a &lt;b&gt; cat", "videoqat &lt;x&gt;"))
    assert "http" not in web.replace("http://www.w3.org", "")


# Recipes, command line, refusals


def test_shipped_recipes_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = get_recipe("recipe/sage3_direct_p")
    assert (recipe.name, recipe.two_level_p, recipe.p_gain_log2, recipe.smooth_q, recipe.smooth_k) == ("sage3_direct_p", False, 0, True, True)
    with pytest.raises(ConfigError, match=r"'recipe/nothing' does not exist; legal: .*, recipe/NAME for a file of configs/recipe, or"):
        get_recipe("recipe/nothing")


def test_the_recipes_page_names_every_shipped_recipe() -> None:
    root = Path(__file__).resolve().parent.parent
    page = (root / "docs" / "recipes.md").read_text()
    assert [name for name, recipe in RECIPES.items() if recipe.is_quantised and f"`{name}`" not in page] == []
    files = [path.stem for path in (root / "configs" / "recipe").glob("*.yaml")]
    assert len(files) > len(VARIANTS)
    assert [name for name in files if not name.startswith("attn_qat_search_keep") and f"`recipe/{name}`" not in page] == []


def test_the_flag_of_compare_is_the_command() -> None:
    words = ["--config", "compare-attention/training-free", "model=m", "prompts=p", "out=o"]
    assert build_parser().parse_args(["compare", "--attention-only", *words]).name == "compare-attention"
    assert build_parser().parse_args(["compare-attention", *words]).name == "compare-attention"
    assert build_parser().parse_args(["compare", *words]).name == "compare"


def test_a_dry_run_by_the_flag_plans_and_writes_nothing(tiny_pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\n")
    words = [f"model={tiny_pipeline}", f"prompts={tmp_path / 'prompts.txt'}", f"out={tmp_path / 'out'}", "sampling.num_inference_steps=5"]
    assert main(["compare", "--attention-only", "--config", "compare-attention/training-free", *words, "--dry-run", "--json", "-"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["command"], planned["steps"], planned["prompts"]) == ("compare-attention", [0, 2, 4], ["a cat"])
    assert sorted(recipe["name"] for recipe in planned["recipes"]) == sorted(ALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"recipes": []}, "recipes=[] is not legal; legal: one or more"),
        ({"recipes": ["sage3", "bf16"]}, "recipes='bf16' is not legal; legal: recipes that quantise"),
        ({"recipes": ["sage3", "sage3"]}, "recipes=['sage3', 'sage3'] is not legal; legal: recipes with names that differ"),
        ({"recipes": ["sage4"]}, "recipe 'sage4' does not exist"),
        ({"steps": [4]}, "steps=[4] is not legal; legal: 0 to 3, of sampling.num_inference_steps=4"),
        ({"steps": [1, 1]}, "steps=[1, 1] is not legal; legal: numbers from 0 that differ"),
        ({"layers": [2]}, "layers=[2] names block 2; legal for "),
        ({"seeds": []}, "seeds=[] is not legal; legal: one or more"),
        ({"max_queries": 0}, "max_queries=0 is not legal; legal: at least 1"),
        ({"prompts": "nowhere.txt"}, "prompts='nowhere.txt' is not legal; legal: an existing file"),
        ({"sampling": SamplingConfig(num_frames=5, height=40, width=32)}, "sampling: height 40"),
    ],
)
def test_bad_input_is_told_before_anything_is_loaded(changes: dict[str, Any], says: str, tiny_pipeline: Path, tmp_path: Path) -> None:
    config = settings(tiny_pipeline, tmp_path)
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(ConfigError) as caught:
        plan(config)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_overwritten_and_no_recipe_is_without_layers(tiny_pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(UserError, match="is there already; legal: a new or an empty folder"):
        compare_attention(settings(tiny_pipeline, tmp_path))
    (tmp_path / "kept.yaml").write_text("base: sage3\nname: kept\nkeep_layers: [0]\n")
    config = settings(tiny_pipeline, tmp_path, out=str(tmp_path / "new"), recipes=["sage3", str(tmp_path / "kept.yaml")], layers=[0])
    with pytest.raises(ConfigError, match="recipe 'kept' covers none of the layers that are looked at"):
        compare_attention(config)
    assert not (tmp_path / "new").exists()
