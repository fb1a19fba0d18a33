"""The tiny VAEs of CogVideoX and HunyuanVideo, whose few weights are written down, not learned.

They code a video as a mosaic. A latent is the mean colour of its block of 4x4 pixels and (but for the first frame) 4 frames, as 4 mixtures of red,
green and blue; decoding paints every block in its colour. That is no good picture, but a true one: it shows where things are and how they move,
nothing is random about it, and what goes through it can be told to the pixel.

How a deep network with norms and activations comes to compute a mean: the residual blocks add nothing; colours travel in pairs (x, -x), since
silu(x) - silu(-x) = x; and a pair of large constants beside them keeps group norm from noticing the video, so that it only divides by a number
known beforehand.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from diffusers import AutoencoderKLCogVideoX, AutoencoderKLHunyuanVideo

LATENT_CHANNELS = 4
CONSTANT = 64.0  # how large the constants are beside colours of at most 1
ARCHITECTURE: dict[str, Any] = {
    "block_out_channels": [8, 8, 8],  # +-red, +-green, +-blue, +-constant; two halvings of height and width
    "down_block_types": ["CogVideoXDownBlock3D"] * 3,
    "up_block_types": ["CogVideoXUpBlock3D"] * 3,
    "layers_per_block": 1,
    "norm_num_groups": 1,
    "latent_channels": LATENT_CHANNELS,
    "temporal_compression_ratio": 4,
    "sample_height": 64,
    "sample_width": 64,
}
HUNYUAN_ARCHITECTURE: dict[str, Any] = {
    "block_out_channels": [8, 8, 8],
    "down_block_types": ["HunyuanVideoDownBlock3D"] * 3,
    "up_block_types": ["HunyuanVideoUpBlock3D"] * 3,
    "layers_per_block": 1,
    "norm_num_groups": 1,
    "latent_channels": LATENT_CHANNELS,
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 4,
}
# Columns of equal length, at right angles to each other and to (1, 1, 1, 1): what the four channels make of red, green and blue.
MIXTURE = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]]) / 2
DIVISOR = (2 * CONSTANT**2 / 8) ** 0.5  # the deviation that group norm finds in 8 channels
SCALING_FACTOR = 2.0  # brings the moving garments' latents to a deviation of about 1


@torch.no_grad()
def mosaic_vae() -> "AutoencoderKLCogVideoX":
    """The VAE, float32, in eval mode. Always the same weights."""
    from diffusers import AutoencoderKLCogVideoX

    with torch.random.fork_rng(devices=[]):
        vae = AutoencoderKLCogVideoX(**ARCHITECTURE, scaling_factor=SCALING_FACTOR).eval()
    for parameter in vae.parameters():
        parameter.zero_()
    encoder, decoder = vae.encoder, vae.decoder

    _pairs_of_colours(encoder.conv_in.conv)
    for block in encoder.down_blocks[:-1]:
        _mean_of_four(block.downsamplers[0].conv)
    nn.init.ones_(encoder.norm_out.weight)
    _mixtures(encoder.conv_out.conv)

    # The decoder's last norm adds a linear map of the latents themselves to its input. That map is the decoder; the input is multiplied by zero.
    for colour in range(3):
        column = MIXTURE[:, colour]
        decoder.norm_out.conv_b.conv.weight[2 * colour, :, 0, 0, 0] = column
        decoder.norm_out.conv_b.conv.weight[2 * colour + 1, :, 0, 0, 0] = -column
        decoder.conv_out.conv.weight[colour, 2 * colour, -1, 1, 1] = 1.0
        decoder.conv_out.conv.weight[colour, 2 * colour + 1, -1, 1, 1] = -1.0
    return vae


def _mean_of_four(conv: nn.Conv2d) -> None:
    """Makes a 3x3 convolution of stride 2, padded below and to the right, the mean of 2x2 pixels."""
    for channel in range(conv.in_channels):
        conv.weight[channel, channel, :2, :2] = 0.25


@torch.no_grad()
def hunyuan_mosaic_vae() -> "AutoencoderKLHunyuanVideo":
    """That of HunyuanVideo, float32, in eval mode. Always the same weights."""
    from diffusers import AutoencoderKLHunyuanVideo

    with torch.random.fork_rng(devices=[]):
        vae = AutoencoderKLHunyuanVideo(**HUNYUAN_ARCHITECTURE, scaling_factor=SCALING_FACTOR).eval()
    for parameter in vae.parameters():
        parameter.zero_()
    encoder, decoder = vae.encoder, vae.decoder
    for part in (encoder, decoder):
        nn.init.ones_(part.conv_norm_out.weight)
    for pointwise in (vae.quant_conv, vae.post_quant_conv):
        pointwise.weight[:, :, 0, 0, 0] = torch.eye(pointwise.in_channels)

    _pairs_of_colours(encoder.conv_in.conv)
    for block in encoder.down_blocks[:-1]:
        halving = block.downsamplers[0].conv.conv  # of height and width (padded on both sides) and, but for the first frame, of time
        for channel in range(8):
            halving.weight[channel, channel, 1:, 1:, 1:] = 1 / 8
    _mixtures(encoder.conv_out.conv)

    decoder.conv_in.conv.bias[6:] = torch.tensor([CONSTANT, -CONSTANT])
    for block in decoder.up_blocks[:-1]:
        for channel in range(8):
            block.upsamplers[0].conv.conv.weight[channel, channel, -1, 1, 1] = 1.0
    for colour in range(3):
        decoder.conv_in.conv.weight[2 * colour, :, -1, 1, 1] = MIXTURE[:, colour]
        decoder.conv_in.conv.weight[2 * colour + 1, :, -1, 1, 1] = -MIXTURE[:, colour]
        decoder.conv_out.conv.weight[colour, 2 * colour, -1, 1, 1] = DIVISOR
        decoder.conv_out.conv.weight[colour, 2 * colour + 1, -1, 1, 1] = -DIVISOR
    return vae


def _pairs_of_colours(conv: nn.Conv3d) -> None:
    """Makes an encoder's first convolution, causal in time, give +-red, +-green, +-blue and the constants."""
    for colour in range(3):
        conv.weight[2 * colour, colour, -1, 1, 1] = 1.0
        conv.weight[2 * colour + 1, colour, -1, 1, 1] = -1.0
    assert conv.bias is not None
    conv.bias[6:] = torch.tensor([CONSTANT, -CONSTANT])


def _mixtures(conv: nn.Conv3d) -> None:
    """Makes an encoder's last convolution, behind group norm, give the latents, and next to no variance."""
    for colour in range(3):
        column = MIXTURE[:, colour] * DIVISOR
        conv.weight[:LATENT_CHANNELS, 2 * colour, -1, 1, 1] = column
        conv.weight[:LATENT_CHANNELS, 2 * colour + 1, -1, 1, 1] = -column
    assert conv.bias is not None
    conv.bias[LATENT_CHANNELS:] = -10.0  # log-variance
