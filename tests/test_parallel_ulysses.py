"""Sequence parallelism on gloo ranks, held against one process: attention alone, joint attention, and a whole transformer."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from helpers.ranks import run_ranks
from helpers.sequence import assert_close, draw, sequence_ranks, summed, ulysses_ranks, with_gradients
from torch.utils.checkpoint import checkpoint

from videoqat.attention import attention, record_receipts
from videoqat.errors import AttentionError, CheckpointError, ConfigError
from videoqat.models.install import install, observe, shard_sequence, uninstall
from videoqat.models.wan import FAMILY
from videoqat.parallel.exchange import all_to_all
from videoqat.parallel.ulysses import Ulysses, attend, attend_joint
from videoqat.recipes import RECIPES, AttentionRecipe

pytestmark = pytest.mark.dist
NAMES = {"bf16": ("attn_qat", "attn_qat_search", "bf16", "sage3"), "packed": ("attn_qat", "attn_qat_search", "mxfp4", "qk_nvfp4", "bf16")}
LENGTHS = (64, 37, 3, 1)  # of up to 4 ranks: even; with a tail; and too short for every rank to have a token
# video, text, text_first; blocks of V shifted by the text, and not
JOINT = ((64, 16, True), (37, 5, True), (37, 5, False), (3, 7, True), (1, 20, False))
TINY: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
VIDEO = (2, 4, 3, 6, 10)  # 45 tokens: no multiple of 2 or 4


def self_attention(degree: int, wire: str) -> int:
    checked = 0
    with ulysses_ranks(degree, wire) as ulysses:
        for name in NAMES[wire]:
            for num_tokens in LENGTHS:
                for kv_len in (None, torch.tensor([num_tokens, (num_tokens + 1) // 2]))[: 1 + (num_tokens == 37)]:
                    ulysses.num_tokens = num_tokens
                    *leaves, grad = draw(*((2, num_tokens, heads, 32) for heads in (8, 4, 4, 8)), seed=num_tokens)

                    def divided(q, k, v, kv_len=kv_len, name=name):
                        parts = [ulysses.shard(x, 1) for x in (q, k, v)]
                        return (ulysses.gather(attend(*parts, RECIPES[name], kernel="auto", ulysses=ulysses, kv_len=kv_len), 1),)

                    def whole(q, k, v, kv_len=kv_len, name=name):
                        return (attention(q, k, v, name, kv_len=kv_len),)

                    with record_receipts() as receipts:
                        out, gradients = with_gradients(divided, leaves, (grad,))
                    assert [("came as codes" in receipt.reason) for receipt in receipts] == [wire == "packed" and name != "bf16"]
                    truth, true_gradients = with_gradients(whole, leaves, (grad,))
                    assert_close(out, truth)
                    assert_close(summed(gradients), true_gradients)
                    checked += 1
    return checked


@pytest.mark.parametrize("wire", ["bf16", "packed"])
@pytest.mark.parametrize("degree", [2, 4])
def test_self_attention_is_that_of_one_process(degree, wire):
    assert run_ranks(self_attention, degree, degree, wire) == [len(NAMES[wire]) * (len(LENGTHS) + 1)] * degree


def joint_attention(degree: int, wire: str) -> int:
    checked = 0
    with ulysses_ranks(degree, wire) as ulysses:
        for name in NAMES[wire]:
            for num_tokens, num_text, text_first in JOINT:
                for kv_len in (None, torch.tensor([num_tokens + num_text, max(num_tokens, num_text) - 1]))[: 1 + (num_tokens == 37)]:
                    ulysses.num_tokens = num_tokens
                    leaves = draw(*((2, n, heads, 32) for n in (num_tokens, num_text) for heads in (8, 4, 4)), seed=num_tokens)
                    grads = draw((2, num_tokens, 8, 32), (2, num_text, 8, 32), seed=99)

                    def divided(*x, name=name, text_first=text_first, kv_len=kv_len):
                        parts = [ulysses.shard(y, 1) for y in x[:3]]
                        options = {"text_first": text_first, "kernel": "auto", "ulysses": ulysses, "kv_len": kv_len}
                        video, text = attend_joint(*parts, *x[3:], RECIPES[name], **options)
                        return ulysses.gather(video, 1), text

                    def whole(*x, name=name, text_first=text_first, kv_len=kv_len, text=num_text, video=num_tokens):
                        together = [torch.cat((b, a) if text_first else (a, b), 1) for a, b in zip(x[:3], x[3:], strict=True)]
                        parts = attention(*together, name, kv_len=kv_len).split((text, video) if text_first else (video, text), 1)
                        return parts[::-1] if text_first else parts

                    # What the gradient of text is on one rank, it is a part of on each.
                    parts_of_grads = (grads[0], grads[1] * 2 * (ulysses.rank + 1) / (degree * (degree + 1)))
                    out, gradients = with_gradients(divided, leaves, parts_of_grads)
                    truth, true_gradients = with_gradients(whole, leaves, grads)
                    assert_close(out, truth)
                    assert_close(summed(gradients), true_gradients)
                    checked += 1
    return checked


@pytest.mark.parametrize("wire", ["bf16", "packed"])
@pytest.mark.parametrize("degree", [2, 4])
def test_joint_attention_is_that_of_one_process(degree, wire):
    assert run_ranks(joint_attention, degree, degree, wire) == [len(NAMES[wire]) * (len(JOINT) + 2)] * degree


def padding_is_poison(wire: str) -> None:
    """What stands in the padding of a part, NaN even, reaches neither result nor gradients, and gets none."""
    with ulysses_ranks(2, wire, num_tokens=37) as ulysses:
        real = 37 - ulysses.part_size if ulysses.rank else ulysses.part_size
        assert real < ulysses.part_size or ulysses.rank == 0
        for joint in (False, True):
            leaves = [ulysses.shard(x, 1).clone() for x in draw(*[(2, 37, 2, 32)] * 3)]
            text = draw(*[(2, 5, 2, 32)] * 3, seed=1)
            poisoned = [x.clone() for x in leaves]
            for x in poisoned:
                x[:, real:] = float("nan")

            def run(q, k, v, joint=joint, text=text):
                if joint:
                    return attend_joint(q, k, v, *text, RECIPES["attn_qat"], text_first=False, kernel="auto", ulysses=ulysses)
                return (attend(q, k, v, RECIPES["attn_qat"], kernel="auto", ulysses=ulysses),)

            grads = draw((2, ulysses.part_size, 2, 32), (2, 5, 2, 32), seed=2)[: 1 + joint]
            out, gradients = with_gradients(run, leaves, grads)
            poisoned_out, poisoned_gradients = with_gradients(run, poisoned, grads)
            assert all(torch.equal(a, b) for a, b in zip((*out, *gradients), (*poisoned_out, *poisoned_gradients), strict=True))
            assert all(bool((x[:, real:] == 0).all()) for x in (out[0], *gradients))
            assert all(bool((x[:, :real] != 0).any()) for x in (out[0], *gradients))


@pytest.mark.parametrize("wire", ["bf16", "packed"])
def test_padding_never_gets_in(wire):
    run_ranks(padding_is_poison, 2, wire)


def make_transformer(**changes: Any) -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(**(TINY | changes))


def step(transformer: torch.nn.Module, timestep: torch.Tensor, seed: int = 0, **inputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Prediction and every parameter's gradient, of a loss that weighs all numbers differently."""
    video, text, weights = draw(VIDEO, (2, 9, 24), VIDEO, seed=seed)
    transformer.zero_grad()
    out = transformer(video, timestep, text, return_dict=False, **inputs)[0]
    (out * weights).mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}


