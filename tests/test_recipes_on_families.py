"""Every recipe on every family's transformer: the kernel that serves it on this machine against the dense reference in fp64, through the whole model.

And SageAttention3's smoothing where it is easiest to get wrong, text and video in one sequence with padding behind it, against an evaluation of
single rows that is written from docs/numerics.md alone.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.naive_attention import NaiveAttention
from torch import Tensor, nn

from videoqat.attention import reference, sagebwd
from videoqat.attention.backends import KERNELS, record_receipts
from videoqat.attention.functional import attention
from videoqat.models import cogvideox, hunyuan, hunyuan15, wan
from videoqat.models.hunyuan15_transformer import sort_on_the_device
from videoqat.models.install import install, observe
from videoqat.models.spec import FAMILIES, Condition
from videoqat.models.tiny import cogvideox_transformer
from videoqat.models.tiny_hunyuan import hunyuan_transformer
from videoqat.models.tiny_hunyuan15 import hunyuan15_transformer
from videoqat.recipes import RECIPES, AttentionRecipe, get_recipe

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "recipe"
FILES = {path.stem: get_recipe(f"recipe/{path.stem}") for path in sorted(CONFIGS.glob("*.yaml"))}
SHIPPED = [name for name, recipe in FILES.items() if not recipe.keep_layers]  # others keep blocks of a model of their own
ALL = {name: recipe for name, recipe in RECIPES.items() if recipe.is_quantised} | {name: FILES[name] for name in SHIPPED}
Inputs = tuple[Tensor, Tensor, Condition]


class Reference:
    """The dense reference in the place of a kernel, with what was asked of it."""

    BY_NAME_ONLY = ("cpu", "cuda")

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []

    def describe(self, recipe: AttentionRecipe, device_type: str) -> tuple[bool, str]:
        return False, "the reference"

    def why_not(self, *_: Any) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor | None, recipe: AttentionRecipe, scale: float, causal: bool, _: bool) -> Any:
        self.calls.append((q, k, v, kv_len))
        if recipe.qk == "int8":
            out, lse, m, sums = sagebwd.forward(q, k, v, recipe, scale=scale, kv_len_B=kv_len, causal=causal, dtype=torch.float64)
        else:
            ready = dataclasses.replace(recipe, rotate_qk=False)  # the operator has rotated already, for whichever kernel
            out, lse, m, sums = reference.forward(q, k, v, ready, scale=scale, kv_len=kv_len, causal=causal)
        return out.to(q.dtype), lse.float(), m.float(), sums.float(), []


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> Reference:
    kernel = Reference()
    monkeypatch.setitem(KERNELS, "reference", kernel)
    return kernel


def wan_transformer() -> nn.Module:
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "text_dim": 24, "freq_dim": 16, "ffn_dim": 64}
    return WanTransformer3DModel(patch_size=(1, 2, 2), num_layers=2, rope_max_seq_len=32, **sizes).eval()


SIZES = {"num_attention_heads": 2, "attention_head_dim": 32, "text_embed_dim": 24}
BUILD = {
    "wan": wan_transformer,
    "cogvideox": lambda: cogvideox_transformer(**SIZES, time_embed_dim=32),
    "hunyuanvideo": lambda: hunyuan_transformer(**SIZES, pooled_projection_dim=12),
    "hunyuan15": lambda: sort_on_the_device(hunyuan15_transformer(**SIZES, text_embed_2_dim=20, image_embed_dim=12)),
}
MODULES: dict[str, Any] = {"wan": wan, "cogvideox": cogvideox, "hunyuanvideo": hunyuan, "hunyuan15": hunyuan15}
LENGTHS = (9, 4)  # text tokens of the samples, where a family pads


@functools.cache
def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = BUILD[family]()
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.ndim == 1 and "linear" not in name:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
        if "linear" in name:  # gates that are nearly zero would hide attention
            nn.init.normal_(parameter, std=0.2)
    return model


def inputs_of(family: str, frames: int = 2) -> Inputs:
    """Two samples of 15 video tokens a frame, with texts of `LENGTHS` tokens."""
    channels = model_of(family).config.out_channels
    conditions, xs = [], []
    for length in LENGTHS:
        draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(length))
        xs.append(draw(channels, frames, 6, 10))
        own = {"hunyuanvideo": {"pooled": draw(12)}, "hunyuan15": {"glyph": draw(3, 20)}}.get(family, {})
        conditions.append({"text": draw(26 if family == "cogvideox" else length, 24), **own})
    return torch.stack(xs), torch.tensor([0.2, 0.7]), MODULES[family].FAMILY.batch_conditions(conditions, 26 if family == "cogvideox" else 11)


def run(family: str, recipe: str | AttentionRecipe, kernel: str = "auto", frames: int = 2, device: str = "cpu") -> Tensor:
    model = model_of(family).to(device)
    install(model, recipe, kernel=kernel)
    x, t, condition = inputs_of(family, frames)
    with torch.no_grad():
        out: Tensor = MODULES[family].FAMILY.forward(model, x.to(device), t.to(device), {key: value.to(device) for key, value in condition.items()})
    model.to("cpu")
    return out


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_no_family_is_left_out() -> None:
    assert MODULES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("family", MODULES)
def test_every_recipe_runs_on_every_family_as_the_reference_computes_it(family: str, name: str, dense: Reference) -> None:
    recipe = ALL[name]
    with record_receipts() as receipts:
        ours = run(family, recipe)
    quantised = {receipt.kernel: receipt.calls for receipt in receipts if receipt.recipe == name}
    layers = [layer for layer in MODULES[family].FAMILY.attention_layers(model_of(family)) if recipe.covers(layer.kind, layer.index)]
    assert quantised == {"torch": len(layers)}
    assert len(layers) == 2
    expected = run(family, recipe, "reference")
    assert len(dense.calls) == 2
    effect = error(run(family, "bf16"), expected)
    assert effect > 5e-4
    assert error(ours, expected) < effect / 5  # in fact 1e-6, unless a code hangs on the last bits of its input


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("family", MODULES)
def test_every_recipe_runs_on_a_gpu_as_the_reference_computes_it(family: str, name: str, dense: Reference) -> None:
    """By whichever kernel serves it there. What isn't quantised is rounded to bf16 on the way, so that the errors are larger than on the CPU.

    Most of all where Q and K aren't, since logits are exponents: there a fifth of the effect is too little (4.24e-3 of 2.00e-2 on an H200).
    """
    with record_receipts() as receipts:
        ours = run(family, ALL[name], frames=10, device="cuda")
    assert sum(receipt.calls for receipt in receipts if receipt.recipe == name) == 2
    expected = run(family, ALL[name], "reference", frames=10, device="cuda")
    assert len(dense.calls) == 2
    effect = error(run(family, "bf16", frames=10, device="cuda"), expected)
    assert error(ours, expected) < max(effect / (4 if ALL[name].qk == "bf16" else 5), 3e-3)


JOINT = ["cogvideox", "hunyuanvideo", "hunyuan15"]


@pytest.mark.parametrize("family", JOINT)
def test_sage3_in_joint_attention_is_what_the_numerics_say(family: str, dense: Reference) -> None:
    """161 to 176 tokens, two blocks of smoothed queries, of which the second holds text and padding, too; K's mean is over the sample's real keys."""
    recipe = RECIPES["sage3"]
    run(family, recipe, "reference", frames=10)
    q, k, v, kv_len = dense.calls[0]
    q, k, v = (x[:, :, :1] for x in (q, k, v))  # one head, for speed
    num_text = q.shape[1] - 150
    if family == "cogvideox":
        assert kv_len is None
        assert num_text == 26
    else:
        text = (9, 4) if family == "hunyuanvideo" else (12, 7)  # with three tokens of glyphs
        assert kv_len is not None
        assert kv_len.tolist() == [150 + length for length in text]
        assert all(k[i, n:].any() for i, n in enumerate(kv_len.tolist()))  # there is something that must not get into K's
    ours = attention(q, k, v, recipe, kv_len=kv_len)
    expected, _, unsure = NaiveAttention(q, k, v, recipe, kv_len=kv_len).forward()
    sure = ~unsure
    assert sure.float().mean() > 0.9
    assert error(ours[sure].double(), expected[sure]) < 1e-5
    plain = attention(q, k, v, "recipe/sage3_no_smoothing", kv_len=kv_len)
    assert error(plain[sure].double(), expected[sure]) > 1e-2
    if kv_len is not None:  # what lies in the padding of K and V is nobody's business
        k, v = k.clone(), v.clone()
        for i, n in enumerate(kv_len.tolist()):
            k[i, n:], v[i, n:] = float("nan"), 1e9
        assert torch.equal(attention(q, k, v, recipe, kv_len=kv_len), ours)


@pytest.mark.parametrize("recipe", ["attn_qat", "sage3", "sagebwd"])
@pytest.mark.parametrize("family", ["hunyuanvideo", "hunyuan15"])
def test_what_stands_in_a_texts_padding_changes_nothing(family: str, recipe: str) -> None:
    """Bit for bit, also with means and scales over blocks of tokens."""
    out = run(family, recipe, frames=10)
    x, t, condition = inputs_of(family, frames=10)
    text = condition["text"].clone()
    for i, length in enumerate(LENGTHS):
        text[i, length:] = 5.0
    with torch.no_grad():
        assert torch.equal(MODULES[family].FAMILY.forward(model_of(family), x, t, {**condition, "text": text}), out)


@pytest.mark.parametrize("family", JOINT)
def test_an_observer_is_shown_no_padding(family: str) -> None:
    """What is judged by Q, K and V alone would else count keys that attention doesn't see."""
    install(model_of(family), "attn_qat")
    kinds = {layer.name: layer.kind for layer in MODULES[family].FAMILY.attention_layers(model_of(family))}
    seen: list[tuple[int, ...]] = []
    observe(model_of(family), lambda name, q, k, v: seen.append((len(q), *(x.shape[1] for x in (q, k, v)))) if kinds[name] == "joint" else None)
    with torch.no_grad():
        MODULES[family].FAMILY.forward(model_of(family), *inputs_of(family))
    observe(model_of(family), None)
    text = {"cogvideox": [], "hunyuanvideo": [9, 4], "hunyuan15": [12, 7]}[family]
    assert seen == [(1, *[30 + length] * 3) for length in text] * 2 if text else [(2, 56, 56, 56)] * 2
