"""`videoqat.install` in diffusers transformers of no family here: held against diffusers itself, and against attention by single rows in fp64."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from helpers.transformers import naive_sdpa
from torch import Tensor, nn

import videoqat
from videoqat.attention.backends import record_receipts
from videoqat.errors import AttentionError, CheckpointError, ConfigError
from videoqat.models import other
from videoqat.models.install import computing_by, install, installed_recipe, observe, shard_sequence, uninstall
from videoqat.recipes import RECIPES, AttentionRecipe

TEXT = 9  # tokens; with the video's or image's no multiple of 16


@dataclass(frozen=True)
class Model:
    """A tiny transformer of a published kind: how it is built and called, and what its attention layers should be."""

    build: Callable[[], nn.Module]
    inputs: Callable[[Callable[..., Tensor]], dict[str, Any]]
    layers: list[tuple[str, int, str]]  # name, block, kind
    tokens: dict[str, int]  # kind -> number of keys


HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=2, joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(4, 6, 6), **HEADS
    )


def mochi() -> nn.Module:
    return diffusers.MochiTransformer3DModel(num_layers=2, pooled_projection_dim=24, in_channels=4, text_embed_dim=32, time_embed_dim=16, **HEADS)


def ltx() -> nn.Module:
    return diffusers.LTXVideoTransformer3DModel(in_channels=8, out_channels=8, cross_attention_dim=32, num_layers=2, caption_channels=24, **HEADS)


def sd3(**changes: Any) -> nn.Module:
    sizes = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 3, "joint_attention_dim": 24, "caption_projection_dim": 32}
    sizes |= {"pooled_projection_dim": 20, "pos_embed_max_size": 16, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}
    return diffusers.SD3Transformer2DModel(**sizes | HEADS | changes)


def vace() -> nn.Module:
    sizes = {"patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 24, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2}
    return diffusers.WanVACETransformer3DModel(**sizes, rope_max_seq_len=32, vace_layers=[0], vace_in_channels=6, **HEADS)


def flux_inputs(draw: Callable[..., Tensor]) -> dict[str, Any]:
    height, width = torch.meshgrid(torch.arange(5), torch.arange(6), indexing="ij")
    ids = torch.stack((torch.zeros_like(height), height, width), dim=-1).flatten(0, 1).float()
    image = {"hidden_states": draw(2, 30, 8), "img_ids": ids, "txt_ids": torch.zeros(TEXT, 3)}
    return {**image, "encoder_hidden_states": draw(2, TEXT, 24), "pooled_projections": draw(2, 20), "timestep": torch.tensor([0.3, 0.7])}


def mochi_inputs(draw: Callable[..., Tensor]) -> dict[str, Any]:
    mask = (torch.arange(TEXT) < torch.tensor([[TEXT], [4]])).to(draw(1).dtype)
    text = {"encoder_hidden_states": draw(2, TEXT, 32), "encoder_attention_mask": mask}
    return {"hidden_states": draw(2, 4, 3, 6, 10), **text, "timestep": torch.tensor([300, 700])}


def ltx_inputs(draw: Callable[..., Tensor]) -> dict[str, Any]:
    mask = (torch.arange(TEXT) < torch.tensor([[TEXT], [4]])).to(draw(1).dtype)
    text = {"encoder_hidden_states": draw(2, TEXT, 24), "encoder_attention_mask": mask}
    return {"hidden_states": draw(2, 30, 8), **text, "timestep": torch.tensor([300, 700]), "num_frames": 2, "height": 3, "width": 5}


def sd3_inputs(draw: Callable[..., Tensor]) -> dict[str, Any]:
    text = {"encoder_hidden_states": draw(2, TEXT, 24), "pooled_projections": draw(2, 20)}
    return {"hidden_states": draw(2, 4, 10, 12), **text, "timestep": torch.tensor([300.0, 700.0])}


def vace_inputs(draw: Callable[..., Tensor]) -> dict[str, Any]:
    control = {"control_hidden_states": draw(2, 6, 2, 6, 10), "control_hidden_states_scale": torch.tensor([0.8])}
    return {"hidden_states": draw(2, 4, 2, 6, 10), "encoder_hidden_states": draw(2, TEXT, 24), **control, "timestep": torch.tensor([300.0, 700.0])}


MODELS = {
    "flux": Model(
        flux,
        flux_inputs,
        [("transformer_blocks.0.attn", 0, "joint"), *((f"single_transformer_blocks.{i}.attn", 1 + i, "joint") for i in (0, 1))],
        {"joint": 39},
    ),
    "mochi": Model(mochi, mochi_inputs, [(f"transformer_blocks.{i}.attn1", i, "joint") for i in (0, 1)], {"joint": 54}),
    "ltx": Model(
        ltx,
        ltx_inputs,
        [(f"transformer_blocks.{i}.{name}", i, kind) for i in (0, 1) for name, kind in (("attn1", "self"), ("attn2", "cross"))],
        {"self": 30},
    ),
    "sd3.5": Model(
        sd3,
        sd3_inputs,
        [
            *((f"transformer_blocks.{i}.{name}", i, kind) for i in (0, 1) for name, kind in (("attn", "joint"), ("attn2", "self"))),
            ("transformer_blocks.2.attn", 2, "joint"),
        ],
        {"joint": 39, "self": 30},
    ),
    "wan vace": Model(
        vace,
        vace_inputs,
        [
            (f"{block}.{name}", index, kind)
            for index, block in enumerate(("blocks.0", "blocks.1", "vace_blocks.0"))
            for name, kind in (("attn1", "self"), ("attn2", "cross"))
        ],
        {"self": 30, "cross": TEXT},
    ),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Any]]:
    """The model in eval mode, and a batch of two."""
    torch.manual_seed(0)
    model = MODELS[name].build().eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name and parameter.ndim == 1 and "linear" not in parameter_name:  # norms of 1 and 0 would hide one that is left out
            nn.init.normal_(parameter, mean=1.0, std=0.3)
        if parameter_name == "pos_frequencies" or "linear" in parameter_name or "proj_out" in parameter_name:  # zeros would hide what they gate
            nn.init.normal_(parameter, std=0.2)
    generator = torch.Generator().manual_seed(1)
    return model.to(dtype), MODELS[name].inputs(lambda *shape: torch.randn(*shape, generator=generator).to(dtype))


def outputs_and_gradients(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    model.zero_grad()
    out = model(**inputs, return_dict=False)[0]
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def run(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs, return_dict=False)[0]
    return out


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_bf16_recipe_is_bitwise_the_stock_processors(name: str, dtype: torch.dtype) -> None:
    model, inputs = make(name, dtype)
    stock = outputs_and_gradients(model, inputs)
    assert videoqat.install(model, "bf16") == []
    with record_receipts() as receipts:
        ours = outputs_and_gradients(model, inputs)
    assert equal(stock, ours)
    assert len(stock) > 20
    assert {receipt.kernel for receipt in receipts} == {"sdpa"}
    assert all(isinstance(layer.module.processor, other._known(layer.module.processor).ours) for layer in other.OTHER.attention_layers(model))


@pytest.mark.parametrize("name", MODELS)
def test_bf16_recipe_is_bitwise_the_stock_processors_under_autocast(name: str) -> None:
    model, inputs = make(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = run(model, inputs)
        install(model, "bf16")
        seen: set[torch.dtype] = set()
        observe(model, lambda name, q, k, v: seen.update((q.dtype, k.dtype, v.dtype)))
        ours = run(model, inputs)
    assert seen == {torch.bfloat16}
    assert torch.equal(stock, ours)


@pytest.mark.parametrize("name", ["flux", "ltx", "wan vace"])
def test_fused_projections(name: str) -> None:
    """LTX-Video's stock processor goes on with the projections that were there, and so does ours."""
    model, inputs = make(name)
    model.fuse_qkv_projections()
    stock = run(model, inputs)
    install(model, "bf16")
    assert torch.equal(run(model, inputs), stock)


