"""The service as it runs: a server and a worker, asked over HTTP, then killed. The tests share one server; the last ones end it."""

import hashlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.pipelines import enliven
from helpers.service import SMALL, Running, wait_for

from videoqat.config import GenerateConfig, RuntimeConfig, SamplingConfig
from videoqat.data.video_io import read_video
from videoqat.generation import single

LONG = {"num_inference_steps": 400}  # longer than any test waits


@pytest.fixture(scope="module")
def model(tiny_pipeline, tmp_path_factory) -> Path:
    return enliven(tiny_pipeline, tmp_path_factory.mktemp("lively") / "model")


@pytest.fixture(scope="module")
def service(model, tmp_path_factory) -> Iterator[Running]:
    tiny = {"name": "tiny", "path": str(model), "sampling": {"max_text_tokens": 16}}
    settings = {"models": [tiny], "limits": {"max_queued": 60, "max_steps": 400}, "lease_s": 5.0, "page": False}
    running = Running(tmp_path_factory.mktemp("running") / "service", settings)
    yield running
    if running.process.poll() is None:
        running.stop()


def files(service: Running) -> set[str]:
    return {path.name for path in (service.folder / "videos").iterdir()}


def test_a_video_from_submitting_to_its_bytes(service, model, tmp_path):
    video = service.submit(seed=3, attention="attn_qat")
    assert video["status"] in ("queued", "in_progress")
    done = service.until(video["id"])
    assert (done["progress"], done["status"], done["error"], done["restarts"]) == (100, "completed", None, 0)
    assert done["created_at"] - 1 <= done["started_at"] <= done["completed_at"] + 1 <= done["expires_at"]
    result = done["result"]
    assert {(r["recipe"], r["kernel"], r["native"]) for r in result["receipts"]} == {("attn_qat", "torch", False), ("bf16", "sdpa", True)}
    timings = result["timings"]
    assert len(timings["steps_s"]) == 2
    assert all(timings[stage] > 0 for stage in ("text_s", "denoise_s", "vae_s", "encode_s", "total_s"))
    assert result["peak_memory_bytes"] > 2**20
    assert (result["recipe"]["name"], result["checkpoint_recipe"], result["num_tokens"]) == ("attn_qat", None, 32)
    assert str(model) not in json.dumps(done)
    content = service.http.get(done["content_url"])
    assert (content.status_code, content.headers["content-type"]) == (200, "video/mp4")
    assert hashlib.sha256(content.content).hexdigest() == result["video_sha256"]
    part = service.http.get(done["content_url"], headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, content.content[10:20])
    # What the service makes is what the command makes, to the byte.
    sampling = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2, max_text_tokens=16)
    wanted = GenerateConfig(model=str(model), prompt=video["prompt"], seed=3, recipe="attn_qat", out=str(tmp_path / "a.mp4"), sampling=sampling)
    single.generate(GenerateConfig(**{**vars(wanted), "runtime": RuntimeConfig(device="cpu")}))
    assert (tmp_path / "a.mp4").read_bytes() == content.content


def test_a_comparison_is_rendered_measured_and_floored(service, tmp_path):
    first = service.submit(compare=True, floor=True)
    url = f"/v1/comparisons/{first['comparison_id']}"
    comparison = wait_for(lambda: (found := service.http.get(url).json())["differences"] and found, "it is measured")
    reference, other, floor = comparison["videos"]
    assert (comparison["status"], comparison["reference"], comparison["floor"]) == ("completed", reference["id"], floor["id"])
    assert [video["attention"] for video in comparison["videos"]] == ["bf16", "attn_qat_search", "bf16"]
    assert len({video["seed"] for video in comparison["videos"]}) == 1
    measured = comparison["differences"]["videos"]
    assert measured[floor["id"]]["identical"], "the same recipe and seed on the same device"
    assert not measured[other["id"]]["identical"]
    frames = []
    for number, video in enumerate((reference, other)):
        path = tmp_path / f"{number}.mp4"
        path.write_bytes(service.http.get(video["content_url"]).content)
        frames.append(read_video(path)[0].astype(np.float64))
    psnr = np.mean([10 * np.log10(255**2 / ((a - b) ** 2).mean()) for a, b in zip(*frames, strict=True)])
    assert measured[other["id"]]["psnr_mean"] == pytest.approx(psnr)


def test_cancelling_ends_a_video_within_a_step_and_the_next_one_begins(service):
    running, waiting, after = service.submit(**LONG), service.submit(), service.submit()
    wait_for(lambda: (service.get(running["id"])["stage"] or {"step": 0})["step"] >= 2, "it denoises")
    now = service.get(running["id"])
    assert (now["status"], now["stage"]["name"], now["stage"]["steps"]) == ("in_progress", "denoising", 400)
    assert service.get(waiting["id"])["queue_position"] == 1
    assert service.http.get(f"/v1/videos/{running['id']}/content").status_code == 409
    assert service.http.post(f"/v1/videos/{waiting['id']}/cancel").json()["status"] == "cancelled"
    assert service.http.post(f"/v1/videos/{running['id']}/cancel").json()["cancel_requested"]
    ended = service.until(running["id"], "cancelled")
    assert ended["result"] is None
    assert service.http.post(f"/v1/videos/{running['id']}/cancel").status_code == 200  # once more: it is so already
    assert service.until(after["id"])["started_at"] >= ended["started_at"]
    assert service.get(waiting["id"])["started_at"] is None
    assert not any(running["id"] in name for name in files(service))


