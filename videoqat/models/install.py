"""Puts an attention recipe into a transformer, layer by layer, and takes it out again.

Nothing global is touched: the recipe lives in the processors of this one transformer, so that a BF16 and an FP4 model can share a process.
Every attention layer gets a processor of ours. Layers that the recipe doesn't cover run the bf16 recipe, which is bitwise what diffusers'
own processor computes; that way all of them can be observed.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from videoqat.errors import CheckpointError, ConfigError
from videoqat.models.other import OTHER, OtherTransformers
from videoqat.models.spec import AttentionLayer, ModelFamily, family_of, family_of_transformer
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import RECIPES, AttentionRecipe, get_recipe

Observer = Callable[[str, Tensor, Tensor, Tensor], None]  # layer name, q_BNHD, k_BNHD, v_BNHD as they go into attention


@dataclass(frozen=True)
class _Installed:
    """Kept on the transformer while a recipe is installed."""

    recipe: AttentionRecipe
    component: str  # which of its pipeline's transformers this one is
    layers: list[AttentionLayer]
    stock: list[Any]  # what the layers' processors were before
    ours: list[Any]  # what they are now


@dataclass(frozen=True)
class _Sharded:
    """Kept on the transformer while its sequence is divided."""

    ulysses: Ulysses
    hooks: list[RemovableHandle]


def attention_of(transformer: nn.Module) -> ModelFamily | OtherTransformers:
    """What knows this transformer's attention: its family, or for one of no family `other.OTHER`, which knows stock processors."""
    try:
        return family_of_transformer(transformer)
    except CheckpointError:
        return OTHER


def install(
    transformer: nn.Module,
    recipe: AttentionRecipe | str,
    *,
    kernel: str = "auto",
    family: ModelFamily | None = None,
    component: str = "transformer",
) -> list[AttentionLayer]:
    """Makes `transformer` compute attention by `recipe`. A recipe already installed is replaced.

    Args:
        transformer: of a family in `videoqat.models.spec.FAMILIES`, or any of diffusers whose attention processors `videoqat.models.other` knows.
        recipe: a recipe, or the name or file of one.
        kernel: for the quantised layers; `auto`, or a kernel's name to insist on it.
        family: found by the transformer's class if not given.
        component: which of its pipeline's transformers it is; a recipe may treat the two of a pair differently.

    Returns:
        The layers that are now quantised (none for a bf16 recipe). Denoising steps are nobody's business here: who knows the step has these layers
        compute by bf16 where the recipe keeps it (`stepping`).

    Raises:
        ConfigError: the recipe keeps a block that the model doesn't have, or it can't run on a divided sequence (`shard_sequence`).
        CheckpointError: a transformer of no known family with an attention processor that isn't known.
    """
    recipe = get_recipe(recipe)
    known = family or attention_of(transformer)
    layers = known.attention_layers(transformer)
    check_kept_layers(recipe, component, 1 + max(layer.index for layer in layers))
    sharded: _Sharded | None = getattr(transformer, "_videoqat_sharded", None)
    if sharded is not None:
        check_sharded(recipe, layers, sharded.ulysses, component)
    _put_back(transformer)
    stock = [layer.module.processor for layer in layers]
    quantised = [layer for layer in layers if recipe.covers(layer.kind, layer.index, component)]
    ours = []
    for layer in layers:
        # A kernel that is insisted on is meant for the quantised layers; it need not be able to do plain attention.
        processor = known.make_processor(layer, recipe, kernel) if layer in quantised else known.make_processor(layer, RECIPES["bf16"], "auto")
        processor.ulysses = None if sharded is None else sharded.ulysses
        _set_processor(layer.module, processor)
        ours.append(processor)
    transformer._videoqat_installed = _Installed(recipe, component, layers, stock, ours)  # type: ignore[assignment]
    return quantised


