"""A complete `HunyuanVideo15Pipeline` small enough to train on two CPU cores, for `tiny.build_pipeline`.

Its Qwen tokenizer begins each prompt with 108 marks in the place of a template, as many tokens as the pipeline crops away, and its encoder has
positions for 26 more. Its VAE codes a video as a mosaic (see `tiny_mosaic`); its transformer makes a token of 2x2 latents.
"""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from videoqat.config import ExampleModelConfig
from videoqat.models.tiny_mosaic import CONSTANT, LATENT_CHANNELS, MIXTURE, SCALING_FACTOR

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, DiffusionPipeline, HunyuanVideo15Transformer3DModel
    from transformers import Qwen2Tokenizer

TEXT_DIM, GLYPH_DIM, IMAGE_DIM = 64, 32, 16
TEMPLATE_TOKENS, TEXT_TOKENS = 108, 26
FLOW_SHIFT = 5.0  # as 480p has it
VOCABULARY_SIZE = 512
BEGIN, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
VAE: dict[str, Any] = {
    "block_out_channels": [24, 32, 2 * LATENT_CHANNELS],
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 4,
    "downsample_match_channel": False,
    "upsample_match_channel": False,
    "latent_channels": LATENT_CHANNELS,
}


def hunyuan15_pipeline(config: ExampleModelConfig, captions: tuple[str, ...]) -> "DiffusionPipeline":
    """The pipeline: `HunyuanVideo15ImageToVideoPipeline` where `config` says image_to_video.

    Args:
        config: sizes and seed.
        captions: words for which the tokenizer is to have tokens.
    """
    from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
    from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

    tokenizer, tokenizer_2 = build_qwen_tokenizer(captions), ByT5Tokenizer(extra_ids=0)
    marks = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(config.seed)
    # The pipeline takes the third hidden states from the end: of four layers, what two have made. Weights are large, so that they make much of it.
    qwen = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer), hidden_size=TEXT_DIM, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=TEMPLATE_TOKENS + TEXT_TOKENS, initializer_range=0.1, **marks,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    )  # fmt: skip
    byt5 = T5Config(
        vocab_size=len(tokenizer_2), d_model=GLYPH_DIM, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        pad_token_id=tokenizer_2.pad_token_id, eos_token_id=tokenizer_2.eos_token_id, decoder_start_token_id=tokenizer_2.pad_token_id,
    )  # fmt: skip
    text_encoder, text_encoder_2 = Qwen2_5_VLTextModel(qwen).eval(), T5EncoderModel(byt5).eval()
    torch.manual_seed(config.seed + 1)
    sizes = {"num_attention_heads": config.num_heads, "attention_head_dim": config.head_dim, "num_layers": config.num_layers}
    transformer = hunyuan15_transformer(**sizes, task_type="i2v" if config.image_to_video else "t2v")
    return (HunyuanVideo15ImageToVideoPipeline if config.image_to_video else HunyuanVideo15Pipeline)(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        tokenizer_2=tokenizer_2,
        text_encoder_2=text_encoder_2,
        transformer=transformer,
        vae=hunyuan15_mosaic_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=FLOW_SHIFT),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
        **(_image_encoder(config.seed + 3) if config.image_to_video else {}),
    )


def _image_encoder(seed: int) -> dict[str, Any]:
    """A small SigLIP and what prepares its pictures: 28x28 pixels become 4 tokens, where the published one makes 729 of 384x384."""
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": IMAGE_DIM, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder = SiglipVisionModel(SiglipVisionConfig(image_size=28, patch_size=14, **sizes)).eval()
    return {"image_encoder": encoder, "feature_extractor": SiglipImageProcessor(size={"height": 28, "width": 28})}


def hunyuan15_transformer(**changes: Any) -> "HunyuanVideo15Transformer3DModel":
    """A small HunyuanVideo 1.5 transformer, in eval mode, drawn from torch's global generator.

    Args:
        changes: of its configuration. Of each head, a quarter is rotated by time and the rest by height and width.
    """
    from diffusers import HunyuanVideo15Transformer3DModel

    settings: dict[str, Any] = {
        "in_channels": 2 * LATENT_CHANNELS + 1,
        "out_channels": LATENT_CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "num_layers": 2,
        "patch_size": 2,
        "text_embed_dim": TEXT_DIM,
        "text_embed_2_dim": GLYPH_DIM,
        "image_embed_dim": IMAGE_DIM,
        "target_size": 64,
        "task_type": "t2v",
    } | changes
    head_dim = settings["attention_head_dim"]
    axes = (head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3)
    return HunyuanVideo15Transformer3DModel(rope_axes_dim=axes, **settings).eval()