def compare(transformer: torch.nn.Module, ulysses: Any, timestep: torch.Tensor) -> None:
    shard_sequence(transformer, None)
    truth, true_gradients = step(transformer, timestep)
    shard_sequence(transformer, ulysses)
    out, gradients = step(transformer, timestep)
    assert_close([out], [truth])
    assert gradients.keys() == true_gradients.keys()
    assert len(gradients) > 40
    # A bias of keys has no gradient in exact arithmetic (softmax doesn't see it); what is there is noise.
    names = [name for name in gradients if not name.endswith("to_k.bias")]
    assert_close(summed([gradients[name] for name in names]), [true_gradients[name] for name in names])


def whole_transformer(degree: int, wire: str) -> None:
    with ulysses_ranks(degree, wire) as ulysses:
        transformer = make_transformer()
        for name in ("attn_qat", "bf16"):
            install(transformer, name)
            compare(transformer, ulysses, torch.tensor([17.0, 803.5]))
        times_of_tokens = torch.cat((torch.zeros(2, 15), torch.full((2, 30), 803.5)), 1)  # the first frame is given: Wan 2.2 TI2V
        compare(transformer, ulysses, times_of_tokens)
        transformer.enable_gradient_checkpointing()
        install(transformer, "attn_qat_search")
        compare(transformer, ulysses, torch.tensor([17.0, 803.5]))


@pytest.mark.parametrize(("degree", "wire"), [(2, "bf16"), (4, "bf16"), (4, "packed")])
def test_a_transformer_is_that_of_one_process(degree, wire):
    run_ranks(whole_transformer, degree, degree, wire)


