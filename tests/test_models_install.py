"""Recipes into transformers and out again, layer by layer and model by model."""

from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from videoqat.attention.backends import record_receipts
from videoqat.errors import AttentionError, CheckpointError, ConfigError
from videoqat.models.install import install, installed_recipe, observe, uninstall
from videoqat.models.wan import FAMILY, WanProcessor
from videoqat.recipes import RECIPES, AttentionRecipe


@pytest.fixture
def model() -> WanTransformer3DModel:
    return make_model()


def make_model() -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=8, freq_dim=16, ffn_dim=32,
        num_layers=4, rope_max_seq_len=32,
    ).eval()  # fmt: skip


def run(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        x_BCFHW, text_BLD = torch.randn(1, 4, 3, 8, 8, generator=generator), torch.randn(1, 5, 8, generator=generator)
        return FAMILY.forward(model, x_BCFHW, torch.tensor([0.5]), {"text": text_BLD})


def test_uninstall_restores_the_very_processors(model: WanTransformer3DModel) -> None:
    before = {name: id(processor) for name, processor in model.attn_processors.items()}
    exact = run(model)
    install(model, "attn_qat")
    install(model, "sage3")  # a second one replaces the first, and doesn't become what is restored
    assert installed_recipe(model) == RECIPES["sage3"]
    assert not torch.equal(run(model), exact)
    uninstall(model)
    assert {name: id(processor) for name, processor in model.attn_processors.items()} == before
    assert installed_recipe(model) is None
    assert torch.equal(run(model), exact)
    uninstall(model)  # nothing is installed: nothing happens


def test_installing_twice_is_installing_once(model: WanTransformer3DModel) -> None:
    first = install(model, "attn_qat")
    once = run(model)
    second = install(model, "attn_qat")
    assert [layer.name for layer in first] == [layer.name for layer in second] == [f"blocks.{i}.attn1" for i in range(4)]
    assert torch.equal(run(model), once)


def test_keep_layers_stay_in_bf16(model: WanTransformer3DModel) -> None:
    recipe = AttentionRecipe("kept", keep_layers=(0, 3))
    assert [layer.index for layer in install(model, recipe)] == [1, 2]
    recipes = {name: processor.recipe.name for name, processor in model.attn_processors.items() if "attn1" in name}
    assert list(recipes.values()) == ["bf16", "kept", "kept", "bf16"]
    assert installed_recipe(model) == recipe


def test_keeping_every_layer_is_bf16(model: WanTransformer3DModel) -> None:
    exact = run(model)
    assert install(model, AttentionRecipe("all kept", keep_layers=(0, 1, 2, 3))) == []
    assert torch.equal(run(model), exact)


def test_keep_layers_that_the_model_lacks(model: WanTransformer3DModel) -> None:
    with pytest.raises(ConfigError, match="'deep': keep_layers names block 4, but this model has blocks 0 to 3"):
        install(model, AttentionRecipe("deep", keep_layers=(1, 4)))
    assert not any(isinstance(processor, WanProcessor) for processor in model.attn_processors.values())


def test_refused_recipe_leaves_the_installed_one(model: WanTransformer3DModel) -> None:
    install(model, "attn_qat")
    with pytest.raises(ConfigError, match="keep_layers"):
        install(model, AttentionRecipe("deep", keep_layers=(9,)))
    assert installed_recipe(model) == RECIPES["attn_qat"]


def test_two_models_in_one_process_do_not_touch_each_other() -> None:
    plain, quantised, sage = make_model(), make_model(), make_model()
    exact = run(plain)
    install(quantised, "attn_qat")
    install(sage, "sage3")
    outputs = [run(model) for model in (plain, quantised, sage)]
    assert torch.equal(outputs[0], exact)
    assert not torch.equal(outputs[1], exact)
    assert not torch.equal(outputs[2], outputs[1])
    uninstall(sage)
    assert torch.equal(run(sage), exact)
    assert torch.equal(run(quantised), outputs[1])


def test_observer_sees_every_attention_and_changes_nothing(model: WanTransformer3DModel) -> None:
    install(model, "attn_qat")
    unobserved = run(model)
    seen: list[tuple[str, Any]] = []
    observe(model, lambda name, q, k, v: seen.append((name, (q.shape, k.shape, v.shape))))
    assert torch.equal(run(model), unobserved)
    video, text = (1, 3 * 4 * 4, 2, 16), (1, 5, 2, 16)
    expected = []
    for block in range(4):
        expected += [(f"blocks.{block}.attn1", (video, video, video)), (f"blocks.{block}.attn2", (video, text, text))]
    assert seen == expected
    observe(model, None)
    run(model)
    assert len(seen) == len(expected)


def test_observing_needs_a_recipe(model: WanTransformer3DModel) -> None:
    with pytest.raises(CheckpointError, match="install one"):
        observe(model, None)


def test_kernel_that_is_insisted_on_serves_the_quantised_layers(model: WanTransformer3DModel) -> None:
    install(model, "attn_qat", kernel="torch")
    with record_receipts() as receipts:
        run(model)
    assert {(r.recipe, r.kernel, r.calls) for r in receipts} == {("attn_qat", "torch", 4), ("bf16", "sdpa", 4)}
    install(model, "attn_qat", kernel="sdpa")
    with pytest.raises(AttentionError, match="sdpa"):
        run(model)


def test_transformer_of_no_known_family() -> None:
    with pytest.raises(CheckpointError, match=r"Linear is of no known family and has no attention processors; known: "):
        install(nn.Linear(2, 2), "bf16")