SDPA = F.scaled_dot_product_attention


def naive_but_for_cross(*args: Tensor, **options: Any) -> Tensor:
    q, k, v = args or (options.pop(name) for name in ("query", "key", "value"))
    return naive_sdpa(q, k, v) if q.shape[2] == k.shape[2] else SDPA(q, k, v, **options)


@pytest.mark.parametrize("name", MODELS)
def test_quantised_model_is_that_of_an_independent_evaluation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole model: diffusers' stock processors around an attention of single rows in fp64, which shares nothing with ours. For two
    models the gradients, too."""
    gradients = name in ("mochi", "sd3.5")
    evaluate = outputs_and_gradients if gradients else lambda model, inputs: [run(model, inputs)]
    model, inputs = make(name)
    plain = evaluate(model, inputs)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", naive_but_for_cross)
        expected = evaluate(model, inputs)
    quantised = install(model, "attn_qat", kernel="torch")
    assert [(layer.name, layer.index, layer.kind) for layer in quantised] == [layer for layer in MODELS[name].layers if layer[2] != "cross"]
    ours = evaluate(model, inputs)
    names = ["out", *(name for name, p in model.named_parameters() if gradients and p.grad is not None)]
    # A code that hangs on the last bits of its input may fall either way; without quantisation everything is further off.
    assert {name: error for name, error in zip(names, relative(ours, expected), strict=True) if error > 2e-3} == {}
    assert relative(plain, expected)[0] > max(2e-3, 10 * relative(ours, expected)[0])


def relative(xs: list[Tensor], truths: list[Tensor]) -> list[float]:
    """Errors in L2, each relative to its truth; none is taken for smaller than 1e-3 of the largest gradient, since some are nothing but rounding."""
    floor = max([1e-3 * float(truth.norm()) for truth in truths[1:]], default=0.0)
    return [float((x - truth).norm()) / max(float(truth.norm()), floor) for x, truth in zip(xs, truths, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_layers_kinds_and_blocks(name: str) -> None:
    model, inputs = make(name)
    install(model, "attn_qat")
    layers = other.OTHER.attention_layers(model)
    assert [(layer.name, layer.index, layer.kind) for layer in layers] == MODELS[name].layers
    assert {(layer.num_heads, layer.head_dim) for layer in layers} == {(2, 16)}
    kinds = {layer.name: layer.kind for layer in layers}
    seen: list[tuple[str, int]] = []
    observe(model, lambda name, q, k, v: seen.append((name, k.shape[1])))
    out = run(model, inputs)
    observe(model, None)
    assert torch.equal(run(model, inputs), out)
    if name == "mochi":  # each sample's own tokens
        assert [length for _, length in seen] == [54, 49] * 2
    else:
        expected = [(layer, MODELS[name].tokens[kind]) for layer, kind in kinds.items() if kind in MODELS[name].tokens]
        assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("name", MODELS)
def test_uninstall_keep_layers_and_computing_by(name: str) -> None:
    model, inputs = make(name)
    before = {path: module.processor for path, module in model.named_modules() if hasattr(module, "processor")}
    exact = run(model, inputs)
    quantised = install(model, "attn_qat")
    in_4_bits = run(model, inputs)
    with computing_by(quantised, RECIPES["mxfp4"]):
        assert not torch.equal(run(model, inputs), in_4_bits)
    assert torch.equal(run(model, inputs), in_4_bits)
    blocks = sorted({index for _, index, _ in MODELS[name].layers})
    assert {layer.index for layer in install(model, AttentionRecipe("kept", keep_layers=tuple(blocks[1:])))} == {0}
    kept = run(model, inputs)
    assert not torch.equal(kept, in_4_bits)
    assert not torch.equal(kept, exact)
    with pytest.raises(ConfigError, match=f"keep_layers names block {blocks[-1] + 1}, but this model has blocks 0 to {blocks[-1]}"):
        install(model, AttentionRecipe("deep", keep_layers=(blocks[-1] + 1,)))
    assert installed_recipe(model).name == "kept"
    videoqat.uninstall(model)
    after = {path: module.processor for path, module in model.named_modules() if hasattr(module, "processor")}
    assert all(after[path] is processor for path, processor in before.items())
    assert torch.equal(run(model, inputs), exact)


def test_a_mochi_sample_does_not_depend_on_its_batch() -> None:
    """Also with smoothed Q, whose blocks of 128 tokens would else hold other samples' padding; and whichever tokens the mask leaves out."""
    model, inputs = make("mochi")
    install(model, "sage3")
    together = run(model, inputs)
    for i in range(2):
        own = {key: value[i : i + 1] for key, value in inputs.items()}
        real = own["encoder_attention_mask"][0].bool()
        own |= {key: own[key][:, real] for key in ("encoder_hidden_states", "encoder_attention_mask")}
        torch.testing.assert_close(run(model, own), together[i : i + 1], rtol=0, atol=1e-5)
    changed = inputs["encoder_hidden_states"].clone()
    changed[1, 4:] += 1.0
    assert torch.equal(run(model, inputs | {"encoder_hidden_states": changed}), together)
    scattered = inputs["encoder_attention_mask"].clone()
    scattered[1] = torch.tensor([1, 0, 1, 0, 0, 1, 0, 0, 1])
    uninstall(model)
    stock = run(model, inputs | {"encoder_attention_mask": scattered})
    install(model, "bf16")
    assert torch.equal(run(model, inputs | {"encoder_attention_mask": scattered}), stock)


