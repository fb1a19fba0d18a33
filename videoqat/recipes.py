"""Attention recipes: what is quantised, and how.

An `AttentionRecipe` is a small frozen value. The same object drives the reference, every kernel, the trainer, the exported checkpoint
(`videoqat.json`), generation and the tests. What each field means is defined in `docs/numerics.md`.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from videoqat.errors import ConfigError

OPERAND_FORMATS = ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8", "int8")
SEARCH_DIVISORS = (6.0, 6.5, 5.6, 4.0)
ATTENTION_KINDS = ("self", "joint", "cross")


@dataclass(frozen=True)
class AttentionRecipe:
    """How attention is quantised. Equal recipes give equal numbers.

    Attributes:
        name: what results and checkpoints call it.
        qk: format of Q and K in S = Q K^T, blocks along head_dim; one of `OPERAND_FORMATS` (`bf16`: left as they come; `int8`: SageBwd, for
            qk and pv together, with smooth_k as its only variant).
        pv: format of P and V in O = P V, blocks along keys.
        p_gain_log2: g; P is multiplied by 2^g before it is quantised, and the gain cancels in the division by l.
        scale_divisors: divisors c tried for the NVFP4 scale E4M3(amax / c) of Q, K and V; the least squared error wins, the first of equals.
        normalizer: `exact` (l sums p) or `quantised` (l sums p').
        grad_p: P in dS: `exact`, or `quantised` (only with a quantised normaliser).
        smooth_q: subtract from Q the mean of its block of 128 tokens; mean_q K^T is added to S in high precision.
        smooth_k: subtract from K its mean over tokens.
        two_level_p: SageAttention3's scale for each row and 128 keys, before NVFP4.
        delta: D in dS = P (dP - D): `high_precision_output` (rowsum of dO and O_hp = P V'), or `output` (from O: the paper's ablation).
        dv_p: P in dV = P^T dO: `quantised` (the forward's codes), or `exact` (the paper's ablation).
        attention_kinds: which attention is quantised: `self` (video tokens), `joint` (text and video), `cross` (to text).
        keep_layers: indices of transformer blocks whose attention stays in bf16.
        as_json: all of the above (not to be given).
    """

    name: str
    qk: str = "nvfp4"
    pv: str = "nvfp4"
    p_gain_log2: int = 11
    scale_divisors: tuple[float, ...] = (6.0,)
    normalizer: str = "exact"
    grad_p: str = "exact"
    smooth_q: bool = False
    smooth_k: bool = False
    two_level_p: bool = False
    delta: str = "high_precision_output"
    dv_p: str = "quantised"
    attention_kinds: tuple[str, ...] = ("self", "joint")
    keep_layers: tuple[int, ...] = ()
    as_json: str = dataclasses.field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        def legal(field: str, value: object, values: tuple[Any, ...]) -> None:
            if value not in values:
                raise ConfigError(f"recipe {self.name!r}: {field}={value!r} is not one of {', '.join(map(repr, values))}")

        def sequence(field: str, kind: type | UnionType) -> None:
            value = getattr(self, field)
            if not isinstance(value, list | tuple) or any(isinstance(v, bool) or not isinstance(v, kind) for v in value):
                raise ConfigError(f"recipe {self.name!r}: {field}={value!r} is not a list of {getattr(kind, '__name__', 'numbers')}")
            object.__setattr__(self, field, tuple(float(v) if field == "scale_divisors" else v for v in value))

        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"recipe name {self.name!r} is not text")
        sequence("scale_divisors", int | float)
        sequence("attention_kinds", str)
        sequence("keep_layers", int)
        for field, scalar in (("smooth_q", bool), ("smooth_k", bool), ("two_level_p", bool), ("p_gain_log2", int)):
            if type(getattr(self, field)) is not scalar:
                raise ConfigError(f"recipe {self.name!r}: {field}={getattr(self, field)!r} is not {scalar.__name__}")
        legal("qk", self.qk, OPERAND_FORMATS)
        legal("pv", self.pv, OPERAND_FORMATS)
        legal("normalizer", self.normalizer, ("exact", "quantised"))
        legal("grad_p", self.grad_p, ("exact", "quantised"))
        legal("delta", self.delta, ("high_precision_output", "output"))
        legal("dv_p", self.dv_p, ("quantised", "exact"))
        for kind in self.attention_kinds:
            legal("attention_kinds", kind, ATTENTION_KINDS)
        # 2^g/6 <= 448 (E4M3's largest scale) bounds g at 11; plain fp8 elements saturate at 448, so there 2^8 is the largest power of two.
        largest_gain = 8 if self.pv == "fp8" else 11
        legal("p_gain_log2", self.p_gain_log2, tuple(range(largest_gain + 1)))
        if not self.scale_divisors or any(not 0 < c < math.inf for c in self.scale_divisors):
            raise ConfigError(f"recipe {self.name!r}: scale_divisors={self.scale_divisors} must be one or more positive numbers")
        if any(layer < 0 for layer in self.keep_layers):
            raise ConfigError(f"recipe {self.name!r}: keep_layers={self.keep_layers} must be indices of blocks, from 0")
        if self.scale_divisors != (6.0,) and "nvfp4" not in (self.qk, self.pv):
            raise ConfigError(f"recipe {self.name!r}: scale_divisors are for nvfp4, but qk={self.qk} and pv={self.pv}")
        if self.grad_p == "quantised" and self.normalizer != "quantised":
            raise ConfigError(f"recipe {self.name!r}: grad_p='quantised' needs normalizer='quantised' (rows of dS must sum to zero)")
        if self.two_level_p and (self.pv != "nvfp4" or self.p_gain_log2 != 0):
            raise ConfigError(f"recipe {self.name!r}: two_level_p needs pv='nvfp4' and p_gain_log2=0 (its row scale is the gain)")
        self._check_int8()

        # How the recipe travels through the attention operator. Made here once: torch.compile can read a string, but not run this.
        object.__setattr__(self, "as_json", json.dumps(self.to_dict()))

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

    def covers(self, kind: str, layer: int) -> bool:
        """Whether this recipe quantises the attention of `kind` in transformer block `layer`."""
        return self.is_quantised and kind in self.attention_kinds and layer not in self.keep_layers

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict; `recipe_from_dict` is its inverse."""
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k != "as_json"}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


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
    unknown = sorted(set(fields) - {*known, "base"})
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
    """The recipe called `recipe`, or the one in the YAML or JSON file of that path.

    Raises:
        ConfigError: neither a name nor a file; all names are listed.
    """
    if isinstance(recipe, AttentionRecipe):
        return recipe
    if recipe in RECIPES:
        return RECIPES[recipe]
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml", ".json") and path.is_file():
        import yaml

        try:
            fields = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
        except (ValueError, yaml.YAMLError) as error:  # ValueError: JSON's syntax, or bytes that are no text
            raise ConfigError(f"recipe {recipe!r} can't be read: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}: a recipe file holds a mapping")
        return recipe_from_dict(fields, str(path))
    raise ConfigError(f"recipe {recipe!r} does not exist; legal: {', '.join(RECIPES)}, or the path of a recipe's .yaml or .json file")
