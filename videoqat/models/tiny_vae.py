"""The tiny video VAE: an `AutoencoderKLWan` of 1.2 million weights with Wan's compression (4x in time, 8x8 in space, 16 channels).

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


def load_tiny_vae(path: Path = ASSET) -> "AutoencoderKLWan":
    """The shipped VAE, float32, in eval mode; its configuration, with the latents' mean and deviation, comes from the same file.

    Raises:
        CheckpointError: the file is torn, or doesn't fit the architecture it names.
    """
    from diffusers import AutoencoderKLWan
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as handle:
            config = json.loads(handle.metadata()["config"])
            weights = {key: handle.get_tensor(key).float() for key in handle.keys()}  # noqa: SIM118 - safe_open is no mapping
        vae = AutoencoderKLWan(**config)
        vae.load_state_dict(weights, strict=True)
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not the tiny VAE: {error}") from error
    return vae.eval()


def read_clips(path: str) -> np.ndarray:
    """Clips as uint8 (N, F, H, W, 3): a .npy file, or all mp4 files of a folder, in order of their names.

    Raises:
        DataError: nothing there, another layout, or clips of several sizes.
    """
    if path.endswith(".npy") and Path(path).is_file():
        clips = np.load(path, mmap_mode="r", allow_pickle=False)
    else:
        import imageio.v3 as iio

        files = sorted(Path(path).rglob("*.mp4"))
        if not files:
            raise DataError(f"{path!r} is neither a .npy file nor a folder with mp4 files")
        frames = [np.asarray(iio.imread(file)) for file in files]
        if len({clip.shape for clip in frames}) != 1:
            raise DataError(f"{path!r}: clips must be of one size, but there are {sorted({clip.shape for clip in frames})}")
        clips = np.stack(frames)
    if clips.dtype != np.uint8 or clips.ndim != 5 or clips.shape[-1] != 3 or clips.shape[1] % 4 != 1:
        raise DataError(f"{path!r} holds {clips.dtype} {clips.shape}; clips must be uint8 (N, 4n+1, H, W, 3)")
    return clips


def to_video(clips_NFHWC: Tensor) -> Tensor:
    """uint8 (N, F, H, W, 3) to float32 (N, 3, F, H, W) in [-1, 1]."""
    return clips_NFHWC.permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def augment(video_BCFHW: Tensor, generator: torch.Generator) -> Tensor:
    """Turns a batch in ways that leave it a likely video: mirrored, upside down, backwards, transposed, with its colours exchanged."""
    draws = torch.rand(4, generator=generator)
    axes = [axis for axis, draw in zip((4, 3, 2), draws.tolist(), strict=False) if draw < 0.5]
    video_BCFHW = video_BCFHW.flip(axes)[:, torch.randperm(3, generator=generator)]
    return video_BCFHW.transpose(3, 4) if draws[3] < 0.5 else video_BCFHW


def reconstruction_loss(made_BCFHW: Tensor, video_BCFHW: Tensor) -> Tensor:
    """L1 of the pixels, and of their differences along time, height and width: edges and motion count for more than flat ground."""
    loss = (made_BCFHW - video_BCFHW).abs().mean()
    for axis in (2, 3, 4):
        loss = loss + 0.5 * (made_BCFHW.diff(dim=axis) - video_BCFHW.diff(dim=axis)).abs().mean()
    return loss


def psnr_of(vae: "AutoencoderKLWan", clips: Tensor, batch_size: int = 16) -> float:
    """Mean over clips of 10 log10(1 / MSE), in dB, pixels in [0, 1]; clips uint8 (N, F, H, W, 3) through the posterior's mode and back."""
    values = []
    with torch.no_grad():
        for chunk in clips.split(batch_size):
            video = to_video(chunk)
            made = vae.decode(vae.encode(video).latent_dist.mode()).sample
            values.append(-10 * torch.log10(((made - video) / 2).square().mean(dim=(1, 2, 3, 4))))
    return float(torch.cat(values).mean())


