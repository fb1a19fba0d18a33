"""Small networks that look at a video of a moving garment and say which garment it is and where it goes: does the text decide what is seen?

They are trained on frames and clips as `data.moving_garments` draws them, of photos of the test part that no generator was trained on: four of five.
How often they are right on clips from the fifth, written as mp4 and read back as a generated video is, is measured in the same run and kept
with the weights: no generated video can be judged more surely than that. All see pixels alone, reduced in size and varied in sharpness, so that
what sets a decoded video apart from a drawn one (a VAE's blur, the codec) counts for little.

The judge of garments looks at five frames, one by one, finds the garment in each, cuts it out, and takes the mean of its logits. The judge of
directions looks at all frames of a small grey picture as channels of one image: it can tell nothing but how that changes with time.

What ships (assets/judges.safetensors) is what `videoqat evidence train-judges photos=FOLDER out=FILE` makes, FOLDER holding all of Fashion-MNIST.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from videoqat.config import JudgeConfig, TrainJudgesConfig, require
from videoqat.console import progress, say
from videoqat.data.clips import decode_clip, write_video
from videoqat.data.moving_garments import DIRECTIONS, GARMENTS, caption_of, draw_clip, draw_views, read_photos
from videoqat.data.video_io import read_video
from videoqat.errors import CheckpointError, DataError
from videoqat.files import atomic_path, check_writable, writable_folder, write_json
from videoqat.provenance import provenance

ASSET = Path(__file__).parent / "assets" / "judges.safetensors"
NUM_FRAMES, GARMENT_SIZE, DIRECTION_SIZE = 17, 64, 16
FOUND_SIZE, CUT_SIZE, MARGIN = 32, 32, 1.14  # pixels in which the garment is found and named; what is cut out, as a share of the garment's extent
LOOKED_AT = (4, 6, 8, 10, 12)  # frames in which the garment is well within the picture
WHOLE = np.array([[0.0, 0.0, 1.0]])  # a window of `draw_views`: the frame
CAPTIONS = {caption_of(i): (i % len(GARMENTS), i // len(GARMENTS)) for i in range(len(GARMENTS) * len(DIRECTIONS))}  # garment, direction
KINDS = ("garment", "direction")


def _layer(width_in: int, width_out: int, stride: int, kernel: int = 3) -> list[nn.Module]:
    return [nn.Conv2d(width_in, width_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(width_out), nn.ReLU()]


def _head(width: int, answers: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, answers)]


class GarmentJudge(nn.Module):
    """Finds the garment, cuts it out, and names it.

    Attributes:
        finder: (B, 3, 32, 32) to (B, 3): x and y of the garment's centre, -1 to 1 across the frame, and its extent as a share of the frame.
        namer: what was cut out, (B, 3, 32, 32), to logits (B, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        self.finder = nn.Sequential(*_layer(3, 16, 2, 5), *_layer(16, 32, 2), *_layer(32, 32, 1), nn.Flatten(), nn.Linear(32 * 8 * 8, 3))
        layers = [*_layer(3, 32, 1), *_layer(32, 64, 2), *_layer(64, 64, 1), *_layer(64, 96, 2), *_layer(96, 96, 1), *_layer(96, 96, 1)]
        self.namer = nn.Sequential(*layers, *_head(96, len(GARMENTS)))

    def find(self, small_BCHW: Tensor) -> Tensor:
        """Places (B, 3) of the garments in frames (B, 3, 32, 32)."""
        return self.finder(small_BCHW - small_BCHW.mean((1, 2, 3), keepdim=True))

    def forward(self, frames_BCHW: Tensor) -> Tensor:
        """(B, 3, 64, 64) in [0, 1] to logits (B, 10), the mean of what was cut out and its mirror image."""
        cut = cut_out(frames_BCHW, self.find(F.avg_pool2d(frames_BCHW, 2)))
        return (self.namer(cut) + self.namer(cut.flip(3))) / 2


def cut_out(frames_BCHW: Tensor, places: Tensor) -> Tensor:
    """The surroundings of `places` (B, 3), (B, 3, 32, 32); what lies beyond the frame is as its border."""
    theta = torch.zeros(len(places), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = MARGIN * places[:, 2]
    theta[:, :, 2] = places[:, :2]
    grid = F.affine_grid(theta, [len(places), 3, CUT_SIZE, CUT_SIZE], align_corners=False)
    return F.grid_sample(frames_BCHW, grid, padding_mode="border", align_corners=False)


def direction_judge() -> nn.Sequential:
    """(B, 17, 16, 16), frames as channels, to logits (B, 4)."""
    return nn.Sequential(*_layer(NUM_FRAMES, 32, 1), *_layer(32, 32, 2), *_head(32, len(DIRECTIONS)))


MAKERS: dict[str, Callable[[], nn.Module]] = {"garment": GarmentJudge, "direction": direction_judge}


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

    def __init__(self, networks: dict[str, nn.Module], card: dict[str, Any]) -> None:
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
    low, high = (middle - spread) / (1 + z2 / trials), (middle + spread) / (1 + z2 / trials)
    return max(0.0, low), min(1.0, high)  # of none and of all it ends there, but for rounding: a page would say -0%


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


def _check_videos(config: JudgeConfig) -> tuple[Judges, list[str], list[Path]]:
    """The judges, the captions and the files. Raises as `judge`."""
    config.validate()
    folder = Path(config.videos)
    try:
        videos = json.loads((folder / "manifest.json").read_text())["videos"]
        prompts, files = [video["prompt"] for video in videos], [folder / video["video"] for video in videos]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"videos={config.videos!r} is no folder that generate prompts=FILE wrote: {error!r}") from error
    unknown = [prompt for prompt in prompts if prompt not in CAPTIONS]
    if unknown or not videos:
        raise DataError(
            f"videos={config.videos!r}: no judge knows {unknown[0] if unknown else 'no video at all'!r}; captions are as {caption_of(7)!r}"
        )
    absent = [file for file in files if not file.is_file()]
    if absent:
        raise DataError(f"videos={config.videos!r}: {absent[0].name} of its manifest is not there; generate makes it again")
    return Judges.load(config.judges or ASSET), prompts, files


def plan_judging(config: JudgeConfig) -> dict[str, Any]:
    """What `judge` would look at: how many `videos`, and what is known of the judges (`real_clips`).

    Raises:
        UserError: whatever `judge` would refuse before it looks at a video.
    """
    judges, prompts, _ = _check_videos(config)
    return {"videos": len(prompts), "real_clips": judges.card["real_clips"]}


def judge(config: JudgeConfig) -> dict[str, Any]:
    """Judges the videos of a folder that `generate prompts=FILE` wrote, by their captions.

    Returns:
        As `accuracies`, and `by_garment`, `by_direction` (shares), `confusion` of garments, `real_clips` (how often the judges are right on those)
        and `provenance`.

    Raises:
        DataError: no such folder of videos, one of them gone, or a caption that the judges don't know. CheckpointError: no judges.
    """
    judges, prompts, files = _check_videos(config)
    asked = [CAPTIONS[prompt] for prompt in prompts]
    found = [judges.judge(read_video(file)[0]) for file in progress(files, desc="judging", unit="video")]
    result = accuracies(asked, found) | {
        "by_garment": _shares(asked, found, 0, len(GARMENTS)),
        "by_direction": _shares(asked, found, 1, len(DIRECTIONS)),
        "confusion": confusion([a[0] for a in asked], [f[0] for f in found], len(GARMENTS)),
        "real_clips": judges.card["real_clips"],
        "provenance": provenance("cpu"),
    }
    say(f"{config.videos}: " + ", ".join(f"{kind} {result[kind]['share']:.1%}" for kind in KINDS) + f" of {len(files)} videos as the caption says")
    return result


def _shares(asked: list[tuple[int, int]], found: list[tuple[int, int]], kind: int, answers: int) -> list[float | None]:
    right = [[a[kind] == f[kind] for a, f in zip(asked, found, strict=True) if a[kind] == answer] for answer in range(answers)]
    return [sum(r) / len(r) if r else None for r in right]


# --- training


def _check_training(config: TrainJudgesConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Photos, labels, and which of them are for testing alone. Raises as `train_judges`."""
    config.validate()
    require(config.out.endswith(".safetensors"), "out", config.out, "a path that ends in .safetensors")
    check_writable("out", Path(config.out).parent)
    photos, labels = read_photos(config.photos, "held_out")
    return photos, labels, np.arange(len(photos)) % 5 == 4


def plan_training(config: TrainJudgesConfig) -> dict[str, Any]:
    """How many photos `train_judges` would train and test on: `photos`, `test_photos`.

    Raises:
        UserError: whatever it would refuse before it begins.
    """
    *_, test = _check_training(config)
    return {"photos": int((~test).sum()), "test_photos": int(test.sum())}


def train_judges(config: TrainJudgesConfig) -> dict[str, Any]:
    """Trains both judges on the CPU, measures them on real clips from photos they have not seen, and writes them to `config.out`.

    Returns the card: `real_clips` (as `accuracies`, with `confusion`), `trained_on`, `seed`, `seconds`, `parameters`, `provenance`.

    Raises:
        UserError: `out` can't be written. DataError: the photos can't be read.
    """
    photos, labels, test = _check_training(config)
    writable_folder("out", Path(config.out).parent)
    began = time.monotonic()
    networks = _trained(photos[~test], labels[~test], config)
    judges = Judges(networks, {})
    found, wanted = [], [CAPTIONS[caption_of(i)] for i in range(config.num_test_clips)]
    with tempfile.TemporaryDirectory() as folder:
        for i in progress(range(config.num_test_clips), desc="testing", unit="clip"):
            path = Path(folder) / "clip.mp4"
            write_video(path, _clip(photos[test], labels[test], i, config, config.seed + 1), 16)
            found.append(judges.judge(decode_clip(path, NUM_FRAMES, 16, config.size, config.size)))
    real = accuracies(wanted, found) | {"confusion": confusion([w[0] for w in wanted], [f[0] for f in found], len(GARMENTS))}
    judges.card = {
        "real_clips": real,
        "trained_on": f"{len(photos) - test.sum()} photos of the held-out part, all but every fifth, and {config.num_clips} clips of them",
        "tested_on": f"clips of {config.size}x{config.size} from the other {test.sum()} photos, through mp4",
        "seed": config.seed,
        "seconds": round(time.monotonic() - began),
        "parameters": {kind: sum(p.numel() for p in network.parameters()) for kind, network in networks.items()},
        "provenance": provenance("cpu"),
    }
    judges.save(Path(config.out))
    write_json(Path(config.out).with_suffix(".json"), judges.card)
    say(f"{config.out}: on {real['videos']} real clips garment {real['garment']['share']:.1%}, direction {real['direction']['share']:.1%}")
    return judges.card


def _clip(photos: np.ndarray, labels: np.ndarray, index: int, config: TrainJudgesConfig, seed: int) -> np.ndarray:
    return draw_clip(photos, labels, index, num_frames=NUM_FRAMES, size=config.size, seed=seed, split="held_out")


def _trained(photos: np.ndarray, labels: np.ndarray, config: TrainJudgesConfig) -> dict[str, nn.Module]:
    """Both judges, trained on these photos alone, with weights that fp16 holds exactly: what is measured is what is saved."""
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    garment, direction = GarmentJudge(), direction_judge()

    def found() -> Tensor:
        places = _places(rng, config.batch_size)
        frames = draw_views(photos[rng.integers(len(photos), size=len(places))], places, WHOLE.repeat(len(places), 0), size=FOUND_SIZE, rng=rng)
        return (garment.find(_varied(frames)) - torch.from_numpy(places)).abs().mean()

    def named() -> Tensor:
        places = _places(rng, config.batch_size)
        chosen = next(order)
        windows = places * [1, 1, MARGIN] + places[:, 2:] * rng.normal(0, 0.07, places.shape)
        views = draw_views(photos[chosen], places, windows, size=CUT_SIZE, rng=rng, turns=_turns(rng, len(places)))
        return F.cross_entropy(garment.namer(_with_holes(_varied(views))), torch.from_numpy(labels[chosen]).long(), label_smoothing=0.05)

    clips = [
        seen_by_judges(_clip(photos, labels, i, config, config.seed))[1] for i in progress(range(config.num_clips), desc="drawing clips", unit="clip")
    ]
    asked, clips_NFHW = torch.tensor([CAPTIONS[caption_of(i)][1] for i in range(config.num_clips)]), torch.stack(clips)

    def directed() -> Tensor:
        chosen = torch.from_numpy(rng.integers(config.num_clips, size=config.batch_size))
        batch, answers = clips_NFHW[chosen], asked[chosen]
        if rng.random() < 0.5:  # backwards: left is right, up is down
            batch, answers = batch.flip(1), answers ^ 1
        if rng.random() < 0.5:  # rows are columns: left is up, right is down
            batch, answers = batch.transpose(2, 3), answers ^ 2
        return F.cross_entropy(direction(_varied(batch)), answers, label_smoothing=0.05)

    order = _shuffled(rng, len(photos), config.batch_size)
    _fit(garment.finder, found, config.lr, config.steps, "what finds the garment")
    _fit(garment.namer, named, config.lr, config.steps, "judge of the garment")
    _fit(direction, directed, config.lr, config.steps // 4, "judge of the direction")
    return {kind: network.half().float() for kind, network in zip(KINDS, (garment, direction), strict=True)}


def _shuffled(rng: np.random.Generator, count: int, size: int) -> Iterator[np.ndarray]:
    """Batches of places in a set of `count`, each once before any comes again."""
    rest = np.zeros(0, np.int64)
    while True:
        while len(rest) < size:
            rest = np.concatenate([rest, rng.permutation(count)])
        yield rest[:size]
        rest = rest[size:]


def _places(rng: np.random.Generator, count: int) -> np.ndarray:
    """Where garments lie in frames of clips, and somewhat beyond: (count, 3)."""
    extent = rng.uniform(0.42, 0.64, (count, 1))
    return np.concatenate([rng.uniform(-1, 1, (count, 2)) * (1 - extent), extent], 1)


def _turns(rng: np.random.Generator, count: int) -> np.ndarray:
    """Half are mirrored; all are turned and stretched a little. (count, 2, 2)."""
    angle, stretch, mirror = rng.normal(0, 0.08, count), np.exp(rng.normal(0, 0.06, count)), rng.choice((-1, 1), count)
    rows = [[np.cos(angle) * stretch * mirror, -np.sin(angle) * mirror], [np.sin(angle), np.cos(angle) / stretch]]
    return np.array(rows).transpose(2, 0, 1)


def _fit(network: nn.Module, loss_of_batch: Callable[[], Tensor], lr: float, steps: int, what: str) -> None:
    """AdamW under one cycle of the learning rate, in bf16 (autocast): thrice as fast where the CPU has matrix units."""
    network.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.2)
    for _ in progress(range(steps), desc=what, unit="step"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    network.eval()


def _varied(batch: Tensor) -> Tensor:
    """Brightness, noise and, for half of the batch, more or less of the blur of a VAE: pixels halved and doubled again."""
    half = len(batch) // 2
    coarse = F.interpolate(F.avg_pool2d(batch[:half], 2), scale_factor=2, mode="bilinear", align_corners=False)
    batch = torch.cat([torch.lerp(batch[:half], coarse, torch.rand(half, 1, 1, 1)), batch[half:]])
    gain = 1 + 0.15 * torch.randn(len(batch), 1, 1, 1)
    return (batch * gain + 0.03 * torch.randn(batch.shape)).clamp(0, 1)


def _with_holes(batch: Tensor) -> Tensor:
    """Half of the pictures lose a square to their mean colour: no single place is enough to tell (cutout, DeVries and Taylor 2017)."""
    side = 0.15 + 0.3 * torch.rand(len(batch), 1)
    line = (torch.arange(batch.shape[-1]) + 0.5) / batch.shape[-1]
    rows, columns = ((line - torch.rand(len(batch), 1)).abs() < side / 2 for _ in "xy")
    hole = (rows[:, None, :, None] & columns[:, None, None, :]) & (torch.rand(len(batch), 1, 1, 1) < 0.5)
    return torch.where(hole, batch.mean((2, 3), keepdim=True), batch)
