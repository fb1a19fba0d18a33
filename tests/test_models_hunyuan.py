"""HunyuanVideo's processors, held against diffusers' own; its quantised gradients against an independent evaluation; its masks; and its sequences
divided among processes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import HunyuanVideoTransformer3DModel
from helpers import transformers
from helpers.ranks import run_ranks
from helpers.transformers import Inputs, different, in_bf16, naive_sdpa, relative, with_lively_norms
from torch import Tensor

from videoqat.attention.backends import record_receipts
from videoqat.config import ParallelConfig
from videoqat.errors import AttentionError
from videoqat.models.hunyuan import FAMILY
from videoqat.models.hunyuan_processor import HunyuanProcessor, RefinerProcessor
from videoqat.models.install import install, installed_recipe, uninstall
from videoqat.models.spec import family_of_transformer
from videoqat.models.tiny_hunyuan import hunyuan_transformer
from videoqat.parallel.mesh import open_mesh
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import RECIPES

outputs_and_gradients = partial(transformers.outputs_and_gradients, FAMILY)


def make_transformer(seed: int = 0, **changes: Any) -> HunyuanVideoTransformer3DModel:
    torch.manual_seed(seed)
    return with_lively_norms(hunyuan_transformer(**{"attention_head_dim": 32, "text_embed_dim": 24, "pooled_projection_dim": 12} | changes))


def make_inputs(
    model: HunyuanVideoTransformer3DModel, dtype: torch.dtype = torch.float32, lengths: tuple[int, ...] = (9, 4), num_text: int = 11, frames: int = 2
) -> Inputs:
    """x (B, C, F, 6, 10), t, and a batch of texts of these lengths. A sample is a function of its length and its number."""
    conditions, xs = [], []
    for i, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(100 * i + length)
        x, text, pooled = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((4, frames, 6, 10), (length, 24), (12,)))
        conditions.append({"text": text, "pooled": pooled})
        xs.append(x)
    return torch.stack(xs), torch.tensor([0.0175, 0.8035])[: len(lengths)], FAMILY.batch_conditions(conditions, num_text)


@pytest.mark.parametrize("convert", [lambda m: m, in_bf16, partial(transformers.fused_one_by_one, FAMILY)], ids=["fp32", "bf16", "fused"])
def test_bf16_recipe_is_bitwise_the_stock_processor(convert: Callable) -> None:
    """Video, and every parameter's gradient."""
    model = convert(make_transformer(num_layers=2, num_single_layers=2))
    inputs = make_inputs(model, model.dtype)
    stock = outputs_and_gradients(model, inputs)
    assert install(model, "bf16") == []
    ours = outputs_and_gradients(model, inputs)
    assert [type(layer.module.processor) for layer in FAMILY.attention_layers(model)] == [RefinerProcessor] * 2 + [HunyuanProcessor] * 4
    assert len(stock) > 1
    assert different(ours, stock) == []


def test_bf16_recipe_is_bitwise_the_stock_processor_under_autocast() -> None:
    model = make_transformer()
    transformers.assert_same_under_autocast(outputs_and_gradients, model, make_inputs(model), lambda model: install(model, "bf16"))


@pytest.mark.gpu
def test_on_a_gpu_too_and_4_bits_are_those_of_the_cpu() -> None:
    model = make_transformer(num_layers=2, num_single_layers=2, attention_head_dim=64)
    x, t_B, condition = make_inputs(model)
    on_gpu = (x.cuda(), t_B.cuda(), {key: value.cuda() for key, value in condition.items()})
    install(model, "attn_qat", kernel="torch")
    with torch.no_grad():
        expected = FAMILY.forward(model, x, t_B, condition)
        model.cuda()
        install(model, "attn_qat", kernel="triton")
        found = FAMILY.forward(model, *on_gpu)
        # Four layers whose products and outputs are rounded to bf16 (4.8e-3 on an H200); 4 bits themselves make 1.7e-2.
        assert (found.cpu() - expected).norm() < 7e-3 * expected.norm()
        uninstall(model)
        in_bf16(model)
        stock = FAMILY.forward(model, *on_gpu)
        install(model, "bf16")
        assert torch.equal(FAMILY.forward(model, *on_gpu), stock)


