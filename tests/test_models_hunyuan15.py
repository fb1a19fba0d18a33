"""HunyuanVideo 1.5's forward and processor, held against diffusers' own; quantised gradients against an independent evaluation; its masks; and its
sequences divided among processes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import HunyuanVideo15Transformer3DModel
from helpers import transformers
from helpers.ranks import run_ranks
from helpers.transformers import Inputs, different, in_bf16, naive_sdpa, with_lively_norms
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from videoqat.attention.backends import record_receipts
from videoqat.config import ParallelConfig
from videoqat.errors import AttentionError
from videoqat.models.hunyuan15 import FAMILY
from videoqat.models.hunyuan15_transformer import HunyuanVideo15Processor, sort_on_the_device
from videoqat.models.hunyuan_processor import RefinerProcessor
from videoqat.models.install import install, observe, uninstall
from videoqat.models.spec import family_of_transformer
from videoqat.models.tiny_hunyuan15 import hunyuan15_transformer
from videoqat.parallel.mesh import open_mesh
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import RECIPES

LENGTHS = ((9, 3), (4, 0))  # of the prompts and the glyphs of two samples
GIVEN = pytest.mark.parametrize("image", [False, True], ids=["t2v", "i2v"])


def make_transformer(seed: int = 0, **changes: Any) -> HunyuanVideo15Transformer3DModel:
    torch.manual_seed(seed)
    sizes = {"attention_head_dim": 32, "text_embed_dim": 24, "text_embed_2_dim": 20, "image_embed_dim": 12}
    return with_lively_norms(hunyuan15_transformer(**sizes | changes))


def ours(model: HunyuanVideo15Transformer3DModel, recipe: str = "bf16", **options: Any) -> HunyuanVideo15Transformer3DModel:
    """With the forward of ours and a recipe."""
    sort_on_the_device(model)
    install(model, recipe, **options)
    return model


def make_inputs(
    image: bool = False, dtype: torch.dtype = torch.float32, lengths: tuple[tuple[int, int], ...] = LENGTHS, num_text: int = 11, frames: int = 2
) -> Inputs:
    """x (B, C, F, 6, 10), t, and the condition of a batch with texts of these lengths. A sample is a function of its lengths."""
    conditions, xs = [], []
    for num_prompt, num_glyph in lengths:
        generator = torch.Generator().manual_seed(10 * num_prompt + num_glyph)
        shapes = {
            "x": (4, frames, 6, 10),
            "text": (num_prompt, 24),
            "glyph": (num_glyph, 20),
            "image_latents": (4, 1, 6, 10),
            "image_embedding": (5, 12),
        }
        condition = {part: torch.randn(*shape, generator=generator).to(dtype) for part, shape in shapes.items()}
        xs.append(condition.pop("x"))
        conditions.append({part: value for part, value in condition.items() if image or not part.startswith("image")})
    return torch.stack(xs), torch.tensor([0.0175, 0.8035])[: len(lengths)], FAMILY.batch_conditions(conditions, num_text)


def outputs_and_gradients(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """`out`, and gradients by name. What projects an image has, without one, a gradient of zero in diffusers, which runs it on nothing, and none in
    our forward: here zero, too."""
    found = transformers.outputs_and_gradients(FAMILY, model, inputs)
    if "image_latents" not in inputs[2]:
        unused = {name: p for name, p in model.named_parameters() if name.startswith("image_embedder.") and p.grad is None}
        found |= {name: torch.zeros_like(p) for name, p in unused.items()}
    return found


@GIVEN
@pytest.mark.parametrize("convert", [lambda m: m, in_bf16, partial(transformers.fused_one_by_one, FAMILY)], ids=["fp32", "bf16", "fused"])
def test_bf16_recipe_is_bitwise_the_stock_transformer(convert: Callable, image: bool) -> None:
    """Video, and every parameter's gradient: with our processors, with our forward, too, and then with our forward alone."""
    model = convert(make_transformer())
    inputs = make_inputs(image, model.dtype)
    stock = outputs_and_gradients(model, inputs)
    assert install(model, "bf16") == []
    assert [type(layer.module.processor) for layer in FAMILY.attention_layers(model)] == [RefinerProcessor] * 2 + [HunyuanVideo15Processor] * 2
    results = [outputs_and_gradients(model, inputs)]
    sort_on_the_device(model)
    results.append(outputs_and_gradients(model, inputs))
    uninstall(model)
    results.append(outputs_and_gradients(model, inputs))
    assert len(stock) > 100
    assert [different(result, stock) for result in results] == [[]] * 3


