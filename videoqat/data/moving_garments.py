"""The embedded set: photos of garments (Fashion-MNIST) that move over a textured canvas, with captions such as "a sneaker moves left".

Small enough for a tiny model on two CPU cores, and yet real: photographs, text that decides what is seen and where it goes, and mp4 files
that walk the same road as anybody's clips. What the caption leaves open (which photo, size, tint, canvas, lane) is drawn at random. Clip i
of a seed is a pure function of (seed, split, i): ten garments and four directions take turns, so any 40 clips in a row hold each pair once.

The photos are Fashion-MNIST's, (c) 2017 Zalando SE, MIT licence (assets/NOTICE.fashion-mnist). A subset ships with the package: the first
60 of each class from the training part, the first 20 from the test part (held out). It was made, byte for byte, by

    python -m videoqat.data.moving_garments FOLDER      # with train-images-idx3-ubyte.gz and its three siblings
"""

import argparse
import functools
import gzip
import itertools
import json
import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from videoqat import config as configuration
from videoqat.config import ExampleClipsConfig, require
from videoqat.console import progress, say
from videoqat.data.video_io import write_video
from videoqat.errors import DataError, UserError
from videoqat.files import atomic_folder, atomic_path, check_writable, writable_folder, write_json

GARMENTS = (  # in the order of Fashion-MNIST's labels
    "a t-shirt moves",
    "trousers move",
    "a pullover moves",
    "a dress moves",
    "a coat moves",
    "a sandal moves",
    "a shirt moves",
    "a sneaker moves",
    "a bag moves",
    "an ankle boot moves",
)
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # (x, y), y downwards
SUBSET = Path(__file__).parent / "assets" / "fashion_mnist_subset.npz"
SUBSET_PER_CLASS = {"train": 60, "held_out": 20}
IDX_PREFIX = {"train": "train", "held_out": "t10k"}
VERSION = 1  # of the drawing: another number where the same settings give other pixels


def _read_idx(path: Path) -> np.ndarray:
    """An idx file (gzipped or not) of unsigned bytes, as http://yann.lecun.com/exdb/mnist lays it out."""
    found = next((p for p in (path, path.with_suffix("")) if p.is_file()), None)
    if found is None:
        raise DataError(f"photos: {str(path)!r} does not exist (nor without .gz)")
    try:
        raw = gzip.decompress(found.read_bytes()) if found.suffix == ".gz" else found.read_bytes()
        if raw[:3] != b"\0\0\x08":
            raise ValueError("not an idx file of unsigned bytes")
        shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4)
        return np.array(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])).reshape(tuple(int(n) for n in shape))
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"photos: {str(found)!r} can't be read: {error}") from error


def read_photos(photos: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Photos uint8 (N, 28, 28) and labels uint8 (N,) of `split` (train or held_out), embedded or from a folder with the four idx files.

    Raises:
        DataError: a file is missing or isn't what it should be.
    """
    if photos == "embedded":
        with np.load(SUBSET, allow_pickle=False) as archive:
            return archive[f"{split}_photos"], archive[f"{split}_labels"]
    prefix = IDX_PREFIX[split]
    images = _read_idx(Path(photos) / f"{prefix}-images-idx3-ubyte.gz")
    labels = _read_idx(Path(photos) / f"{prefix}-labels-idx1-ubyte.gz")
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or set(np.unique(labels)) != set(range(10)):
        raise DataError(f"photos: {photos!r} holds images {images.shape} and labels {labels.shape}, which are not Fashion-MNIST's")
    return images, labels


def write_subset(folder: str, path: Path = SUBSET) -> None:
    """Writes the subset that ships with the package from Fashion-MNIST's idx files in `folder`."""
    arrays = {}
    for split, per_class in SUBSET_PER_CLASS.items():
        images, labels = read_photos(folder, split)
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in range(10)]))
        arrays[f"{split}_photos"], arrays[f"{split}_labels"] = images[chosen], labels[chosen]
    with atomic_path(path) as aside:
        np.savez_compressed(aside, **arrays)


