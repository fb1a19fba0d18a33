"""The service as it runs on several machines: PostgreSQL holds the videos, Redis hands them out, and a worker stands alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.pipelines import enliven
from helpers.service import ROOT, Running, postgresql_server, redis_server, wait_for
from test_service_running import fifty, made


@pytest.fixture(scope="module")
def service(tiny_pipeline, tmp_path_factory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("machines")
    model = enliven(tiny_pipeline, folder / "model")
    (folder / "redis").mkdir()
    with postgresql_server(folder / "cluster") as database, redis_server(folder / "redis") as queue:
        (folder / "database-url").write_text(database + "\n")
        settings = {
            "models": [{"name": "tiny", "path": str(model), "sampling": {"max_text_tokens": 16}}],
            "database": f"@{folder / 'database-url'}",
            "queue": queue,
            "lease_s": 5.0,
            "page": False,
        }
        running = Running(folder / "service", settings)
        yield running
        if running.process.poll() is None:
            running.stop()


@pytest.fixture(scope="module")
def alone(service) -> Iterator[subprocess.Popen]:
    """`videoqat worker`, whose server has none of its own."""
    config = service.folder.with_name("worker.yaml")
    config.write_text(
        "".join(line for line in service.config.read_text().splitlines(keepends=True) if not line.startswith(("port", "devices", "- cpu", "page")))
    )
    words = [sys.executable, "-m", "videoqat", "worker", "--config", str(config), "runtime.device=cpu"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    with open(service.folder.with_name("worker.log"), "w") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    yield process
    process.kill()
    process.wait()


def test_fifty_at_once_through_the_death_of_server_and_worker(service, request):
    """Both are killed in one moment: nobody can tell of it, so the lease has to run out. Then the server comes back, and a worker by itself."""
    ids = fifty(service)
    wait_for(lambda: sum(service.get(video)["status"] == "completed" for video in ids) >= 3, "some are made")
    service.kill(service.worker_pid())
    service.config.write_text(service.config.read_text().replace("devices:\n- cpu\n", "devices: []\n"))
    request.getfixturevalue("alone")
    service.start()
    videos = [service.until(video) for video in ids]
    starts = [video["started_at"] for video in videos if not video["restarts"]]
    assert starts == sorted(starts)
    assert sum(video["restarts"] for video in videos) <= 1  # the one that was being made, if one was
    assert made(service) == 50
    assert all(service.http.head(video["content_url"]).status_code == 200 for video in videos)


def test_redis_may_forget_everything(service):
    """Messages are in Redis; what is wanted is in the database."""
    import redis

    first = service.submit(num_inference_steps=100)["id"]
    ids = [service.submit(seed=seed)["id"] for seed in range(3)]
    wait_for(lambda: service.get(first)["status"] == "in_progress", "it is begun")
    redis.Redis.from_url(yaml_queue(service.config)).flushall()
    assert {service.until(video)["status"] for video in [first, *ids]} == {"completed"}


def test_a_worker_told_to_end_lets_go_of_its_video(service, alone):
    running = service.submit(num_inference_steps=100)["id"]
    wait_for(lambda: (service.get(running)["stage"] or {"step": 0})["step"] >= 1, "it denoises")
    assert service.get(running)["worker"] == service.http.get("/v1/queue").json()["workers"][0]["id"]
    alone.send_signal(signal.SIGTERM)
    assert alone.wait(60) == 0
    left = service.get(running)
    assert (left["status"], left["restarts"], left["queue_position"]) == ("queued", 0, 1)
    assert service.http.get("/ready").status_code == 503
    assert service.http.delete(f"/v1/videos/{running}").status_code == 200


def yaml_queue(config: Path) -> str:
    (line,) = [line for line in config.read_text().splitlines() if line.startswith("queue: ")]
    return line.removeprefix("queue: ")
