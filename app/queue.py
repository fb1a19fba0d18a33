"""Handing out work: huey, in an SQLite file or in Redis.

A message is the id of a video that waits. Whoever takes one makes the video whose turn it is by the database (`jobs.py`). So a message that comes
twice does no harm, and one that is lost, with the worker that had taken it or with Redis itself, is sent again (`keeper.py`).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huey import Huey, RedisHuey, SqliteHuey
from huey.registry import Message
from huey.serializer import Serializer

from videoqat.config.serving import without_password
from videoqat.errors import UserError

NAME = "videoqat"


class _Json(Serializer):  # type: ignore[misc]
    """Messages as JSON: huey's own way, pickle, would let whoever can write to Redis run programs on the workers."""

    def _serialize(self, data: Any) -> bytes:
        return json.dumps(list(data) if isinstance(data, Message) else data).encode()

    def _deserialize(self, data: bytes) -> Any:
        loaded = json.loads(data)
        return Message(*loaded) if isinstance(loaded, list) else loaded


class Queue:
    """The queue at a URL.

    Args:
        url: `redis://...`, `rediss://...` or `sqlite:///FILE`.
        make_video: what a worker does about a message, given the id in it; servers, which only send, have none.

    Raises:
        UserError: it can't be reached.
    """

    def __init__(self, url: str, make_video: Callable[[str], None] | None = None) -> None:
        try:
            self.huey: Huey = _open(url)
            self.huey.pending_count()
        except Exception as error:
            raise UserError(f"queue={without_password(url)} can't be used: {error}") from error

        def video(name: str) -> None:
            if make_video is None:
                raise RuntimeError("this process only sends messages")
            make_video(name)

        self._send = self.huey.task(name="video")(video)

    def send(self, video: str) -> None:
        """Puts a video at the end of the queue."""
        self._send(video)

    def take(self) -> Callable[[], None] | None:
        """The next message, taken out, as what is to be done about it; None: there is none (Redis waits a second for one)."""
        task = self.huey.dequeue()
        return None if task is None else lambda: self.huey.execute(task)

    def pending(self) -> set[str]:
        """Videos for which messages wait."""
        return {task.args[0] for task in self.huey.pending() if task.args}


def _open(url: str) -> Huey:
    if url.startswith("sqlite:///"):
        file = Path(url.removeprefix("sqlite:///"))
        file.parent.mkdir(parents=True, exist_ok=True)
        return SqliteHuey(NAME, filename=str(file), results=False, serializer=_Json(), fsync=True, strict_fifo=True, timeout=10)
    return RedisHuey(NAME, url=url, results=False, serializer=_Json())
