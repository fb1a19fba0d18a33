"""What a recipe keeps in bf16: layers, of one transformer of a pair, whole transformers, denoising steps; and layers that a measurement chose."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pipelines import enliven
from helpers.training import tiny_config

from videoqat.attention.backends import record_receipts
from videoqat.config import CompareConfig, CompareEntry, ExportConfig, GenerateConfig, RuntimeConfig, SamplingConfig
from videoqat.errors import ConfigError, UserError
from videoqat.evaluation import compare
from videoqat.evaluation.layers import LayerErrors
from videoqat.generation import batch
from videoqat.generation.engine import Engine, choose_recipe
from videoqat.generation.pool import warm_up
from videoqat.models.install import install
from videoqat.models.spec import family_of, read_recipe
from videoqat.recipes import RECIPES, AttentionRecipe, get_recipe, recipe_from_dict
from videoqat.training.export import export
from videoqat.training.runlog import read_log
from videoqat.training.trainer import train

PROMPT = "a sneaker moves left"
SAMPLING = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=3, max_text_tokens=16)
CPU = RuntimeConfig(device="cpu")


@pytest.fixture(scope="module")
def model(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return enliven(tiny_pipeline, tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def pair(tiny_pipeline_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return enliven(tiny_pipeline_pair, tmp_path_factory.mktemp("policy") / "pair")


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(model, CPU)


# The value


def test_recipes_that_keep_the_same_are_equal_and_others_are_not():
    kept = AttentionRecipe("x", keep_layers=(3, 0, 3), keep_layers_in={"transformer_2": [5, 3]}, keep_components=["transformer"])  # type: ignore[arg-type]
    assert (kept.keep_layers, kept.keep_layers_in, kept.keep_components) == ((0, 3), (("transformer_2", (5,)),), ("transformer",))
    same = AttentionRecipe("x", keep_layers=(0, 3), keep_layers_in=(("transformer_2", (5,)), ("transformer", (1,))), keep_components=("transformer",))
    assert same == kept  # a layer of a transformer that is kept whole changes nothing
    assert hash(same) == hash(kept)
    changes: list[dict[str, Any]] = [
        {"keep_layers": (0,)}, {"keep_layers_in": {"transformer": [1]}}, {"keep_layers_in": {"transformer_2": [1]}},
        {"keep_components": ["transformer_2"]}, {"keep_first_steps": 1}, {"keep_last_steps": 1},
    ]  # fmt: skip
    assert len({AttentionRecipe("x"), *(AttentionRecipe("x", **change) for change in changes)}) == 1 + len(changes)


def test_what_older_versions_wrote_loads_and_is_equal():
    before = {
        "name": "old", "qk": "nvfp4", "pv": "nvfp4", "p_gain_log2": 11, "scale_divisors": [6.0], "normalizer": "exact", "grad_p": "exact",
        "smooth_q": False, "smooth_k": False, "two_level_p": False, "delta": "high_precision_output", "dv_p": "quantised",
        "attention_kinds": ["self", "joint"], "keep_layers": [0],
    }  # fmt: skip
    recipe = recipe_from_dict(before, "videoqat.json")
    assert recipe == AttentionRecipe("old", keep_layers=(0,))
    assert recipe.to_dict() == before  # so that runs, videos and comparisons made before can be gone on with


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"keep_layers_in": {"transformer_3": [0]}}, "keep_layers_in names 'transformer_3'; legal: transformer, transformer_2"),
        ({"keep_layers_in": {"transformer": "all"}}, "keep_layers_in={'transformer': 'all'} is no mapping such as"),
        ({"keep_layers_in": [0]}, "keep_layers_in=[0] is no mapping such as"),
        ({"keep_layers_in": {"transformer": [-1]}}, "must be indices of blocks, from 0"),
        ({"keep_layers_in": {"transformer": [True]}}, "must be indices of blocks, from 0"),
        ({"keep_components": ["vae"]}, "keep_components names 'vae'; legal: transformer, transformer_2"),
        ({"keep_components": "transformer"}, "keep_components='transformer' is not a list of str"),
        ({"keep_first_steps": -1}, "keep_first_steps=-1 must be 0 or more"),
        ({"keep_last_steps": 1.5}, "keep_last_steps=1.5 is not int"),
    ],
)
def test_what_cannot_be_kept_is_refused(fields: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as caught:
        AttentionRecipe("mine", **fields)
    assert says in str(caught.value)


def test_steps_and_components():
    recipe = AttentionRecipe("x", keep_layers=(0,), keep_layers_in={"transformer_2": [2]}, keep_first_steps=1, keep_last_steps=2)  # type: ignore[arg-type]
    assert [[recipe.covers("self", layer, component) for layer in range(4)] for component in ("transformer", "transformer_2")] == [
        [False, True, True, True], [False, True, False, True],
    ]  # fmt: skip
    assert [recipe.keeps_step(step, 5) for step in range(5)] == [True, False, False, True, True]
    assert not any(AttentionRecipe("x").keeps_step(step, 5) for step in range(5))
    recipe.check_steps(3)
    with pytest.raises(ConfigError, match="keeps the first 1 and the last 2 denoising steps in bf16, of 2; legal: num_inference_steps of 3 or more"):
        recipe.check_steps(2)


# Denoising


def calls_of(engine: Engine, sampling: SamplingConfig, recipe: AttentionRecipe) -> tuple[list[tuple[str, dict[str, Any], torch.Tensor]], Any]:
    """Every forward of a video: component, what went in, what came out; and the result."""
    seen: list[tuple[str, dict[str, Any], torch.Tensor]] = []
    hooks = []
    for name, transformer in engine.transformers.items():

        def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any, name: str = name) -> None:
            seen.append((name, {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}, output[0].clone()))

        hooks.append(transformer.register_forward_hook(after, with_kwargs=True))
    try:
        result = engine.generate(PROMPT, 0, sampling, recipe)
    finally:
        for hook in hooks:
            hook.remove()
    return seen, result


@functools.cache
def loaded(folder: Path, name: str) -> torch.nn.Module:
    return family_of(folder).load_transformer(folder, name, dtype=torch.float32)


@torch.no_grad()
def by(folder: Path, name: str, recipe: AttentionRecipe | str, kwargs: dict[str, Any]) -> torch.Tensor:
    """What another copy of a transformer yields, which knows nothing of steps and pairs."""
    transformer = loaded(folder, name)
    install(transformer, recipe)
    out: torch.Tensor = transformer(**kwargs)[0]
    return out


def test_kept_steps_are_bf16_and_the_others_are_not_bit_for_bit(model: Path, engine: Engine):
    recipe = AttentionRecipe("ends", keep_first_steps=1, keep_last_steps=1)
    seen, result = calls_of(engine, SAMPLING, recipe)
    assert len(seen) == 3 * 2  # with and without the prompt
    for at, (name, kwargs, output) in enumerate(seen):
        exact, quantised = by(model, name, "bf16", kwargs), by(model, name, "attn_qat", kwargs)
        assert not torch.equal(exact, quantised)
        assert torch.equal(output, quantised if at // 2 == 1 else exact)
    # Two layers, one step of three, with and without the prompt; bf16: their other steps, and cross-attention.
    assert {r["recipe"]: r["calls"] for r in result.receipts} == {"ends": 2 * 1 * 2, "bf16": 2 * 2 * 2 + 2 * 3 * 2}
    assert result.recipe == recipe


def test_a_second_order_schedulers_two_forwards_belong_to_one_step(model: Path):
    from diffusers import FlowMatchHeunDiscreteScheduler

    engine = Engine(model, CPU)
    engine._scheduler = FlowMatchHeunDiscreteScheduler()
    sampling = dataclasses.replace(SAMPLING, guidance_scale=1.0)
    seen, _ = calls_of(engine, sampling, AttentionRecipe("first", keep_first_steps=1))
    kept = [torch.equal(output, by(model, name, "bf16", kwargs)) for name, kwargs, output in seen]
    assert kept == [True, True, False, False, False]  # both of step 1, both of step 2, and the last, which has one


def test_each_transformer_of_a_pair_has_layers_of_its_own_and_both_keep_steps(pair: Path):
    engine = Engine(pair, CPU)
    recipe = AttentionRecipe("mixed", keep_layers_in={"transformer_2": [0]}, keep_last_steps=1)  # type: ignore[arg-type]
    alone = AttentionRecipe("second", keep_components=("transformer",))
    sampling = dataclasses.replace(SAMPLING, num_inference_steps=4, guidance_scale=1.0)
    seen, _ = calls_of(engine, sampling, recipe)
    wanted = {"transformer": AttentionRecipe("all"), "transformer_2": AttentionRecipe("one", keep_layers=(0,))}
    assert {name for name, _, _ in seen[:-1]} == {"transformer", "transformer_2"}
    for at, (name, kwargs, output) in enumerate(seen):
        assert torch.equal(output, by(pair, name, "bf16" if at == 3 else wanted[name], kwargs))
    for name, kwargs, output in calls_of(engine, sampling, alone)[0]:
        assert torch.equal(output, by(pair, name, "bf16" if name == "transformer" else "attn_qat", kwargs))


def test_keeping_all_steps_is_bf16(engine: Engine):
    kept = engine.generate(PROMPT, 1, SAMPLING, AttentionRecipe("all", keep_first_steps=3))
    assert np.array_equal(kept.frames, engine.generate(PROMPT, 1, SAMPLING, "bf16").frames)
    assert {r["recipe"] for r in kept.receipts} == {"bf16"}


def test_an_early_end_leaves_the_recipe_as_it_was(engine: Engine):
    recipe = AttentionRecipe("ends", keep_first_steps=2)
    whole = engine.generate(PROMPT, 1, SAMPLING, recipe).frames

    def enough(done: int, total: int) -> None:
        raise KeyboardInterrupt  # while step 2, which is kept, is still to come

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, 1, SAMPLING, recipe, on_step=enough)
    processors = [module.processor for name, module in engine.transformers["transformer"].named_modules() if name.endswith("attn1")]
    assert [processor.recipe for processor in processors] == [recipe, recipe]
    assert np.array_equal(engine.generate(PROMPT, 1, SAMPLING, recipe).frames, whole)


def test_warming_up_reaches_a_step_that_is_quantised(engine: Engine, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("base: attn_qat\nname: mine\nkeep_first_steps: 1\n")
    with record_receipts() as receipts:
        warm_up(engine, SAMPLING, [str(tmp_path / "mine.yaml")])
    assert {receipt.recipe: receipt.calls for receipt in receipts}["mine"] == 2 * 2  # two layers, with and without the prompt: one step


def test_errors_by_layer_are_of_quantised_steps_alone(engine: Engine):
    errors = LayerErrors(engine, AttentionRecipe("first", keep_layers=(0,), keep_first_steps=2))
    with errors.watching():
        engine.generate(PROMPT, 1, SAMPLING, errors.recipe)
    assert {layer: len(calls) for layer, calls in errors.found.items()} == {"blocks.1.attn1": 2}  # one step, with and without the prompt


# Bad input, before weights are loaded


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"keep_layers": [2]}, "keep_layers names block 2, but this model has blocks 0 to 1"),
        ({"keep_layers_in": {"transformer": [7]}}, "keep_layers_in names block 7, but this model has blocks 0 to 1"),
        ({"keep_layers_in": {"transformer_2": [0]}}, "keeps layers of 'transformer_2', which .* does not have; legal: transformer"),
        ({"keep_components": ["transformer_2"]}, "keeps layers of 'transformer_2', which .* does not have; legal: transformer"),
        ({"keep_first_steps": 2, "keep_last_steps": 2}, "keeps the first 2 and the last 2 denoising steps in bf16, of 3"),
    ],
)
def test_what_a_model_or_its_sampling_lacks_is_said_before_loading(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], says: str
):
    monkeypatch.setattr("videoqat.models.wan.WanFamily.load_pipeline", lambda *_, **__: pytest.fail("a pipeline was loaded"))
    recipe = tmp_path / "mine.json"
    recipe.write_text(json.dumps({"base": "attn_qat", "name": "mine", **fields}))
    (tmp_path / "prompts.txt").write_text("a cat\n")
    one = GenerateConfig(model=str(model), recipe=str(recipe), prompt=PROMPT, out=str(tmp_path / "a.mp4"), sampling=SAMPLING, runtime=CPU)
    many = dataclasses.replace(one, prompt="", prompts=str(tmp_path / "prompts.txt"), out=str(tmp_path / "videos"))
    entries = [CompareEntry(name="a", model=str(model)), CompareEntry(name="b", model=str(model), recipe=str(recipe))]
    compared = CompareConfig(entries=entries, prompts=str(tmp_path / "prompts.txt"), out=str(tmp_path / "out"), sampling=SAMPLING, runtime=CPU)
    for plan, config in ((batch.plan, one), (batch.plan, many), (compare.plan, compared)):
        with pytest.raises(UserError, match=f"recipe 'mine'.*{says}"):
            plan(config)  # type: ignore[operator]


# Training, export, serving


def test_training_quantises_at_all_times_and_the_export_remembers(model: Path, tiny_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: attn_qat\nname: mine\nkeep_first_steps: 1\nkeep_last_steps: 1\n")
    steps = {"train__steps": 1, "train__save_every": 1, "train__health_every": 0}
    train(tiny_config(model, tiny_cache, tmp_path / "run", recipe=str(recipe), **steps))
    assert "training has no steps, and quantises at all times" in capsys.readouterr().err
    train(tiny_config(model, tiny_cache, tmp_path / "plain", recipe="attn_qat", **steps))
    losses = [read_log(tmp_path / run / "log.jsonl")[0]["loss"] for run in ("run", "plain")]
    assert losses[0] == losses[1]
    out = tmp_path / "exported"
    export(ExportConfig(run=str(tmp_path / "run"), out=str(out)))
    assert read_recipe(out) == get_recipe(str(recipe))
    assert json.loads((out / "videoqat.json").read_text())["training"]["quantised_times"] == "all"
    result = Engine(out, CPU).generate(PROMPT, 0, SAMPLING, "checkpoint")
    assert {r["recipe"]: r["calls"] for r in result.receipts}["mine"] == 2 * 1 * 2
    chosen, warnings = choose_recipe(out, "attn_qat")
    assert (chosen, len(warnings)) == (RECIPES["attn_qat"], 1)
    assert "was trained for recipe mine and runs here with recipe attn_qat" in warnings[0]


def test_training_knows_which_transformer_of_a_pair_it_trains(pair: Path, tiny_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = tmp_path / "mine.json"
    recipe.write_text(json.dumps({"base": "attn_qat", "name": "mine", "keep_components": ["transformer"], "keep_layers_in": {"transformer_2": [0]}}))
    wish = {"recipe": str(recipe), "train__steps": 1, "train__health_every": 0}
    train(tiny_config(pair, tiny_cache, tmp_path / "second", model__component="transformer_2", **wish))
    assert "attention: recipe mine in 1 layers" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"recipe 'mine' keeps all of model\.component='transformer' in bf16"):
        train(tiny_config(pair, tiny_cache, tmp_path / "run", recipe=str(recipe)))


# Layers that a measurement chose


def measured(folder: Path, **changes: Any) -> Path:
    path = [
        {"count": 0, "kept": {"transformer": []}, "error": 0.10, "share": 0.9},
        {"count": 1, "kept": {"transformer": [2]}, "error": 0.05, "share": 0.6},
        {"count": 2, "kept": {"transformer": [2, 0]}, "error": 0.06, "share": 0.3},
        {"count": 3, "kept": {"transformer": [2, 0, 1]}, "error": 0.0, "share": 0.0},
    ]
    (folder / "sensitivity.json").write_text(
        json.dumps({"recipe": RECIPES["attn_qat"].to_dict(), "components": ["transformer"], "path": path, **changes})
    )
    return folder / "sensitivity.json"


def auto(folder: Path, **fields: Any) -> AttentionRecipe:
    file = folder / "mine.json"
    file.write_text(json.dumps({"base": "attn_qat", "name": "mine", "keep_layers": "auto", "sensitivity": "sensitivity.json", **fields}))
    return get_recipe(str(file))


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"max_error": 0.2}, ()),
        ({"max_error": 0.05}, (2,)),
        ({"max_error": 0.01}, (0, 1, 2)),
        ({"max_kept": 0}, ()),
        ({"max_kept": 2}, (2,)),  # the best of at most two is one
        ({"min_share": 0.2}, (2,)),
        ({"min_share": 0.7}, ()),
        ({"max_error": 0.07, "min_share": 0.5}, (2,)),
    ],
)
def test_auto_becomes_plain_indices(tmp_path: Path, limits: dict[str, Any], kept: tuple[int, ...]):
    measured(tmp_path)
    recipe = auto(tmp_path, keep_first_steps=1, **limits)
    assert recipe == dataclasses.replace(RECIPES["attn_qat"], name="mine", keep_layers=kept, keep_first_steps=1)
    (tmp_path / "sensitivity.json").unlink()  # nothing of it is needed any more
    assert recipe_from_dict(json.loads(json.dumps(recipe.to_dict())), "export") == recipe


def test_auto_of_a_pair_keeps_layers_of_each(tmp_path: Path):
    path = [{"count": 2, "kept": {"transformer": [1], "transformer_2": [0, 3]}, "error": 0.1, "share": 0.5}]
    measured(tmp_path, components=["transformer", "transformer_2"], path=path)
    assert auto(tmp_path, max_kept=2).keep_layers_in == (("transformer", (1,)), ("transformer_2", (0, 3)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "need all of `keep_layers: auto`, `sensitivity: FILE`"),
        ({"max_kept": 1, "sensitivity": "nope.json"}, "sensitivity='nope.json' is no result of `videoqat sensitivity`: FileNotFoundError"),
        ({"max_kept": 1, "keep_layers": [1]}, "need all of `keep_layers: auto`"),
        ({"max_kept": 1.5}, "max_kept=1.5 is not legal; legal: 0, 1, 2 ..."),
        ({"max_error": -1}, "max_error=-1 is not legal; legal: a number, 0 or more"),
        (
            {"max_error": 0.01, "max_kept": 2},
            r"no choice of layers in .*sensitivity.json meets {'max_error': 0.01, 'max_kept': 2}",
        ),
        ({"max_kept": 1, "base": "sage3"}, "measured recipe 'attn_qat', with p_gain_log2=11, not 0; it says nothing about recipe 'mine'"),
        ({"max_kept": 1, "keep_components": ["transformer"]}, "with keep_components=\\(\\), not \\('transformer',\\)"),
        ({"max_kept": 1, "keep_layers_in": {"transformer": [1]}}, "keep_layers_in can't stand beside `keep_layers: auto`"),
        ({"max_kept": 1, "name": 5}, "recipe name 5 is not text"),
    ],
)
def test_auto_that_cannot_be_is_refused(tmp_path: Path, fields: dict[str, Any], says: str):
    measured(tmp_path)
    with pytest.raises(ConfigError, match=says):
        auto(tmp_path, **fields)


def test_auto_needs_a_name_of_its_own(tmp_path: Path):
    measured(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: attn_qat\nkeep_layers: auto\nsensitivity: sensitivity.json\nmax_kept: 1\n")
    with pytest.raises(ConfigError, match="a recipe that changes 'attn_qat' needs a name of its own"):
        get_recipe(str(tmp_path / "mine.yaml"))
    measured(tmp_path, path=[{"no": "such thing"}])
    with pytest.raises(ConfigError, match="is no result of `videoqat sensitivity`: KeyError"):
        auto(tmp_path, max_kept=1)
