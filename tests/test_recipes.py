"""Recipes: frozen values that refuse what can't be computed and survive the way to JSON and back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from videoqat.errors import ConfigError
from videoqat.recipes import OPERAND_FORMATS, RECIPES, AttentionRecipe, get_recipe, recipe_from_dict


def test_a_recipe_is_frozen_and_hashable():
    recipe = AttentionRecipe("mine")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.qk = "bf16"  # type: ignore[misc]
    assert len({recipe, AttentionRecipe("mine"), AttentionRecipe("other")}) == 2


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=str)
def test_every_named_recipe_survives_json(recipe):
    text = json.dumps(recipe.to_dict())
    assert recipe_from_dict(json.loads(text), "test") == recipe


def test_a_recipe_with_no_field_at_its_default_survives_json():
    recipe = AttentionRecipe(
        "all",
        qk="mxfp8",
        pv="nvfp4",
        p_gain_log2=3,
        scale_divisors=(6.0, 5.5),
        v_blocks="head_dim",
        normalizer="quantised",
        grad_p="quantised",
        smooth_q=True,
        smooth_k=True,
        rotate_qk=True,
        twice=("v", "p"),
        delta="output",
        dv_p="exact",
        attention_kinds=("cross",),
        keep_layers=(0, 7),
        keep_layers_in=(("transformer_2", (3,)),),
        keep_components=("transformer",),
        keep_first_steps=2,
        keep_last_steps=1,
    )
    defaults = AttentionRecipe("default")
    same = [f.name for f in dataclasses.fields(recipe) if getattr(recipe, f.name) == getattr(defaults, f.name)]
    assert same == ["pv", "two_level_p"]  # scale_divisors need nvfp4 somewhere, and two_level_p excludes a gain
    assert recipe_from_dict(json.loads(json.dumps(recipe.to_dict())), "test") == recipe


def test_the_named_recipes_are_what_the_documents_say():
    assert {name: (r.qk, r.pv, r.p_gain_log2) for name, r in RECIPES.items()} == {
        "bf16": ("bf16", "bf16", 0),
        "attn_qat": ("nvfp4", "nvfp4", 11),
        "attn_qat_search": ("nvfp4", "nvfp4", 11),
        "attn_qat_paper": ("nvfp4", "nvfp4", 0),
        "attn_qat_no_o_hp": ("nvfp4", "nvfp4", 11),
        "attn_qat_exact_dv": ("nvfp4", "nvfp4", 11),
        "qk_nvfp4": ("nvfp4", "bf16", 11),
        "pv_nvfp4": ("bf16", "nvfp4", 11),
        "mxfp4": ("mxfp4", "mxfp4", 11),
        "sage3": ("nvfp4", "nvfp4", 0),
        "b200_nvfp4_bf16": ("nvfp4", "bf16", 11),
        "b200_nvfp4_fp8": ("nvfp4", "fp8", 8),
        "b200_mxfp8_fp8": ("mxfp8", "fp8", 8),
        "sagebwd": ("int8", "int8", 0),
    }
    assert RECIPES["attn_qat_search"].scale_divisors == (6.0, 6.5, 5.6, 4.0)
    assert (RECIPES["sage3"].smooth_q, RECIPES["sage3"].smooth_k, RECIPES["sage3"].two_level_p) == (True, True, True)
    assert (RECIPES["sagebwd"].smooth_k, RECIPES["sagebwd"].delta) == (True, "output")
    assert [name for name, r in RECIPES.items() if not r.is_quantised] == ["bf16"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"qk": "int4"}, "qk='int4' is not one of 'bf16', 'nvfp4'"),
        ({"pv": "fp4"}, "pv='fp4' is not one of"),
        ({"v_blocks": "channels"}, "v_blocks='channels' is not one of 'tokens', 'head_dim'"),
        ({"v_blocks": "head_dim", "pv": "fp8", "p_gain_log2": 8}, "v_blocks='head_dim' needs pv of nvfp4, mxfp4, mxfp8, but pv=fp8"),
        ({"normalizer": "quantized"}, "normalizer='quantized' is not one of 'exact', 'quantised'"),
        ({"grad_p": "none"}, "grad_p='none' is not one of"),
        ({"delta": "o"}, "delta='o' is not one of"),
        ({"dv_p": "p"}, "dv_p='p' is not one of"),
        ({"attention_kinds": ("selff",)}, "attention_kinds='selff' is not one of 'self', 'joint', 'cross'"),
        ({"attention_kinds": "self"}, "attention_kinds='self' is not a list of str"),
        ({"p_gain_log2": 12}, "p_gain_log2=12 is not one of 0, 1, 2"),
        ({"p_gain_log2": -1}, "p_gain_log2=-1 is not one of"),
        ({"p_gain_log2": True}, "p_gain_log2=True is not int"),
        ({"pv": "fp8", "p_gain_log2": 9}, "p_gain_log2=9 is not one of 0, 1, 2, 3, 4, 5, 6, 7, 8"),
        ({"scale_divisors": ()}, "scale_divisors=() must be one or more positive numbers"),
        ({"scale_divisors": (6.0, 0.0)}, "must be one or more positive numbers"),
        ({"scale_divisors": (float("nan"),)}, "must be one or more positive numbers"),
        ({"scale_divisors": (6.0, 1e-39)}, "must be one or more positive numbers, 2^-126 to 2^126"),  # 0 * inf: blocks of zeros would be NaN
        ({"scale_divisors": (10**400,)}, "must be one or more positive numbers, 2^-126 to 2^126"),
        ({"scale_divisors": 6.0}, "scale_divisors=6.0 is not a list of numbers"),
        ({"scale_divisors": (4.0,), "qk": "mxfp4", "pv": "mxfp4"}, "scale_divisors are for nvfp4, but qk=mxfp4 and pv=mxfp4"),
        ({"grad_p": "quantised"}, "needs normalizer='quantised'"),
        ({"qk": "int8"}, "qk='int8' and pv='nvfp4', but int8 (SageBwd) is for both together"),
        ({"qk": "bf16", "pv": "int8"}, "qk='bf16' and pv='int8', but int8"),
        *[
            ({"qk": "int8", "pv": "int8", "p_gain_log2": 0, "delta": "output", **fields}, says)
            for fields, says in (
                ({"p_gain_log2": 8}, "p_gain_log2=8 does not go with int8 (SageBwd), which needs 0"),
                ({"delta": "high_precision_output"}, "delta='high_precision_output' does not go with int8 (SageBwd), which needs 'output'"),
                ({"smooth_q": True}, "smooth_q=True does not go with int8"),
                ({"normalizer": "quantised"}, "normalizer='quantised' does not go with int8"),
                ({"dv_p": "exact"}, "dv_p='exact' does not go with int8"),
                ({"two_level_p": True}, "two_level_p needs pv='nvfp4'"),
                ({"scale_divisors": (6.0, 4.0)}, "scale_divisors are for nvfp4"),
            )
        ],
        ({"two_level_p": True}, "two_level_p needs pv='nvfp4' and p_gain_log2=0"),
        ({"two_level_p": True, "p_gain_log2": 0, "pv": "mxfp4"}, "two_level_p needs pv='nvfp4'"),
        ({"rotate_qk": 1}, "rotate_qk=1 is not bool"),
        ({"rotate_qk": True, "qk": "bf16"}, "rotate_qk is for qk of nvfp4, mxfp4, mxfp8 or fp8, not bf16"),
        ({"rotate_qk": True, "qk": "int8", "pv": "int8", "p_gain_log2": 0, "delta": "output"}, "rotate_qk is for qk of nvfp4"),
        ({"twice": ("o",)}, "twice='o' is not one of 'q', 'k', 'v', 'p'"),
        ({"twice": "q"}, "twice='q' is not a list of str"),
        ({"twice": ("k",), "qk": "mxfp4"}, "twice='k' needs qk='nvfp4', not 'mxfp4'"),
        ({"twice": ("p",), "pv": "bf16"}, "twice='p' needs pv='nvfp4', not 'bf16'"),
        ({"smooth_k": "yes"}, "smooth_k='yes' is not bool"),
        ({"keep_layers": (-1,)}, "must be indices of blocks, from 0"),
        ({"keep_layers": (0.5,)}, "keep_layers=(0.5,) is not a list of int"),
    ],
)
def test_what_cannot_be_computed_is_refused(fields: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as caught:
        AttentionRecipe("mine", **fields)
    assert says in str(caught.value)
    assert "'mine'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_covers_asks_for_kind_and_layer():
    recipe = AttentionRecipe("mine", keep_layers=(0, 2))
    assert [recipe.covers("self", layer) for layer in range(4)] == [False, True, False, True]
    assert recipe.covers("joint", 1)
    assert not recipe.covers("cross", 1)
    assert not RECIPES["bf16"].covers("self", 1)


def test_every_operand_format_makes_a_recipe():
    four_bits_and_eight = [format for format in OPERAND_FORMATS if format != "int8"]
    for qk in four_bits_and_eight:
        for pv in four_bits_and_eight:
            assert AttentionRecipe("mine", qk=qk, pv=pv, p_gain_log2=8).is_quantised == ((qk, pv) != ("bf16", "bf16"))
    assert AttentionRecipe("mine", qk="int8", pv="int8", p_gain_log2=0, delta="output").is_quantised


def test_a_recipe_from_a_file_starts_from_a_named_one(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: attn_qat_search\nname: mine\nkeep_layers: [0, 1]\n")
    recipe = get_recipe(str(file))
    assert recipe == dataclasses.replace(RECIPES["attn_qat_search"], name="mine", keep_layers=(0, 1))
    as_json = tmp_path / "mine.json"
    as_json.write_text(json.dumps(recipe.to_dict()))
    assert get_recipe(str(as_json)) == recipe
    assert get_recipe(recipe) is recipe


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "base: attn_qat\nname: x\nqkk: bf16\n", "unknown recipe key 'qkk'; legal keys: base, name, qk"),
        ("a.yaml", "base: attn_qat\nname: x\n16: nvfp4\nqkk: bf16\n", "unknown recipe key 16; legal keys: base, name, qk"),
        ("a.yaml", "base: attn_qat\nqk: bf16\n", "a recipe that changes 'attn_qat' needs a name of its own"),
        ("a.yaml", "qk: bf16\n", "a recipe needs a name"),
        ("a.yaml", "base: nope\nname: x\n", "base='nope' is not a named recipe; legal: bf16, attn_qat"),
        ("a.yaml", "- 1\n", "a recipe file holds a mapping"),
        ("a.yaml", "a: [1\n", "can't be read"),
        ("a.yaml", "name: 5\n", "recipe name 5 is not text"),
        ("a.json", "{", "can't be read"),
        ("a.json", "\N{LATIN SMALL LETTER E WITH ACUTE}".encode("latin-1"), "can't be read"),
        ("a.yaml", "name: x\nqk: [nvfp4]\n", "qk=['nvfp4'] is not one of"),
    ],
)
def test_a_bad_recipe_file_is_named(tmp_path: Path, name: str, text: str | bytes, says: str):
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        get_recipe(str(file))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recipe", ["nope", "nope.yaml", ""])
def test_a_recipe_that_does_not_exist_lists_those_that_do(recipe: str):
    with pytest.raises(ConfigError) as caught:
        get_recipe(recipe)
    assert f"recipe {recipe!r} does not exist" in str(caught.value)
    assert all(name in str(caught.value) for name in RECIPES)