def hooks_come_and_go() -> None:
    with ulysses_ranks(2, "bf16") as ulysses:
        transformer = make_transformer()
        with pytest.raises(CheckpointError, match="no recipe is installed"):
            shard_sequence(transformer, ulysses)
        hooked = copy.deepcopy([module._forward_hooks for module in transformer.modules()])
        stock, _ = step(transformer, torch.tensor([17.0, 803.5]))
        layers = install(transformer, "attn_qat")
        assert [module._forward_hooks for module in transformer.modules()] == hooked  # without sequence parallelism, nothing
        shard_sequence(transformer, ulysses)
        shard_sequence(transformer, ulysses)  # replaces, not doubles
        install(transformer, "attn_qat_search")  # another recipe finds the sequence divided, too
        assert all(layer.module.processor.ulysses is ulysses for layer in FAMILY.attention_layers(transformer))

        seen: dict[str, list[torch.Tensor]] = {}
        observe(transformer, lambda name, *qkv: seen.setdefault(name, [x.detach().clone() for x in qkv]) and None)
        step(transformer, torch.tensor([17.0, 803.5]))
        divided = dict(seen)
        shard_sequence(transformer, None)
        seen.clear()
        step(transformer, torch.tensor([17.0, 803.5]))
        for layer in layers:  # observers see the whole sequence and this rank's heads
            assert_close(divided[layer.name], [x.chunk(2, dim=2)[ulysses.rank] for x in seen[layer.name]])

        shard_sequence(transformer, ulysses)
        uninstall(transformer)
        out, _ = step(transformer, torch.tensor([17.0, 803.5]))
        assert torch.equal(out, stock)
        assert [module._forward_hooks for module in transformer.modules()] == hooked
        assert FAMILY.blocks(transformer) == list(transformer.blocks)


def test_hooks_come_and_go():
    run_ranks(hooks_come_and_go, 2)


def what_is_refused() -> None:
    with ulysses_ranks(2, "bf16") as ulysses:
        odd = make_transformer(num_attention_heads=3)
        install(odd, "attn_qat")
        with pytest.raises(ConfigError, match=r"parallel.sp=2 does not divide the 3 heads of blocks.0.attn1"):
            shard_sequence(odd, ulysses)
        even = make_transformer()
        everywhere = ("self", "joint", "cross")
        install(even, AttentionRecipe("cross_too", attention_kinds=everywhere))
        shard_sequence(even, ulysses)  # blocks along head_dim don't mind
        compare(even, ulysses, torch.tensor([17.0, 803.5]))
        smooth_q = AttentionRecipe("smooth_cross", smooth_q=True, attention_kinds=everywhere)
        int8 = dataclasses.replace(RECIPES["sagebwd"], name="int8_cross", attention_kinds=everywhere)
        for recipe in (smooth_q, int8):
            with pytest.raises(
                ConfigError, match=r"recipe '\w+': (smooth_q|qk=int8) works on blocks of queries.*blocks.0.attn2.*legal: parallel.sp=1"
            ):
                install(even, recipe)
        install(even, "sage3")  # smooths in self-attention alone

        ulysses.num_tokens = 9
        q = torch.zeros(1, 9, 2, 16)
        with pytest.raises(AttentionError, match=r"legal: .* with 5 tokens, a part of 9, and a multiple of 2 heads"):
            attend(q, q, q, RECIPES["bf16"], kernel="auto", ulysses=ulysses)
        q = torch.zeros(1, 5, 3, 16)
        with pytest.raises(AttentionError, match="multiple of 2 heads"):
            attend(q, q, q, RECIPES["bf16"], kernel="auto", ulysses=ulysses)
        with pytest.raises(AttentionError, match="3 heads can't be divided among 2 ranks"):
            ulysses.own_heads(q)
        with pytest.raises(AttentionError, match="5 tokens can't be divided as one of 9"):
            ulysses.shard(q, 1)
        with pytest.raises(AttentionError, match="a part of 3 tokens"):
            ulysses.gather(q, 2)


def test_what_cannot_be_divided_is_refused():
    run_ranks(what_is_refused, 2)


def as_an_operator() -> None:
    """torch.compile in one graph, checkpointing, opcheck, every dtype that travels."""
    with sequence_ranks(2) as group:
        for wire in ("bf16", "packed"):
            ulysses = Ulysses(group, wire)
            ulysses.num_tokens = 37
            leaves = [ulysses.shard(x, 1) for x in draw(*[(2, 37, 4, 32)] * 3)]
            text = draw(*[(2, 5, 4, 32)] * 3, seed=1)
            grads = draw((2, ulysses.part_size, 4, 32), (2, 5, 4, 32), seed=2)

            def layer(*x, ulysses=ulysses):
                alone = attend(*x[:3], RECIPES["attn_qat"], kernel="auto", ulysses=ulysses)
                video, text = attend_joint(*x, RECIPES["attn_qat"], text_first=True, kernel="auto", ulysses=ulysses)
                return alone * 0.5 + video, text

            def checkpointed(*x, layer=layer):
                return checkpoint(layer, *x, use_reentrant=False)

            truth = with_gradients(layer, (*leaves, *text), grads)
            for other in (torch.compile(layer, fullgraph=True, backend="aot_eager"), checkpointed):
                result = with_gradients(other, (*leaves, *text), grads)
                assert all(torch.equal(a, b) for pair in zip(result, truth, strict=True) for a, b in zip(*pair, strict=True))

            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
                x = (torch.arange(6).view(2, 3) + 10 * ulysses.rank).to(dtype)
                assert all_to_all(x, ulysses.group_name).tolist() == [[3 * ulysses.rank + i + 10 * j for i in range(3)] for j in (0, 1)]
            strided = torch.randn(3, 2, requires_grad=True).t()
            torch.library.opcheck(all_to_all, (strided, ulysses.group_name))


def test_compiled_and_checkpointed():
    run_ranks(as_an_operator, 2)
