"""Published models as configurations, for whoever wants their sizes and not their weights: memory estimates, benchmarks, tests.

The numbers are those of the checkpoints' own `config.json` files, as far as sizes depend on them; a VAE's means and deviations are left out.
`write_folder` makes a pipeline folder that everything here can read, without weights or with random ones: what a step costs doesn't depend on what
the weights say. Two values were seen in more than one form and change nothing here but what can be asked for: CogVideoX 1.5's text length (226 in the
copies seen, 224 in its authors' own code) and its sample size (96 x 170, and 300 x 300 in older copies).
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from videoqat.files import atomic_folder, write_json
from videoqat.models.spec import families, family_of

Config = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """A published pipeline.

    Attributes:
        repository: on the hub.
        pipeline: class name.
        transformer, vae, scheduler: their configurations, `_class_name` among them.
        size: FRAMESxHEIGHTxWIDTH that it was made for.
        encoders: the other parts with weights, such as `text_encoder` -> how many.
        index: what else model_index.json says; with a `boundary_ratio` there are two transformers.
        parts: configurations of the other parts that a family reads.
    """

    repository: str
    pipeline: str
    transformer: Config
    vae: Config
    scheduler: Config
    size: str
    encoders: dict[str, int]
    index: Config = field(default_factory=dict)
    parts: dict[str, Config] = field(default_factory=dict)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of its transformers."""
        return ("transformer", "transformer_2") if self.index.get("boundary_ratio") else ("transformer",)


# How many weights encoders have: those of UMT5-XXL, T5 v1.1 XXL and ByT5-small; the vision parts of CLIP ViT-H/14 and SigLIP-so400m; CLIP-L for text;
# Llama 3 8B and Qwen2.5-VL 7B (language) without their last layer.
_UMT5, _T5, _BYT5 = 5_680_910_336, 4_762_310_656, 217_657_472
_CLIP_H, _SIGLIP, _CLIP_L, _LLAMA, _QWEN = 630_766_080, 428_225_600, 123_060_480, 7_505_186_816, 7_070_619_136

_WAN: Config = {
    "_class_name": "WanTransformer3DModel",
    "added_kv_proj_dim": None,
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "freq_dim": 256,
    "image_dim": None,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "pos_embed_seq_len": None,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}
