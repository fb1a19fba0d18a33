"""Two small networks that look at a video of a moving garment and say which garment it is and where it goes: does the text decide what is seen?

They are trained on real clips (`data.moving_garments`), drawn from photos of the test part that no generator was trained on: four of five.
How often they are right on clips from the fifth, written as mp4 and read back as a generated video is, is measured in the same run and kept
with the weights: no generated video can be judged more surely than that. Both see pixels alone, halved in size again and again, so that what sets
a decoded video apart from a drawn one (a VAE's blur, the codec) counts for little.

Those that ship (assets/judges.safetensors) come from an earlier form of `train_judges`: trained on photos with even numbers and measured on those
with odd ones, without mirrored pictures, with a quarter of the steps for directions. Their card, judges.json, is of that run.

The judge of garments looks at five frames, one by one, and takes the mean of its logits. The judge of directions looks at all frames of a small
grey picture as channels of one image: it can tell nothing but how that changes with time.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from videoqat.config import JudgeConfig, TrainJudgesConfig, require
from videoqat.console import progress, say
from videoqat.data.clips import decode_clip, write_video
from videoqat.data.moving_garments import DIRECTIONS, GARMENTS, caption_of, draw_clip, read_photos
from videoqat.data.video_io import read_video
from videoqat.errors import CheckpointError, DataError
from videoqat.files import atomic_path, write_json
from videoqat.provenance import provenance

ASSET = Path(__file__).parent / "assets" / "judges.safetensors"
NUM_FRAMES, GARMENT_SIZE, DIRECTION_SIZE = 17, 64, 16
LOOKED_AT = (4, 6, 8, 10, 12)  # frames in which the garment is well within the picture
CAPTIONS = {caption_of(i): (i % len(GARMENTS), i // len(GARMENTS)) for i in range(len(GARMENTS) * len(DIRECTIONS))}  # garment, direction
KINDS = ("garment", "direction")


def _layer(width_in: int, width_out: int, stride: int, kernel: int = 3) -> list[nn.Module]:
    return [nn.Conv2d(width_in, width_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(width_out), nn.ReLU()]


def _head(width: int, answers: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, answers)]


def garment_judge() -> nn.Sequential:
    """(B, 3, 64, 64) in [0, 1] to logits (B, 10)."""
    layers = [*_layer(3, 32, 2, 5), *_layer(32, 64, 2), *_layer(64, 96, 1), *_layer(96, 96, 2), *_layer(96, 96, 1)]
    return nn.Sequential(*layers, *_head(96, len(GARMENTS)))


def direction_judge() -> nn.Sequential:
    """(B, 17, 16, 16), frames as channels, to logits (B, 4)."""
    return nn.Sequential(*_layer(NUM_FRAMES, 32, 1), *_layer(32, 32, 2), *_head(32, len(DIRECTIONS)))


MAKERS: dict[str, Callable[[], nn.Sequential]] = {"garment": garment_judge, "direction": direction_judge}


def seen_by_judges(frames_FHWC: np.ndarray) -> tuple[Tensor, Tensor]:
    """What the two judges see of a video, uint8 (17, H, W, 3): (5, 3, 64, 64) and (17, 16, 16), in [0, 1].

    Raises:
        DataError: not 17 frames.
    """
    if frames_FHWC.shape[0] != NUM_FRAMES or frames_FHWC.ndim != 4:
        raise DataError(f"the judges look at videos of {NUM_FRAMES} frames, not at {tuple(frames_FHWC.shape)}")
    video_FCHW = torch.from_numpy(frames_FHWC).permute(0, 3, 1, 2).float() / 255
    garment = F.interpolate(video_FCHW[list(LOOKED_AT)], size=(GARMENT_SIZE, GARMENT_SIZE), mode="area")
    direction = F.interpolate(video_FCHW.mean(1, keepdim=True), size=(DIRECTION_SIZE, DIRECTION_SIZE), mode="area")
    return garment, direction[:, 0]


class Judges:
    """The two networks, in eval mode on the CPU.

    Attributes:
        card: what is known of them: on how many real clips they were right, what they were trained on.
    """

    def __init__(self, networks: dict[str, nn.Sequential], card: dict[str, Any]) -> None:
        self.networks = {kind: network.eval() for kind, network in networks.items()}
        self.card = card

    @classmethod
    def load(cls, path: str | Path = ASSET) -> "Judges":
        """Raises CheckpointError where the file is torn or holds something else."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as handle:
                card = json.loads(handle.metadata()["card"])
                weights = {key: handle.get_tensor(key).float() for key in handle.keys()}  # noqa: SIM118 - safe_open is no mapping
            networks = {kind: make() for kind, make in MAKERS.items()}
            for kind, network in networks.items():
                network.load_state_dict({key.partition(".")[2]: value for key, value in weights.items() if key.startswith(f"{kind}.")})
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} holds no judges: {error}") from error
        return cls(networks, card)

    def save(self, path: Path) -> None:
        """In fp16, the card as metadata."""
        from safetensors.torch import save

        weights = {f"{kind}.{key}": value for kind, network in self.networks.items() for key, value in network.state_dict().items()}
        weights = {key: value.half().contiguous() for key, value in weights.items() if not key.endswith("num_batches_tracked")}
        with atomic_path(path) as aside:
            aside.write_bytes(save(weights, {"card": json.dumps(self.card)}))

    @torch.no_grad()
    def judge(self, frames_FHWC: np.ndarray) -> tuple[int, int]:
        """(garment, direction) of a video, uint8 (17, H, W, 3): places in GARMENTS and DIRECTIONS."""
        garment, direction = seen_by_judges(frames_FHWC)
        return int(self.networks["garment"](garment).mean(0).argmax()), int(self.networks["direction"](direction[None]).argmax())


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (Wilson 1927): honest for small numbers and near 0 and 1."""
    share, z2 = successes / trials, z * z
    middle, spread = share + z2 / (2 * trials), z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    return (middle - spread) / (1 + z2 / trials), (middle + spread) / (1 + z2 / trials)


def accuracies(asked: list[tuple[int, int]], found: list[tuple[int, int]]) -> dict[str, Any]:
    """For `garment`, `direction` and `both`: how many of the videos were judged to be what was asked for, the share, and its interval."""
    result: dict[str, Any] = {"videos": len(asked)}
    pairs = list(zip(asked, found, strict=True))
    for kind, right in {
        "garment": sum(a[0] == f[0] for a, f in pairs),
        "direction": sum(a[1] == f[1] for a, f in pairs),
        "both": sum(a == f for a, f in pairs),
    }.items():
        result[kind] = {"right": right, "share": right / len(pairs), "interval": list(wilson(right, len(pairs)))}
    return result


def confusion(asked: list[int], found: list[int], answers: int) -> list[list[int]]:
    """Row: asked for; column: judged to be."""
    table = [[0] * answers for _ in range(answers)]
    for row, column in zip(asked, found, strict=True):
        table[row][column] += 1
    return table


# --- judging


def judge(config: JudgeConfig) -> dict[str, Any]:
    """Judges the videos of a folder that `generate prompts=FILE` wrote, by their captions.

    Returns:
        As `accuracies`, and `by_garment`, `by_direction` (shares), `confusion` of garments, `real_clips` (how often the judges are right on those)
        and `provenance`.

    Raises:
        DataError: no such folder of videos, or a caption that the judges don't know.
    """
    config.validate()
    folder = Path(config.videos)
    judges = Judges.load(config.judges or ASSET)
    try:
        videos = json.loads((folder / "manifest.json").read_text())["videos"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"videos={config.videos!r} is no folder that generate prompts=FILE wrote: {error}") from error
    unknown = [video["prompt"] for video in videos if video["prompt"] not in CAPTIONS]
    if unknown or not videos:
        raise DataError(
            f"videos={config.videos!r}: no judge knows {unknown[0] if unknown else 'no video at all'!r}; captions are as {caption_of(7)!r}"
        )
    asked = [CAPTIONS[video["prompt"]] for video in videos]
    found = [judges.judge(read_video(folder / video["video"])[0]) for video in progress(videos, desc="judging", unit="video")]
    result = accuracies(asked, found) | {
        "by_garment": _shares(asked, found, 0, len(GARMENTS)),
        "by_direction": _shares(asked, found, 1, len(DIRECTIONS)),
        "confusion": confusion([a[0] for a in asked], [f[0] for f in found], len(GARMENTS)),
        "real_clips": judges.card["real_clips"],
        "provenance": provenance("cpu"),
    }
    say(f"{folder}: " + ", ".join(f"{kind} {result[kind]['share']:.1%}" for kind in KINDS) + f" of {len(videos)} videos as the caption says")
    return result


def _shares(asked: list[tuple[int, int]], found: list[tuple[int, int]], kind: int, answers: int) -> list[float | None]:
    right = [[a[kind] == f[kind] for a, f in zip(asked, found, strict=True) if a[kind] == answer] for answer in range(answers)]
    return [sum(r) / len(r) if r else None for r in right]


# --- training


def train_judges(config: TrainJudgesConfig) -> dict[str, Any]:
    """Trains both judges on the CPU, measures them on real clips from photos they have not seen, and writes them to `config.out`.

    Returns the card: `real_clips` (as `accuracies`, with `confusion`), `trained_on`, `seed`, `seconds`, `parameters`, `provenance`.

    Raises:
        DataError: the photos can't be read.
    """
    config.validate()
    require(config.out.endswith(".safetensors"), "out", config.out, "a path that ends in .safetensors")
    began = time.monotonic()
    torch.manual_seed(config.seed)
    photos, labels = read_photos(config.photos, "held_out")

    def drawn(index: int, test: bool) -> np.ndarray:
        part = (np.arange(len(photos)) % 5 == 4) == test
        return draw_clip(photos[part], labels[part], index, num_frames=NUM_FRAMES, size=config.size, seed=config.seed + test, split="held_out")

    seen = [seen_by_judges(drawn(i, False)) for i in progress(range(config.num_clips), desc="drawing clips", unit="clip")]
    asked = torch.tensor([CAPTIONS[caption_of(i)] for i in range(config.num_clips)])
    data = {"garment": torch.stack([s[0] for s in seen]).mul(255).byte(), "direction": torch.stack([s[1] for s in seen]).mul(255).byte()}
    networks = {kind: MAKERS[kind]() for kind in KINDS}
    for place, kind in enumerate(KINDS):
        _fit(networks[kind], data[kind], asked[:, place], config, kind)
    judges = Judges(networks, {})
    found, wanted = [], [CAPTIONS[caption_of(i)] for i in range(config.num_test_clips)]
    with tempfile.TemporaryDirectory() as folder:
        for i in progress(range(config.num_test_clips), desc="testing", unit="clip"):
            path = Path(folder) / "clip.mp4"
            write_video(path, drawn(i, True), 16)
            found.append(judges.judge(decode_clip(path, NUM_FRAMES, 16, config.size, config.size)))
    real = accuracies(wanted, found) | {"confusion": confusion([w[0] for w in wanted], [f[0] for f in found], len(GARMENTS))}
    judges.card = {
        "real_clips": real,
        "trained_on": f"{config.num_clips} clips of {config.size}x{config.size}, from {len(photos) - len(photos) // 5} photos: all but every fifth",
        "seed": config.seed,
        "seconds": round(time.monotonic() - began),
        "parameters": {kind: sum(p.numel() for p in network.parameters()) for kind, network in networks.items()},
        "provenance": provenance("cpu"),
    }
    judges.save(Path(config.out))
    write_json(Path(config.out).with_suffix(".json"), judges.card)
    say(f"{config.out}: on {real['videos']} real clips garment {real['garment']['share']:.1%}, direction {real['direction']['share']:.1%}")
    return judges.card


def _fit(network: nn.Sequential, data: Tensor, answers: Tensor, config: TrainJudgesConfig, kind: str) -> None:
    """AdamW under one cycle of the learning rate. `data` are bytes, (N, 17, 16, 16), or (N, 5, 3, 64, 64), of which each step takes one frame."""
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, total_steps=config.steps, pct_start=0.2)
    network.train()
    for _ in progress(range(config.steps), desc=f"judge of the {kind}", unit="step"):
        chosen = torch.randint(len(data), (config.batch_size,), generator=generator)
        batch = data[chosen].float() / 255
        if kind == "garment":
            batch = batch[torch.arange(len(batch)), torch.randint(batch.shape[1], (len(batch),), generator=generator)]
            mirrored = torch.rand(len(batch), 1, 1, 1, generator=generator) < 0.5
            batch = torch.where(mirrored, batch.flip(3), batch)
        loss = F.cross_entropy(network(_varied(batch, generator)), answers[chosen], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    network.eval()


def _varied(batch: Tensor, generator: torch.Generator) -> Tensor:
    """Brightness, noise and, for half of the batch, the blur of a VAE: pixels halved and doubled again."""
    half = len(batch) // 2
    coarse = F.interpolate(F.avg_pool2d(batch[:half], 2), scale_factor=2, mode="bilinear", align_corners=False)
    batch = torch.cat([coarse, batch[half:]])
    gain = 1 + 0.15 * torch.randn(len(batch), 1, 1, 1, generator=generator)
    return (batch * gain + 0.03 * torch.randn(batch.shape, generator=generator)).clamp(0, 1)
