"""One worker: a process with a device of its own that makes one video at a time.

It reports after every denoising step, and is told in reply whether the video is still wanted. A second thread reports while a step or a load takes
long. Told to stop, it leaves its video after the step and the video waits again. When the server that started it is gone, it stops, too.
"""

import os
import signal
import socket
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from sqlalchemy.exc import SQLAlchemyError

from app.catalogue import Catalogue, Model, open_catalogue
from app.group import Group, WarmUp
from app.jobs import Jobs, Row
from app.queue import Queue
from app.tables import open_database
from videoqat.config import GenerateConfig, SamplingConfig, ServiceConfig
from videoqat.console import say
from videoqat.errors import GenerationCancelled, NonFiniteError, UserError, WorkerLost
from videoqat.files import writable_folder
from videoqat.generation import single
from videoqat.generation.division import check_guided
from videoqat.generation.engine import Engine
from videoqat.generation.pool import EnginePool, warm_up

IDLE_S = 0.1  # how often an SQLite queue is looked into
BEATS_PER_LEASE = 6
LOCK_WAIT_S = 120.0  # for another worker that is about to leave this GPU


class DeviceLock:
    """That no other worker of this machine, whoever started it, has the same GPU. It goes with the process, however that ends.

    An abstract socket: the kernel keeps its name, in no folder.

    Args:
        name: of the GPU, such as its UUID.
        wait_s: how long to wait for another worker.

    Raises:
        UserError: it is still taken after that.
    """

    def __init__(self, name: str, wait_s: float = LOCK_WAIT_S) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self._socket.bind(f"\0videoqat:{name}")
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise UserError(f"another worker has the GPU {name}; legal: one worker for each GPU") from None
                time.sleep(min(0.2, wait_s))

    def release(self) -> None:
        """Lets others have it."""
        self._socket.close()


