"""Frames of the same videos by several rows of the evidence, as one picture.

    python -m videoqat.evaluation.evidence_picture OUT.webp "BF16=main/rows/bf16-seed0" "NVFP4=main/rows/nvfp4-seed0" ...

Nobody chooses the videos: of a row's list of captions every eleventh is taken, from the first. Of configs/evidence/captions.txt these are four
garments, each in another direction. Rows must be of the same prompts and seeds. Of each video three frames are shown: at a quarter, in the middle, at
three quarters.
"""

import argparse
import io
import json
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from videoqat.data.video_io import read_video
from videoqat.errors import DataError, UserError
from videoqat.evaluation.evidence import RESULT
from videoqat.files import atomic_path

EVERY = 11  # captions
QUARTERS = (1, 2, 3)
GAP, HEAD, INK, PAPER = 12, 26, "#1e293b", "#ffffff"
MOST_BYTES = 300_000


def picture(rows: dict[str, Path]) -> tuple[Image.Image, list[tuple[str, int]]]:
    """One column for each row, under its name, and one line for each chosen video; and the prompts and seeds of these.

    Args:
        rows: name -> the folder that `evidence measure` wrote.

    Raises:
        DataError: a folder is no row's, has no videos, or others than the first.
    """
    told = {}
    for name, folder in rows.items():
        try:
            videos = json.loads((folder / RESULT).read_text())["videos"]
            told[name] = [(place, video["prompt"], video["seed"]) for place, video in enumerate(videos)][::EVERY]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder} is no row that `evidence measure` wrote: {error!r}") from error
    first, *others = told
    for name in others:
        if told[name] != told[first]:
            raise DataError(f"{rows[name]} has other prompts or seeds than {rows[first]}; legal: rows of one table and one seed")
    if not told[first]:
        raise DataError(f"{rows[first]} has no videos; legal: a row that was measured with prompts")
    strips = {name: [_strip(folder / "videos" / f"{place:03d}.mp4") for place, _, _ in told[first]] for name, folder in rows.items()}
    width, height = strips[first][0].size
    lines = len(told[first])
    sheet = Image.new("RGB", (len(rows) * (width + GAP) - GAP, HEAD + lines * (height + HEAD)), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(16)
    for column, name in enumerate(rows):
        left = column * (width + GAP)
        draw.text((left, 4), name, INK, font)
        for line, strip in enumerate(strips[name]):
            sheet.paste(strip, (left, HEAD + line * (height + HEAD)))
    for line, (_, prompt, seed) in enumerate(told[first]):
        draw.text((0, HEAD + line * (height + HEAD) + height + 3), f"“{prompt}”, seed {seed}", INK, font)
    return sheet, [(prompt, seed) for _, prompt, seed in told[first]]


def _strip(path: Path) -> Image.Image:
    """Three frames of a video, side by side."""
    if not path.is_file():
        raise DataError(f"{path} is missing; legal: a row with its videos")
    frames_FHWC, _ = read_video(path)
    chosen = [Image.fromarray(frames_FHWC[(len(frames_FHWC) - 1) * quarter // 4]) for quarter in QUARTERS]
    width, height = chosen[0].size
    strip = Image.new("RGB", (len(chosen) * width, height), PAPER)
    for at, frame in enumerate(chosen):
        strip.paste(frame, (at * width, 0))
    return strip


def save(sheet: Image.Image, out: Path) -> None:
    """As WebP, at most `MOST_BYTES` large: for a README.

    Raises:
        DataError: it stays larger at every quality that is worth looking at; or `out` is of another format.
    """
    if out.suffix != ".webp":
        raise DataError(f"{out}: legal: a path that ends in .webp")
    for quality in (92, 85, 75, 60):
        encoded = io.BytesIO()
        sheet.save(encoded, "webp", quality=quality, method=6)
        if len(encoded.getvalue()) <= MOST_BYTES:
            with atomic_path(out) as aside:
                aside.write_bytes(encoded.getvalue())
            return
    raise DataError(f"{out} would be larger than {MOST_BYTES} bytes; legal: fewer rows or smaller videos")


def main() -> None:
    """The command line."""
    about = "Frames of the same videos by several rows of the evidence, as one picture."
    parser = argparse.ArgumentParser(prog="python -m videoqat.evaluation.evidence_picture", description=about)
    parser.add_argument("out", type=Path, help="a .webp file")
    parser.add_argument("rows", nargs="+", help="NAME=FOLDER, a column each; FOLDER as `evidence measure` wrote it")
    arguments = parser.parse_args()
    try:
        sheet, shown = picture({name: Path(folder) for name, _, folder in (row.partition("=") for row in arguments.rows)})
        save(sheet, arguments.out)
    except UserError as error:
        parser.exit(2, f"{error}\n")
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes, " + ", ".join(f"{prompt!r} (seed {seed})" for prompt, seed in shown))


if __name__ == "__main__":
    main()
