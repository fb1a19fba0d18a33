"""Models that are given a first frame, held against diffusers' own pipelines and against an independent evaluation of 4-bit attention."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import CogVideoXImageToVideoPipeline, WanImageToVideoPipeline
from helpers.engines import batch, loss_of
from helpers.pipelines import edited, enliven
from helpers.transformers import naive_sdpa
from PIL import Image
from torch import Tensor, nn

from videoqat.config import ExampleModelConfig, RuntimeConfig, SamplingConfig
from videoqat.errors import CheckpointError, ConfigError
from videoqat.generation.engine import Engine
from videoqat.models.install import install
from videoqat.models.spec import family_of
from videoqat.models.tiny import build_pipeline, cogvideox_transformer
from videoqat.training.objective import denoising_loss
from videoqat.training.throughput import forward_cost

KINDS: dict[str, dict[str, Any]] = {
    "wan": {"image_to_video": True},
    "wan-pair": {"image_to_video": True, "two_transformers": True},
    "ti2v": {"expand_timesteps": True},
    "cogvideox": {"family": "cogvideox", "image_to_video": True},
}
SIZES = {
    "cogvideox": (9, 64, 64),
    "cogvideox-1.5": (17, 32, 48),
}  # the first has positions for one size alone; 17 frames are 5 of latents, an odd number


def size_of(name: str) -> tuple[int, int, int]:
    return SIZES.get(name, (5, 32, 48))


def sampling_of(name: str, steps: int = 2, **changes: Any) -> SamplingConfig:
    frames, height, width = size_of(name)
    return SamplingConfig(num_frames=frames, height=height, width=width, num_inference_steps=steps, **changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny pipelines whose transformers predict something, two layers of two heads of 16; and one like CogVideoX 1.5 for images."""
    root = tmp_path_factory.mktemp("image to video")
    for name, kind in KINDS.items():
        build_pipeline(ExampleModelConfig(out=str(root / "built" / name), num_layers=2, head_dim=16, **kind))
    pipeline = CogVideoXImageToVideoPipeline.from_pretrained(root / "built" / "cogvideox")
    torch.manual_seed(5)
    changes = {"in_channels": 8, "patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 64}
    pipeline.register_modules(transformer=cogvideox_transformer(attention_head_dim=16, **changes))
    pipeline.vae.register_to_config(invert_scale_latents=True)
    pipeline.save_pretrained(root / "built" / "cogvideox-1.5")
    return {name: enliven(root / "built" / name, root / name) for name in (*KINDS, "cogvideox-1.5")}


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 70, 3), dtype=np.uint8))


ALL = pytest.mark.parametrize("name", [*KINDS, "cogvideox-1.5"])


def stock_pipeline(name: str, folder: Path) -> Any:
    """As its model card loads it; TI2V's folder names the other pipeline."""
    pipeline = (CogVideoXImageToVideoPipeline if name.startswith("cogvideox") else WanImageToVideoPipeline).from_pretrained(folder)
    assert getattr(pipeline.config, "expand_timesteps", False) == (name == "ti2v")
    return pipeline


def call(pipeline: Any, name: str, picture: Image.Image, steps: int = 2, guidance_scale: float = 3.0, **more: Any) -> Any:
    frames, height, width = size_of(name)
    tokens = 26 if name.startswith("cogvideox") else 512
    return pipeline(
        image=picture, prompt="a bag moves up", height=height, width=width, num_frames=frames, num_inference_steps=steps, output_type="np",
        guidance_scale=guidance_scale, generator=torch.Generator().manual_seed(3), max_sequence_length=tokens, **more,
    ).frames[0]  # fmt: skip


@ALL
def test_engine_renders_bitwise_the_stock_videos_under_bf16(name: str, folders: dict[str, Path], picture: Image.Image) -> None:
    stock = np.rint(call(stock_pipeline(name, folders[name]), name, picture) * 255).astype(np.uint8)
    engine = Engine(folders[name], RuntimeConfig(device="cpu"))
    ours = engine.generate("a bag moves up", 3, sampling_of(name), "bf16", image=picture)
    assert np.array_equal(ours.frames, stock)
    assert ours.timings["image_s"] > 0
    assert any("40x70" in warning and "stretched" in warning for warning in ours.warnings)
    other = engine.generate("a bag moves up", 3, sampling_of(name), "bf16", image=picture.rotate(180))
    quantised = engine.generate("a bag moves up", 3, sampling_of(name), "attn_qat", image=picture)
    assert not np.array_equal(other.frames, stock)
    assert not np.array_equal(quantised.frames, stock)


