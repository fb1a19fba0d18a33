"""Recipes side by side on attention alone: on the Q, K and V of a model that denoises in bf16, each recipe's output is held against the exact one.

Nothing is rendered by a recipe, so errors of one layer don't reach the next; and all recipes meet the very same inputs.
"""

import contextlib
import functools
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from videoqat.attention.output_error import OutputError, output_errors
from videoqat.config import CompareAttentionConfig, to_dict
from videoqat.console import progress, say
from videoqat.errors import ConfigError, GenerationCancelled, UserError
from videoqat.evaluation.attention_report import text_table, write_report
from videoqat.files import check_writable, writable_folder, write_json
from videoqat.generation.engine import Engine, check_sampling
from videoqat.generation.images import check_image, read_image
from videoqat.generation.prompts import read_prompts_with_images
from videoqat.models.hub import check_weights, origin
from videoqat.models.install import check_policy, observe
from videoqat.models.spec import AttentionLayer, family_of
from videoqat.provenance import provenance
from videoqat.recipes import AttentionRecipe, get_recipe

BF16 = get_recipe("bf16")


def chosen_steps(config: CompareAttentionConfig) -> list[int]:
    """Denoising steps to be looked at, in order."""
    last = config.sampling.num_inference_steps - 1
    return sorted(set(config.steps or (0, (last + 1) // 2, last)))


def plan(config: CompareAttentionConfig) -> dict[str, Any]:
    """What `compare_attention(config)` would do, checked without loading weights.

    Returns:
        `model`'s size (see `check_sampling`), `recipes` (as plain data), `prompts` and `steps`.

    Raises:
        UserError: whatever `compare_attention` would refuse before it loads the model.
    """
    config.validate()
    recipes = [get_recipe(recipe) for recipe in config.recipes]
    check_weights(config.model)
    size = check_sampling(config.model, config.sampling)
    config.runtime.resolve()
    for recipe in recipes:
        check_policy(recipe, config.model)
    _check_layers(config, recipes)
    out = Path(config.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out={str(out)!r} is there already; legal: a new or an empty folder")
    check_writable("out", out)
    prompts = read_prompts_with_images(config.prompts)
    for prompt, image in prompts:
        check_image(config.model, image, f"prompts={config.prompts!r}, {prompt!r}: image")
    named = [recipe.to_dict() for recipe in recipes]
    return {**size, "recipes": named, "prompts": [prompt for prompt, _ in prompts], "steps": chosen_steps(config)}


def _check_layers(config: CompareAttentionConfig, recipes: list[AttentionRecipe]) -> None:
    """Requires that the model has the blocks that are asked for, and that each recipe quantises something in them."""
    family = family_of(config.model)
    built = {component: family.attention_layers(family.build(config.model, component)) for component in family.components(config.model)}
    last = max(layer.index for layers in built.values() for layer in layers)
    for index in config.layers:
        if index > last:
            raise ConfigError(f"layers={config.layers} names block {index}; legal for {config.model}: 0 to {last}")
    looked_at = [(component, layer) for component, layers in built.items() for layer in layers if layer.index in config.layers or not config.layers]
    for recipe in recipes:
        if not any(recipe.covers(layer.kind, layer.index, component) for component, layer in looked_at):
            raise ConfigError(f"recipe {recipe.name!r} covers none of the layers that are looked at; legal: recipes that do, or other layers=")


class _Watch:
    """Collects `OutputError`s of every covered layer, call by call, for (recipe, layer)."""

    def __init__(self, engine: Engine, recipes: list[AttentionRecipe], config: CompareAttentionConfig) -> None:
        self.engine = engine
        self.recipes = recipes
        self.steps = chosen_steps(config)
        self.blocks = set(config.layers)
        self.max_queries = config.max_queries
        self.step = 0
        self.found: dict[str, dict[str, list[OutputError]]] = {recipe.name: defaultdict(list) for recipe in recipes}
        self.order: list[str] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Looks at every attention until the block ends."""
        self.engine.install(BF16)
        for component, transformer in self.engine.transformers.items():
            layers = {layer.name: layer for layer in self.engine.family.attention_layers(transformer)}
            self.order += [self._name(component, layer) for layer in layers]
            observe(transformer, functools.partial(self._measure, component, layers))
        try:
            yield
        finally:
            for transformer in self.engine.transformers.values():
                observe(transformer, None)

    def _name(self, component: str, layer: str) -> str:
        return layer if len(self.engine.transformers) == 1 else f"{component}.{layer}"

    def _measure(self, component: str, layers: dict[str, AttentionLayer], name: str, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> None:
        layer = layers[name]
        if self.step not in self.steps or (self.blocks and layer.index not in self.blocks):
            return
        recipes = [recipe for recipe in self.recipes if recipe.covers(layer.kind, layer.index, component)]
        for recipe, error in zip(recipes, output_errors(q_BNHD, k_BNHD, v_BNHD, recipes, max_queries=self.max_queries), strict=True):
            self.found[recipe.name][self._name(component, name)].append(error)

    def on_step(self, done: int, total: int) -> None:
        """After each forward of denoising; ends the video after the last step that is wanted, so that nothing is decoded."""
        self.step = done // self.engine.pipeline.scheduler.order  # a second-order scheduler takes two for one step
        if self.step > self.steps[-1]:
            raise GenerationCancelled


def compare_attention(config: CompareAttentionConfig) -> dict[str, Any]:
    """Measures, and writes report.json, report.md and report.html to `config.out`.

    Returns:
        What report.json holds: `recipes`, each with its fields, `calls`, `layers` (name -> cosine, relative_l1, rmse: means over calls), `mean` and
        `worst` over layers; `steps`, `prompts`, `settings`, `provenance`. And `report_html`, `report_md`, `report_json`: where they are.

    Raises:
        UserError: bad configuration or input; nothing is overwritten.
    """
    planned = plan(config)
    recipes = [get_recipe(recipe) for recipe in config.recipes]
    out = writable_folder("out", config.out)
    say(f"loading {config.model}")
    engine = Engine(config.model, config.runtime)
    watch = _Watch(engine, recipes, config)
    videos = [(prompt, image, seed) for prompt, image in read_prompts_with_images(config.prompts) for seed in config.seeds]
    with watch.open():
        for prompt, path, seed in progress(videos, desc="captured", unit="video"):
            watch.step = 0
            image = read_image(path)[0] if path else None
            with contextlib.suppress(GenerationCancelled):
                engine.generate(prompt, seed, config.sampling, BF16, image=image, on_step=watch.on_step)
    result = {
        "model": str(config.model),
        "model_origin": origin(config.model),
        "recipes": [_summary(recipe, watch) for recipe in recipes],
        "steps": planned["steps"],
        "prompts": planned["prompts"],
        "seeds": list(config.seeds),
        "num_tokens": planned["num_tokens"],
        "dtype": str(engine.dtype),
        "settings": to_dict(config),
        "provenance": provenance(str(engine.device)),
    }
    write_json(out / "report.json", result)
    written = write_report(result, out)
    say(text_table(result))
    return {**result, **written, "report_json": str(out / "report.json")}


def _summary(recipe: AttentionRecipe, watch: _Watch) -> dict[str, Any]:
    found = watch.found[recipe.name]
    if not found:  # of a pair, which transformer serves a step is known only now
        raise ConfigError(f"recipe {recipe.name!r} covers none of the layers that run in steps={watch.steps}; legal: steps in which one does")
    layers = {name: _means(found[name]) for name in watch.order if name in found}
    worst = {
        "cosine": min(layers, key=lambda name: layers[name]["cosine"]),
        **{key: max(layers, key=lambda name: layers[name][key]) for key in ("relative_l1", "rmse")},
    }
    return {
        "recipe": recipe.to_dict(),
        "calls": sum(map(len, found.values())),
        "layers": layers,
        "mean": {key: statistics.fmean(layer[key] for layer in layers.values()) for key in worst},
        "worst": {key: {"value": layers[name][key], "layer": name} for key, name in worst.items()},
    }


def _means(errors: list[OutputError]) -> dict[str, float]:
    rows = [asdict(error) for error in errors]
    return {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
