"""A complete `HunyuanVideoPipeline` small enough to train on two CPU cores, for `tiny.build_pipeline`.

Its tokenizer of the Llama kind splits text as Llama 3's does, and knows every word of the template in which the pipeline has a prompt read. So the
template's beginning comes to 95 tokens, as many as the pipeline crops, and everything works as in a pipeline of full size.
"""

import re
from typing import TYPE_CHECKING, Any

import torch

from videoqat.config import ExampleModelConfig
from videoqat.models.tiny_mosaic import LATENT_CHANNELS, hunyuan_mosaic_vae

if TYPE_CHECKING:
    from diffusers import HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
    from transformers import PreTrainedTokenizerFast

TEXT_DIM = 64
POOLED_DIM = 32
FLOW_SHIFT = 7.0  # as published
VOCABULARY_SIZE = 2048  # more than there is to merge
BEGIN, PAD = "<|begin_of_text|>", "<|pad|>"
# How Llama 3 splits text before it looks for tokens: contractions, words with the space before them, up to three digits, signs, line ends, spaces.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def hunyuan_pipeline(config: ExampleModelConfig, tokenizer_2: "PreTrainedTokenizerFast", captions: tuple[str, ...]) -> "HunyuanVideoPipeline":
    """The pipeline.

    Args:
        config: sizes and seed.
        tokenizer_2: of the CLIP kind: it ends every text with its `eos_token`.
        captions: words for which the Llama kind is to have tokens.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    tokenizer = build_llama_tokenizer(captions)
    marks = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(config.seed)
    # The pipeline takes the third hidden states from the end: of four layers, what two have made. Weights are large, so that they make much of it.
    llama = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=TEXT_DIM, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, initializer_range=0.1, **marks,
    )  # fmt: skip
    text_encoder = LlamaModel(llama).eval()
    clip = CLIPTextConfig(
        vocab_size=len(tokenizer_2), hidden_size=POOLED_DIM, intermediate_size=64, projection_dim=POOLED_DIM, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=77, eos_token_id=tokenizer_2.eos_token_id, pad_token_id=tokenizer_2.pad_token_id,
        bos_token_id=tokenizer_2.pad_token_id,
    )  # fmt: skip
    text_encoder_2 = CLIPTextModel(clip).eval()
    torch.manual_seed(config.seed + 1)
    single = config.num_layers // 2
    transformer = hunyuan_transformer(
        num_attention_heads=config.num_heads, attention_head_dim=config.head_dim, num_layers=config.num_layers - single, num_single_layers=single
    )
    return HunyuanVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        tokenizer_2=tokenizer_2,
        text_encoder_2=text_encoder_2,
        transformer=transformer,
        vae=hunyuan_mosaic_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=FLOW_SHIFT),
    )


def hunyuan_transformer(**changes: Any) -> "HunyuanVideoTransformer3DModel":
    """A small HunyuanVideo transformer, in eval mode, drawn from torch's global generator.

    Args:
        changes: of its configuration. Of each head, a quarter is rotated by time and the rest by height and width.
    """
    from diffusers import HunyuanVideoTransformer3DModel

    settings: dict[str, Any] = {
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 2,
        "text_embed_dim": TEXT_DIM,
        "pooled_projection_dim": POOLED_DIM,
    } | changes
    head_dim = settings["attention_head_dim"]
    axes = (head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3)
    return HunyuanVideoTransformer3DModel(rope_axes_dim=axes, **settings).eval()


def build_llama_tokenizer(captions: tuple[str, ...]) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer in which every word of `captions` and of the pipeline's template is one token; it begins every text with a mark and
    pads on the right. Takes milliseconds and is the same every time."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    template = str(DEFAULT_PROMPT_TEMPLATE["template"])
    marks = list(dict.fromkeys(re.findall(r"<\|\w+\|>", template)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, special_tokens=[PAD, BEGIN, *marks], initial_alphabet=alphabet, show_progress=False)
    texts = re.split(r"<\|\w+\|>|{}", template)
    tokenizer.train_from_iterator([*texts, *captions, *(f" {caption}" for caption in captions)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token="<|eot_id|>", pad_token=PAD, model_max_length=512, padding_side="right"
    )