def uninstall(transformer: nn.Module) -> None:
    """Puts back the processors that were there before `install`, and ends `shard_sequence`; does nothing where none was installed."""
    if getattr(transformer, "_videoqat_installed", None) is not None:
        shard_sequence(transformer, None)
        _put_back(transformer)


def _put_back(transformer: nn.Module) -> None:
    installed: _Installed | None = getattr(transformer, "_videoqat_installed", None)
    if installed is None:
        return
    for layer, processor in zip(installed.layers, installed.stock, strict=True):
        _set_processor(layer.module, processor)
    del transformer._videoqat_installed


def _set_processor(module: Any, processor: Any) -> None:
    if hasattr(module, "set_processor"):  # Mochi's attention has none
        module.set_processor(processor)
    else:
        module.processor = processor


def installed_recipe(transformer: nn.Module) -> AttentionRecipe | None:
    """The recipe that `install` put in, or None; also where a processor has been exchanged since, as CogVideoX's fuse_qkv_projections() does, and
    unfuse_qkv_projections(), which may put one of ours from an earlier `install` in its place."""
    installed: _Installed | None = getattr(transformer, "_videoqat_installed", None)
    if installed is None or any(layer.module.processor is not own for layer, own in zip(installed.layers, installed.ours, strict=True)):
        return None
    return installed.recipe


def shard_sequence(transformer: nn.Module, ulysses: Ulysses | None, *, family: ModelFamily | None = None) -> None:
    """Divides the tokens of every later forward among `ulysses`' ranks (a recipe must be installed); None ends it.

    Recipes that are installed later find it so.

    Raises:
        ConfigError: the ranks don't divide a layer's heads, or the recipe can't run on a divided sequence.
        CheckpointError: no recipe is installed: diffusers' own processors would attend within each part; or a transformer of no family.
    """
    installed: _Installed | None = getattr(transformer, "_videoqat_installed", None)
    if installed is None:
        raise CheckpointError("no recipe is installed in this transformer: install one (bf16 will do) before dividing its sequence")
    if ulysses is not None:
        check_sharded(installed.recipe, installed.layers, ulysses, installed.component)
    sharded: _Sharded | None = getattr(transformer, "_videoqat_sharded", None)
    for hook in sharded.hooks if sharded is not None else ():
        hook.remove()
    transformer._videoqat_sharded = None  # type: ignore[assignment]
    if ulysses is not None:
        hooks = (family or attention_of(transformer)).shard_sequence(transformer, ulysses)
        transformer._videoqat_sharded = _Sharded(ulysses, hooks)  # type: ignore[assignment]
    for layer in installed.layers:
        layer.module.processor.ulysses = ulysses  # type: ignore[union-attr]


def divided_by(transformer: nn.Module) -> Ulysses | None:
    """What `shard_sequence` divides this transformer's sequences by, or None."""
    sharded: _Sharded | None = getattr(transformer, "_videoqat_sharded", None)
    return None if sharded is None else sharded.ulysses


def check_kept_layers(recipe: AttentionRecipe, component: str, num_layers: int) -> None:
    """Requires that a transformer of `num_layers` blocks has those that `recipe` keeps in it.

    Raises:
        ConfigError: it lacks one.
    """
    for field, kept in (("keep_layers", recipe.keep_layers), ("keep_layers_in", dict(recipe.keep_layers_in).get(component, ()))):
        for index in kept:
            if index >= num_layers:
                which = "this model" if component == "transformer" else component
                raise ConfigError(f"recipe {recipe.name!r}: {field} names block {index}, but {which} has blocks 0 to {num_layers - 1}")


def check_policy(recipe: AttentionRecipe, folder: str | Path) -> None:
    """Requires that the model in `folder` has every transformer and every block that `recipe` names. Nothing is loaded.

    Raises:
        ConfigError: it lacks one.
    """
    family = family_of(folder)
    components = family.components(folder)
    for component in (*recipe.keep_components, *dict(recipe.keep_layers_in)):
        if component not in components:
            raise ConfigError(f"recipe {recipe.name!r} keeps layers of {component!r}, which {folder} does not have; legal: {', '.join(components)}")
    for component in components:
        check_kept_layers(recipe, component, family.geometry(folder, component).num_layers)