@pytest.mark.parametrize("name", ["wan", "cogvideox-1.5"])
def test_parts_of_different_dtypes_go_together(name: str, folders: dict[str, Path], picture: Image.Image) -> None:
    """In 16 bits VAE and image encoder stay in fp32, as for Wan its pipeline's own documentation has it."""
    ours = Engine(folders[name], RuntimeConfig(device="cpu", dtype="bfloat16")).generate(
        "a bag moves up", 3, sampling_of(name), "bf16", image=picture
    )
    if name == "wan":
        dtypes = {"vae": torch.float32, "image_encoder": torch.float32, "default": torch.bfloat16}
        stock = call(WanImageToVideoPipeline.from_pretrained(folders[name], dtype=dtypes), name, picture)
        assert np.array_equal(ours.frames, np.rint(stock * 255).astype(np.uint8))
    assert ours.frames.std() > 1


@pytest.mark.gpu
@ALL
def test_on_a_gpu(name: str, folders: dict[str, Path], picture: Image.Image) -> None:
    """In fp32 the same video as on the CPU, but for rounding; in bf16 and by 4-bit attention it is Triton's kernel that runs."""
    frames = [
        Engine(folders[name], RuntimeConfig(device=device, dtype="float32"))
        .generate("a bag moves up", 3, sampling_of(name), "bf16", image=picture)
        .frames.astype(int)
        for device in ("cpu", "cuda")
    ]
    assert np.abs(frames[0] - frames[1]).mean() < 1
    quantised = Engine(folders[name], RuntimeConfig(device="cuda")).generate("a bag moves up", 3, sampling_of(name), "attn_qat", image=picture)
    assert {receipt["kernel"] for receipt in quantised.receipts if receipt["recipe"] == "attn_qat"} == {"triton"}


def test_the_second_transformer_has_a_guidance_of_its_own(folders: dict[str, Path], picture: Image.Image) -> None:
    """Its part of two steps is the second."""
    engine = Engine(folders["wan-pair"], RuntimeConfig(device="cpu"))
    ours = engine.generate("a bag moves up", 3, sampling_of("wan-pair", guidance_scale_2=7.0), "bf16", image=picture).frames
    stock = call(stock_pipeline("wan-pair", folders["wan-pair"]), "wan-pair", picture, guidance_scale_2=7.0)
    assert np.array_equal(ours, np.rint(stock * 255).astype(np.uint8))
    assert not np.array_equal(ours, engine.generate("a bag moves up", 3, sampling_of("wan-pair"), "bf16", image=picture).frames)


def test_ti2v_without_an_image_is_what_it_was(folders: dict[str, Path], picture: Image.Image) -> None:
    """One engine renders with and without, in any order."""
    from diffusers import WanPipeline

    frames, height, width = size_of("ti2v")
    stock = WanPipeline.from_pretrained(folders["ti2v"])(
        "a bag moves up", height=height, width=width, num_frames=frames, num_inference_steps=2, guidance_scale=3.0,
        generator=torch.Generator().manual_seed(3),
    ).frames[0]  # fmt: skip
    engine = Engine(folders["ti2v"], RuntimeConfig(device="cpu"))
    engine.generate("a bag moves up", 3, sampling_of("ti2v"), "bf16", image=picture)
    assert np.array_equal(engine.generate("a bag moves up", 3, sampling_of("ti2v"), "bf16").frames, np.rint(stock * 255).astype(np.uint8))


