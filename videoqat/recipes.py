"""Attention recipes: what is quantised, and how.

An `AttentionRecipe` is a small frozen value. The same object drives the reference, every kernel, the trainer, the exported checkpoint
(`videoqat.json`), generation and the tests. What each field means is defined in `docs/numerics.md`; what stays in bf16, in `docs/sensitivity.md`.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from videoqat.errors import ConfigError
from videoqat.files import shipped

T = TypeVar("T")

OPERAND_FORMATS = ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8", "int8")
BLOCK_FORMATS = ("nvfp4", "mxfp4", "mxfp8")  # neighbours share a scale
PRODUCT_OF = {"q": "qk", "k": "qk", "v": "pv", "p": "pv"}  # the field that holds an operand's format
SEARCH_DIVISORS = (6.0, 6.5, 5.6, 4.0)
ATTENTION_KINDS = ("self", "joint", "cross", "refiner")
COMPONENTS = ("transformer", "transformer_2")  # what pipelines call their transformers, the one for high noise first
CHOICE_KEYS = ("max_error", "max_kept", "min_share")  # limits by which `keep_layers: auto` chooses; see `choose_kept`
AUTO_KEYS = {"sensitivity", *CHOICE_KEYS}
# What a forward computes depends on these alone, beside where it is quantised at all; the rest are a name, and the backward's.
FORWARD_FIELDS = (
    "qk", "pv", "p_gain_log2", "scale_divisors", "v_blocks", "normalizer", "smooth_q", "smooth_k", "rotate_qk", "two_level_p", "twice",
    "attention_kinds",
)  # fmt: skip


@dataclass(frozen=True)
class AttentionRecipe:
    """How attention is quantised. Equal recipes give equal numbers.

    Attributes:
        name: what results and checkpoints call it.
        qk: format of Q and K in S = Q K^T, blocks along head_dim; one of `OPERAND_FORMATS` (`bf16`: left as they come; `int8`: SageBwd, for
            qk and pv together, with smooth_k as its only variant).
        pv: format of P and V in O = P V, blocks along keys.
        v_blocks: V's blocks run along `tokens`, or along `head_dim`: a training ablation, which block-scaled hardware can't serve.
        p_gain_log2: g; P is multiplied by 2^g before it is quantised, and the gain cancels in the division by l.
        scale_divisors: divisors c tried for the NVFP4 scale E4M3(amax / c) of Q, K and V; the least squared error wins, the first of equals.
        normalizer: `exact` (l sums p) or `quantised` (l sums p').
        grad_p: P in dS: `exact`, or `quantised` (only with a quantised normaliser).
        smooth_q: subtract from Q the mean of its block of 128 tokens; mean_q K^T is added to S in high precision.
        smooth_k: subtract from K its mean over tokens.
        rotate_qk: multiply Q and K of each head by a Hadamard matrix, before anything else: no logit changes, but no channel sticks out.
        two_level_p: SageAttention3's scale for each row and 128 keys, before NVFP4.
        twice: which of `q`, `k`, `v` and `p` are two NVFP4 terms, x' = N(x) + N(x - N(x)): one more 4-bit product for each, for studies.
        delta: D in dS = P (dP - D): `high_precision_output` (rowsum of dO and O_hp = P V'), or `output` (from O: the paper's ablation).
        dv_p: P in dV = P^T dO: `quantised` (the forward's codes), or `exact` (the paper's ablation).
        attention_kinds: which attention is quantised: `self` (video tokens), `joint` (text and video), `cross` (to text), `refiner` (text
            alone, before the blocks).
        keep_layers: indices of transformer blocks whose attention stays in bf16, in every transformer of the model.
        keep_layers_in: likewise for single transformers of a pair, beside keep_layers: pairs of (one of `COMPONENTS`, indices), or a mapping.
        keep_components: transformers that stay in bf16 altogether.
        keep_first_steps, keep_last_steps: so many denoising steps at the beginning and the end of a video are computed in bf16, by both transformers
            of a pair. Training has no steps: it quantises at all times.
        as_json: all of the above (not to be given).
    """

    name: str
    qk: str = "nvfp4"
    pv: str = "nvfp4"
    p_gain_log2: int = 11
    scale_divisors: tuple[float, ...] = (6.0,)
    v_blocks: str = "tokens"
    normalizer: str = "exact"
    grad_p: str = "exact"
    smooth_q: bool = False
    smooth_k: bool = False
    rotate_qk: bool = False
    two_level_p: bool = False
    twice: tuple[str, ...] = ()
    delta: str = "high_precision_output"
    dv_p: str = "quantised"
    attention_kinds: tuple[str, ...] = ("self", "joint")
    keep_layers: tuple[int, ...] = ()
    keep_layers_in: tuple[tuple[str, tuple[int, ...]], ...] = ()
    keep_components: tuple[str, ...] = ()
    keep_first_steps: int = 0
    keep_last_steps: int = 0
    as_json: str = dataclasses.field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        def legal(field: str, value: object, values: tuple[Any, ...]) -> None:
            if value not in values:
                raise ConfigError(f"recipe {self.name!r}: {field}={value!r} is not one of {', '.join(map(repr, values))}")

        def sequence(field: str, kind: type | UnionType) -> None:
            value = getattr(self, field)
            if not isinstance(value, list | tuple) or any(isinstance(v, bool) or not isinstance(v, kind) for v in value):
                raise ConfigError(f"recipe {self.name!r}: {field}={value!r} is not a list of {getattr(kind, '__name__', 'numbers')}")
            object.__setattr__(self, field, tuple(value))

        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"recipe name {self.name!r} is not text")
        sequence("scale_divisors", int | float)
        sequence("attention_kinds", str)
        sequence("twice", str)
        sequence("keep_layers", int)
        sequence("keep_components", str)
        for field, scalar in (
            ("smooth_q", bool), ("smooth_k", bool), ("rotate_qk", bool), ("two_level_p", bool), ("p_gain_log2", int), ("keep_first_steps", int),
            ("keep_last_steps", int),
        ):  # fmt: skip
            if type(getattr(self, field)) is not scalar:
                raise ConfigError(f"recipe {self.name!r}: {field}={getattr(self, field)!r} is not {scalar.__name__}")
        legal("qk", self.qk, OPERAND_FORMATS)
        legal("pv", self.pv, OPERAND_FORMATS)
        legal("v_blocks", self.v_blocks, ("tokens", "head_dim"))
        legal("normalizer", self.normalizer, ("exact", "quantised"))
        legal("grad_p", self.grad_p, ("exact", "quantised"))
        legal("delta", self.delta, ("high_precision_output", "output"))
        legal("dv_p", self.dv_p, ("quantised", "exact"))
        for kind in self.attention_kinds:
            legal("attention_kinds", kind, ATTENTION_KINDS)
        for operand in self.twice:
            legal("twice", operand, tuple(PRODUCT_OF))
        object.__setattr__(self, "twice", tuple(operand for operand in PRODUCT_OF if operand in self.twice))
        # 2^g/6 <= 448 (E4M3's largest scale) bounds g at 11; plain fp8 elements saturate at 448, so there 2^8 is the largest power of two.
        largest_gain = 8 if self.pv == "fp8" else 11
        legal("p_gain_log2", self.p_gain_log2, tuple(range(largest_gain + 1)))
        if not self.scale_divisors or any(not 2.0**-126 <= c <= 2.0**126 for c in self.scale_divisors):  # beyond, fp32 has no 1/c
            raise ConfigError(f"recipe {self.name!r}: scale_divisors={self.scale_divisors} must be one or more positive numbers, 2^-126 to 2^126")
        object.__setattr__(self, "scale_divisors", tuple(map(float, self.scale_divisors)))
        self._check_kept()
        if self.scale_divisors != (6.0,) and "nvfp4" not in (self.qk, self.pv):
            raise ConfigError(f"recipe {self.name!r}: scale_divisors are for nvfp4, but qk={self.qk} and pv={self.pv}")
        if self.v_blocks != "tokens" and self.pv not in BLOCK_FORMATS:
            raise ConfigError(f"recipe {self.name!r}: v_blocks={self.v_blocks!r} needs pv of {', '.join(BLOCK_FORMATS)}, but pv={self.pv}")
        if self.grad_p == "quantised" and self.normalizer != "quantised":
            raise ConfigError(f"recipe {self.name!r}: grad_p='quantised' needs normalizer='quantised' (rows of dS must sum to zero)")
        if self.two_level_p and (self.pv != "nvfp4" or self.p_gain_log2 != 0):
            raise ConfigError(f"recipe {self.name!r}: two_level_p needs pv='nvfp4' and p_gain_log2=0 (its row scale is the gain)")
        if self.rotate_qk and self.qk in ("bf16", "int8"):
            raise ConfigError(f"recipe {self.name!r}: rotate_qk is for qk of {', '.join(BLOCK_FORMATS)} or fp8, not {self.qk}")
        for operand in self.twice:
            format = getattr(self, PRODUCT_OF[operand])
            if format != "nvfp4":
                raise ConfigError(f"recipe {self.name!r}: twice={operand!r} needs {PRODUCT_OF[operand]}='nvfp4', not {format!r}")
        self._check_int8()

        # How the recipe travels through the attention operator. Made here once: torch.compile can read a string, but not run this.
        object.__setattr__(self, "as_json", json.dumps(self.to_dict()))

    def _check_kept(self) -> None:
        """Brings what stays in bf16 into one form, so that recipes that keep the same are equal."""
        given = self.keep_layers_in
        pairs = list(given.items()) if isinstance(given, dict) else given
        well_formed = isinstance(pairs, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
        if not well_formed or any(not isinstance(kept, list | tuple) for _, kept in pairs):
            raise ConfigError(f"recipe {self.name!r}: keep_layers_in={given!r} is no mapping such as {{transformer: [0], transformer_2: [0, 29]}}")
        for field, components in (("keep_layers_in", [component for component, _ in pairs]), ("keep_components", self.keep_components)):
            for component in components:
                if component not in COMPONENTS:
                    raise ConfigError(f"recipe {self.name!r}: {field} names {component!r}; legal: {', '.join(COMPONENTS)}")
        for field, layers in (("keep_layers", self.keep_layers), *(("keep_layers_in", kept) for _, kept in pairs)):
            if any(type(layer) is not int or layer < 0 for layer in layers):
                raise ConfigError(f"recipe {self.name!r}: {field}={getattr(self, field)!r} must be indices of blocks, from 0")
        for field in ("keep_first_steps", "keep_last_steps"):
            if getattr(self, field) < 0:
                raise ConfigError(f"recipe {self.name!r}: {field}={getattr(self, field)} must be 0 or more")
        everywhere = _once(self.keep_layers)
        own: dict[str, set[int]] = {}
        for component, kept in pairs:
            own.setdefault(component, set()).update(set(kept) - set(everywhere))
        object.__setattr__(self, "keep_layers", everywhere)
        object.__setattr__(self, "keep_components", _once(self.keep_components))
        alone = [(component, _once(kept)) for component, kept in sorted(own.items()) if kept and component not in self.keep_components]
        object.__setattr__(self, "keep_layers_in", tuple(alone))

    def _check_int8(self) -> None:
        """INT8 is SageBwd, whole: both products, D from O, and none of what is there for 4 bits."""
        if "int8" not in (self.qk, self.pv):
            return
        if self.qk != self.pv:
            raise ConfigError(f"recipe {self.name!r}: qk={self.qk!r} and pv={self.pv!r}, but int8 (SageBwd) is for both together")
        required = {
            "p_gain_log2": 0, "normalizer": "exact", "grad_p": "exact", "smooth_q": False, "two_level_p": False, "delta": "output",
            "dv_p": "quantised",
        }  # fmt: skip
        for field, value in required.items():
            if getattr(self, field) != value:
                raise ConfigError(f"recipe {self.name!r}: {field}={getattr(self, field)!r} does not go with int8 (SageBwd), which needs {value!r}")

    @property
    def is_quantised(self) -> bool:
        """Whether any operand is quantised; if not, attention is plain SDPA."""
        return (self.qk, self.pv) != ("bf16", "bf16")

    def covers(self, kind: str, layer: int, component: str = "transformer") -> bool:
        """Whether this recipe quantises the attention of `kind` in block `layer` of the transformer `component`, in steps that it doesn't keep."""
        if not self.is_quantised or kind not in self.attention_kinds or component in self.keep_components:
            return False
        return layer not in self.keep_layers and layer not in dict(self.keep_layers_in).get(component, ())

    def keeps_step(self, step: int, num_steps: int) -> bool:
        """Whether denoising step `step` (from 0) of `num_steps` is computed in bf16."""
        return step < self.keep_first_steps or step >= num_steps - self.keep_last_steps

    def check_steps(self, num_steps: int) -> None:
        """Requires that a video of `num_steps` denoising steps has the steps that are to be kept.

        Raises:
            ConfigError: it has fewer.
        """
        kept = self.keep_first_steps + self.keep_last_steps
        if kept > num_steps:
            raise ConfigError(
                f"recipe {self.name!r} keeps the first {self.keep_first_steps} and the last {self.keep_last_steps} denoising steps in bf16, of "
                f"{num_steps}; legal: num_inference_steps of {kept} or more, or a recipe that keeps fewer"
            )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict; `recipe_from_dict` is its inverse.

        Keys that came later are in it only where they say something: what was written before there were such keys means the same, and is equal.
        """
        fields: dict[str, Any] = {k: v for k, v in dataclasses.asdict(self).items() if k != "as_json"}
        later = {
            "v_blocks": "tokens", "rotate_qk": False, "twice": (), "keep_layers_in": (), "keep_components": (), "keep_first_steps": 0,
            "keep_last_steps": 0,
        }  # fmt: skip
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items() if v != later.get(k)}
        if self.keep_layers_in:
            fields["keep_layers_in"] = {component: list(kept) for component, kept in self.keep_layers_in}
        return fields


def _once(values: Iterable[T]) -> tuple[T, ...]:
    """Each of `values` once, in ascending order."""
    return tuple(sorted(set(values)))  # type: ignore[type-var]


_NAMED = (
    AttentionRecipe("bf16", qk="bf16", pv="bf16", p_gain_log2=0),
    AttentionRecipe("attn_qat"),
    AttentionRecipe("attn_qat_search", scale_divisors=SEARCH_DIVISORS),
    AttentionRecipe("attn_qat_paper", p_gain_log2=0),
    AttentionRecipe("attn_qat_no_o_hp", delta="output"),
    AttentionRecipe("attn_qat_exact_dv", dv_p="exact"),
    AttentionRecipe("qk_nvfp4", pv="bf16"),
    AttentionRecipe("pv_nvfp4", qk="bf16"),
    AttentionRecipe("mxfp4", qk="mxfp4", pv="mxfp4"),
    AttentionRecipe("sage3", p_gain_log2=0, smooth_q=True, smooth_k=True, two_level_p=True),
    AttentionRecipe("b200_nvfp4_bf16", qk="nvfp4", pv="bf16"),
    AttentionRecipe("b200_nvfp4_fp8", qk="nvfp4", pv="fp8", p_gain_log2=8),
    AttentionRecipe("b200_mxfp8_fp8", qk="mxfp8", pv="fp8", p_gain_log2=8),
    AttentionRecipe("sagebwd", qk="int8", pv="int8", p_gain_log2=0, smooth_k=True, delta="output"),
)
RECIPES: dict[str, AttentionRecipe] = {recipe.name: recipe for recipe in _NAMED}


def recipe_from_dict(fields: dict[str, Any], origin: str) -> AttentionRecipe:
    """A recipe from a mapping. `base: NAME` starts from a named recipe; `name` is then required unless nothing else changes.

    Raises:
        ConfigError: an unknown key or an illegal value; `origin` (a file, say) is named.
    """
    known = [field.name for field in dataclasses.fields(AttentionRecipe) if field.init]
    unknown = sorted(set(fields) - {*known, "base"}, key=str)
    if unknown:
        raise ConfigError(f"{origin}: unknown recipe key {unknown[0]!r}; legal keys: base, {', '.join(known)}")
    changes = {k: v for k, v in fields.items() if k != "base"}
    if "base" in fields:
        base = RECIPES.get(str(fields["base"]))
        if base is None:
            raise ConfigError(f"{origin}: base={fields['base']!r} is not a named recipe; legal: {', '.join(RECIPES)}")
        if changes and "name" not in changes:
            raise ConfigError(f"{origin}: a recipe that changes {base.name!r} needs a name of its own")
        return dataclasses.replace(base, **changes)
    if "name" not in changes:
        raise ConfigError(f"{origin}: a recipe needs a name")
    return AttentionRecipe(**changes)


def get_recipe(recipe: "str | AttentionRecipe") -> AttentionRecipe:
    """The recipe called `recipe`, or the one in the YAML or JSON file of that path; `recipe/NAME` is the file configs/recipe/NAME.yaml.

    Raises:
        ConfigError: neither a name nor a file; all names are listed.
    """
    if isinstance(recipe, AttentionRecipe):
        return recipe
    if recipe in RECIPES:
        return RECIPES[recipe]
    path = (shipped(recipe) if recipe.startswith("recipe/") else None) or Path(recipe)
    if path.suffix in (".yaml", ".yml", ".json") and path.is_file():
        import yaml

        try:
            fields = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
        except (ValueError, yaml.YAMLError) as error:  # ValueError: JSON's syntax, or bytes that are no text
            raise ConfigError(f"recipe {recipe!r} can't be read: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}: a recipe file holds a mapping")
        if fields.get("keep_layers") == "auto" or AUTO_KEYS & fields.keys():
            return _with_measured_layers(fields, path)
        return recipe_from_dict(fields, str(path))
    legal = f"{', '.join(RECIPES)}, recipe/NAME for a file of configs/recipe, or the path of a recipe's .yaml or .json file"
    raise ConfigError(f"recipe {recipe!r} does not exist; legal: {legal}")


def _with_measured_layers(fields: dict[str, Any], path: Path) -> AttentionRecipe:
    """The recipe of a file with `keep_layers: auto`: which layers that means stands in what `videoqat sensitivity` found out.

    Beside it the file has `sensitivity` (the result's path, from the file's own folder) and one or more of `CHOICE_KEYS`.
    """
    limits: dict[str, Any] = {key: fields[key] for key in CHOICE_KEYS if key in fields}
    if fields.get("keep_layers") != "auto" or not isinstance(fields.get("sensitivity"), str) or not limits:
        asked = "`keep_layers: auto`, `sensitivity: FILE` (what `videoqat sensitivity` wrote) and one or more of " + ", ".join(CHOICE_KEYS)
        raise ConfigError(f"{path}: layers that are to be chosen by a measurement need all of {asked}")
    for key, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int if key == "max_kept" else int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"{path}: {key}={value!r} is not legal; legal: {'0, 1, 2 ...' if key == 'max_kept' else 'a number, 0 or more'}")
    recipe = recipe_from_dict({k: v for k, v in fields.items() if k not in AUTO_KEYS} | {"keep_layers": []}, str(path))
    if recipe.keep_layers_in:
        raise ConfigError(f"{path}: keep_layers_in can't stand beside `keep_layers: auto`, which decides it")
    source = path.parent / fields["sensitivity"]
    try:
        found = json.loads(source.read_text())
        measured, components = recipe_from_dict(found["recipe"], str(source)), found["components"]
        chosen = choose_kept(found["path"], **limits)
        kept = None if chosen is None else kept_fields(chosen["kept"], components)
        least = min(step["error"] for step in found["path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: sensitivity={fields['sensitivity']!r} is no result of `videoqat sensitivity`: {error!r}") from error
    for field in (*FORWARD_FIELDS, "keep_components"):
        if getattr(measured, field) != getattr(recipe, field):
            difference = f"with {field}={getattr(measured, field)!r}, not {getattr(recipe, field)!r}"
            raise ConfigError(f"{path}: {source} measured recipe {measured.name!r}, {difference}; it says nothing about recipe {recipe.name!r}")
    if kept is None:
        raise ConfigError(f"{path}: no choice of layers in {source} meets {limits}; the least error that it reached is {least:.3g}")
    return dataclasses.replace(recipe, **kept)


def choose_kept(
    path: list[dict[str, Any]], *, max_error: float | None = None, max_kept: int | None = None, min_share: float | None = None
) -> dict[str, Any] | None:
    """The one of several measured choices of layers to keep in bf16 that meets all limits; None if none does.

    Args:
        path: the choices, each with `kept` (component -> indices), `count` (how many the choice adds to what the recipe keeps), `error`, `share`.
        max_error: the error at the transformer's output that may remain; of those that meet it, the choice that keeps fewest layers is taken.
            Without it, the one with the least error.
        max_kept: how many layers may be kept, beside those that the recipe keeps.
        min_share: the share of attention's arithmetic that must be left in the recipe's formats.
    """
    able = [step for step in path if (max_kept is None or step["count"] <= max_kept) and (min_share is None or step["share"] >= min_share)]
    if max_error is not None:
        return min((step for step in able if step["error"] <= max_error), key=lambda step: step["count"], default=None)
    return min(able, key=lambda step: (step["error"], step["count"]), default=None)


def kept_fields(kept: dict[str, list[int]], components: list[str]) -> dict[str, Any]:
    """Fields of a recipe that keeps these layers, of a model with these transformers."""
    if len(components) == 1:
        return {"keep_layers": tuple(kept[components[0]]), "keep_layers_in": ()}
    return {"keep_layers": (), "keep_layers_in": tuple((component, tuple(layers)) for component, layers in kept.items())}
