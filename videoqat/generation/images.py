"""First frames that people bring: which models take them, and how they are read."""

import hashlib
import io
from pathlib import Path

from PIL import Image, ImageOps

from videoqat.config import require
from videoqat.errors import ConfigError, DataError
from videoqat.models.spec import family_of

STRETCH = 1.02  # from what change of its shape on an image is told to be stretched


def check_taken(folder: str | Path, given: bool, key: str = "image") -> None:
    """Requires that the model in `folder` is given a first frame if it needs one, and none if it takes none; `key` names what gives it.

    Raises:
        ConfigError: it is not so.
    """
    takes = family_of(folder).takes_image(folder)
    if given and takes == "no":
        raise ConfigError(f"{key} is not legal for {folder}: it makes videos from text alone; legal: no image, or an image-to-video model")
    if not given and takes == "required":
        raise ConfigError(f"{key} is missing: {folder} makes videos from a first frame; legal: a path of an image")


def read_image(path: str | Path, key: str = "image") -> tuple[Image.Image, str]:
    """The picture in a file, upright and in RGB, and the SHA-256 of the file's content.

    Raises:
        ConfigError: no such file.
        DataError: it is there, but holds no image that can be read whole.
    """
    require(Path(path).is_file(), key, str(path), "a path of an image that exists")
    try:
        content = Path(path).read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            picture = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{key}={str(path)!r} can't be read as an image: {' '.join(str(error).split())}") from error
    return picture, hashlib.sha256(content).hexdigest()


def check_image(folder: str | Path, path: str | Path, key: str = "image") -> str:
    """`check_taken`, and that the image, if one is given (`path` isn't empty), can be read. Returns its SHA-256, or nothing without one."""
    check_taken(folder, bool(path), f"{key}={str(path)!r}" if path else key)
    return read_image(path, key)[1] if path else ""


def stretched(image: Image.Image, height: int, width: int) -> list[str]:
    """A warning where an image hasn't the shape of the video that begins with it: pipelines stretch it, or crop it (HunyuanVideo 1.5)."""
    change = (image.width / image.height) / (width / height)
    if 1 / STRETCH < change < STRETCH:
        return []
    return [f"the image has {image.height}x{image.width} pixels (height x width) and is stretched or cropped to the video's {height}x{width}"]
