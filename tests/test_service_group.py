"""A worker that is two processes: they make videos together, cancel within a step, go on after a bad request, and end together."""

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.pipelines import enliven
from helpers.ranks import outcomes, run_ranks
from helpers.service import wait_for

from app.jobs import Jobs, Order
from app.queue import Queue
from app.serve import plan_worker, work
from app.tables import open_database
from videoqat.config import GenerationRuntimeConfig, SamplingConfig, ServeConfig, ServedModel, VideoParallelConfig, WorkerConfig
from videoqat.data.video_io import read_video
from videoqat.errors import ConfigError
from videoqat.generation.engine import Engine

SAMPLING = {"num_frames": 5, "height": 32, "width": 32, "num_inference_steps": 2, "max_text_tokens": 16, "fps": 16}
PROMPT = "a dress moves up"
DEFINITE = ("completed", "failed", "cancelled")


@pytest.fixture(scope="module")
def model(tiny_pipeline, tmp_path_factory) -> Path:
    return enliven(tiny_pipeline, tmp_path_factory.mktemp("lively") / "model")


@pytest.fixture
def config(model, tmp_path) -> WorkerConfig:
    return WorkerConfig(
        folder=str(tmp_path / "service"),
        models=[ServedModel("tiny", str(model), sampling={"max_text_tokens": 16})],
        runtime=GenerationRuntimeConfig(device="cpu"),
        parallel=VideoParallelConfig(cfg=2),
        warm_up=False,
        lease_s=5.0,
    )


def jobs_of(config: WorkerConfig) -> Jobs:
    return Jobs(open_database(config.database_url()), config.retries, config.lease_s)


def submit(config: WorkerConfig, *settings: dict) -> list[str]:
    Path(config.folder).mkdir(parents=True)
    orders = [Order(PROMPT, "tiny", "attn_qat", 3, SAMPLING | setting) for setting in settings]
    videos = jobs_of(config).submit(orders, 100)
    queue = Queue(config.queue_url())
    for video in videos:
        queue.send(video)
    return videos


def work_until_done(config: WorkerConfig, videos: list[str], to_cancel: str) -> tuple[dict, list[dict]]:
    """`worker` on a rank. The first one's other thread cancels a video once it denoises, and tells both to stop when all are in a definite state."""

    def tell() -> None:
        jobs = jobs_of(config)
        wait_for(lambda: (jobs.get(to_cancel)["step"] or 0) >= 1, "it denoises")
        jobs.cancel(to_cancel)
        wait_for(lambda: all(jobs.get(video)["status"] in DEFINITE for video in videos), "all ended")
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "0":
        threading.Thread(target=tell, daemon=True).start()
    result = work(config)
    return result, [jobs_of(config).get(video) for video in videos]


def work_and_die(config: WorkerConfig) -> dict:
    """`worker` on a rank; the second one's process ends in its first forward."""
    if os.environ["RANK"] == "1":
        original = Engine.generate

        def dying(self, *args, **options):
            self.transformers["transformer"].register_forward_hook(lambda *_: os._exit(9))
            return original(self, *args, **options)

        Engine.generate = dying
    return work(config)


@pytest.mark.dist
def test_two_processes_make_videos_cancel_and_end_together(config, model):
    videos = submit(config, {}, {"guidance_scale": 1.0}, {"num_inference_steps": 400}, {"height": 48})
    (first, rows), (second, _) = run_ranks(work_until_done, 2, config, videos, videos[2])
    assert (first, second) == ({"exit_code": 0}, {"exit_code": 0})
    assert [row["status"] for row in rows] == ["completed", "failed", "cancelled", "completed"]
    assert rows[1]["error_code"] == "invalid_request"
    assert "parallel.cfg=2" in rows[1]["error_message"]
    expected = Engine(model, GenerationRuntimeConfig(device="cpu")).generate(PROMPT, 3, SamplingConfig(**SAMPLING), "attn_qat").frames
    (file,) = Path(config.folder, "videos").glob(f"{videos[0]}*.mp4")
    assert np.corrcoef(read_video(file)[0].mean(-1).ravel(), expected.mean(-1).ravel())[0, 1] > 0.98  # compressed


@pytest.mark.dist
def test_a_process_that_dies_ends_the_worker_and_its_video_waits_for_another(config):
    (video,) = submit(config, {})
    found = outcomes(work_and_die, 2, config)
    assert [outcome.exit_code for outcome in found] == [1, 9]
    assert "WorkerLost" in found[0].error
    assert jobs_of(config).get(video)["status"] not in DEFINITE


def test_groups_that_cannot_be_are_refused(config, monkeypatch):
    with pytest.raises(ConfigError, match=r"parallel.sp \* parallel.cfg=2 is not legal; legal: a product of 1, .*; or torchrun --nproc-per-node 2"):
        plan_worker(config)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    config.parallel = VideoParallelConfig(sp=3)
    with pytest.raises(ConfigError, match=r"parallel.sp=3 is not legal; legal: a divisor of the 2 heads"):
        work(config)
    with pytest.raises(ConfigError, match=r"devices=.*torchrun starts such workers"):
        ServeConfig(parallel=VideoParallelConfig(cfg=2)).validate()