def test_in_the_blocks_padding_too_is_bitwise_stock() -> None:
    """In the refiner padding attends to other keys than in diffusers, so there the rows of real tokens alone are the same."""
    model = make_transformer()
    inputs = make_inputs(model)
    states: list[Tensor] = []
    for path in ("context_embedder", "transformer_blocks.0", "single_transformer_blocks.0"):
        model.get_submodule(path).register_forward_hook(lambda module, args, out: states.extend([out] if isinstance(out, Tensor) else out))
    with torch.no_grad():
        FAMILY.forward(model, *inputs)
        refined, theirs = states[0], states[1:]
        states.clear()
        install(model, "bf16")
        FAMILY.forward(model, *inputs)
        real_BL = torch.arange(11) < inputs[2]["text_len"].unsqueeze(1)
        assert torch.equal(states[0][real_BL], refined[real_BL])
        assert not torch.equal(states[0], refined)
        states.clear()
        model.context_embedder.register_forward_hook(lambda module, args, out: refined)  # from the same text, padding and all
        FAMILY.forward(model, *inputs)
    ours = [state for state in states if state is not refined][-4:]
    assert len(ours) == len(theirs) == 4
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_masks_are_of_keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of pairs would be 14 GB for a video of 118,800 tokens."""
    model = make_transformer()
    install(model, "bf16")
    plain, masks = F.scaled_dot_product_attention, []

    def watched(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        masks.append(attn_mask)
        return plain(query, key, value, attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    with torch.no_grad():
        FAMILY.forward(model, *make_inputs(model))
    assert [mask.shape for mask in masks] == [(2, 1, 1, 11)] * 2 + [(2, 1, 1, 30 + 11)] * 2
    assert [mask.sum(dim=3).flatten().tolist() for mask in masks] == [[9, 4]] * 2 + [[39, 34]] * 2


@pytest.mark.parametrize("refiner_too", [False, True])
def test_quantised_gradients_are_those_of_an_independent_evaluation(refiner_too: bool) -> None:
    """Through the whole model: diffusers' stock processors around an attention of single rows in fp64, which shares nothing with ours."""
    model = make_transformer(attention_head_dim=16)
    inputs = make_inputs(model)
    plain = F.scaled_dot_product_attention

    def naive(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **_: Any) -> Tensor:
        if attn_mask.shape[2] == 1 or refiner_too:
            # The refiner's mask, (B, H, L, L), says for its first row which tokens are real.
            return naive_sdpa(query, key, value, attn_mask[:, 0, 0].sum(dim=1))
        return plain(query, key, value, attn_mask)

    def quantise() -> None:
        kinds = ("joint", "refiner") if refiner_too else ("joint",)
        assert len(install(model, replace(RECIPES["attn_qat"], attention_kinds=kinds), kernel="torch")) == 2 + 2 * refiner_too

    plain_errors = transformers.assert_gradients_of_an_independent_evaluation(lambda: outputs_and_gradients(model, inputs), naive, quantise)
    touched = [error for name, error in plain_errors.items() if "blocks.0.attn.to_q.weight" in name]
    assert len(touched) == 3
    assert min(touched) > 1e-2


# --- text of different lengths


@pytest.mark.parametrize("recipe", ["bf16", "attn_qat", "attn_qat_search"])
def test_samples_of_a_batch_are_what_they_are_alone(recipe: str) -> None:
    """Two prompts of different length together, each alone with as much padding, and each without any."""
    model = make_transformer()
    install(model, recipe)
    x, t_B, condition = make_inputs(model)
    with torch.no_grad():
        together = FAMILY.forward(model, x, t_B, condition)
        for i, length in enumerate((9, 4)):
            one = {key: value[i : i + 1] for key, value in condition.items()}
            padded = FAMILY.forward(model, x[i : i + 1], t_B[i : i + 1], one)
            bare = FAMILY.forward(model, x[i : i + 1], t_B[i : i + 1], one | {"text": one["text"][:, :length]})
            for alone in (padded, bare):
                assert (alone[0] - together[i]).norm() < 2e-6 * together[i].norm()


