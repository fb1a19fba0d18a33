"""The tiny video VAE: an `AutoencoderKLWan` of 1.5 million weights with Wan's compression (4x in time, 8x8 in space, 16 channels).

Its trained weights ship as `assets/tiny_vae.safetensors` (what they were trained on, and how well they reconstruct: `assets/tiny_vae.md`).
This module loads them, and holds the program that made them:

    python -m videoqat.models.tiny_vae --clips train.npy --held-out held_out.npy --out FOLDER --minutes 4
"""

import argparse
import hashlib
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from videoqat.console import say
from videoqat.errors import CheckpointError, DataError
from videoqat.files import atomic_path, writable_folder, write_json
from videoqat.provenance import provenance

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

ASSET = Path(__file__).parent / "assets" / "tiny_vae.safetensors"
ARCHITECTURE: dict[str, Any] = {
    "base_dim": 16,
    "z_dim": 16,
    "dim_mult": [1, 2, 3],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "patch_size": 2,  # pixels are folded 2x2 into channels first: the convolutions then run on a quarter of the places
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 8,
}


def load_tiny_vae() -> "AutoencoderKLWan":
    """The shipped VAE, float32, in eval mode; its configuration, with the latents' mean and deviation, comes from the same file.

    Raises:
        CheckpointError: the file is torn, or doesn't fit the architecture it names.
    """
    from diffusers import AutoencoderKLWan
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(ASSET, framework="pt") as handle:
            config = json.loads(handle.metadata()["config"])
            weights = {key: handle.get_tensor(key).float() for key in handle.keys()}  # noqa: SIM118 - safe_open is no mapping
        vae = AutoencoderKLWan(**config)
        vae.load_state_dict(weights, strict=True)
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{ASSET} is not the tiny VAE: {error}") from error
    return vae.eval()