def check_sharded(recipe: AttentionRecipe, layers: list[AttentionLayer], ulysses: Ulysses, component: str = "transformer") -> None:
    """Requires that these layers can attend by `recipe` when the sequence is divided, and quantise the same numbers together.

    Raises:
        ConfigError: the ranks don't divide a layer's heads; the recipe covers cross-attention and works on blocks of queries there; or it has no
            codes for a wire that is to be packed.
    """
    ulysses.packs(recipe)
    for layer in layers:
        if layer.kind != "cross" and layer.num_heads % ulysses.degree:
            raise ConfigError(f"parallel.sp={ulysses.degree} does not divide the {layer.num_heads} heads of {layer.name}")
    check_cut(recipe, layers, ulysses.degree, component)


def check_cut(recipe: AttentionRecipe, layers: list[AttentionLayer], sp: int, component: str = "transformer") -> None:
    """Requires that `recipe` quantises the same numbers together where `sp` ranks, two or more, have a part of the queries each.

    Raises:
        ConfigError: it covers cross-attention, and works on blocks of queries there.
    """
    for layer in layers:
        if layer.kind == "cross" and recipe.covers(layer.kind, layer.index, component) and (recipe.smooth_q or recipe.qk == "int8"):
            # Queries of cross-attention stay divided. Their own blocks run along head_dim, but these two look at many queries at once.
            how = "smooth_q" if recipe.smooth_q else "qk=int8"
            raise ConfigError(
                f"recipe {recipe.name!r}: {how} works on blocks of queries, and parallel.sp={sp} would cut those of {layer.name}, which "
                "is cross-attention, in other places; legal: parallel.sp=1, or attention_kinds without cross"
            )


@contextlib.contextmanager
def computing_by(layers: list[AttentionLayer], recipe: AttentionRecipe, kernel: str = "auto") -> Iterator[None]:
    """Within the block the quantised `layers` (as `install` returned them) compute by another recipe. All else about their processors stays, so that
    neither a sharded nor a compiled transformer has to be made anew. Not between a forward and its backward."""
    processors: list[Any] = [layer.module.processor for layer in layers]
    before = [(processor.recipe, processor.kernel) for processor in processors]
    for processor in processors:
        processor.recipe, processor.kernel = recipe, kernel
    try:
        yield
    finally:
        for processor, (own_recipe, own_kernel) in zip(processors, before, strict=True):
            processor.recipe, processor.kernel = own_recipe, own_kernel


@contextlib.contextmanager
def stepping(layers: list[AttentionLayer], recipe: AttentionRecipe, num_steps: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to be called with the number of each of `num_steps` denoising steps (from 0) before its forwards: from then on the quantised
    `layers` compute by bf16 if `recipe` keeps that step, else by what is installed in them. Afterwards they compute by that again."""
    with contextlib.ExitStack() as kept:

        def begin(step: int) -> None:
            kept.close()
            if step < num_steps and recipe.keeps_step(step, num_steps):
                kept.enter_context(computing_by(layers, RECIPES["bf16"]))

        yield begin


def observe(transformer: nn.Module, observer: Observer | None) -> None:
    """Has `observer(layer name, q_BNHD, k_BNHD, v_BNHD)` called before every attention of `transformer`; None ends it.

    Raises:
        CheckpointError: no recipe is installed, so there is nothing to observe with.
    """
    installed = getattr(transformer, "_videoqat_installed", None)
    if installed is None:
        raise CheckpointError("no recipe is installed in this transformer: install one (bf16 will do) before observing it")
    for layer in installed.layers:
        layer.module.processor.observer = observer
