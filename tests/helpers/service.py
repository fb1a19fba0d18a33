"""A running service: `videoqat serve` in a process of its own, asked over HTTP, or in this one; PostgreSQL and Redis, of Debian's packages."""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.catalogue import open_catalogue
from app.comparisons import Comparisons
from app.jobs import Jobs
from app.queue import Queue
from app.server import Service
from app.tables import open_database
from videoqat.config import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"num_frames": 5, "size": "32x32", "num_inference_steps": 2}
PATIENCE_S = 180.0  # for a busy machine; nothing here is about speed


def wait_for(what: Callable[[], Any], why: str, patience_s: float = PATIENCE_S) -> Any:
    """What `what` returns, as soon as it is true."""
    deadline = time.monotonic() + patience_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"{why}: not within {patience_s:.0f} s"
        time.sleep(0.05)
    return found


def service_of(config: ServeConfig, folder: Path) -> Service:
    """What the API works with, without a server or workers, in `folder`."""
    config = dataclasses.replace(config, folder=str(folder))
    (folder / "videos").mkdir()
    engine = open_database(config.database_url())
    jobs = Jobs(engine, config.retries, config.lease_s)
    return Service(config, open_catalogue(config), jobs, Comparisons(engine), Queue(config.queue_url()), threading.Lock())


class Running:
    """A server with its workers, started with `settings`, in `folder`."""

    def __init__(self, folder: Path, settings: dict[str, Any] | None) -> None:
        """Without settings it is `videoqat serve` as it comes, in the folder that it takes then, but for the port, which others may have."""
        self.folder = folder
        self.config = folder.with_suffix(".yaml")
        quick = {"folder": str(folder), "warm_up": False, "page": False, "devices": ["cpu"]}
        self.config.write_text(yaml.safe_dump({"port": 0} | ({} if settings is None else quick | settings)))
        self.log = folder.with_suffix(".log")
        self.start()

    def start(self) -> None:
        """Starts it, and waits until a worker is ready."""
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "videoqat", "serve", "--config", str(self.config)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(words, cwd=self.folder.parent, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.url = wait_for(self._find_url, "the server starts")
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.wait_ready()

    def _find_url(self) -> str | None:
        text = self.log.read_text()
        assert self.process.poll() is None, text[-3000:]
        found = re.search(r"videoqat serves at (\S+)", text)
        return found[1] if found else None

    def wait_ready(self) -> None:
        """Waits until a video asked for now would be made."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                return self.http.get("/ready").status_code == 200
            return False

        wait_for(is_ready, "a worker is ready")

    def kill(self, *others: int) -> None:
        """The server ends, and the processes with these numbers, without a word; nobody else."""
        self.process.kill()
        for other in others:
            os.kill(other, signal.SIGKILL)
        self.process.wait()
        self.http.close()

    def worker_pid(self) -> int:
        """Of the only worker."""
        (worker,) = self.http.get("/v1/queue").json()["workers"]
        return int(worker["pid"])

    def processes(self) -> list[int]:
        """Every process that was started in the service's folder, by whichever of its servers."""
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and (process / "cwd").readlink() == self.folder.parent:
                    found.append(int(process.name))
        return found

    def stop(self) -> int:
        """Told to end, it does. Returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        self.http.close()
        return self.process.wait(60)

    def submit(self, **changes: Any) -> dict[str, Any]:
        """A small video that is wanted."""
        answer = self.http.post("/v1/videos", json={"prompt": "a sneaker moves left", **SMALL, **changes})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def get(self, video: str) -> dict[str, Any]:
        """A video."""
        found: dict[str, Any] = self.http.get(f"/v1/videos/{video}").json()
        return found

    def until(self, video: str, *statuses: str) -> dict[str, Any]:
        """The video, once it has one of these states."""
        statuses = statuses or ("completed",)

        def reached() -> dict[str, Any] | None:
            now = self.get(video)
            ended = now["status"] in ("completed", "failed", "cancelled")
            assert now["status"] in statuses or not ended, now
            return now if now["status"] in statuses else None

        found: dict[str, Any] = wait_for(reached, f"{video} is {' or '.join(statuses)}")
        return found


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _program(name: str, package: str) -> str:
    """The path of a server program, or the test is skipped, saying why."""
    found = shutil.which(name) or next(iter(sorted(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")))), None)
    if found is None:
        pytest.skip(f"needs {name}, of Debian's package {package}, which is not installed")
    return found


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A Redis of our own; yields its URL."""
    port = free_port()
    words = [_program("redis-server", "redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with open(folder / "redis.log", "w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:

        def answers() -> bool:
            with socket.socket() as there:
                return there.connect_ex(("127.0.0.1", port)) == 0

        wait_for(answers, "Redis answers")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def postgresql_server(folder: Path) -> Iterator[str]:
    """A PostgreSQL of our own, which won't run as root: then as the package's user. Yields its URL."""
    initdb, postgres = _program("initdb", "postgresql"), _program("postgres", "postgresql")
    port, data = free_port(), folder / "data"
    folder.mkdir(parents=True)
    as_user: list[str] = []
    if os.getuid() == 0:
        as_user = [_program("setpriv", "util-linux"), "--reuid=postgres", "--regid=postgres", "--init-groups"]
        shutil.chown(folder, "postgres")
        for parent in folder.parents:  # pytest's folders are their owner's alone; others may pass through
            if parent == Path("/"):
                break
            parent.chmod(parent.stat().st_mode | 0o011)
    with open(folder / "log", "w") as log:
        made = subprocess.run([*as_user, initdb, "-D", data, "-U", "tester", "-A", "trust", "-N"], stdout=log, stderr=log, check=False)
        if made.returncode:
            pytest.skip(f"PostgreSQL can't be set up here: {(folder / 'log').read_text()[-300:]}")
        process = subprocess.Popen([*as_user, postgres, "-D", data, "-p", str(port), "-k", folder, "-c", "fsync=off"], stdout=log, stderr=log)
    url = f"postgresql+psycopg://tester@127.0.0.1:{port}/postgres"
    try:

        def answers() -> bool:
            import psycopg

            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(url.replace("+psycopg", "")).close()
                return True
            return False

        wait_for(answers, "PostgreSQL answers")
        yield url
    finally:
        process.send_signal(signal.SIGINT)  # at once, also with connections open
        process.wait(30)