@pytest.mark.parametrize("recipe", ["bf16", "attn_qat", "sage3", "sagebwd"])
def test_padding_has_no_say(recipe: str) -> None:
    """Whatever stands there, and with recipes, too, that quantise many queries together."""
    model = make_transformer(attention_head_dim=64)
    install(model, replace(RECIPES[recipe], attention_kinds=("joint", "refiner")))
    x, t_B, condition = make_inputs(model, num_text=48)
    position_L = torch.arange(48)
    padding_BL1 = (position_L >= condition["text_len"].unsqueeze(1)).unsqueeze(2)
    garbage = condition["text"] + 7 * padding_BL1 * torch.randn(2, 48, 24, generator=torch.Generator().manual_seed(3))
    shorter = condition["text"] * (position_L < torch.tensor([[8], [4]])).unsqueeze(2)  # one real token less
    with torch.no_grad():
        expected, ours, other = (FAMILY.forward(model, x, t_B, condition | {"text": text}) for text in (condition["text"], garbage, shorter))
    assert torch.equal(ours, expected)
    assert (other[0] - expected[0]).norm() > 1e-4 * expected[0].norm()
    assert torch.equal(other[1], expected[1])


def left(mask_BL: Tensor) -> Tensor:
    return mask_BL.flip(1)


def all_but_the_first(mask_BL: Tensor) -> Tensor:
    return mask_BL & (torch.arange(mask_BL.shape[1]) > 0)


def with_a_hole(mask_BL: Tensor) -> Tensor:
    return mask_BL & (torch.arange(mask_BL.shape[1]) != 2)