class Worker:
    """See the module.

    Args:
        config: the service's; `runtime.device` is this worker's.
        identity: from `jobs.new_identity`.
        parent: a pipe's end that becomes readable, or breaks, when the worker is to stop; None: it stands alone.
        group: the processes that make its videos, of which this is the first; None: it is the only one.

    Raises:
        UserError: device, database, queue, models or folder can't be used.
    """

    def __init__(self, config: ServiceConfig, identity: str, parent: Connection | None = None, group: Group | None = None) -> None:
        self.identity = identity
        self.config = config
        self.group = group or Group()
        self.pool = EnginePool(config.runtime, config.memory.device_gib, config.memory.host_gib, self.group.division)
        self._lock = lock_device(self.pool.device)
        self.videos = writable_folder("folder", Path(config.folder).absolute() / "videos")
        self.catalogue: Catalogue = open_catalogue(config)
        self.jobs = Jobs(open_database(config.database_url()), config.retries, config.lease_s)
        self.queue = Queue(config.queue_url(), self.make)
        self.stopping = threading.Event()
        self._ended = threading.Event()
        self.broken = False  # whether the device, or the group, is beyond use
        self._lost: WorkerLost | None = None
        self._parent = parent
        self._lease: str | None = None
        self._unwanted: str | None = None  # a lease that was found to be gone
        self._state = "starting"
        self._fingerprints: dict[str, str] = {}
        self.jobs.register(identity, socket.gethostname(), os.getpid(), str(self.pool.device))

    def run(self) -> None:
        """Works until told to stop.

        Raises:
            WorkerLost: another process of its group ended.
        """
        beats = threading.Thread(target=self._beat, daemon=True)
        beats.start()
        try:
            if self.config.warm_up:
                self._warm_up()
            self._set_state("ready")
            say(f"worker {self.identity} is ready")
            while not self.stopping.is_set() and not self.broken:
                try:
                    message = self.queue.take()
                except Exception as error:  # Redis away, or SQLite busy for long: neither is a reason to lose a warm GPU
                    say(f"worker {self.identity}: the queue doesn't answer: {error}")
                    self.stopping.wait(1.0)
                    continue
                if message is None:
                    self.group.idle()
                    self.stopping.wait(IDLE_S)
                elif self.stopping.is_set():
                    break  # the keeper sends the message again
                else:
                    message()
            if self._lost is not None:
                raise self._lost
        finally:
            self._ended.set()
            beats.join(timeout=5)
            self.jobs.unregister(self.identity)

    def make(self, _: str) -> None:
        """Makes the video whose turn it is, if one waits, and leaves it in a definite state. That need not be the one in the message: a video that is
        begun again keeps its place, and its message comes last."""
        row = self.jobs.claim_next(self.identity)
        if row is None:
            return
        video, lease = row["id"], row["lease"]
        self._lease = lease
        self._set_state("busy")
        out = self.videos / f"{row['id']}.{lease}.mp4"
        try:
            self._complete(row, out, self._render(row, out))
            return
        except GenerationCancelled:
            if self.jobs.release(lease) == "queued":
                self.queue.send(video)
        except WorkerLost as error:
            self._lost = error  # huey would keep an exception to itself
            self.broken = True  # the lease runs out, and the video is begun again, as that of any worker which is gone
            return
        except UserError as error:
            self._fail(row, "invalid_request", str(error))
        except NonFiniteError as error:
            self._fail(row, "non_finite", str(error))
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._fail(row, "out_of_memory", str(error) or "the host's memory is full")
        except torch.AcceleratorError as error:
            self.broken = True  # nothing can be computed in this process any more; a new one takes its place
            self._fail(row, "device_failed", str(error))
        except Exception as error:
            traceback.print_exc()
            self._fail(row, "internal_error", f"{type(error).__name__}: {error}")
        finally:
            self._lease = None
            self._set_state("ready")
        if (self.jobs.get(video) or {}).get("file") == out.name:
            return  # the database took it, but its answer was lost on the way
        for path in (out, out.with_suffix(".json")):
            path.unlink(missing_ok=True)
        if self.pool.device.type == "cuda" and not self.broken:
            torch.cuda.empty_cache()

    def _render(self, row: Row, out: Path) -> Row:
        model = self.catalogue.models.get(row["model"])
        if model is None or row["attention"] not in (*self.catalogue.recipes, "checkpoint"):
            raise UserError(f"worker {self.identity} doesn't offer model={row['model']!r} with attention={row['attention']!r}")
        sampling = SamplingConfig(**row["sampling"])
        check_guided(self.config.parallel, model.path, sampling)
        engine = self._engine(model)
        self._report("text", 0)

        def on_step(done: int, total: int) -> None:
            self._report("decoding" if done == total else "denoising", done)

        wanted = GenerateConfig(
            model=model.path,
            recipe=self._recipe_spec(row["attention"]),
            prompt=row["prompt"],
            seed=row["seed"],
            out=str(out),
            sampling=sampling,
            runtime=self.config.runtime,
            parallel=self.config.parallel,
        )
        with self.group.together():
            self.group.tell(wanted)
            record = single.render(engine, wanted, self._fingerprints[model.path], self.group.agreeing(on_step))
        return self._result(record, model)

    def _engine(self, model: Model) -> Engine:
        """A model on the device, and its fingerprint from before it was loaded."""
        if model.path not in (*self.pool.resident, *self.pool.set_aside):
            self._fingerprints[model.path] = single.model_fingerprint(model.path)
        return self.pool.get(model.path)

    def _recipe_spec(self, attention: str) -> str:
        """The name or file by which the recipe is found again."""
        names = dict(zip(self.config.recipe_names(), self.config.recipes, strict=True))
        return names.get(attention, attention)

    def _result(self, record: Row, model: Model) -> Row:
        """What users are told of a video's record: all of it but this machine's paths."""
        kept = ("recipe", "receipts", "timings", "peak_memory_bytes", "num_tokens", "max_text_tokens", "dtype", "video_sha256", "model_fingerprint")
        provenance = {key: record["provenance"][key] for key in ("date", "commit", "versions", "device")}
        warnings = [self.catalogue.hide_paths(warning) for warning in record["warnings"]]
        trained_for = None if model.trained_for is None else model.trained_for.to_dict()
        return {key: record[key] for key in kept} | {"warnings": warnings, "checkpoint_recipe": trained_for, "provenance": provenance}

    def _complete(self, row: Row, out: Path, result: Row) -> None:
        """Tells the database, also one that is away for a moment: the video is there, and took long."""
        for pause_s in (1.0, 2.0, 4.0, 0.0):
            try:
                wanted = self.jobs.complete(row["lease"], out.name, result, _sums(row, result))
                break
            except SQLAlchemyError:
                if not pause_s:
                    raise
                time.sleep(pause_s)
        if not wanted:
            raise GenerationCancelled

    def _fail(self, row: Row, code: str, message: str) -> None:
        told = self.catalogue.hide_paths(" ".join(message.split())).replace(str(self.videos.parent), "folder")[:2000]
        self.jobs.fail(row["lease"], code, told)

    def _report(self, stage: str, step: int) -> None:
        """Between steps: progress to the database, and from it whether to go on."""
        assert self._lease is not None
        if self.stopping.is_set() or self._unwanted == self._lease:
            raise GenerationCancelled
        try:
            wanted = self.jobs.report(self._lease, stage=stage, step=step)
        except SQLAlchemyError as error:  # for a while: what is being made isn't given up for that
            say(f"worker {self.identity}: the database doesn't answer: {error}")
            return
        if not wanted:
            raise GenerationCancelled

    def _beat(self) -> None:
        """The second thread: signs of life, also while the last step before a stop takes long, and listening for the end."""
        while not self._ended.is_set():
            try:
                self.jobs.alive(self.identity, self._state, self._resident())
                lease = self._lease
                if lease is not None and not self.jobs.report(lease):
                    self._unwanted = lease
            except SQLAlchemyError as error:
                say(f"worker {self.identity}: the database doesn't answer: {error}")
            if self._parent is None or self.stopping.is_set():
                self._ended.wait(self.config.lease_s / BEATS_PER_LEASE)
            elif self._parent.poll(self.config.lease_s / BEATS_PER_LEASE):
                self.stopping.set()

    def _resident(self) -> list[str]:
        return [name for name, model in self.catalogue.models.items() if model.path in self.pool.resident]

    def _set_state(self, state: str) -> None:
        self._state = state
        try:
            self.jobs.alive(self.identity, state, self._resident())
        except SQLAlchemyError as error:
            say(f"worker {self.identity}: the database doesn't answer: {error}")

    def _warm_up(self) -> None:
        model = self.catalogue.default
        recipes = [self._recipe_spec(name) for name in self.catalogue.compare]
        engine = self._engine(model)
        with self.group.together():
            self.group.tell(WarmUp(model.path, model.sampling, recipes))
            warm_up(engine, model.sampling, recipes)


def _sums(row: Row, result: Row) -> list[tuple[str, str, float]]:
    """What a completed video adds to the sums of /metrics besides itself: (name, labels, value)."""
    which = f"{row['model']}\t{row['attention']}"
    return [("stage_seconds", f"{which}\t{stage}", result["timings"][f"{stage}_s"]) for stage in ("text", "denoise", "vae", "encode", "total")]


def lock_device(device: torch.device) -> DeviceLock | None:
    """The lock of a GPU; there is none of a CPU."""
    if device.type != "cuda":
        return None
    return DeviceLock(str(torch.cuda.get_device_properties(device).uuid))


def main(config: ServiceConfig, identity: str, parent: Connection | None = None, group: Group | None = None) -> int:
    """A worker's whole life, in this process. Returns its exit code.

    Raises:
        WorkerLost: another process of its group ended.
    """
    try:
        worker = Worker(config, identity, parent, group)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.stopping.set())
        worker.run()
    except UserError as error:
        say(f"worker {identity}: {error}")
        return 2
    return 1 if worker.broken else 0
