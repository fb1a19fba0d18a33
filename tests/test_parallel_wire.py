"""The packed wire: codes that are those of the whole sequence bit for bit, attention that starts from them, and when they travel."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel
from helpers.ranks import run_ranks
from helpers.sequence import assert_close, draw, sequence_ranks, ulysses_ranks, with_gradients

from videoqat.attention import attention, coded, record_receipts
from videoqat.attention.coded import attention_forward_coded, code_shapes, encode, layout, packed_obstacle
from videoqat.attention.functional import attention_backward
from videoqat.errors import AttentionError, ConfigError
from videoqat.models.install import install, shard_sequence
from videoqat.parallel import ulysses as ulysses_module
from videoqat.parallel import wire
from videoqat.parallel.ulysses import Ulysses, attend, attend_joint
from videoqat.recipes import RECIPES, SEARCH_DIVISORS, AttentionRecipe

CODED = {
    "attn_qat": RECIPES["attn_qat"],
    "search": AttentionRecipe("search", scale_divisors=SEARCH_DIVISORS),
    "mxfp4": RECIPES["mxfp4"],
    "mxfp8_fp8": RECIPES["b200_mxfp8_fp8"],  # v has no codes
    "rotated": AttentionRecipe("rotated", rotate_qk=True, twice=("p",)),
    "mixed": AttentionRecipe("mixed", qk="nvfp4", pv="mxfp8"),
    "v_head_dim": AttentionRecipe("v_head_dim", v_blocks="head_dim", scale_divisors=(6.0, 4.0)),
}


def difficult(*shapes, seed=0):
    """Magnitudes of many orders, and a NaN (which is to be seen, not rounded away)."""
    tensors = draw(*shapes, seed=seed)
    for x in tensors:
        x *= torch.exp2(torch.randint(-12, 8, x.shape[:3], generator=torch.Generator().manual_seed(seed)).float()).unsqueeze(3)
    tensors[-1][0, 1, 0, 3] = float("nan")
    return tensors


class Caught(Exception):
    pass


def caught(run):
    """The codes (and v) with which `run` goes to the kernel."""

    def catch(codes, v, *rest):
        raise Caught(codes, v)

    forward, wire.attention_forward_coded = wire.attention_forward_coded, catch
    try:
        run()
    except Caught as call:
        return call.args
    finally:
        wire.attention_forward_coded = forward


def own(x, ulysses):
    return x.chunk(ulysses.degree, dim=2)[ulysses.rank]


def codes_are_those_of_the_whole(degree: int) -> int:
    checked = 0
    with ulysses_ranks(degree, "packed") as ulysses:
        for recipe in CODED.values():
            choice = (recipe.as_json, "auto", False)
            for num_tokens in (150, 17):
                ulysses.num_tokens = num_tokens
                q, k, v = difficult(*((2, num_tokens, heads, 48) for heads in (8, 4, 4)), seed=num_tokens)
                parts = [ulysses.shard(x, 1) for x in (q, k, v)]
                q, k, v = (own(x, ulysses) for x in (q, k, v))
                for kv_len in (None, torch.tensor([num_tokens, num_tokens // 3])):
                    got, got_v = caught(lambda p=parts, r=recipe, n=kv_len: attend(*p, r, kernel="auto", ulysses=ulysses, kv_len=n))
                    expected = [*encode(q, None, False, *choice), *encode(k, kv_len, False, *choice)]
                    if recipe.pv == "fp8":
                        assert torch.equal(got_v.nan_to_num(nan=7.0), v.nan_to_num(nan=7.0))
                    else:
                        assert got_v is None
                        expected += encode(v, kv_len, True, *choice)
                    assert len(got) == len(expected)
                    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
                    checked += 1

                text = draw((2, 21, 8, 48), (2, 21, 4, 48), (2, 21, 4, 48), seed=1)
                for text_first in (True, False):
                    kv_len = torch.tensor([num_tokens + 21, num_tokens + 2])
                    options = {"text_first": text_first, "kernel": "auto", "ulysses": ulysses, "kv_len": kv_len}
                    got, got_v = caught(lambda p=parts, t=text, r=recipe, o=options: attend_joint(*p, *t, r, **o))
                    video_text = zip((q, k, v), (own(x, ulysses) for x in text), strict=True)
                    whole = [torch.cat((b, a) if text_first else (a, b), dim=1) for a, b in video_text]
                    expected = [*encode(whole[0], None, False, *choice), *encode(whole[1], kv_len, False, *choice)]
                    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
                    assert torch.equal(got_v.nan_to_num(nan=7.0), whole[2].nan_to_num(nan=7.0))
                    checked += 1
    return checked


@pytest.mark.dist
@pytest.mark.parametrize("degree", [2, 4])
def test_codes_are_those_of_the_whole_sequence(degree):
    assert run_ranks(codes_are_those_of_the_whole, degree, degree) == [len(CODED) * 2 * 4] * degree


def from_codes(q, k, v, grad, recipe, kernel, kv_len, code_v):
    """Output and gradients by way of codes, in one process."""
    choice = (recipe.as_json, kernel, True)
    codes = [*encode(q, None, False, *choice), *encode(k, kv_len, False, *choice)]
    if code_v:
        codes += encode(v, kv_len, True, *choice)
    num_keys, num_kv_heads, d = k.shape[1:]
    given = None if code_v else v
    out, lse, m, l_BHN, kept = attention_forward_coded(codes, given, kv_len, d, q.dtype, recipe.as_json, d**-0.5, kernel, True)
    rest = (m, l_BHN, [*codes, *kept], kv_len, num_keys, num_kv_heads, recipe.as_json, d**-0.5, False, kernel)
    return out, lse, attention_backward(grad, None, None, given, out, *rest)


@pytest.mark.parametrize(
    ("kernel", "name", "code_v"),
    [("torch", name, code_v) for name in CODED for code_v in (True, False) if name != "mxfp8_fp8" or not code_v]
    + [("triton", "search", True), ("triton", "v_head_dim", True), ("triton", "mixed", False), ("triton", "mxfp8_fp8", False)],
)
def test_attention_from_codes_is_attention(kernel, name, code_v):
    batch, kv_len = (2, torch.tensor([37, 20])) if kernel == "torch" else (1, torch.tensor([20]))  # Triton's interpreter is slow
    leaves = draw((batch, 19, 2, 32), (batch, 37, 1, 32), (batch, 37, 1, 32), (batch, 19, 2, 32))
    for x in leaves[:3]:  # scales so small that quantising a second time would change them
        x *= torch.exp2(torch.randint(-11, 2, x.shape[:3], generator=torch.Generator().manual_seed(5)).float()).unsqueeze(3)
    for dtype in (torch.float32, torch.bfloat16) if kernel == "torch" else (torch.bfloat16,):
        *leaves, grad = (x.to(dtype) for x in leaves)
        out, lse, gradients = from_codes(*leaves, grad, CODED[name], kernel, kv_len, code_v)
        leaves = [x.requires_grad_() for x in leaves]
        truth, true_lse = attention(*leaves, CODED[name], kernel=kernel, kv_len=kv_len, return_lse=True)
        pairs = zip((out, lse, *gradients), (truth, true_lse, *torch.autograd.grad(truth, leaves, grad)), strict=True)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
        leaves = [*(x.detach() for x in leaves), grad]


@pytest.mark.parametrize("is_v", [False, True])
@pytest.mark.parametrize("name", ["search", "mixed", "v_head_dim"])
def test_kernels_make_the_same_codes(name, is_v):
    (x,) = difficult((2, 37, 1, 48))
    lengths = torch.tensor([37, 21])
    recipe = CODED[name].as_json
    by_torch, by_triton = (
        encode(x.transpose(1, 2).contiguous().transpose(1, 2), lengths, is_v, recipe, kernel, False) for kernel in ("torch", "triton")
    )
    assert all(torch.equal(a, b) for a, b in zip(by_torch, by_triton, strict=True))
    assert tuple(tuple(part.shape) for part in by_torch) == code_shapes(x.shape, *layout(CODED[name], is_v))
    zeroed = x.clone()
    zeroed[1, 21:] = 0
    assert all(torch.equal(a, b) for a, b in zip(by_torch, encode(zeroed, None, is_v, recipe, "torch", False), strict=True))


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_operators_of_codes_are_sound(kernel):
    checks = {"test_utils": ("test_schema", "test_faketensor")} if kernel == "triton" else {}  # the interpreter is slow
    q, k, v = draw((1, 10, 1, 32), (1, 19, 1, 32), (1, 19, 1, 32))
    for name, code_v in (("search", True), ("search", False), ("v_head_dim", False), ("mxfp8_fp8", False))[kernel == "triton" :]:
        recipe = CODED[name].as_json
        choice = (recipe, kernel, True)
        codes = [*encode(q, None, False, *choice), *encode(k, None, False, *choice)]
        if code_v:
            torch.library.opcheck(encode, (v, torch.tensor([17]), True, *choice), **checks)
            codes += encode(v, None, True, *choice)
        torch.library.opcheck(encode, (q.transpose(1, 2).contiguous().transpose(1, 2), None, False, *choice), **checks)
        arguments = (codes, None if code_v else v, torch.tensor([17]), 32, torch.bfloat16, recipe, 0.25, kernel, True)
        torch.library.opcheck(attention_forward_coded, arguments, **checks)
        with pytest.raises(AttentionError, match=r"kv_len=.20. must be between 0 and 19"):
            attention_forward_coded(*arguments[:2], torch.tensor([20]), *arguments[3:])


def test_a_kernel_without_codes_says_so(monkeypatch):
    monkeypatch.delattr(coded.backends.KERNELS["torch"], "forward_coded")
    with pytest.raises(AttentionError, match=r"kernel 'torch' can't start from codes; legal with a packed wire: .*triton"):
        encode(torch.zeros(1, 4, 2, 16), None, False, RECIPES["attn_qat"].as_json, "torch", False)


def test_what_has_codes():
    without = {name: obstacle for name, recipe in RECIPES.items() if (obstacle := packed_obstacle(recipe))}
    assert set(without) == {"bf16", "pv_nvfp4", "sage3", "sagebwd"}
    assert "smooths" in without["sage3"]
    assert "qk=bf16 has no codes; nvfp4, mxfp4, mxfp8 have" in without["pv_nvfp4"]


def who_packs() -> None:
    recipes = [RECIPES["attn_qat"], RECIPES["bf16"], RECIPES["sage3"]]
    with sequence_ranks(2) as group:
        ulysses = Ulysses(group, "auto")  # both on this host
        assert [ulysses.packs(recipe) for recipe in recipes] == [False, False, False]
        assert ulysses.describe(RECIPES["attn_qat"]) == {"degree": 2, "wire": "bf16", "asked_for": "auto"}
        ulysses.num_tokens = 37
        assert ulysses.part_size == 19

        ulysses_module.socket = SimpleNamespace(gethostname=lambda: f"host{group.rank()}")
        ulysses = Ulysses(group, "auto")
        assert [ulysses.packs(recipe) for recipe in recipes] == [True, False, False]
        assert ulysses.describe(RECIPES["attn_qat"]) == {"degree": 2, "wire": "packed", "asked_for": "auto"}
        ulysses.num_tokens = 37
        assert ulysses.part_size == 32  # a part begins where a block of V does

        ulysses = Ulysses(group, "packed")
        with pytest.raises(ConfigError, match=r"parallel.ulysses_wire=packed is not possible with recipe 'sage3': it smooths over tokens"):
            ulysses.packs(RECIPES["sage3"])
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=8, freq_dim=8, ffn_dim=8,
            num_layers=1,
        )  # fmt: skip
        install(transformer, "attn_qat")
        shard_sequence(transformer, ulysses)
        with pytest.raises(ConfigError, match="ulysses_wire=packed is not possible with recipe 'sagebwd'"):
            install(transformer, "sagebwd")
        install(transformer, "bf16")  # quantises nothing: travels as it is
        with pytest.raises(ConfigError, match=r"parallel.ulysses_wire='fp4' is not one of auto, bf16, packed"):
            Ulysses(group, "fp4")


@pytest.mark.dist
def test_when_codes_travel():
    run_ranks(who_packs, 2)


def what_travels() -> list[int]:
    """Bytes of each exchange of codes; and that a look at what goes into attention (an observer) changes no number."""
    sent = []
    with ulysses_ranks(2, "packed", num_tokens=90) as ulysses:
        leaves = [ulysses.shard(x, 1).bfloat16() for x in draw(*[(1, 90, 2, 32)] * 3)]
        grad = draw((1, ulysses.part_size, 2, 32), seed=1)[0].bfloat16()
        exchange = ulysses.exchange

        def counted(x, group):
            if x.dtype == torch.uint8:
                sent.append(x.numel())
            return exchange(x, group)

        ulysses.exchange = counted

        def run(*x, **options):
            return (attend(*x, RECIPES["attn_qat"], kernel="auto", ulysses=ulysses, **options),)

        seen = []
        with record_receipts() as receipts:
            out, gradients = with_gradients(run, leaves, [grad])
            observed = with_gradients(lambda *x: run(*x, observer=lambda *qkv: seen.extend(qkv)), leaves, [grad])
        assert [(receipt.kernel, "q, k and v came as codes" in receipt.reason) for receipt in receipts] == [("torch", True), ("torch", False)]
        assert [tuple(x.shape) for x in seen] == [(1, 90, 1, 32)] * 3
        assert all(x.dtype == torch.bfloat16 for x in gradients)
        assert all(torch.equal(a, b) for a, b in zip((*out, *gradients), (*observed[0], *observed[1]), strict=True))
        whole = attention(*(x.bfloat16() for x in draw(*[(1, 90, 2, 32)] * 3)), "attn_qat")
        assert_close([x.float() for x in out], [ulysses.shard(whole.float(), 1)])
    return sent


@pytest.mark.dist
def test_four_and_a_half_bits_travel():
    per_rank = 64 * 2 * 32  # numbers of one of q, k, v; 90 tokens on two ranks, parts a multiple of 32
    assert run_ranks(what_travels, 2) == [[3 * per_rank * 9 // 16]] * 2