def test_zeros_for_an_image_are_no_image() -> None:
    """As diffusers' pipeline gives them: 729 tokens, here 5, in the place of none."""
    model = make_transformer()
    x, t_B, condition = make_inputs()
    zeros = condition | {"image_latents": torch.zeros(2, 4, 1, 6, 10), "image_embedding": torch.zeros(2, 5, 12)}
    x_and_nothing = torch.cat([x, torch.zeros(2, 5, *x.shape[2:])], dim=1)
    arguments = {"encoder_hidden_states": condition["text"], "encoder_hidden_states_2": condition["glyph"], "image_embeds": zeros["image_embedding"]}
    masks = [(torch.arange(condition[part].shape[1]) < condition[f"{part}_len"].unsqueeze(1)).float() for part in ("text", "glyph")]
    arguments |= {"encoder_attention_mask": masks[0], "encoder_attention_mask_2": masks[1]}
    with torch.no_grad():
        stock = model(x_and_nothing, t_B * 1000, **arguments).sample
        assert torch.equal(ours(model)(x_and_nothing, t_B * 1000, **arguments).sample, stock)
        without = FAMILY.forward(model, x, t_B, condition)
    assert (without - stock).norm() < 1e-6 * stock.norm()


def test_bf16_recipe_is_bitwise_the_stock_processor_under_autocast() -> None:
    transformers.assert_same_under_autocast(outputs_and_gradients, make_transformer(), make_inputs(), ours)