@pytest.mark.parametrize("wrong", [left, all_but_the_first, with_a_hole])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_padding_before_text_is_refused(wrong: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    model = make_transformer()
    install(model, "attn_qat")
    x, t_B, condition = make_inputs(model)
    good = torch.arange(11) < condition["text_len"].unsqueeze(1)
    masks = (good.to(dtype), torch.stack([good[0], wrong(good)[1]]).to(dtype))
    rest = (condition["pooled"], t_B * 1000)
    with torch.no_grad():
        model(x, t_B, condition["text"], masks[0], *rest)
        with pytest.raises(AttentionError, match=r"text mask of sample 1 of 2 has padding before text; legal: text first, .*padding_side=right"):
            model(x, t_B, condition["text"], masks[1], *rest)
    uninstall(model)
    with torch.no_grad():
        model(x, t_B, condition["text"], masks[1], *rest)  # diffusers takes it, and takes the first tokens for the real ones


def test_what_is_no_mask_of_keys_and_16_bit_angles_are_refused() -> None:
    model = make_transformer()
    install(model, "bf16")
    x, text = (torch.zeros(1, n, 64) for n in (4, 2))
    for block in (model.transformer_blocks[0], model.single_transformer_blocks[0]):
        for mask in (torch.ones(1, 1, 6, 6).bool(), torch.ones(1, 1, 1, 6)):
            with pytest.raises(AttentionError, match=r"transformer_blocks.0.attn: the mask is .*legal: \(batch, 1, 1, 6\) of bool"):
                block.attn(x, encoder_hidden_states=text, attention_mask=mask)
        with pytest.raises(AttentionError, match=r"rotary tables must be float32, got torch.bfloat16"):
            block.attn(x, encoder_hidden_states=text, image_rotary_emb=(torch.zeros(4, 32).bfloat16(),) * 2)
    with pytest.raises(AttentionError, match=r"refiner_blocks.0.attn: the refiner's attention is self-attention"):
        model.context_embedder.token_refiner.refiner_blocks[0].attn(x, encoder_hidden_states=text)


@pytest.mark.slow
def test_blocks_compile_in_one_graph() -> None:
    """Masks, lengths and the quantised operator included."""
    model = make_transformer()
    install(model, "attn_qat")
    inputs = make_inputs(model)
    expected = outputs_and_gradients(model, inputs)
    for block in FAMILY.blocks(model):
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")  # type: ignore[method-assign]
    assert max(relative(outputs_and_gradients(model, inputs), expected).values()) < 1e-5


# --- the family's view of a transformer


def test_the_blocks_attention_is_quantised_and_the_refiners_when_asked_for() -> None:
    model = make_transformer(num_layers=2, num_single_layers=1)
    assert family_of_transformer(model) is FAMILY
    layers = FAMILY.attention_layers(model)
    blocks = ["transformer_blocks.0.attn", "transformer_blocks.1.attn", "single_transformer_blocks.0.attn"]
    refiner = [f"context_embedder.token_refiner.refiner_blocks.{i}.attn" for i in (0, 1)]
    assert [(x.name, x.index) for x in layers] == list(zip(refiner + blocks, (-2, -1, 0, 1, 2), strict=True))
    assert {(x.kind, x.num_heads, x.head_dim) for x in layers} == {("refiner", 2, 32), ("joint", 2, 32)}
    assert all(model.get_submodule(x.name) is x.module for x in layers)
    assert [x.name for x in install(model, "attn_qat")] == blocks
    assert FAMILY.blocks(model) == [*model.transformer_blocks, *model.single_transformer_blocks]
    with record_receipts() as receipts, torch.no_grad():
        FAMILY.forward(model, *make_inputs(model))
    assert {receipt.recipe: receipt.calls for receipt in receipts} == {"bf16": 2, "attn_qat": 3}
    model.fuse_qkv_projections()  # changes nothing in this transformer
    assert installed_recipe(model) == RECIPES["attn_qat"]
    assert [x.name for x in install(model, replace(RECIPES["attn_qat"], keep_layers=(0, 2)))] == blocks[1:2]
    assert [x.name for x in install(model, replace(RECIPES["attn_qat"], attention_kinds=("refiner",)))] == refiner
    uninstall(model)
    stock = [type(x.module.processor).__name__ for x in layers]
    assert stock == ["AttnProcessor2_0"] * 2 + ["HunyuanVideoAttnProcessor2_0"] * 3


def test_image_to_video_transformers_can_be_quantised_where_they_stand() -> None:
    """Their pipelines are not supported; their attention is the same."""
    for condition_type in ("token_replace", "latent_concat"):
        model = make_transformer(image_condition_type=condition_type)
        inputs = make_inputs(model)
        with torch.no_grad():
            stock = FAMILY.forward(model, *inputs)
            install(model, "bf16")
            assert torch.equal(FAMILY.forward(model, *inputs), stock)
            assert len(install(model, "attn_qat")) == 2
            assert not torch.equal(FAMILY.forward(model, *inputs), stock)


# --- divided sequences


def on_each_rank(degree: int) -> dict[str, float]:
    """The largest error of any output and gradient, by recipe, of a divided sequence against the whole one."""
    found = {}
    with open_mesh(ParallelConfig(sp=degree), torch.device("cpu")) as mesh:
        assert mesh.sp_group is not None
        for recipe in ("bf16", "attn_qat", "attn_qat_packed"):
            model = make_transformer(num_attention_heads=4, attention_head_dim=16)
            inputs = make_inputs(model, frames=3, num_text=13)  # 45 video tokens; text of 9 and 4 tokens in 13
            install(model, recipe.removesuffix("_packed"))
            ulysses = Ulysses(mesh.sp_group, "packed" if recipe.endswith("packed") else "bf16")
            found[recipe] = transformers.error_of_division(outputs_and_gradients, model, inputs, ulysses)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("degree", [2, 4])
def test_divided_sequence_is_the_whole_one(degree: int) -> None:
    """Batch 2 with texts of different lengths; neither the 45 video tokens nor the 13 of text are divisible by the ranks."""
    for errors in run_ranks(on_each_rank, degree, degree):
        assert len(errors) == 3
        assert {key: error for key, error in errors.items() if error > 5e-6} == {}
