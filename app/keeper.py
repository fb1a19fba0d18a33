"""What must be done now and then: the dead are buried, lost messages sent again, the old is cleared away, comparisons are measured.

Every server runs one. All it does to the database is conditional (`jobs.py`), so several of them do no harm.
"""

import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from app.comparisons import Comparisons, measure
from app.jobs import Jobs
from app.queue import Queue
from videoqat.console import say

EVERY_S = 2.0
ORPHANS_EVERY_S = 600.0
ORPHAN_AGE_S = 600.0


class Keeper:
    """See the module.

    Args:
        jobs: the videos.
        comparisons: and what they belong to.
        queue: where messages go.
        sending: held while a message is sent, so that messages stand in the order of the videos.
        folder: of the videos' files.
        keep_s: how long a video is kept after it ended.
    """

    def __init__(self, jobs: Jobs, comparisons: Comparisons, queue: Queue, sending: threading.Lock, folder: Path, keep_s: float) -> None:
        self.jobs, self.comparisons, self.queue, self.sending = jobs, comparisons, queue, sending
        self.folder, self.keep_s = folder, keep_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._measuring: dict[str, Future[dict[str, object]]] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._orphans_at = 0.0

    def start(self) -> None:
        """Begins, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self._stopping.set()
        self._thread.join(timeout=10)
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for duty in (self.reap, self.resend, self.clear, self.measure):
                try:
                    duty()
                except Exception as error:  # a database or queue that is away comes back
                    say(f"keeper: {duty.__name__}: {type(error).__name__}: {error}")
            self._stopping.wait(EVERY_S)

    def reap(self, worker: str | None = None) -> None:
        """Videos of dead workers, or of one that is known to be dead, wait again, or fail."""
        for ended in self.jobs.reap(worker):
            say(f"{ended.id}: its worker is gone; it is {ended.status} now")
        if worker is not None:
            self.jobs.unregister(worker)

    def resend(self) -> None:
        """Messages for waiting videos that have none. One more than needed does no harm."""
        with self.sending:
            pending = self.queue.pending()
            for video in self.jobs.waiting():
                if video not in pending:
                    self.queue.send(video)

    def clear(self) -> None:
        """What is too old goes, and files that belong to nothing."""
        for file in self.jobs.expire(self.keep_s):
            remove(self.folder, file)
        if time.monotonic() < self._orphans_at:
            return
        self._orphans_at = time.monotonic() + ORPHANS_EVERY_S
        known = self.jobs.files()
        leases = {name.split(".")[1] if name.endswith(".mp4") else name for name in known}
        for path in self.folder.iterdir():
            parts = path.name.removeprefix(".").split(".")
            if len(parts) > 1 and parts[1] not in leases and time.time() - path.stat().st_mtime > ORPHAN_AGE_S:
                path.unlink(missing_ok=True)

    def measure(self) -> None:
        """Comparisons that are complete are measured, in another process: it takes long and would make requests wait."""
        for comparison, future in list(self._measuring.items()):
            if not future.done():
                continue
            del self._measuring[comparison]
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                self._pool = None
            self.comparisons.measured(comparison, future.result() if error is None else {"error": f"{type(error).__name__}: {error}"})
        for row in self.comparisons.unmeasured():
            if row["id"] not in self._measuring:
                files = [(video["id"], video["file"]) for video in row["videos"] if video["status"] == "completed"]
                if self._pool is None:
                    self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
                self._measuring[row["id"]] = self._pool.submit(measure, str(self.folder), files)


def remove(folder: Path, file: str) -> None:
    """A video's file, and the record beside it."""
    path = folder / file
    path.unlink(missing_ok=True)
    path.with_suffix(".json").unlink(missing_ok=True)