_WAN_1B = _WAN | {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
_WAN_14B = _WAN | {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
_WAN_14B_IMAGE = _WAN_14B | {"in_channels": 36}
_WAN_14B_CLIP = _WAN_14B_IMAGE | {"image_dim": 1280, "added_kv_proj_dim": 5120}
_WAN_5B = _WAN | {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48}
_WAN_VAE: Config = {
    "_class_name": "AutoencoderKLWan",
    "attn_scales": [],
    "base_dim": 96,
    "dim_mult": [1, 2, 4, 4],
    "dropout": 0.0,
    "num_res_blocks": 2,
    "scale_factor_spatial": 8,
    "scale_factor_temporal": 4,
    "temperal_downsample": [False, True, True],
    "z_dim": 16,
}
_WAN22_VAE = _WAN_VAE | {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "in_channels": 12,
    "is_residual": True,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "z_dim": 48,
}
_CLIP_H_CONFIG: Config = {"hidden_size": 1280, "image_size": 224, "patch_size": 14}


def _wan(name: str, transformer: Config, size: str, shift: float, *, image: bool = False, **rest: Any) -> Published:
    scheduler = {
        "_class_name": "UniPCMultistepScheduler",
        "flow_shift": shift,
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
    }
    clip = transformer["image_dim"] is not None
    rest.setdefault("vae", _WAN_VAE)
    return Published(
        f"Wan-AI/{name}-Diffusers",
        "WanImageToVideoPipeline" if image else "WanPipeline",
        transformer,
        scheduler=scheduler,
        size=size,
        encoders={"text_encoder": _UMT5} | ({"image_encoder": _CLIP_H} if clip else {}),
        parts={"image_encoder": _CLIP_H_CONFIG} if clip else {},
        **rest,
    )


_COG_2B: Config = {
    "_class_name": "CogVideoXTransformer3DModel",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "attention_head_dim": 64,
    "dropout": 0.0,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "in_channels": 16,
    "max_text_seq_length": 226,
    "norm_elementwise_affine": True,
    "norm_eps": 1e-5,
    "num_attention_heads": 30,
    "num_layers": 30,
    "out_channels": 16,
    "patch_size": 2,
    "sample_frames": 49,
    "sample_height": 60,
    "sample_width": 90,
    "spatial_interpolation_scale": 1.875,
    "temporal_compression_ratio": 4,
    "temporal_interpolation_scale": 1.0,
    "text_embed_dim": 4096,
    "time_embed_dim": 512,
    "timestep_activation_fn": "silu",
    "use_rotary_positional_embeddings": False,
}
_COG_5B = _COG_2B | {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
_COG_15 = _COG_5B | {"patch_bias": False, "patch_size_t": 2, "sample_frames": 81, "sample_height": 96, "sample_width": 170}
_COG_VAE: Config = {
    "_class_name": "AutoencoderKLCogVideoX",
    "block_out_channels": [128, 256, 256, 512],
    "down_block_types": ["CogVideoXDownBlock3D"] * 4,
    "latent_channels": 16,
    "layers_per_block": 3,
    "norm_num_groups": 32,
    "sample_height": 480,
    "sample_width": 720,
    "scaling_factor": 0.7,
    "temporal_compression_ratio": 4,
    "up_block_types": ["CogVideoXUpBlock3D"] * 4,
}


def _cog(name: str, transformer: Config, size: str, *, image: bool = False, snr_shift: float = 1.0, vae: Config = _COG_VAE) -> Published:
    scheduler = {
        "_class_name": "CogVideoXDDIMScheduler",
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "clip_sample": False,
        "num_train_timesteps": 1000,
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "set_alpha_to_one": True,
        "snr_shift_scale": snr_shift,
        "timestep_spacing": "trailing",
    }
    pipeline = "CogVideoXImageToVideoPipeline" if image else "CogVideoXPipeline"
    if image:
        transformer = transformer | {"in_channels": 32}
    return Published(f"THUDM/{name}", pipeline, transformer, vae, scheduler, size, {"text_encoder": _T5})


_HUNYUAN: Config = {
    "_class_name": "HunyuanVideoTransformer3DModel",
    "attention_head_dim": 128,
    "guidance_embeds": True,
    "in_channels": 16,
    "mlp_ratio": 4.0,
    "num_attention_heads": 24,
    "num_layers": 20,
    "num_refiner_layers": 2,
    "num_single_layers": 40,
    "out_channels": 16,
    "patch_size": 2,
    "patch_size_t": 1,
    "pooled_projection_dim": 768,
    "qk_norm": "rms_norm",
    "rope_axes_dim": [16, 56, 56],
    "rope_theta": 256.0,
    "text_embed_dim": 4096,
}
_HUNYUAN_VAE: Config = {
    "_class_name": "AutoencoderKLHunyuanVideo",
    "block_out_channels": [128, 256, 512, 512],
    "latent_channels": 16,
    "layers_per_block": 2,
    "mid_block_add_attention": True,
    "norm_num_groups": 32,
    "scaling_factor": 0.476986,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 4,
}
_HUNYUAN15: Config = {
    "_class_name": "HunyuanVideo15Transformer3DModel",
    "attention_head_dim": 128,
    "image_embed_dim": 1152,
    "in_channels": 65,
    "mlp_ratio": 4.0,
    "num_attention_heads": 16,
    "num_layers": 54,
    "num_refiner_layers": 2,
    "out_channels": 32,
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "rope_axes_dim": [16, 56, 56],
    "rope_theta": 256.0,
    "text_embed_2_dim": 1472,
    "text_embed_dim": 3584,
    "use_meanflow": False,
}
_HUNYUAN15_VAE: Config = {
    "_class_name": "AutoencoderKLHunyuanVideo15",
    "block_out_channels": [128, 256, 512, 1024, 1024],
    "downsample_match_channel": True,
    "in_channels": 3,
    "latent_channels": 32,
    "layers_per_block": 2,
    "out_channels": 3,
    "scaling_factor": 1.03682,
    "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 4,
    "upsample_match_channel": True,
}
_SIGLIP_CONFIG: Config = {"hidden_size": 1152, "image_size": 384, "patch_size": 14}


def _euler(shift: float) -> Config:
    return {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": shift, "use_dynamic_shifting": False}


def _hunyuan15(variant: str, size: str, shift: float) -> Published:
    image = variant.endswith("i2v")
    return Published(
        f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{variant}",
        "HunyuanVideo15ImageToVideoPipeline" if image else "HunyuanVideo15Pipeline",
        _HUNYUAN15 | {"target_size": 640 if variant.startswith("480p") else 960, "task_type": variant[-3:]},
        _HUNYUAN15_VAE,
        _euler(shift),
        size,
        {"text_encoder": _QWEN, "text_encoder_2": _BYT5} | ({"image_encoder": _SIGLIP} if image else {}),
        parts={"image_encoder": _SIGLIP_CONFIG} if image else {},
    )


_ALL: dict[str, Published] = {
    "wan2.1-t2v-1.3b": _wan("Wan2.1-T2V-1.3B", _WAN_1B, "81x480x832", 3.0),
    "wan2.1-t2v-14b": _wan("Wan2.1-T2V-14B", _WAN_14B, "81x720x1280", 3.0),
    "wan2.1-i2v-14b-480p": _wan("Wan2.1-I2V-14B-480P", _WAN_14B_CLIP, "81x480x832", 3.0, image=True),
    "wan2.1-i2v-14b-720p": _wan("Wan2.1-I2V-14B-720P", _WAN_14B_CLIP, "81x720x1280", 5.0, image=True),
    "wan2.2-t2v-a14b": _wan("Wan2.2-T2V-A14B", _WAN_14B, "81x720x1280", 3.0, index={"boundary_ratio": 0.875}),
    "wan2.2-i2v-a14b": _wan("Wan2.2-I2V-A14B", _WAN_14B_IMAGE, "81x720x1280", 3.0, image=True, index={"boundary_ratio": 0.9}),
    "wan2.2-ti2v-5b": _wan("Wan2.2-TI2V-5B", _WAN_5B, "121x704x1280", 5.0, vae=_WAN22_VAE, index={"expand_timesteps": True}),
    "cogvideox-2b": _cog("CogVideoX-2b", _COG_2B, "49x480x720", snr_shift=3.0, vae=_COG_VAE | {"scaling_factor": 1.15258426}),
    "cogvideox-5b": _cog("CogVideoX-5b", _COG_5B, "49x480x720"),
    "cogvideox-5b-i2v": _cog("CogVideoX-5b-I2V", _COG_5B | {"use_learned_positional_embeddings": True}, "49x480x720", image=True),
    "cogvideox1.5-5b": _cog("CogVideoX1.5-5B", _COG_15, "81x768x1360"),
    "cogvideox1.5-5b-i2v": _cog(
        "CogVideoX1.5-5B-I2V", _COG_15 | {"ofs_embed_dim": 512}, "81x768x1360", image=True, vae=_COG_VAE | {"invert_scale_latents": True}
    ),
    "hunyuanvideo": Published(
        "hunyuanvideo-community/HunyuanVideo",
        "HunyuanVideoPipeline",
        _HUNYUAN,
        _HUNYUAN_VAE,
        _euler(7.0),
        "129x720x1280",
        {"text_encoder": _LLAMA, "text_encoder_2": _CLIP_L},
    ),
    "hunyuanvideo1.5-480p-t2v": _hunyuan15("480p_t2v", "121x480x848", 5.0),
    "hunyuanvideo1.5-480p-i2v": _hunyuan15("480p_i2v", "121x480x848", 5.0),
    "hunyuanvideo1.5-720p-t2v": _hunyuan15("720p_t2v", "121x720x1280", 9.0),
    "hunyuanvideo1.5-720p-i2v": _hunyuan15("720p_i2v", "121x720x1280", 7.0),
}
# No published model: it has Wan's parts, small enough for a CPU.
TINY = "tiny"
_TINY = _WAN | {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "ffn_dim": 128, "text_dim": 32, "freq_dim": 32}


@functools.cache
def published() -> dict[str, Published]:
    """Name -> model, of those whose family is supported, in order of family and size; `tiny` comes last."""
    supported = {pipeline for family in families() for pipeline in family.pipeline_classes}
    models = {name: model for name, model in _ALL.items() if model.pipeline in supported}
    return models | {TINY: _wan("none", _TINY, "17x64x64", 3.0)}


def write_folder(out: str | Path, name: str, *, random_on: str | None = None, seed: int = 0) -> Path:
    """The pipeline folder `out` of the model `name`: configurations, and with `random_on` a transformer with random weights in bfloat16.

    Args:
        out: a folder that is not there yet.
        name: a key of `published()`.
        random_on: a torch device on which the weights are drawn (a GPU draws billions in a second); None: no weights.
        seed: of the weights.
    """
    out, model = Path(out), published()[name]
    with atomic_folder(out) as aside:
        configs = dict.fromkeys(model.components, model.transformer) | {"vae": model.vae} | model.parts
        index = (
            {"_class_name": model.pipeline} | model.index | {part: ["diffusers", config.get("_class_name", "")] for part, config in configs.items()}
        )
        index |= {part: ["transformers", "CLIPVisionModel"] for part in model.parts}
        write_json(aside / "model_index.json", index | {"scheduler": ["diffusers", model.scheduler["_class_name"]]})
        files = {f"{part}/config.json": config for part, config in configs.items()} | {"scheduler/scheduler_config.json": model.scheduler}
        for path, content in files.items():
            (aside / path).parent.mkdir()
            write_json(aside / path, content)
        if random_on is not None:
            for component in model.components:
                random_transformer(aside, component, random_on, torch.bfloat16, seed).save_pretrained(aside / component, max_shard_size="5GB")  # type: ignore[operator]
    return out


def random_transformer(folder: str | Path, component: str, device: str | torch.device, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """A folder's transformer on `device` in `dtype`, initialised there as diffusers does it; what diffusers keeps in float32 stays so."""
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        return family_of(folder).load_transformer(folder, component, dtype=dtype, from_scratch=True, seed=seed)
