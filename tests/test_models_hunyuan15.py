"""HunyuanVideo 1.5's forward and processor, held against diffusers' own; quantised gradients against an independent evaluation; its masks; and its
sequences divided among processes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import HunyuanVideo15Transformer3DModel
from helpers.naive_attention import NaiveAttention
from helpers.ranks import run_ranks
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
from videoqat.models.install import install, observe, shard_sequence, uninstall
from videoqat.models.spec import Condition, family_of_transformer
from videoqat.models.tiny_hunyuan15 import hunyuan15_transformer
from videoqat.parallel.mesh import open_mesh
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import RECIPES

Inputs = tuple[Tensor, Tensor, Condition]
LENGTHS = ((9, 3), (4, 0))  # of the prompts and the glyphs of two samples
GIVEN = pytest.mark.parametrize("image", [False, True], ids=["t2v", "i2v"])


def make_transformer(seed: int = 0, **changes: Any) -> HunyuanVideo15Transformer3DModel:
    torch.manual_seed(seed)
    sizes = {"attention_head_dim": 32, "text_embed_dim": 24, "text_embed_2_dim": 20, "image_embed_dim": 12}
    model = hunyuan15_transformer(**sizes | changes)
    for name, parameter in model.named_parameters():
        if "norm" in name and "linear" not in name:  # norms of exactly 1 and 0 would hide a norm that is left out
            nn.init.normal_(parameter, mean=1.0, std=0.3)
        if "norm" in name and "linear" in name:  # gates and shifts that are nearly zero would hide what they gate
            nn.init.normal_(parameter, std=0.2)
    return model


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
    """`out`, and by name."""
    model.zero_grad()
    out = FAMILY.forward(model, *inputs)
    out.float().square().mean().backward()
    return {"out": out.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(xs: dict[str, Tensor], truths: dict[str, Tensor]) -> dict[str, float]:
    """Errors in L2, each relative to its truth. Some gradients are nothing but rounding (a bias of all keys alike moves no softmax): none is taken
    for smaller than 1e-3 of the largest."""
    floor = 1e-3 * max(float(truth.norm()) for name, truth in truths.items() if name != "out")
    assert xs.keys() == truths.keys()
    return {name: float((xs[name] - truth).norm()) / max(float(truth.norm()), floor) for name, truth in truths.items()}


def fused(model: HunyuanVideo15Transformer3DModel) -> HunyuanVideo15Transformer3DModel:
    """Module by module: the transformer's own method doesn't reach them, and diffusers' processor goes on with the projections that were there."""
    for layer in FAMILY.attention_layers(model):
        layer.module.fuse_projections()  # type: ignore[operator]
    return model


def in_bf16(model: HunyuanVideo15Transformer3DModel) -> HunyuanVideo15Transformer3DModel:
    return model.to(torch.bfloat16)


@GIVEN
@pytest.mark.parametrize("convert", [lambda m: m, in_bf16, fused], ids=["fp32", "bf16", "fused"])
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
    for result in results:
        unused = stock.keys() - result.keys()  # what projects an image: without one, diffusers runs it on nothing for a gradient of zero
        assert all(name.startswith("image_embedder.") and not image and not stock[name].any() for name in unused)
        assert len(result) > 100
        assert [name for name in result if not torch.equal(result[name], stock[name])] == []


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
    model = make_transformer()
    inputs = make_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = outputs_and_gradients(model, inputs)
        ours(model)
        seen: list[torch.dtype] = []
        observe(model, lambda name, q, k, v: seen.extend((q.dtype, k.dtype, v.dtype)))
        result = outputs_and_gradients(model, inputs)
    assert set(seen) == {torch.bfloat16}
    assert [name for name in result if not torch.equal(result[name], stock[name])] == []


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


class Naive(torch.autograd.Function):
    """`NaiveAttention` in the place of scaled_dot_product_attention: (B, H, N, D), under diffusers' mask (B, 1, N, N)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.detach().transpose(1, 2) for x in (q, k, v))
        ctx.naive = NaiveAttention(q, k, v, RECIPES["attn_qat"], kv_len=mask[:, 0, 0].sum(dim=1))
        return ctx.naive.forward()[0].transpose(1, 2).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(x.transpose(1, 2).float() for x in ctx.naive.backward(grads[0].transpose(1, 2))), None


@GIVEN
def test_quantised_gradients_are_those_of_an_independent_evaluation(image: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole model: diffusers' stock forward and processors around an attention of single rows in fp64, which shares nothing with ours."""
    model = make_transformer(attention_head_dim=16)
    inputs = make_inputs(image)
    unquantised = outputs_and_gradients(model, inputs)
    plain = F.scaled_dot_product_attention

    def naive(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        if query.shape[2] == 11:  # the refiner's
            return plain(query, key, value, attn_mask, **options)
        return Naive.apply(query, key, value, attn_mask)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", naive)
        expected = outputs_and_gradients(model, inputs)
    result = outputs_and_gradients(ours(model, "attn_qat", kernel="torch"), inputs)
    unused = {name for name in expected.keys() - result.keys() if name.startswith("image_embedder.") and not image}
    expected, unquantised = ({name: x for name, x in found.items() if name not in unused} for found in (expected, unquantised))
    # A code that hangs on the last bits of its input may fall either way; without quantisation everything is further off.
    assert {name: error for name, error in relative(result, expected).items() if error > 2e-3} == {}
    plain_errors = relative(unquantised, expected)
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
            whole = outputs_and_gradients(model, inputs)
            shard_sequence(model, Ulysses(mesh.sp_group, "packed" if recipe.endswith("packed") else "bf16"))
            divided = outputs_and_gradients(model, inputs)
            for name in divided.keys() - {"out"}:
                dist.all_reduce(divided[name])
            found[recipe] = max(relative(divided, whole).values())
    return found


@pytest.mark.dist
@pytest.mark.parametrize("degree", [2, 4])
def test_divided_sequence_is_the_whole_one(degree: int) -> None:
    """Batch 2 with texts of different lengths; neither the 45 video tokens nor those of text are divisible by the ranks."""
    for errors in run_ranks(on_each_rank, degree, degree):
        assert len(errors) == 3
        assert {key: error for key, error in errors.items() if error > 5e-6} == {}
