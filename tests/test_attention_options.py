"""Options of a recipe that cost more arithmetic: Q and K rotated (`rotate_qk`), and operands of two terms (`twice`).

Both also run through the oracle with every other variant, in test_attention_numerics; from codes, in test_parallel_wire.
"""

import dataclasses

import pytest
import torch
from helpers.naive_attention import NaiveAttention, hadamard_matrix, rotate, terms

from videoqat.attention import attention, metrics, reference
from videoqat.attention.backends import resolve
from videoqat.attention.bench_check import relative_errors
from videoqat.attention.coded import packed_obstacle
from videoqat.attention.functional import _to_json, attention_backward, attention_forward
from videoqat.attention.metrics import attention_health, relative_l2
from videoqat.attention.output_error import output_errors
from videoqat.attention.rotation import hadamard
from videoqat.errors import AttentionError
from videoqat.evaluation.attention_report import overall
from videoqat.evaluation.probe import with_formats
from videoqat.recipes import RECIPES, AttentionRecipe, get_recipe, recipe_from_dict

ROTATED = AttentionRecipe("rotated", rotate_qk=True)
TWICE = {operand: AttentionRecipe(f"{operand}_twice", twice=(operand,)) for operand in "qkvp"}
ALL_TWICE = AttentionRecipe("all_twice", twice=("q", "k", "v", "p"))
OUTLIER = 7  # the channel of K that sticks out


