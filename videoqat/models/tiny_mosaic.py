"""The tiny CogVideoX VAE: an `AutoencoderKLCogVideoX` whose few weights are written down, not learned.

It codes a video as a mosaic. A latent is the mean colour of its block of 4x4 pixels and (but for the first frame) 4 frames, as 4 mixtures of red,
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
    from diffusers import AutoencoderKLCogVideoX

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
# Columns of equal length, at right angles to each other and to (1, 1, 1, 1): what the four channels make of red, green and blue.
MIXTURE = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]]) / 2
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

    colours_in = encoder.conv_in.conv
    for colour in range(3):
        colours_in.weight[2 * colour, colour, -1, 1, 1] = 1.0
        colours_in.weight[2 * colour + 1, colour, -1, 1, 1] = -1.0
    colours_in.bias[6:] = torch.tensor([CONSTANT, -CONSTANT])
    for block in encoder.down_blocks[:-1]:
        _mean_of_four(block.downsamplers[0].conv)
    nn.init.ones_(encoder.norm_out.weight)
    divisor = (2 * CONSTANT**2 / 8) ** 0.5  # the deviation that group norm finds in 8 channels
    for colour in range(3):
        column = MIXTURE[:, colour] * divisor
        encoder.conv_out.conv.weight[:LATENT_CHANNELS, 2 * colour, -1, 1, 1] = column
        encoder.conv_out.conv.weight[:LATENT_CHANNELS, 2 * colour + 1, -1, 1, 1] = -column
    encoder.conv_out.conv.bias[LATENT_CHANNELS:] = -10.0  # log-variance: next to none

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
