"""Published models as configurations, for whoever wants their sizes and not their weights: memory estimates, benchmarks, tests.

The numbers are those of the checkpoints' own `config.json` files. `write_folder` makes a pipeline folder of them that everything here can read,
without weights or with random ones: what a training step costs doesn't depend on what the weights say.
"""

from pathlib import Path
from typing import Any

import torch

from videoqat.files import atomic_folder, write_json

_WAN: dict[str, Any] = {
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
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}
_WAN_VAE = {"_class_name": "AutoencoderKLWan", "z_dim": 16, "scale_factor_spatial": 8, "scale_factor_temporal": 4}

# Name -> configuration of its transformer. `tiny` is no published model: it has the others' parts, small enough for a CPU.
PUBLISHED: dict[str, dict[str, Any]] = {
    "wan2.1-t2v-1.3b": _WAN | {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
    "wan2.1-t2v-14b": _WAN | {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824},
    "tiny": _WAN | {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "ffn_dim": 128, "text_dim": 32, "freq_dim": 32},
}


def write_folder(out: str | Path, name: str, *, random_on: str | None = None, seed: int = 0) -> Path:
    """The pipeline folder `out` of the model `name`: configurations, and with `random_on` a transformer with random weights in bfloat16.

    Args:
        out: a folder that is not there yet.
        name: a key of `PUBLISHED`.
        random_on: a torch device on which the weights are drawn (a GPU draws billions in a second); None: no weights.
        seed: of the weights.
    """
    out = Path(out)
    with atomic_folder(out) as aside:
        write_json(
            aside / "model_index.json",
            {
                "_class_name": "WanPipeline",
                "boundary_ratio": None,
                "scheduler": ["diffusers", "UniPCMultistepScheduler"],
                "transformer": ["diffusers", "WanTransformer3DModel"],
                "vae": ["diffusers", "AutoencoderKLWan"],
            },
        )
        files = {"transformer/config": PUBLISHED[name], "vae/config": _WAN_VAE, "scheduler/scheduler_config": {"num_train_timesteps": 1000}}
        for path, content in files.items():
            (aside / path).parent.mkdir()
            write_json(aside / f"{path}.json", content)
        if random_on is not None:
            _write_random(aside / "transformer", PUBLISHED[name], random_on, seed)
    return out


def _write_random(folder: Path, config: dict[str, Any], device: str, seed: int) -> None:
    """diffusers' own initialisation, in pieces of at most 5 GB, as large checkpoints come."""
    from diffusers import WanTransformer3DModel

    with torch.random.fork_rng(devices=[torch.device(device)] if device.startswith("cuda") else []), torch.device(device):
        torch.manual_seed(seed)
        transformer = WanTransformer3DModel.from_config(config).to(torch.bfloat16)
    transformer.save_pretrained(folder, max_shard_size="5GB")
