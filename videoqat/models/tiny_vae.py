"""The tiny video VAE: an `AutoencoderKLWan` of 1.2 million weights with Wan 2.1's compression (4x in time, 8x8 in space, 16 channels).

Its trained weights ship as `assets/tiny_vae.safetensors` (what they were trained on, and how well they reconstruct: `assets/tiny_vae.md`).
This module loads them, and holds the program that made them:

    python -m videoqat.models.tiny_vae --clips train.npy --held-out held_out.npy --out FOLDER --steps 1000
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
LATENT_NOISE = 0.05  # deviation of the posterior, and of what the decoder is trained to bear
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
        with torch.device("meta"):  # nothing is drawn at random, and nothing is computed twice
            vae = AutoencoderKLWan(**config)
        vae.load_state_dict(weights, strict=True, assign=True)
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


def psnr_of(vae: "AutoencoderKLWan", clips: Tensor, batch_size: int = 16) -> float:
    """Mean over clips of 10 log10(1 / MSE), in dB, pixels in [0, 1]; clips uint8 (N, F, H, W, 3) through the posterior's mode and back."""
    values = []
    with torch.no_grad():
        for chunk in clips.split(batch_size):
            video = to_video(chunk)
            made = vae.decode(vae.encode(video).latent_dist.mode()).sample
            values.append(-10 * torch.log10(((made - video) / 2).square().mean(dim=(1, 2, 3, 4))))
    return float(torch.cat(values).mean())