def test_deleting_a_video_in_progress_frees_the_worker(service):
    running, after = service.submit(**LONG), service.submit()
    wait_for(lambda: (service.get(running["id"])["stage"] or {"step": 0})["step"] >= 1, "it denoises")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: service.http.delete(f"/v1/videos/{running['id']}").status_code, range(2)))
    assert sorted(answers) == [200, 404]
    assert service.http.get(f"/v1/videos/{running['id']}").status_code == 404
    done = service.until(after["id"])
    assert not any(running["id"] in name for name in files(service))
    assert service.http.delete(f"/v1/videos/{done['id']}").json() == {"id": done["id"], "object": "video.deleted", "deleted": True}
    assert service.http.get(f"/v1/videos/{done['id']}/content").status_code == 404
    assert not any(done["id"] in name for name in files(service))


def test_a_client_that_goes_away_leaves_no_trace(service):
    video = service.submit()
    service.until(video["id"])
    host, port = service.url.removeprefix("http://").split(":")
    for request in (
        b'POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"prompt":',
        f"GET /v1/videos/{video['id']}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
        b"GARBAGE\r\n\r\n",
    ):
        with socket.create_connection((host, int(port))) as there:
            there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # reset, without a goodbye
            there.sendall(request)
    before = service.http.get("/v1/queue").json()["videos"]
    assert service.until(service.submit()["id"])["status"] == "completed"
    assert service.http.get("/v1/queue").json()["videos"]["completed"] == before["completed"] + 1


def fifty(service: Running) -> list[str]:
    """Fifty videos asked for at once, by ten clients; their ids in the order in which they were accepted."""
    wish = {"prompt": "a bag moves up", **SMALL, "num_inference_steps": 1}
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda seed: service.http.post("/v1/videos", json={**wish, "seed": seed}), range(50)))
    assert {answer.status_code for answer in answers} == {200}
    page = service.http.get("/v1/videos", params={"limit": 50}).json()["data"]
    assert {video["id"] for video in page} == {answer.json()["id"] for answer in answers}
    return [video["id"] for video in reversed(page)]


def made(service: Running) -> float:
    """Videos that were completed since the service was set up, however often they were."""
    lines = service.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("videoqat_videos_total") and 'outcome="completed"' in line)


def test_fifty_at_once_end_in_order_none_lost_none_twice(service):
    before = made(service)
    ids = fifty(service)
    videos = [service.until(video) for video in ids]
    starts = [video["started_at"] for video in videos]
    assert starts == sorted(starts)
    assert {video["restarts"] for video in videos} == {0}
    assert {video["seed"] for video in videos} == set(range(50))
    assert made(service) == before + 50
    assert len([name for name in files(service) if name.endswith(".mp4") and any(video in name for video in ids)]) == 50


def test_killed_workers_and_servers_lose_nothing(service):
    """A worker, then the server, killed in the middle of twenty videos: the worker is replaced, and its successor leaves with the server."""
    running = service.submit(**{**LONG, "num_inference_steps": 60})
    ids = [running["id"], *(service.submit(seed=seed)["id"] for seed in range(20))]
    wait_for(lambda: (service.get(running["id"])["stage"] or {"step": 0})["step"] >= 1, "it denoises")
    first = service.get(running["id"])["worker"]
    os.kill(service.worker_pid(), signal.SIGKILL)
    wait_for(lambda: service.get(running["id"])["restarts"] == 1, "its death is noticed")
    wait_for(lambda: sum(service.get(video)["status"] == "completed" for video in ids) >= 3, "some are made by another one")
    second = service.worker_pid()
    service.kill()
    wait_for(lambda: not Path(f"/proc/{second}").exists(), "the worker follows its server")
    service.start()
    videos = [service.until(video) for video in ids]
    assert [video["restarts"] for video in videos] == [1] + [0] * 20, "a worker that can let go of its video does"
    assert videos[0]["worker"] != first
    assert [video["started_at"] for video in videos] == sorted(video["started_at"] for video in videos), "it kept its place"
    assert all(service.http.head(video["content_url"]).status_code == 200 for video in videos)
    assert len([name for name in files(service) if name.endswith(".mp4") and any(video in name for video in ids)]) == 21


@pytest.mark.slow
def test_without_settings_it_serves_the_embedded_model_to_this_machine_alone(tmp_path):
    running = Running(tmp_path / "videoqat-service", None)
    try:
        assert running.url.startswith("http://127.0.0.1:")
        offered = running.http.get("/v1/models").json()
        (model,) = offered["data"]
        assert (model["id"], model["defaults"]["size"], model["defaults"]["num_inference_steps"]) == ("garments", "128x128", 25)
        assert (offered["limits"]["max_pixels"], offered["limits"]["max_frames"]) == (256 * 256, 33)
        assert running.http.get("/v1/queue").json()["workers"][0]["models"] == ["garments"]  # warmed up
        first = running.submit(compare=True)
        assert running.until(first["id"])["result"]["recipe"]["name"] == "bf16"
    finally:
        assert running.stop() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"videoqat-service", "videoqat-service.yaml", "videoqat-service.log"}


def test_told_to_end_it_lets_go_of_what_is_in_progress(service):
    running, waiting = service.submit(**LONG), service.submit()
    wait_for(lambda: (service.get(running["id"])["stage"] or {"step": 0})["step"] >= 1, "it denoises")
    worker = service.worker_pid()
    assert service.stop() == 0
    assert not Path(f"/proc/{worker}").exists()
    from app.jobs import Jobs
    from app.tables import open_database

    jobs = Jobs(open_database(f"sqlite:///{service.folder / 'service.db'}"), 1, 5.0)
    assert [jobs.get(video["id"])["status"] for video in (running, waiting)] == ["queued", "queued"]
    assert jobs.get(running["id"])["crashes"] == 0
    assert jobs.workers() == []
    wait_for(lambda: not service.processes(), "no process of this server, nor of the one that was killed, is left")