def caption_of(index: int) -> str:
    """The caption of clip `index`."""
    direction = list(DIRECTIONS)[index // len(GARMENTS) % len(DIRECTIONS)]
    return f"{GARMENTS[index % len(GARMENTS)]} {direction}"


def _canvas(rng: np.random.Generator, size: int) -> torch.Tensor:
    """A dim, smooth, coloured texture, (3, size, size) in 0..1: 3x3 random colours around one hue, interpolated."""
    grown = F.interpolate(torch.from_numpy(_patches(rng))[None].float(), size=(size, size), mode="bicubic", align_corners=True)
    return grown[0].clamp(0, 1)


def draw_clip(photos: np.ndarray, labels: np.ndarray, index: int, *, num_frames: int, size: int, seed: int, split: str) -> np.ndarray:
    """Clip `index` as uint8 (num_frames, size, size, 3): the garment crosses the frame once, at constant speed with sub-pixel steps."""
    rng = np.random.default_rng([seed, index, list(SUBSET_PER_CLASS).index(split)])
    direction = list(DIRECTIONS.values())[index // len(GARMENTS) % len(DIRECTIONS)]
    photo = torch.from_numpy(photos[rng.choice(np.flatnonzero(labels == index % len(GARMENTS)))]).float()[None, None] / 255
    layers = _layers(photo)

    extent = rng.uniform(0.46, 0.6)  # of the garment, as a share of the frame
    room = 1 - extent  # how far its centre may lie from the middle, in units of half a frame
    along = torch.linspace(-room, room, num_frames)
    across = float(rng.uniform(-0.8, 0.8)) * room
    x, y = (along * direction[0], torch.full_like(along, across)) if direction[0] else (torch.full_like(along, across), along * direction[1])
    theta = torch.zeros(num_frames, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 / extent
    theta[:, 0, 2], theta[:, 1, 2] = -x / extent, -y / extent
    grid = F.affine_grid(theta, [num_frames, 2, size, size], align_corners=False)
    moved = F.grid_sample(layers.expand(num_frames, -1, -1, -1), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    tint = torch.tensor(_bright_colour(rng)).float().view(1, 3, 1, 1)
    frames = _composed(_canvas(rng, size), moved, tint)
    return (frames * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def draw_views(
    photos: np.ndarray, places: np.ndarray, windows: np.ndarray, *, size: int, rng: np.random.Generator, turns: np.ndarray | None = None
) -> torch.Tensor:
    """Single frames as `draw_clip` makes them, each seen through a square window, float32 (B, 3, size, size) in 0..1.

    Args:
        photos: uint8 (B, 28, 28).
        places: (B, 3): x and y of the garment's centre, -1 to 1 across the frame, and its extent as a share of the frame.
        windows: (B, 3): the same of what is seen; (0, 0, 1) is the whole frame.
        turns: (B, 2, 2), from directions in the garment as seen to those in the photo; default: as they are.
    """
    count = len(photos)
    layers = _layers(torch.from_numpy(photos).float()[:, None] / 255)
    turns = np.eye(2) if turns is None else turns
    to_photo = np.broadcast_to(turns, (count, 2, 2)) / places[:, 2, None, None]
    theta = np.concatenate([to_photo * windows[:, 2, None, None], to_photo @ (windows[:, :2] - places[:, :2])[:, :, None]], 2)
    grid = F.affine_grid(torch.from_numpy(theta).float(), [count, 2, size, size], align_corners=False)
    moved = F.grid_sample(layers, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    theta = np.concatenate([np.eye(2) * windows[:, 2, None, None], windows[:, :2, None]], 2)
    grid = F.affine_grid(torch.from_numpy(theta).float(), [count, 3, size, size], align_corners=False)
    patches = torch.from_numpy(np.stack([_patches(rng) for _ in range(count)])).float()
    canvases = F.grid_sample(patches, grid, mode="bicubic", padding_mode="border", align_corners=True).clamp(0, 1)
    return _composed(canvases, moved, torch.tensor([_bright_colour(rng) for _ in range(count)]).view(count, 3, 1, 1))


def _layers(photo: torch.Tensor) -> torch.Tensor:
    """Shade and opacity, (B, 2, 28, 28), of photos (B, 1, 28, 28) in 0..1.

    The photos have a black ground. Closing (dilate, erode) keeps dark seams inside a garment opaque."""
    closed = -F.max_pool2d(-F.max_pool2d(photo, 3, 1, 1), 3, 1, 1)
    alpha = (closed * 5).clamp(0, 1)
    return torch.cat([photo * alpha, alpha], dim=1)


def _composed(canvas: torch.Tensor, layers: torch.Tensor, tint: torch.Tensor) -> torch.Tensor:
    shade, alpha = layers[:, :1], layers[:, 1:]
    return (canvas * (1 - alpha) + tint * (0.3 * alpha + 0.7 * shade)).clamp(0, 1)


def _patches(rng: np.random.Generator) -> np.ndarray:
    """3x3 dim colours around one hue, (3, 3, 3): colour, row, column."""
    return np.clip(rng.uniform(0.08, 0.42, (3, 1, 1)) + rng.uniform(-0.14, 0.14, (3, 3, 3)), 0.02, 0.6)


def _bright_colour(rng: np.random.Generator) -> tuple[float, float, float]:
    """A light colour of random hue, RGB in 0..1."""
    hue = rng.uniform(0, 2 * math.pi)
    red, green, blue = (0.775 + 0.225 * math.cos(hue + shift) for shift in (0.0, -2 * math.pi / 3, 2 * math.pi / 3))
    return red, green, blue


def plan(config: ExampleClipsConfig) -> dict[str, Any]:
    """What `write_clips` would return.

    Raises:
        UserError: whatever it would refuse before it draws a clip.
    """
    return _check(config)[0]


def _check(config: ExampleClipsConfig) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """What `write_clips` returns, what set.json says, and which clips there shall be. Raises as `write_clips`."""
    config.validate()
    out = Path(config.out)
    settings = {key: value for key, value in configuration.to_dict(config).items() if key not in ("out", "workers")} | {"version": VERSION}
    settings["num_photos"] = len(read_photos(config.photos, config.split)[0])  # a folder may hold some of Fashion-MNIST alone
    drawn = clips_without(config.leave_out, config.num_clips)
    reused = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if reused and not _holds(out, settings, _names(drawn)):
        raise UserError(f"out={str(out)!r} holds something else than the clips of these settings; legal: a new or empty folder")
    if not reused:
        check_writable("out", out)
    captions = len({caption_of(index) for index in drawn})
    return {"out": str(out), "num_clips": config.num_clips, "captions": captions, "reused": reused}, settings, drawn


def _names(drawn: list[int]) -> list[str]:
    return [f"clips/{index:06d}.mp4" for index in drawn]


def write_clips(config: ExampleClipsConfig) -> dict[str, Any]:
    """Writes `num_clips` mp4 files, metadata.jsonl (file, caption) and set.json (what they were made with) to the folder `config.out`.

    A folder that already holds the set of the same settings is used as it is. Returns {"out", "num_clips", "reused", "captions"}.

    Raises:
        UserError: `out` holds something else; nothing is touched then.
        DataError: the photos can't be read.
    """
    result, settings, drawn = _check(config)
    if result["reused"]:
        say(f"{config.out}: {config.num_clips} clips with these settings are here already")
        return result
    names, out = _names(drawn), writable_folder("out", config.out)
    with atomic_folder(out) as aside:
        draw = functools.partial(_draw_file, config)
        for _ in progress(
            _in_processes(draw, drawn, [aside / name for name in names], config.workers), total=len(names), desc="drawing clips", unit="clip"
        ):
            pass
        lines = [json.dumps({"file": name, "caption": caption_of(index)}) for name, index in zip(names, drawn, strict=True)]
        (aside / "metadata.jsonl").write_text("\n".join(lines) + "\n")
        write_json(aside / "set.json", settings)
    say(f"{out}: {config.num_clips} clips, {result['captions']} captions")
    return result


def clips_without(leave_out: list[str], count: int) -> list[int]:
    """The numbers of the first `count` clips whose captions are not in `leave_out`.

    Raises:
        ConfigError: `leave_out` names what is no caption, or all of them.
    """
    captions = [caption_of(index) for index in range(len(GARMENTS) * len(DIRECTIONS))]
    for caption in leave_out:
        require(caption in captions, "leave_out", caption, f"captions of clips, such as {captions[0]!r}")
    require(len(set(leave_out)) < len(captions), "leave_out", f"all {len(captions)} captions", "fewer")
    return list(itertools.islice((index for index in itertools.count() if caption_of(index) not in leave_out), count))


_photos = functools.cache(read_photos)  # once in each process


def _draw_file(config: ExampleClipsConfig, index: int, path: Path) -> None:
    """Draws and writes one clip."""
    photos, labels = _photos(config.photos, config.split)
    frames = draw_clip(photos, labels, index, num_frames=config.num_frames, size=config.size, seed=config.seed, split=config.split)
    write_video(path, frames, config.fps)


def _in_processes(draw: functools.partial[None], drawn: list[int], paths: list[Path], workers: int) -> Iterator[None]:
    """`draw` for each clip and its path: here, or in `workers` processes of one torch thread each."""
    if workers == 1:
        yield from map(draw, drawn, paths)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(draw, drawn, paths, chunksize=16)


def _holds(out: Path, settings: dict[str, Any], names: list[str]) -> bool:
    """Whether `out` is the set of `settings`, whole."""
    try:
        recorded = json.loads((out / "set.json").read_text())
    except (OSError, ValueError):
        return False
    return recorded == settings and (out / "metadata.jsonl").is_file() and all((out / name).is_file() for name in names)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the subset of Fashion-MNIST that ships with the package.")
    parser.add_argument("folder", help="where train-images-idx3-ubyte.gz and its three siblings lie")
    write_subset(parser.parse_args().folder)