class LargestMask(TorchDispatchMode):
    """The largest number of elements in any tensor of bool."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        sizes = [x.untyped_storage().nbytes() for x in tree_flatten(out)[0] if isinstance(x, Tensor) and x.dtype == torch.bool]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("recipe", ["bf16", "attn_qat"])
def test_no_mask_is_larger_than_a_row_of_keys(recipe: str) -> None:
    model, inputs = make_transformer(), make_inputs(frames=4)
    tokens = 60 + 11 + 3  # of video, prompt, glyphs
    with torch.no_grad(), LargestMask() as largest:
        FAMILY.forward(model, *inputs)
        assert largest.numel == 2 * tokens**2
        ours(model, recipe)
        largest.numel = 0
        FAMILY.forward(model, *inputs)
    assert largest.numel == 2 * 11**2  # the refiner's own, of the prompt alone


@pytest.mark.parametrize("recipe", ["bf16", "attn_qat", None])
def test_forward_needs_no_numbers_from_the_device(recipe: str | None) -> None:
    """Fake tensors have none: whoever asks for one fails, as diffusers' forward does. (The refiner, which looks at masks, leaves fake ones alone.)"""
    model, inputs = make_transformer(), make_inputs(image=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        x, t_B, condition = inputs[0], inputs[1], inputs[2]
        x, t_B, *parts = (fake.from_tensor(tensor) for tensor in (x, t_B, *condition.values()))
        fakes = dict(zip(condition, parts, strict=True))
        with pytest.raises(DataDependentOutputException):
            FAMILY.forward(model, x, t_B, fakes)
        sort_on_the_device(model)
        if recipe is not None:
            install(model, recipe)
        assert FAMILY.forward(model, x, t_B, fakes).shape == x.shape


@GIVEN
def test_quantised_gradients_are_those_of_an_independent_evaluation(image: bool) -> None:
    """Through the whole model: diffusers' stock forward and processors around an attention of single rows in fp64, which shares nothing with ours."""
    model = make_transformer(attention_head_dim=16)
    inputs = make_inputs(image)
    plain = F.scaled_dot_product_attention

    def naive(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        if query.shape[2] == 11:  # the refiner's
            return plain(query, key, value, attn_mask, **options)
        return naive_sdpa(query, key, value, attn_mask[:, 0, 0].sum(dim=1))  # of a mask (B, 1, N, N)

    plain_errors = transformers.assert_gradients_of_an_independent_evaluation(
        lambda: outputs_and_gradients(model, inputs), naive, lambda: ours(model, "attn_qat", kernel="torch")
    )
    touched = [
        plain_errors[f"transformer_blocks.0.attn.{part}.weight"] for part in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
    ]
    assert min(touched) > 1e-2


# --- text of different lengths


@GIVEN
@pytest.mark.parametrize("recipe", ["bf16", "attn_qat", "attn_qat_search"])
def test_samples_of_a_batch_are_what_they_are_alone(recipe: str, image: bool) -> None:
    """Two prompts of different length together, each alone with as much padding, and each with as little as can be."""
    model = ours(make_transformer(), recipe)
    with torch.no_grad():
        together = FAMILY.forward(model, *make_inputs(image))
        for i, lengths in enumerate(LENGTHS):
            for num_text in (11, lengths[0]):
                x, _, condition = make_inputs(image, lengths=(lengths,), num_text=num_text)
                alone = FAMILY.forward(model, x, torch.tensor([0.0175, 0.8035])[i : i + 1], condition)
                assert (alone[0] - together[i]).norm() < 2e-6 * together[i].norm()
    assert condition["glyph"].shape[1] == 1


@pytest.mark.parametrize("recipe", ["bf16", "attn_qat", "sage3", "sagebwd"])
def test_padding_has_no_say(recipe: str) -> None:
    """Whatever stands there, and with recipes, too, that quantise many queries together."""
    model = ours(make_transformer(attention_head_dim=64), recipe)
    x, t_B, condition = make_inputs()
    with torch.no_grad():
        expected = FAMILY.forward(model, x, t_B, condition)
        for part, sample, num in (("text", 0, 9), ("glyph", 0, 3), ("text", 1, 4)):
            padding = (torch.arange(condition[part].shape[1]) >= condition[f"{part}_len"].unsqueeze(1)).unsqueeze(2)
            garbage = condition | {part: condition[part].masked_fill(padding, 7.0)}
            assert torch.equal(FAMILY.forward(model, x, t_B, garbage), expected)
            other = condition[part].clone()
            other[sample, num - 1] = 7.0  # the last real token
            changed = FAMILY.forward(model, x, t_B, condition | {part: other})
            assert (changed[sample] - expected[sample]).norm() > 1e-4 * expected[sample].norm()
            assert torch.equal(changed[1 - sample], expected[1 - sample])


def test_padding_before_a_prompt_is_refused_and_glyphs_may_have_holes() -> None:
    """Real glyphs are moved together, by our forward as by diffusers'; a prompt is refused where its mask comes in, in the refiner."""
    model = make_transformer()
    x, t_B, condition = make_inputs()
    holes = torch.tensor([[0, 1, 1], [1, 0, 1]])
    rest = {"encoder_hidden_states_2": condition["glyph"], "encoder_attention_mask_2": holes, "image_embeds": torch.zeros(2, 5, 12)}
    arguments = (torch.cat([x, x, x[:, :1]], dim=1), t_B * 1000, condition["text"])
    mask = (torch.arange(11) < condition["text_len"].unsqueeze(1)).float()
    with torch.no_grad():
        stock = model(*arguments, mask, **rest).sample
        install(model, "bf16")
        assert torch.equal(model(*arguments, mask, **rest).sample, stock)
        assert torch.equal(sort_on_the_device(model)(*arguments, mask, **rest).sample, stock)
        with pytest.raises(AttentionError, match=r"text mask of sample 1 of 2 has padding before text; legal: text first"):
            model(*arguments, torch.stack([mask[0], mask[1].flip(0)]), **rest)


def test_masks_that_are_no_key_lengths_and_16_bit_angles_are_refused() -> None:
    model = make_transformer()
    install(model, "bf16")
    attn, tables = model.transformer_blocks[0].attn, (torch.zeros(4, 32),) * 2
    x, text = (torch.zeros(1, n, 64) for n in (4, 3))
    for wrong, message in (
        (torch.tensor([[0, 1, 1]]), "have its padding at the tail: real tokens first, then none"),
        (torch.tensor([[True, False, True]]), "have its padding at the tail"),
        (torch.ones(1, 7), r"be \(batch, 3\), got \(1, 7\)"),
        (torch.ones(1, 1, 7, 7).bool(), r"be \(batch, 3\), got \(1, 1, 7, 7\)"),
        (torch.tensor([True]), r"be \(batch, 3\), got \(1,\)"),
    ):
        with pytest.raises(AttentionError, match=f"transformer_blocks.0.attn: a text mask must {message}"):
            attn(x, encoder_hidden_states=text, attention_mask=wrong, image_rotary_emb=tables)
    with pytest.raises(AttentionError, match=r"rotary tables must be float32, got torch.bfloat16"):
        attn(x, encoder_hidden_states=text, attention_mask=torch.tensor([2]), image_rotary_emb=(tables[0].bfloat16(),) * 2)
    with pytest.raises(AttentionError, match="takes glyphs and an image"):
        sort_on_the_device(model)(torch.zeros(1, 9, 1, 2, 2), torch.zeros(1), text, torch.ones(1, 3))


# --- the family's view of a transformer


def test_the_blocks_attention_is_quantised_and_the_refiners_is_not() -> None:
    model = make_transformer()
    assert family_of_transformer(model) is FAMILY
    layers = FAMILY.attention_layers(model)
    blocks = ["transformer_blocks.0.attn", "transformer_blocks.1.attn"]
    refiner = [f"context_embedder.token_refiner.refiner_blocks.{i}.attn" for i in (0, 1)]
    assert [(x.name, x.index) for x in layers] == list(zip(refiner + blocks, (-2, -1, 0, 1), strict=True))
    assert [x.kind for x in layers] == ["refiner"] * 2 + ["joint"] * 2
    assert [x.name for x in install(model, "attn_qat")] == blocks
    assert all(model.get_submodule(x.name) is x.module and (x.num_heads, x.head_dim) == (2, 32) for x in layers)
    assert FAMILY.blocks(model) == list(model.transformer_blocks)
    tokens: list[int] = []
    observe(model, lambda name, q, k, v: tokens.append(k.shape[1]))
    with record_receipts() as receipts, torch.no_grad():
        FAMILY.forward(model, *make_inputs())
    assert {receipt.recipe: receipt.calls for receipt in receipts} == {"bf16": 2, "attn_qat": 2}
    assert tokens == [9, 4] * 2 + [30 + 9 + 3, 30 + 4] * 2  # without padding
    assert install(model, replace(RECIPES["attn_qat"], attention_kinds=("self",))) == []
    uninstall(model)
    stock = [type(x.module.processor).__name__ for x in layers]
    assert stock == ["AttnProcessor2_0"] * 2 + ["HunyuanVideo15AttnProcessor2_0"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "attn_qat"])
def test_padding_makes_no_nan_on_a_gpu(recipe: str) -> None:
    """Most rows of the prompt's mask see nothing in diffusers' refiner, for which not every kernel has a result and a gradient."""
    model = ours(make_transformer(attention_head_dim=64).to("cuda", torch.bfloat16), recipe)
    x, t_B, condition = make_inputs(dtype=torch.bfloat16, num_text=200)
    found = outputs_and_gradients(model, (x.cuda(), t_B.cuda(), {part: tensor.cuda() for part, tensor in condition.items()}))
    assert len(found) > 100
    assert [name for name, tensor in found.items() if not tensor.isfinite().all()] == []
    assert found["context_embedder.token_refiner.refiner_blocks.0.attn.to_q.weight"].any()


# --- divided sequences


def on_each_rank(degree: int) -> dict[str, float]:
    """The largest error of any output and gradient, by recipe, of a divided sequence against the whole one."""
    found = {}
    with open_mesh(ParallelConfig(sp=degree), torch.device("cpu")) as mesh:
        assert mesh.sp_group is not None
        for recipe in ("bf16", "attn_qat", "attn_qat_packed"):
            model = make_transformer(num_attention_heads=4, attention_head_dim=16)
            inputs = make_inputs(image=recipe == "attn_qat", frames=3, num_text=13)  # 45 video tokens; 13, 3 and perhaps 5 of text
            ours(model, recipe.removesuffix("_packed"))
            ulysses = Ulysses(mesh.sp_group, "packed" if recipe.endswith("packed") else "bf16")
            found[recipe] = transformers.error_of_division(outputs_and_gradients, model, inputs, ulysses)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("degree", [2, 4])
def test_divided_sequence_is_the_whole_one(degree: int) -> None:
    """Batch 2 with texts of different lengths; neither the 45 video tokens nor those of text are divisible by the ranks."""
    for errors in run_ranks(on_each_rank, degree, degree):
        assert len(errors) == 3
        assert {key: error for key, error in errors.items() if error > 5e-6} == {}