def build_qwen_tokenizer(captions: tuple[str, ...]) -> "Qwen2Tokenizer":
    """A byte-level BPE tokenizer of Qwen's class that pads on the right, with a chat template that is as long as the pipeline's and says nothing."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, special_tokens=[PAD, BEGIN, END], initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator([*captions, *(f" {caption}" for caption in captions)], trainer)
    learned = json.loads(learner.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        extra_special_tokens=[BEGIN, END],
        padding_side="right",
        # {{ '<|im_start|>' * 108 }} and what the user, behind the system, has to say.
        chat_template=f"{{{{ '{BEGIN}' * {TEMPLATE_TOKENS} }}}}{{{{ messages[1].content }}}}{END}",
    )


@torch.no_grad()
def hunyuan15_mosaic_vae() -> "AutoencoderKLHunyuanVideo15":
    """The VAE, float32, in eval mode. Always the same weights: residual blocks add nothing, and where a block changes the number of channels, a plain
    linear map does what there is to do. What a shortcut past a change of size would add is subtracted, or comes to nothing."""
    from diffusers import AutoencoderKLHunyuanVideo15

    with torch.random.fork_rng(devices=[]):
        vae = AutoencoderKLHunyuanVideo15(**VAE, scaling_factor=SCALING_FACTOR).eval()
    for parameter in vae.parameters():
        parameter.zero_()
    _, middle, _ = VAE["block_out_channels"]

    # Encoder. The shortcuts past halving take means of 4 or 8 neighbouring channels: of +-colours among zeros, nothing.
    halves = [block.downsamplers[0].conv.conv for block in vae.encoder.down_blocks[:2]]
    _centre(vae.encoder.conv_in.conv)[:] = _signed_colours(vae.encoder.conv_in.conv.out_channels)
    for half in halves:
        for colour in range(3):
            _centre(half)[colour, 8 * colour] = 1
    # Behind halving, channel r * n + c is channel c of pixel r of 8: of n = 3, and then of n = 4.
    means = [torch.eye(3, half.out_channels).repeat(1, 8) / 8 for half in halves]
    first, second = (block.resnets[0].conv_shortcut for block in vae.encoder.down_blocks[1:])
    first.weight[:, :, 0, 0, 0] = _signed_colours(middle) @ means[0]
    second.weight[:LATENT_CHANNELS, :, 0, 0, 0] = MIXTURE @ means[1]
    second.bias[LATENT_CHANNELS:] = -10.0  # log-variance: next to none

    # Decoder. Colours are channels 0 to 2 until the last block makes pairs of them, and large constants beside, for the norm to come.
    decoder = vae.decoder
    _centre(decoder.conv_in.conv)[:3] = MIXTURE.T
    _centre(decoder.conv_in.conv)[:] -= torch.eye(LATENT_CHANNELS).repeat_interleave(2, dim=0)  # the shortcut
    for block in decoder.up_blocks[:2]:
        _nearest(block.upsamplers[0].conv.conv)
    decoder.up_blocks[1].resnets[0].conv_shortcut.weight[:3, :3, 0, 0, 0] = torch.eye(3)
    pairs = decoder.up_blocks[2].resnets[0].conv_shortcut
    pairs.weight[:, :3, 0, 0, 0] = _signed_colours(pairs.out_channels)
    pairs.bias[[2, 10]] = CONSTANT  # channels without a colour
    nn.init.ones_(decoder.norm_out.gamma)
    # silu(x) - silu(-x) = x, where x is what the norm made of a colour: sqrt(channels) / |constants| of it.
    _centre(decoder.conv_out.conv)[:] = _signed_colours(pairs.out_channels).T * CONSTANT * (2 / pairs.out_channels) ** 0.5
    return vae


def _centre(conv: Any) -> Tensor:
    """Of a convolution of 3x3x3 that is causal in time: the weights (out, in) of where it stands."""
    return conv.weight[:, :, -1, 1, 1]  # type: ignore[no-any-return]


def _signed_colours(channels: int) -> Tensor:
    """(channels, 3): colour i in channel 8 i, and negative in the one behind it."""
    matrix = torch.zeros(channels, 3)
    for colour in range(3):
        matrix[8 * colour, colour], matrix[8 * colour + 1, colour] = 1, -1
    return matrix


def _nearest(conv: Any) -> None:
    """Makes each of 8 pixels (of 4 in the first frame) what the one was, in channels 0 to 2. Channel r * n + c becomes channel c of pixel r; the
    shortcut adds channel r * n / 8 + c // 8."""
    channels = conv.in_channels
    for pixel in range(8):
        for channel in range(channels):
            _centre(conv)[pixel * channels + channel, pixel * channels // 8 + channel // 8] -= 1
        for colour in range(3):
            _centre(conv)[pixel * channels + colour, colour] += 1
