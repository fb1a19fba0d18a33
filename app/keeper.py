"""What must be done now and then: the dead are buried, lost messages sent again, the old is cleared away, comparisons are measured.

Every server runs one. All it does to the database is conditional (`jobs.py`), so several of them do no harm.
"""

import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from app.comparisons import Comparisons, measure_into
from app.jobs import Jobs
from app.queue import Queue
from videoqat.console import say

EVERY_S = 2.0
ORPHANS_EVERY_S = 600.0
ORPHAN_AGE_S = 600.0
MEASURED_WITHIN_S = 1800.0


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
        duties = ((self.reap, self.resend, self.clear), (self.measure,))  # measuring takes long, and none of the others may wait for it
        self._threads = [threading.Thread(target=self._run, args=some, daemon=True) for some in duties]
        self._measuring: BaseProcess | None = None
        self._orphans_at = 0.0

    def start(self) -> None:
        """Begins, in threads of its own."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends it, if it has begun."""
        self._stopping.set()
        if self._measuring is not None:
            self._measuring.terminate()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=10)

    def _run(self, *duties: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            for duty in duties:
                try:
                    duty()
                except Exception as error:  # a database or queue that is away comes back
                    say(f"keeper: {duty.__name__}: {type(error).__name__}: {error}")
            self._stopping.wait(EVERY_S)

    def reap(self, worker: str | None = None, *, crashed: bool = True) -> None:
        """Videos of dead workers, or of one that is known to be dead, wait again, or fail; see `Jobs.reap`."""
        for ended in self.jobs.reap(worker, crashed=crashed):
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
        """Comparisons that are complete are measured, each in a process of its own: it takes long, and would make requests wait."""
        for row in self.comparisons.unmeasured():
            if self._stopping.is_set():
                return
            files = [(video["id"], video["file"]) for video in row["videos"] if video["status"] == "completed"]
            context = get_context("spawn")
            receiving, sending = context.Pipe(duplex=False)
            self._measuring = context.Process(target=measure_into, args=(sending, str(self.folder), files), daemon=True)
            self._measuring.start()
            sending.close()
            try:
                found = receiving.recv() if receiving.poll(MEASURED_WITHIN_S) else {"error": f"not measured within {MEASURED_WITHIN_S:.0f} s"}
            except EOFError:
                found = {"error": "the process that measured it ended without a word"}
            self._measuring.terminate()
            self._measuring.join()
            if not self._stopping.is_set():
                self.comparisons.measured(row["id"], found)


def remove(folder: Path, file: str) -> None:
    """A video's file, and the record beside it."""
    path = folder / file
    path.unlink(missing_ok=True)
    path.with_suffix(".json").unlink(missing_ok=True)