class Principal:
    """The 16 principal components of a clip's blocks of 4 frames and 8x8 pixels: what the latents are taught to be.

    A linear code of known quality, seen all at once: encoder and decoder can be taught apart from each other, which on few steps beats teaching
    them only through each other. Components are scaled by the square root of their deviation (half whitened) and rotated by a Hadamard matrix, so
    that channels weigh about the same. The first latent frame stands for one video frame, taken as standing still for four.
    """

    def __init__(self, clips: Tensor) -> None:
        blocks = self._blocks(to_video(clips)).flatten(0, 3)
        self.mean = blocks.mean(0)
        centred = blocks - self.mean
        variances, vectors = torch.linalg.eigh(centred.T @ centred / len(blocks))
        rotation = torch.ones(1, 1, device=clips.device)
        while len(rotation) < ARCHITECTURE["z_dim"]:
            rotation = torch.cat([torch.cat([rotation, rotation], 1), torch.cat([rotation, -rotation], 1)]) / math.sqrt(2)
        deviations = variances[-len(rotation) :].sqrt()
        scale = deviations.mean().sqrt()  # brings the latents' variance to about 1
        self.analysis = vectors[:, -len(rotation) :] @ torch.diag(deviations.rsqrt()) @ rotation / scale
        self.synthesis = rotation.T @ torch.diag(deviations.sqrt()) @ vectors[:, -len(rotation) :].T * scale

    @staticmethod
    def _blocks(video_BCFHW: Tensor) -> Tensor:
        """(B, F, H, W, 768) of latent places."""
        still = torch.cat([video_BCFHW[:, :, :1].expand(-1, -1, 3, -1, -1), video_BCFHW], dim=2)
        B, C, F, H, W = still.shape
        return still.reshape(B, C, F // 4, 4, H // 8, 8, W // 8, 8).permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)

    def latents(self, video_BCFHW: Tensor) -> Tensor:
        """latents_BCFHW of a video in [-1, 1]."""
        return ((self._blocks(video_BCFHW) - self.mean) @ self.analysis).permute(0, 4, 1, 2, 3)

    def pixel_error(self, difference_BCFHW: Tensor) -> Tensor:
        """Mean square, in pixels, of what a difference of latents decodes to."""
        return (difference_BCFHW.permute(0, 2, 3, 4, 1) @ self.synthesis).square().mean()


def initialise(vae: "AutoencoderKLWan") -> None:
    """Unit gain through every convolution, residual branches small, an output near the data's dim mean; a posterior of fixed small variance."""
    for name, module in vae.named_modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            gain = 0.3 if name.endswith("conv2") else 0.1 if name == "decoder.conv_out" else 1.0
            torch.nn.init.normal_(module.weight, std=gain / math.sqrt(module.weight[0].numel()))
            torch.nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    with torch.no_grad():
        vae.decoder.conv_out.bias.fill_(-0.4)
        vae.quant_conv.weight[vae.z_dim :] = 0
        vae.quant_conv.bias[vae.z_dim :] = 2 * math.log(LATENT_NOISE)


def decode_unclamped(vae: "AutoencoderKLWan", latents_BCFHW: Tensor) -> Tensor:
    """What `vae.decode` gives before it cuts to [-1, 1]: beyond the cut there would be no gradient."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    vae.clear_cache()
    latents_BCFHW = vae.post_quant_conv(latents_BCFHW)
    frames = []
    for i in range(latents_BCFHW.shape[2]):
        vae._conv_idx = [0]
        frames.append(vae.decoder(latents_BCFHW[:, :, i : i + 1], feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=i == 0))
    vae.clear_cache()
    return unpatchify(torch.cat(frames, dim=2), ARCHITECTURE["patch_size"])


def crop(clips: Tensor, num_frames: int, size: int, generator: torch.Generator) -> Tensor:
    """A random piece of num_frames x size x size of clips uint8 (N, F, H, W, 3), the same place in each."""
    corner = [
        int(torch.randint(whole - part + 1, (1,), generator=generator))
        for whole, part in zip(clips.shape[1:4], (num_frames, size, size), strict=True)
    ]
    f, y, x = corner
    return clips[:, f : f + num_frames, y : y + size, x : x + size]


def train(
    vae: "AutoencoderKLWan",
    clips: Tensor,
    *,
    steps: int,
    minutes: float,
    batch_size: int,
    num_frames: int,
    size: int,
    lr: float,
    apart: float,
    seed: int,
) -> int:
    """Trains on random pieces of uint8 clips (N, F, H, W, 3), on the device where they lie, until `steps` or `minutes` are used up.

    For the share `apart` of that, the decoder is given the principal components and the encoder is taught to find them; then the decoder is given
    what the encoder finds. Matrices go to Muon, the rest to AdamW; over the last half the learning rate falls to zero. Returns the steps taken.
    """
    device = clips.device
    principal = Principal(clips[:200])
    # Muon takes matrices: it is given views of the kernels, (out, in * places), which share their memory.
    kernels = [p for name, p in vae.named_parameters() if p.ndim >= 4 and not name.endswith(("conv_in.weight", "conv_out.weight"))]
    matrices = [torch.nn.Parameter(p.data.flatten(1)) for p in kernels]
    others = [p for p in vae.parameters() if not any(p is kernel for kernel in kernels)]
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr / 2, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    generator = torch.Generator().manual_seed(seed)
    start, step, spent = time.monotonic(), 0, 0.0
    while spent < 1:
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 10, 2 * (1 - spent))
        chosen = torch.randint(len(clips), (batch_size,), generator=generator)
        video = augment(to_video(crop(clips[chosen.to(device)], num_frames, size, generator)), generator)
        target = principal.latents(video)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            found = vae._encode(video)[:, : vae.z_dim]
            given = (target if spent < apart else found) + LATENT_NOISE * torch.randn_like(target)
            made = decode_unclamped(vae, given)
        found_error = principal.pixel_error(found.float() - target)
        made_error = (made.float() - video).square().mean()
        for parameter in vae.parameters():
            parameter.grad = None
        ((found_error + 1e-4).sqrt() + (made_error + 1e-4).sqrt()).backward()
        for kernel, matrix in zip(kernels, matrices, strict=True):
            matrix.grad = None if kernel.grad is None else kernel.grad.flatten(1)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        spent = max(step / steps, (time.monotonic() - start) / (60 * minutes))
        if step % 20 == 0:
            say(f"step {step} ({spent:.0%}): encoder {_decibels(found_error):.2f} dB, decoder {_decibels(made_error):.2f} dB")
    return step


def _decibels(error: Tensor) -> float:
    return -10 * math.log10(max(error.item() / 4, 1e-12))  # /4: the video spans [-1, 1]


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
    """Trains, saves and measures; writes tiny_vae.safetensors and tiny_vae.json to --out. With --steps 0: measures --start, the .json alone."""
    from diffusers import AutoencoderKLWan

    parser = argparse.ArgumentParser(description="Train the tiny video VAE.")
    parser.add_argument("--clips", required=True, help=".npy of uint8 (N, F, H, W, 3), or a folder with mp4 files")
    parser.add_argument("--held-out", required=True, help="likewise, of photos that --clips doesn't show")
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument("--start", help="a tiny_vae.safetensors to go on from")
    parser.add_argument("--steps", type=int, default=4000, help="0: only measures --start")
    parser.add_argument("--minutes", type=float, default=60.0, help="stops after this time if --steps isn't reached before")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--frames", type=int, default=17, help="of the pieces cut from the clips, 4n+1; later frames than trained ones drift")
    parser.add_argument("--size", type=int, default=32, help="height and width of the pieces; a multiple of 8")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--apart", type=float, default=0.4, help="share of the training in which encoder and decoder are taught apart")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps < (0 if args.start else 1):
        parser.error(f"--steps {args.steps} is not legal; legal: 1 or more, or 0 with --start")
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = writable_folder("--out", args.out)
    clips = torch.from_numpy(np.array(read_clips(args.clips))).to(device)
    held_out = torch.from_numpy(np.array(read_clips(args.held_out))).to(device)
    if args.start:
        vae = load_tiny_vae(Path(args.start))
    else:
        vae = AutoencoderKLWan(**ARCHITECTURE)
        initialise(vae)
    vae.to(device)
    path = out / ASSET.name if args.steps else Path(args.start)
    began, steps = time.monotonic(), 0
    if args.steps:
        steps = train(
            vae, clips, steps=args.steps, minutes=args.minutes, batch_size=args.batch_size, num_frames=args.frames, size=args.size, lr=args.lr,
            apart=args.apart, seed=args.seed,
        )  # fmt: skip
        save(vae, clips[:400], path)
    seconds = time.monotonic() - began
    vae = load_tiny_vae(path).to(device)  # what is measured is what ships, rounding included
    report = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "parameters": sum(p.numel() for p in vae.parameters()),
        "clips": list(clips.shape),
        "held_out": list(held_out.shape),
        "steps": steps,
        "seconds": round(seconds),
        "psnr_train_db": psnr_of(vae, clips[: len(held_out)]),
        "psnr_held_out_db": psnr_of(vae, held_out),
        "provenance": provenance(device),
    }
    write_json(out / "tiny_vae.json", report)
    say(json.dumps(report))


if __name__ == "__main__":
    main()