def test_ltx_cross_attention_is_masked_and_stays_in_16_bits() -> None:
    model, inputs = make("ltx")
    cross = AttentionRecipe("crossed", attention_kinds=("self", "cross"))
    assert len(install(model, cross)) == 4
    says = r"transformer_blocks.0.attn2: recipe 'crossed' covers this cross-attention, which is masked.*legal: attention_kinds without cross"
    with pytest.raises(AttentionError, match=says):
        run(model, inputs)
    assert run(model, inputs | {"encoder_attention_mask": None}).isfinite().all()


def test_masks_that_a_processor_has_no_place_for() -> None:
    for name, attention_kwargs in (("flux", {"attention_mask": torch.ones(39, 39)}), ("sd3.5", {"attention_mask": torch.ones(39, 39)})):
        model, inputs = make(name)
        install(model, "bf16")
        with pytest.raises(AttentionError, match=r"^transformer_blocks.0.attn: (Flux|SD3)Processor takes no attention mask"):
            run(model, inputs | {"joint_attention_kwargs": attention_kwargs})


def refused(model: nn.Module, says: str) -> None:
    processors = {path: module.processor for path, module in model.named_modules() if hasattr(module, "processor")}
    with pytest.raises(CheckpointError, match=says) as caught:
        videoqat.install(model, "attn_qat")
    assert "\n" not in str(caught.value)
    assert all(module.processor is processors[path] for path, module in model.named_modules() if path in processors)


