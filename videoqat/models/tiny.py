"""Complete pipelines small enough to train on two CPU cores, built offline from configuration: a `WanPipeline`, a `CogVideoXPipeline`, each also for
images, with first frames given; and those of HunyuanVideo (see `tiny_hunyuan` and `tiny_hunyuan15`).

Every part is a real one. Wan: `WanTransformer3DModel`, `AutoencoderKLWan` with trained weights (see `tiny_vae`), a `UMT5EncoderModel`, a fast
tokenizer, `UniPCMultistepScheduler` with a flow shift. CogVideoX: `CogVideoXTransformer3DModel` with rotary embedding, as 5B has it,
`AutoencoderKLCogVideoX` with weights that are written down (see `tiny_mosaic`: its videos are mosaics of 4x4 pixels), a `T5EncoderModel`, the same
tokenizer, `CogVideoXDDIMScheduler` as 5B's. Transformers and text encoders are random, drawn from the seed. A video of 17x64x64 is 320 tokens in
both. The text encoder stays random for good: what matters is that different words give different vectors, and a random one sees to that.
One such Wan has been trained, and comes along (see `embedded`).
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from videoqat.config import ExampleModelConfig
from videoqat.console import say
from videoqat.errors import UserError
from videoqat.files import atomic_folder, check_writable, writable_folder, write_json
from videoqat.models import embedded
from videoqat.models.spec import family_of
from videoqat.models.tiny_hunyuan import hunyuan_pipeline
from videoqat.models.tiny_hunyuan15 import hunyuan15_pipeline
from videoqat.models.tiny_mosaic import LATENT_CHANNELS, mosaic_vae
from videoqat.models.tiny_vae import ARCHITECTURE as VAE_ARCHITECTURE
from videoqat.models.tiny_vae import load_tiny_vae

if TYPE_CHECKING:
    from diffusers import CogVideoXTransformer3DModel, DiffusionPipeline
    from transformers import PreTrainedTokenizerFast

SIZES = {"num_layers": 4, "num_heads": 2, "head_dim": 64}  # where a configuration has none
BOUNDARY_RATIO = 0.875  # of a pair of transformers, as in Wan 2.2 A14B
FLOW_SHIFT = 3.0
TEXT_DIM = 64
IMAGE_DIM = 32
VOCABULARY_SIZE = 512
COGVIDEOX_TEXT_TOKENS = 26  # as the 226 of the real ones no multiple of 16, the block that V is quantised by
# What the tokenizer's merges are learned from. It is byte-level, so that any other text has tokens too, only more of them.
CAPTION_WORDS = (
    "a t-shirt", "a top", "trousers", "a pullover", "a dress", "a coat", "a sandal", "a shirt", "a sneaker", "a bag", "an ankle boot",
    "moves", "move", "left", "right", "up", "down",
)  # fmt: skip


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer that ends every text with `</s>`, as T5's does. Takes milliseconds and is the same every time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE, special_tokens=["<pad>", "</s>", "<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CAPTION_WORDS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512, padding_side="right"
    )


def _sized(config: ExampleModelConfig) -> ExampleModelConfig:
    """`config` with sizes where it has none, if `out` is free."""
    config.validate()
    if Path(config.out).exists():
        raise UserError(f"out={config.out!r} exists already; legal: a folder that doesn't")
    check_writable("out", Path(config.out).parent)
    own = embedded.sized(config) if config.weights == "embedded" else SIZES
    sizes: dict[str, Any] = {key: getattr(config, key) or size for key, size in own.items()}
    return dataclasses.replace(config, **sizes)


def plan(config: ExampleModelConfig) -> dict[str, Any]:
    """What `build_pipeline` would make: its sizes.

    Raises:
        UserError: as there.
    """
    config = _sized(config)
    return {key: getattr(config, key) for key in SIZES}


def build_pipeline(config: ExampleModelConfig) -> dict[str, Any]:
    """Writes the pipeline to the folder `config.out`, which must not exist yet. The same configuration gives the same bytes.

    Returns:
        `path`, `components`, `parameters` (of each model), `flow_shift`, and `tokens_per_clip` of a 17x64x64 video.

    Raises:
        UserError: `out` exists already, or can't be written; sizes that the embedded weights don't have.
        CheckpointError: the embedded weights can't be used here.
    """
    config = _sized(config)
    out = Path(config.out)
    writable_folder("out", out.parent)
    with torch.random.fork_rng(devices=[]):
        pipeline = BUILDERS[config.family](config)
    record = embedded.put_weights(pipeline) if config.weights == "embedded" else None
    with atomic_folder(out) as aside:
        pipeline.save_pretrained(aside)
        _forget_where_it_was_made(aside)
        if record is not None:
            write_json(aside / "videoqat.json", record)
    family = family_of(out)
    models = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    parameters = {name: sum(p.numel() for p in part.parameters()) for name, part in models.items()}
    say(f"{out}: a tiny {type(pipeline).__name__}, {parameters['transformer']:,} {config.weights} weights in its transformer")
    return {
        "path": str(out),
        "components": list(family.components(out)),
        "parameters": parameters,
        "flow_shift": family.noise_schedule(out).flow_shift,
        "tokens_per_clip": family.geometry(out).num_tokens(17, 64, 64),
    }


def _wan_pipeline(config: ExampleModelConfig) -> "DiffusionPipeline":
    from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    vae = load_tiny_vae()
    latent_channels, mask_channels = VAE_ARCHITECTURE["z_dim"], vae.config.scale_factor_temporal
    embeds_image = config.image_to_video and not config.two_transformers  # as in Wan 2.1; 2.2 A14B does without

    def transformer(seed: int) -> WanTransformer3DModel:
        torch.manual_seed(seed)
        return WanTransformer3DModel(
            patch_size=(1, 2, 2) if config.expand_timesteps else (1, 1, 1),
            num_attention_heads=config.num_heads,
            attention_head_dim=config.head_dim,
            in_channels=latent_channels + (mask_channels + latent_channels if config.image_to_video else 0),
            out_channels=latent_channels,
            image_dim=IMAGE_DIM if embeds_image else None,
            added_kv_proj_dim=config.num_heads * config.head_dim if embeds_image else None,
            text_dim=TEXT_DIM,
            freq_dim=64,
            ffn_dim=4 * config.num_heads * config.head_dim,
            num_layers=config.num_layers,
            rope_max_seq_len=256,
        ).eval()

    tokenizer = build_tokenizer()
    torch.manual_seed(config.seed)
    text_encoder = UMT5EncoderModel(UMT5Config(**_text_config(tokenizer))).eval()
    image_parts = _image_encoder(config.seed + 3) if embeds_image else {}
    return (WanImageToVideoPipeline if config.image_to_video else WanPipeline)(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer(config.seed + 1),
        transformer_2=transformer(config.seed + 2) if config.two_transformers else None,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT),
        boundary_ratio=BOUNDARY_RATIO if config.two_transformers else None,
        expand_timesteps=config.expand_timesteps,
        **image_parts,
    )


def _image_encoder(seed: int) -> dict[str, Any]:
    """A small CLIP and what prepares its pictures: 28x28 pixels become 5 tokens, where the published one makes 257 of 224x224."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": IMAGE_DIM, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder = CLIPVisionModel(CLIPVisionConfig(image_size=28, patch_size=14, **sizes)).eval()
    return {"image_encoder": encoder, "image_processor": CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})}