def make(num_queries=40, num_keys=50, heads=2, kv_heads=1, head_dim=64, batch=1, dtype=torch.float32, seed=0):
    """Q, K with one channel that sticks out, V, dO."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads), (num_queries, heads))
    q, k, v, grad_out = (torch.randn(batch, n, h, head_dim, generator=generator) for n, h in sizes)
    k[..., OUTLIER] *= 10
    q[..., OUTLIER] /= 5
    return [x.to(dtype) for x in (q, k, v, grad_out)]


def with_gradients(function, q, k, v, grad_out):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def assert_same(ours, truth):
    assert all(torch.equal(a, b) for a, b in zip(ours, truth, strict=True))


# The matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_the_order_of_evaluation_is_the_page_s_to_the_last_bit(head_dim, dtype):
    x = (torch.randn(2, 3, head_dim, generator=torch.Generator().manual_seed(head_dim)) * torch.logspace(-3, 3, head_dim)).to(dtype)
    ours = hadamard(x)
    assert ours.dtype == dtype
    assert torch.equal(ours, rotate(x))
    assert torch.equal(hadamard(x.transpose(0, 1)), ours.transpose(0, 1))  # any strides
    assert torch.equal(hadamard(x[1, :1]), ours[1, :1])  # whatever else is in the call


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_the_matrix_is_orthonormal_and_its_own_inverse(head_dim):
    matrix = hadamard(torch.eye(head_dim))
    assert (matrix.double() - hadamard_matrix(head_dim)).abs().max() < 1e-7
    assert (matrix @ matrix.T - torch.eye(head_dim)).abs().max() < 1e-6
    q, k, *_ = make(head_dim=head_dim)
    assert relative_l2(hadamard(hadamard(q)), q) < 1e-6
    logits, of_rotated = (torch.einsum("bihd,bjhd->bhij", a, b) for a, b in ((q[:, :, :1], k), (hadamard(q[:, :, :1]), hadamard(k))))
    assert relative_l2(of_rotated, logits) < 1e-6
    assert hadamard(q.double()).dtype == torch.float64


# Through the operator, in every kernel


def test_kernels_get_q_and_k_rotated_and_give_gradients_of_those_that_came():
    """A rotation outside of attention, by autograd, is the same to the bit: in fp32 nothing is rounded in between."""
    tensors = make(batch=2)
    kv_len = torch.tensor([50, 17])

    class Outside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return hadamard(x)

        @staticmethod
        def backward(ctx, grad):
            return hadamard(grad)

    for options in ({"causal": True, "scale": 0.2, "kv_len": kv_len}, {}):
        inside = with_gradients(lambda q, k, v, o=options: attention(q, k, v, ROTATED, **o), *tensors)
        outside = with_gradients(lambda q, k, v, o=options: attention(Outside.apply(q), Outside.apply(k), v, "attn_qat", **o), *tensors)
        assert_same(inside, outside)
        only_q = with_gradients(lambda q, k, v, o=options: attention(Outside.apply(q), k, v, "attn_qat", **o), *tensors)
        assert relative_l2(only_q[0], inside[0]) > 0.1


def test_opcheck():
    q, k, v, grad_out = (x.requires_grad_() for x in make(num_queries=20, num_keys=25, head_dim=32))
    arguments = (_to_json(ROTATED), 0.2, True, "auto", True)
    checks = {"test_utils": ("test_schema", "test_faketensor", "test_autograd_registration")}  # the rest is what compiling does, below
    torch.library.opcheck(attention_forward, (q, k, v, torch.tensor([20]), *arguments), **checks)
    _, _, m, l_BHN, kept = attention_forward(q, k, v, None, *arguments)
    with torch.no_grad():
        backward = (grad_out, q, k, v, None, m, l_BHN, kept, None, 25, 1, _to_json(ROTATED), 0.2, True, "auto")
        torch.library.opcheck(attention_backward, backward, **checks)


@pytest.mark.parametrize("recipe", [ROTATED, ALL_TWICE], ids=lambda recipe: recipe.name)
def test_compiled_and_under_autocast_it_is_the_same(recipe):
    torch._dynamo.reset()
    tensors = make(head_dim=32)

    def layer(q, k, v):
        return attention(q * 2, k, v, recipe) + 1

    truth = with_gradients(layer, *tensors)
    assert_same(with_gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"), *tensors), truth)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(with_gradients(layer, *tensors), truth)


def test_triton_rotates_too():
    tensors = make(num_queries=19, num_keys=37, heads=1, head_dim=32, dtype=torch.bfloat16)
    kv_len = torch.tensor([33])
    ours, truth, plain = (
        with_gradients(lambda q, k, v, r=recipe, n=kernel: attention(q, k, v, r, kernel=n, kv_len=kv_len), *tensors)
        for recipe, kernel in ((ROTATED, "triton"), (ROTATED, "torch"), ("attn_qat", "torch"))
    )
    for a, b, other in zip(ours, truth, plain, strict=True):
        assert a.dtype == torch.bfloat16
        assert relative_l2(a, b) < 8e-3
        assert relative_l2(other, b) > 2e-2


# Two terms


def test_two_terms_are_what_one_leaves_over_and_add_up_exactly():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator) * torch.exp2(torch.randint(-14, 12, (64, 4, 1), generator=generator)).expand(64, 4, 16).flatten(1)
    for divisors in ((6.0,), (6.0, 6.5, 5.6, 4.0)):
        found = reference._quantised(x, "nvfp4", -1, divisors, True)
        assert torch.equal(found.double(), terms(x, "nvfp4", divisors, True))
        assert relative_l2(found, x) < 0.2 * relative_l2(reference._quantised(x, "nvfp4", -1, divisors, False), x)


@pytest.mark.parametrize("recipe", [ALL_TWICE, dataclasses.replace(ALL_TWICE, two_level_p=True, p_gain_log2=0)], ids=["gain", "two_level_p"])
def test_two_terms_of_p(recipe):
    """The second has signs; with two levels, it is taken within the tile."""
    p = torch.rand(2, 256, 5, generator=torch.Generator().manual_seed(0)).pow(8) * 2.0**recipe.p_gain_log2  # keys before rows
    p[0, :128, 2] = 0.0
    naive = NaiveAttention(*make()[:3], recipe)
    for dtype in (torch.float32, torch.float64):
        found = reference.quantise_p(p.to(dtype), recipe, torch.empty_like(p, dtype=dtype))
        assert found.dtype == dtype
        assert all(torch.equal(found[h, :, r].float().double(), naive._quantise_p(p[h, :, r])) for h in range(2) for r in range(5))


def test_each_operand_s_second_term_takes_its_error_away():
    """Each error with one operand quantised alone falls to a fifth or less; so does that of all together."""
    q, k, v, grad_out = make(num_queries=100, num_keys=200)
    exact = with_gradients(lambda *x: attention(*x, "bf16"), q, k, v, grad_out)
    once, twice = (with_gradients(lambda *x, r=recipe: attention(*x, r), q, k, v, grad_out) for recipe in ("attn_qat", ALL_TWICE))
    assert all(relative_l2(b, truth) < 0.2 * relative_l2(a, truth) for a, b, truth in zip(once, twice, exact, strict=True))
    for operand, others in (("q", "k"), ("k", "q"), ("v", "p"), ("p", "v")):
        base = "qk_nvfp4" if operand in "qk" else "pv_nvfp4"
        almost = dataclasses.replace(RECIPES[base], name="x", twice=(others,))
        whole = dataclasses.replace(almost, twice=(operand, others))
        before, after = (relative_l2(attention(q, k, v, recipe), exact[0]) for recipe in (almost, whole))
        assert after < 0.25 * before, (operand, before, after)


def test_the_torch_kernel_alone_has_two_terms(monkeypatch):
    monkeypatch.setattr("videoqat.attention.triton_backend._missing", lambda device_type: None)
    for training in (False, True):
        receipt = resolve(TWICE["p"], "cuda", torch.bfloat16, 64, training=training)
        assert receipt.kernel == "torch"
        assert receipt.reason.endswith("triton doesn't serve here: it multiplies each operand once, not twice=p")
    q, k, v, _ = make(dtype=torch.bfloat16)
    for kernel in ("triton", "cuda_nvfp4", "cuda_nvfp4_emulated"):
        with pytest.raises(AttentionError, match=r"multiplies each operand once, not twice=q,k,v,p; would work: torch"):
            attention(q, k, v, ALL_TWICE, kernel=kernel)
    assert resolve(ROTATED, "cuda", torch.bfloat16, 64, training=True).kernel == "triton"


def test_two_terms_have_no_codes_but_p_has():
    assert {operand: packed_obstacle(recipe) for operand, recipe in TWICE.items()} == {
        "q": "twice=q is two terms, and codes are of one",
        "k": "twice=k is two terms, and codes are of one",
        "v": "twice=v is two terms, and codes are of one",
        "p": None,
    }
    assert packed_obstacle(ALL_TWICE) == "twice=q,k,v is two terms, and codes are of one"
    assert packed_obstacle(ROTATED) is None


# Where else attention's formulas are used


@pytest.mark.parametrize("recipe", [ROTATED, ALL_TWICE], ids=lambda recipe: recipe.name)
def test_what_is_measured_is_what_attention_does(recipe):
    q, k, v, grad_out = make(heads=2, kv_heads=2)
    exact = attention(q, k, v, "bf16")
    results = with_gradients(lambda *x: attention(*x, recipe), q, k, v, grad_out)
    error = relative_l2(results[0], exact)
    assert attention_health(q, k, v, recipe)["relative_error"] == pytest.approx(error, rel=1e-3)
    by_rmse = output_errors(q, k, v, [recipe])[0].rmse
    assert by_rmse == pytest.approx(float((results[0] - exact).square().mean().sqrt()), rel=1e-3)
    assert max(relative_errors(q, k, v, grad_out, tuple(results), recipe).values()) < 1e-2  # a code of P may hang on a last bit
    assert min(relative_errors(q, k, v, grad_out, tuple(results), RECIPES["attn_qat"]).values()) > 3e-2


def test_health_looks_at_q_and_k_as_they_are_quantised(monkeypatch):
    seen = []
    monkeypatch.setattr(metrics, "block_health", lambda x, *_: seen.append(x) or (1, 0.0, 0.0))
    q, k, v, _ = make(heads=1)
    attention_health(q, k, v, ROTATED)
    assert torch.equal(seen[0], hadamard(q)[:, :, 0])
    assert torch.equal(seen[1], hadamard(k)[:, :, 0])
    assert torch.equal(seen[2], v[:, :, 0])


# Recipes


def test_other_formats_take_along_what_goes_with_them():
    recipe = AttentionRecipe("x", rotate_qk=True, twice=("p", "q"))
    assert recipe.twice == ("q", "p")
    changed = with_formats(recipe, "y", "bf16", "nvfp4")
    assert (changed.rotate_qk, changed.twice) == (False, ("p",))
    changed = with_formats(recipe, "y", "nvfp4", "bf16")
    assert (changed.rotate_qk, changed.twice) == (True, ("q",))


def test_without_the_options_a_recipe_is_written_as_it_was_before_them():
    assert {"rotate_qk", "twice"}.isdisjoint(AttentionRecipe("x").to_dict())
    for recipe in (ROTATED, ALL_TWICE):
        assert recipe_from_dict(recipe.to_dict(), "test") == recipe


def test_shipped_recipes():
    for name in ("attn_qat", "attn_qat_search"):
        assert get_recipe(f"recipe/{name}_rotated") == dataclasses.replace(RECIPES[name], name=f"{name}_rotated", rotate_qk=True)
    for operand in "qkvp":
        named = dataclasses.replace(RECIPES["attn_qat"], name=f"attn_qat_{operand}_twice", twice=(operand,))
        assert get_recipe(f"recipe/attn_qat_{operand}_twice") == named
    assert get_recipe("recipe/attn_qat_twice").twice == ("q", "k", "v", "p")


def test_the_report_of_attention_alone_tells_them_apart():
    numbers = {"cosine": 0.9, "relative_l1": 0.1, "rmse": 0.1}
    worst = {key: {"value": value, "layer": "a"} for key, value in numbers.items()}
    recipes = [RECIPES["attn_qat"], ROTATED, dataclasses.replace(ROTATED, smooth_k=True), AttentionRecipe("t", twice=("p", "q"))]
    entries = [{"recipe": recipe.to_dict(), "layers": {"a": numbers}, "mean": numbers, "worst": worst} for recipe in recipes]
    assert [(row[1], row[3]) for row in overall({"recipes": entries})[1:]] == [
        ("NVFP4", "none"), ("NVFP4", "rotated"), ("NVFP4", "K, rotated"), ("NVFP4, Q P twice", "none"),
    ]  # fmt: skip
