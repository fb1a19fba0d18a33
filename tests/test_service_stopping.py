"""A worker within this process: told to stop in the middle of a step which takes long, its video waits again, and nothing counts it as a crash. And
what it tells of a video that failed.
"""

import threading
import time
from pathlib import Path

import pytest

from app import serve
from app.jobs import Jobs, Order, new_identity
from app.tables import open_database
from app.worker import Worker
from videoqat.config import ServeConfig, ServedModel, ServiceConfig
from videoqat.generation import single
from videoqat.generation.pool import EnginePool

SAMPLING = {"num_frames": 5, "height": 32, "width": 32, "num_inference_steps": 2}


def hang(*_: object) -> None:
    """In the place of a worker's process: it hears nothing."""
    time.sleep(60)


@pytest.fixture
def worker(tiny_pipeline, tmp_path, monkeypatch) -> Worker:
    monkeypatch.setattr(EnginePool, "get", lambda *_: None)
    longer = tmp_path / f"{tiny_pipeline.name}-qat"  # begins as the other's path does
    longer.symlink_to(tiny_pipeline)
    (tmp_path / tiny_pipeline.name).symlink_to(tiny_pipeline)
    models = [ServedModel("tiny", str(tmp_path / tiny_pipeline.name)), ServedModel("better", str(longer))]
    config = ServiceConfig(folder=str(tmp_path / "service"), models=models, warm_up=False, lease_s=1.0)
    config.runtime.device = "cpu"
    return Worker(config, "here:cpu:1")


def test_a_failure_is_told_without_this_machines_paths(worker, tmp_path, monkeypatch):
    def full(engine, wanted, fingerprint, on_step):
        raise OSError(28, f"No space left on device, for {wanted.model}", wanted.out)

    monkeypatch.setattr(single, "render", full)
    (video,) = worker.jobs.submit([Order("a dress moves up", "better", "bf16", 3, SAMPLING)], 9)
    worker.make(video)
    row = worker.jobs.get(video)
    assert row["status"] == "failed"
    assert row["error_message"].startswith("OSError: [Errno 28] No space left on device, for better: 'folder/videos/")
    assert str(tmp_path) not in row["error_message"]


def test_a_worker_lives_until_its_last_step_is_done(worker, monkeypatch):
    ended_early = []

    def step_that_takes_long(engine, wanted, fingerprint, on_step):
        worker.stopping.set()
        for _ in range(25):  # 2.5 leases
            time.sleep(0.1)
            ended_early.extend(worker.jobs.reap())
        on_step(1, 2)

    monkeypatch.setattr(single, "render", step_that_takes_long)
    (video,) = worker.jobs.submit([Order("a dress moves up", "tiny", "bf16", 3, SAMPLING)], 9)
    worker.queue.send(video)
    worker.run()
    row = worker.jobs.get(video)
    assert (ended_early, row["status"], row["crashes"]) == ([], "queued", 0)
    assert worker.queue.pending() == {video}


@pytest.mark.parametrize(("told", "after"), [(True, ("queued", 0)), (False, ("failed", 1))])
def test_a_worker_that_its_server_ends_has_not_crashed(told, after, tmp_path: Path, monkeypatch):
    jobs = Jobs(open_database(f"sqlite:///{tmp_path / 'service.db'}"), retries=0, lease_s=60.0)
    (video,) = jobs.submit([Order("a dress moves up", "tiny", "bf16", 3, SAMPLING)], 9)
    begun = threading.Event()

    def identity(device: str) -> str:
        name = new_identity(device)
        jobs.claim(video, name)
        begun.set()
        return name

    monkeypatch.setattr("app.jobs.new_identity", identity)
    monkeypatch.setattr(serve, "_worker_process", hang if told else int)  # int(...) of these arguments ends at once, with a traceback
    monkeypatch.setattr(serve, "PATIENCE_S", 0.1)
    monkeypatch.setattr(serve, "FIRST_PAUSE_S", 60.0)
    crew = serve._Crew(ServeConfig(folder=str(tmp_path)), ["cpu"], jobs.reap)
    crew.start()
    assert begun.wait(60)
    while not told and jobs.get(video)["status"] == "in_progress":
        time.sleep(0.05)
    crew.stop()
    row = jobs.get(video)
    assert (row["status"], row["crashes"]) == after