def _cogvideox_pipeline(config: ExampleModelConfig) -> "DiffusionPipeline":
    from diffusers import CogVideoXDDIMScheduler, CogVideoXImageToVideoPipeline, CogVideoXPipeline
    from transformers import T5Config, T5EncoderModel

    tokenizer = build_tokenizer()
    torch.manual_seed(config.seed)
    text_encoder = T5EncoderModel(T5Config(**_text_config(tokenizer))).eval()
    torch.manual_seed(config.seed + 1)
    changes: dict[str, Any] = {"in_channels": 2 * LATENT_CHANNELS, "use_learned_positional_embeddings": True} if config.image_to_video else {}
    sizes = {"num_attention_heads": config.num_heads, "attention_head_dim": config.head_dim, "num_layers": config.num_layers}
    return (CogVideoXImageToVideoPipeline if config.image_to_video else CogVideoXPipeline)(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=mosaic_vae(),
        transformer=cogvideox_transformer(**sizes | changes),
        scheduler=CogVideoXDDIMScheduler(
            prediction_type="v_prediction",
            beta_schedule="scaled_linear",
            rescale_betas_zero_snr=True,
            snr_shift_scale=1.0,
            timestep_spacing="trailing",
            clip_sample=False,
        ),
    )


def _hunyuan_pipeline(config: ExampleModelConfig) -> "DiffusionPipeline":
    return hunyuan_pipeline(config, build_tokenizer(), CAPTION_WORDS)


def _hunyuan15_pipeline(config: ExampleModelConfig) -> "DiffusionPipeline":
    return hunyuan15_pipeline(config, CAPTION_WORDS)


BUILDERS = {"wan": _wan_pipeline, "cogvideox": _cogvideox_pipeline, "hunyuanvideo": _hunyuan_pipeline, "hunyuan15": _hunyuan15_pipeline}


def cogvideox_transformer(**changes: Any) -> "CogVideoXTransformer3DModel":
    """A small CogVideoX transformer, in eval mode, drawn from torch's global generator.

    Args:
        changes: of its configuration: `use_rotary_positional_embeddings=False` makes it like 2B, `patch_size_t=2` like 1.5;
            `use_learned_positional_embeddings=True` like 5B's for images, `ofs_embed_dim` like 1.5's, both with twice the in_channels.
    """
    from diffusers import CogVideoXTransformer3DModel

    settings: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "num_layers": 2,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "time_embed_dim": 64,
        "text_embed_dim": TEXT_DIM,
        "sample_height": 16,
        "sample_width": 16,
        "sample_frames": 17,
        "max_text_seq_length": COGVIDEOX_TEXT_TOKENS,
        "use_rotary_positional_embeddings": True,
    }
    return CogVideoXTransformer3DModel(**settings | changes).eval()


def _text_config(tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Of a small T5 or UMT5 encoder."""
    return {
        "vocab_size": VOCABULARY_SIZE, "d_model": TEXT_DIM, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "decoder_start_token_id": tokenizer.pad_token_id,
    }  # fmt: skip


def _forget_where_it_was_made(folder: Path) -> None:
    """Takes paths out of the JSON files, which would otherwise differ from one folder to the next."""
    for path in sorted(folder.rglob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and "_name_or_path" in data:
            del data["_name_or_path"]
            write_json(path, data)