@ALL
def test_forward_is_what_the_pipeline_computes(name: str, folders: dict[str, Path], picture: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels and their order, times, embeddings: of the condition that preprocessing caches, at each step of a sampling."""
    folder, family = folders[name], family_of(folders[name])
    pipeline = stock_pipeline(name, folder)
    seen: list[tuple[str, dict[str, Any], Tensor]] = []
    for component in family.components(folder):
        getattr(pipeline, component).register_forward_hook(
            lambda module, args, kwargs, out, component=component: seen.append((component, kwargs, out[0])), with_kwargs=True
        )
    # The pipeline samples CogVideoX's posterior, training takes its mode, and gives the image noise: so that both see the same, neither does here.
    monkeypatch.setattr("diffusers.models.autoencoders.vae.DiagonalGaussianDistribution.sample", lambda self, generator=None: self.mode())
    monkeypatch.setattr("videoqat.models.cogvideox.IMAGE_NOISE", (-100.0, 0.0))
    frames, height, width = size_of(name)
    small = picture.resize((width, height))
    call(pipeline, name, small, steps=6, guidance_scale=1.0)
    assert {component for component, _, _ in seen} == set(family.components(folder))

    image_BCHW = torch.from_numpy(np.array(small)).permute(2, 0, 1)[None].float() / 127.5 - 1
    encoders = family.load_encoders(folder, device="cpu", dtype=torch.float32)
    image = family.batch_conditions(
        [family.encode_image(encoders, image_BCHW, frames)[0] | {"text": torch.zeros(1, 64)}], 512 if "wan" in name else 1
    )
    shapes = family.condition_shapes(folder, size_of(name), 7, image=True)
    assert {part: tuple(x.shape[1:]) for part, x in image.items() if part != "text"} == {k: shape for k, shape in shapes.items() if k != "text"}
    for component, kwargs, expected in seen:
        transformer = family.load_transformer(folder, component, dtype=torch.float32)
        condition = image | {"text": kwargs["encoder_hidden_states"]}
        x, t_B = kwargs["hidden_states"], kwargs["timestep"].flatten()[-1:] / 1000
        if name.startswith("cogvideox"):
            x, expected, t_B = x.transpose(1, 2), expected.transpose(1, 2), t_B + 0.0005
        x = x[:, : family.geometry(folder).in_channels].clone()
        if name == "ti2v":
            x[:, :, 0] = 7.0  # whatever stands there gives way to the image
        with torch.no_grad():
            torch.testing.assert_close(family.forward(transformer, x, t_B, condition), expected, atol=2e-5, rtol=2e-5)
        assert family.given_frames(condition) == (1 if name == "ti2v" else 0)


def gradients(transformer: nn.Module, folder: Path) -> dict[str, Tensor]:
    transformer.zero_grad()
    loss_of(family_of(folder), transformer, folder, [0, 1]).mean().backward()
    return {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["wan", "ti2v", "cogvideox-1.5"])
def test_quantised_gradients_are_those_of_an_independent_evaluation(name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole model: diffusers' stock processors around an attention of single rows in fp64, which shares nothing with ours."""
    folder = folders[name]
    transformer = family_of(folder).load_transformer(folder, "transformer", dtype=torch.float32)
    unquantised = gradients(transformer, folder)
    sdpa = F.scaled_dot_product_attention

    def naive_within_a_sequence(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return (naive_sdpa if query.shape == key.shape else sdpa)(query, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", naive_within_a_sequence)
        expected = gradients(transformer, folder)
    install(transformer, "attn_qat", kernel="torch")
    ours = gradients(transformer, folder)
    floor = 1e-3 * max(gradient.norm() for gradient in expected.values())

    def errors(found: dict[str, Tensor]) -> dict[str, float]:
        return {key: float((found[key] - truth).norm() / max(truth.norm(), floor)) for key, truth in expected.items()}

    # A code that hangs on the last bits of its input may fall either way; without quantisation everything is further off.
    assert {key: error for key, error in errors(ours).items() if error > 2e-3} == {}
    assert min(error for key, error in errors(unquantised).items() if "attn1.to_v.weight" in key) > 5e-3


def test_the_given_frame_counts_for_nothing_in_the_loss(folders: dict[str, Path]) -> None:
    """Neither its noise nor its latents, which the model never sees; the tokens of the others still see the image."""
    folder, family = folders["ti2v"], family_of(folders["ti2v"])
    transformer, schedule = family.load_transformer(folder, "transformer", dtype=torch.float32), family.noise_schedule(folder)
    noise, t_B, condition, latents = batch(folder, [0, 1])

    def loss(latents: Tensor, noise: Tensor, condition: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return denoising_loss(family, schedule, transformer, latents, noise, t_B, condition)

    before = loss(latents, noise, condition)
    other_latents, other_noise = latents.clone(), noise.clone()
    other_latents[:, :, 0], other_noise[:, :, 0] = 3.0, -2.0
    assert torch.equal(loss(other_latents, other_noise, condition), before)
    assert not torch.equal(loss(latents, noise, condition | {"image_frame": condition["image_frame"] + 1}), before)
    text_alone = {"text": condition["text"]}
    assert not torch.equal(loss(other_latents, noise, text_alone), loss(latents, noise, text_alone))


def test_noise_of_a_cogvideox_image_is_a_function_of_the_image(folders: dict[str, Path]) -> None:
    family = family_of(folders["cogvideox"])
    encoders = family.load_encoders(folders["cogvideox"], device="cpu", dtype=torch.float32)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    together, alone = family.encode_image(encoders, images, 9), family.encode_image(encoders, images[1:], 9)
    torch.testing.assert_close(together[1]["image_latents"], alone[0]["image_latents"])
    clean = encoders.vae.encode(images[1:, :, None]).latent_dist.mode() * encoders.vae.config.scaling_factor
    error = (alone[0]["image_latents"] - clean[0]).square().mean().sqrt()
    assert 1e-4 < error < 0.2


@pytest.mark.parametrize("name", ["wan", "ti2v", "cogvideox"])
def test_costs_are_counted_with_what_a_first_frame_adds(name: str, folders: dict[str, Path]) -> None:
    folder, family = folders[name], family_of(folders[name])
    transformer = family.load_transformer(folder, "transformer", dtype=torch.float32)
    bucket, tokens = "x".join(map(str, size_of(name))), family.text_tokens(folder)
    costs = [forward_cost(str(folder), "transformer", bucket, tokens, image=image) for image in (False, True)]
    assert costs[1].parameters == sum(p.numel() for p in transformer.parameters())
    if name == "ti2v":  # modulation of each token, instead of one for all
        assert costs[1].outer.kept_bytes + costs[1].input_bytes > costs[0].outer.kept_bytes + costs[0].input_bytes
        assert costs[1].linear_flops > costs[0].linear_flops
    else:
        assert costs[1].linear_flops == costs[0].linear_flops  # a model that requires an image is told of one in any case
        (embedding,) = (p for key, p in transformer.named_parameters() if key in ("patch_embedding.weight", "patch_embed.proj.weight"))
        assert costs[1].outer.flops >= 2 * embedding.numel() * family.geometry(folder).num_tokens(*size_of(name))


@pytest.mark.parametrize(
    ("name", "file", "changes", "message"),
    [
        ("wan", "transformer/config.json", {"in_channels": 16}, r"no image-to-video transformer.*in_channels=16.*20 more"),
        ("wan", "transformer/config.json", {"pos_embed_seq_len": 10}, "a first and a last frame"),
        ("wan", "model_index.json", {"image_encoder": [None, None]}, "no image_encoder for it"),
        ("wan", "image_encoder/config.json", {"hidden_size": 48}, "of width 32, and its image_encoder makes one of 48"),
        ("wan", "model_index.json", {"_class_name": "WanPipeline"}, r"no text-to-video transformer.*in_channels=36"),
        ("ti2v", "transformer/config.json", {"patch_size": [1, 1, 1]}, r"expand_timesteps goes with patch_size \(1, 2, 2\)"),
        ("cogvideox", "transformer/config.json", {"in_channels": 4}, r"no image-to-video transformer.*in_channels=4.*twice"),
        ("cogvideox", "model_index.json", {"_class_name": "CogVideoXPipeline"}, "is an image-to-video transformer"),
    ],
)
def test_folders_that_do_not_fit_are_refused(name: str, file: str, changes: Any, message: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edited(folders[name], tmp_path / "x", file, **changes)
    with pytest.raises(CheckpointError, match=message):
        family_of(folder).geometry(folder)


def test_sizes_and_texts_that_do_not_fit_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"32x64 is not the one height x width.*legal: 64x64"):
        family_of(folders["cogvideox"]).geometry(folders["cogvideox"]).check_size("sampling", 9, 32, 64)
    with pytest.raises(ConfigError, match=r"max_text_tokens=30 is not legal.*26"):
        family_of(folders["cogvideox"]).text_tokens(folders["cogvideox"], 30)
    with pytest.raises(ConfigError, match=r"max_text_tokens=30 is not legal.*512"):
        family_of(folders["wan"]).text_tokens(folders["wan"], 30)
    assert family_of(folders["wan-pair"]).text_tokens(folders["wan-pair"], 30) == 30