ALL_KNOWN = "known: JointAttnProcessor2_0, MochiAttnProcessor2_0, FluxAttnProcessor, LTXVideoAttnProcessor, WanAttnProcessor"


def test_unknown_processors_are_refused_by_name() -> None:
    model, _ = make("flux")
    model.single_transformer_blocks[1].attn.set_processor(FluxIPAdapterAttnProcessor(32, 24))
    what = "FluxTransformer2DModel's single_transformer_blocks.1.attn has the attention processor FluxIPAdapterAttnProcessor, which is not known; "
    refused(model, what + ALL_KNOWN)
    model, _ = make("sd3.5")
    model.transformer_blocks[0].attn.set_processor(AttnProcessor2_0())
    refused(model, "transformer_blocks.0.attn has the attention processor AttnProcessor2_0, which is not known")
    model, _ = make("sd3.5")
    with torch.no_grad():
        model.fuse_qkv_projections()
    refused(model, r"FusedJointAttnProcessor2_0, which is not known; .*; undo fuse_qkv_projections\(\) first")


def test_a_processor_of_somebody_else_by_the_same_name_is_refused() -> None:
    model, _ = make("flux")
    model.transformer_blocks[0].attn.set_processor(type("FluxAttnProcessor", (FluxAttnProcessor,), {})())
    refused(model, "transformer_blocks.0.attn has the attention processor FluxAttnProcessor, which is not known")


def test_no_attention_no_family_no_dividing() -> None:
    refused(nn.Linear(2, 2), "^Linear is of no known family and has no attention processors; " + ALL_KNOWN)
    model, _ = make("flux")
    install(model, "bf16")
    ulysses: Any = type("Ulysses", (), {"degree": 2, "packs": lambda self, recipe: False})()
    with pytest.raises(CheckpointError, match="FluxTransformer2DModel is of no known family: its sequence can't be divided"):
        shard_sequence(model, ulysses)


def test_ltx_attention_by_another_name_is_refused() -> None:
    model, _ = make("ltx")
    block = model.transformer_blocks[0]
    block.attn3 = block.attn1
    del block.attn1
    refused(model, "transformer_blocks.0.attn3 with LTXVideoAttnProcessor: whether it is self- or cross-attention is known of attn1 and attn2 alone")
    model, _ = make("ltx")
    install(model, "bf16")
    with pytest.raises(AttentionError, match=r"transformer_blocks.1.attn1: its name says self-attention"):
        model.transformer_blocks[1].attn1(torch.zeros(1, 4, 32), torch.zeros(1, 3, 32))


def test_the_readmes_lines_for_other_models_run() -> None:
    """Its checkpoint replaced by a tiny Flux pipeline's transformer."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    lines = re.findall(r"^```python\n(.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
    assert len(lines) == 1
    model, inputs = make("flux")
    calls: list[str] = []

    class Pipeline:
        transformer = model

        @classmethod
        def from_pretrained(cls, name: str, torch_dtype: torch.dtype) -> "Pipeline":
            calls.append(name)
            assert torch_dtype == torch.bfloat16
            return cls()

        def to(self, device: str) -> "Pipeline":
            assert device == "cuda"
            return self

        def __call__(self, prompt: str) -> Any:
            calls.append(prompt)
            run(self.transformer, inputs)
            return type("Output", (), {"images": [type("Image", (), {"save": lambda self, path: calls.append(path)})()]})()

    exact = run(model, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers, "FluxPipeline", Pipeline)
        exec(lines[0], {})
    assert len(calls) == 3
    assert installed_recipe(model).is_quantised
    assert not torch.equal(run(model, inputs), exact)


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="module 'videoqat' has no attribute 'instal'"):
        videoqat.instal  # noqa: B018