def train(clips: Tensor, *, steps: int, minutes: float, batch_size: int, lr: float, kl_weight: float, seed: int) -> tuple["AutoencoderKLWan", int]:
    """Trains on uint8 clips (N, F, H, W, 3), on the device where they lie, until `steps` or `minutes` are used up.

    The learning rate falls along a cosine to zero by then. Returns the moving average of the weights, as a VAE, and the steps taken.
    """
    from diffusers import AutoencoderKLWan

    torch.manual_seed(seed)
    device = clips.device
    vae = AutoencoderKLWan(**ARCHITECTURE).to(device)
    average = torch.optim.swa_utils.AveragedModel(vae, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998))
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    start, step, spent = time.monotonic(), 0, 0.0
    while spent < 1:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 100) * (1 + math.cos(math.pi * spent)) / 2
        chosen = torch.randint(len(clips), (batch_size,), generator=generator).to(device)
        video = augment(to_video(clips[chosen]), generator)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            posterior = vae.encode(video).latent_dist
            made = vae.decode(posterior.sample()).sample
        rebuilt = reconstruction_loss(made.float(), video)
        divergence = 0.5 * (posterior.mean.float().square() + posterior.var.float() - 1 - posterior.logvar.float()).mean()
        optimizer.zero_grad()
        (rebuilt + kl_weight * divergence).backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(vae)
        step += 1
        spent = max(step / steps, (time.monotonic() - start) / (60 * minutes))
        if step % 100 == 1:
            say(f"step {step}: reconstruction {rebuilt.item():.4f}, KL {divergence.item():.2f} a latent, {time.monotonic() - start:.0f} s")
    return average.module.eval(), step


def save(vae: "AutoencoderKLWan", clips: Tensor, path: Path) -> None:
    """Writes weights in fp16, and as metadata the configuration with the mean and deviation of the latents of `clips`, channel by channel."""
    from safetensors.torch import save_file

    with torch.no_grad():
        latents = torch.cat([vae.encode(to_video(chunk)).latent_dist.mode() for chunk in clips.split(16)])
    mean, std = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
    statistics = {"latents_mean": [round(value, 4) for value in mean.tolist()], "latents_std": [round(value, 4) for value in std.tolist()]}
    weights = {key: value.half().cpu().contiguous() for key, value in vae.state_dict().items()}
    with atomic_path(path) as aside:
        save_file(weights, aside, metadata={"config": json.dumps(ARCHITECTURE | statistics)})


def main() -> None:
    """Trains, saves and measures; writes tiny_vae.safetensors and tiny_vae.json to --out."""
    parser = argparse.ArgumentParser(description="Train the tiny video VAE.")
    parser.add_argument("--clips", required=True, help=".npy of uint8 (N, F, H, W, 3), or a folder with mp4 files")
    parser.add_argument("--held-out", required=True, help="likewise, of photos that --clips doesn't show")
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=4.0, help="stops after this time if --steps isn't reached before")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--kl-weight", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    out = writable_folder("--out", args.out)
    clips = torch.from_numpy(np.array(read_clips(args.clips))).to(device)
    held_out = torch.from_numpy(np.array(read_clips(args.held_out))).to(device)
    options = {key: getattr(args, key) for key in ("steps", "minutes", "batch_size", "lr", "kl_weight", "seed")}
    vae, steps = train(clips, **options)
    path = out / ASSET.name
    save(vae, clips[:1024], path)
    vae = load_tiny_vae(path).to(device)  # what is measured is what ships, rounding included
    report = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "parameters": sum(p.numel() for p in vae.parameters()),
        "clips": list(clips.shape),
        "options": options | {"steps": steps},
        "psnr_train_db": psnr_of(vae, clips[:256]),
        "psnr_held_out_db": psnr_of(vae, held_out),
        "provenance": provenance(device),
    }
    write_json(out / "tiny_vae.json", report)
    say(json.dumps(report))


if __name__ == "__main__":
    main()
