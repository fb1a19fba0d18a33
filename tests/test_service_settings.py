"""The service before it serves: settings that can't be, dry runs, and ports, GPUs and queues that can't be had."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.queue import Queue
from app.serve import serve
from app.worker import DeviceLock
from videoqat.commands import execute
from videoqat.config import LimitsConfig, ServeConfig, ServedModel, load
from videoqat.errors import ConfigError, UserError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["host=0.0.0.0"], ["host", "token_file", "open_to_all"]),
        (["models=[{name: 'a b', path: .}]"], ["models[0].name"]),
        (["models=[{name: a, path: no/such}]"], ["models[0].path", "no/such"]),
        (["models=[{name: a, path: ., sampling: {num_frame: 5}}]"], ["models[0]", "num_frame", "num_frames"]),
        (["models=[{name: a, path: .}, {name: a, path: .}]"], ["models", "differ"]),
        (["compare=[bf16]"], ["compare", "two"]),
        (["compare=[bf16, fp3]"], ["compare", "fp3"]),
        (["devices=[cuda:0, cuda:0]"], ["devices", "once"]),
        (["devices=[cuda, cuda:0]"], ["devices", "once"]),
        (["database=mysql://me:secret@host/x"], ["database", "postgresql+psycopg://"]),
        (["queue=amqp://host"], ["queue", "redis://"]),
        (["port=70000"], ["port"]),
        (["token_file=no/such"], ["token_file"]),
        (["limits.max_frames=0"], ["limits.max_frames"]),
        (["lease_s=0"], ["lease_s"]),
    ],
)
def test_bad_settings_are_one_line(settings, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load(ServeConfig, None, settings)
    assert all(word in str(error.value) for word in words), error.value
    assert "secret" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_embedded_model_alone_is_not_asked_for_long_videos():
    limits = LimitsConfig(max_pixels=2**20, max_frames=17, max_queued=3)
    capped = ServeConfig(limits=limits).request_limits()
    assert (capped.max_pixels, capped.max_frames, capped.max_queued) == (2**16, 17, 3)
    assert ServeConfig(limits=limits, models=[ServedModel("mine", ".")]).request_limits() == limits


def test_a_dry_run_tells_the_kernels_and_writes_nothing(tiny_pipeline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [f"models=[{{name: tiny, path: {tiny_pipeline}}}]", "compare=[bf16, attn_qat, checkpoint]"]
    for name, more in (("serve", ["devices=[cpu, cpu]"]), ("worker", ["runtime.device=cpu"])):
        planned = execute(name, None, [*settings, *more], dry_run=True, show_config=False)
        kernels = {"tiny: bf16": ("sdpa", True), "tiny: attn_qat": ("torch", False), "tiny: checkpoint": ("sdpa", True)}
        assert [w["device"] for w in planned["workers"]] == ["cpu"] * (2 if name == "serve" else 1)
        assert {key: (found["kernel"], found["native"]) for key, found in planned["workers"][0]["kernels"].items()} == kernels
    planned = execute("serve", None, ["devices=[cpu]"], dry_run=True, show_config=False)
    assert planned["models"] == ["garments"]
    assert set(planned["workers"][0]["kernels"]) == {"garments: bf16", "garments: attn_qat_search"}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"kernel='sdpa' can't serve"):
        execute("worker", None, [*settings, "runtime.device=cpu", "runtime.kernel=sdpa"], dry_run=True, show_config=False)


def test_a_port_that_is_taken_is_told_before_anything_is_started(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=f"port={taken.getsockname()[1]}"):
            serve(ServeConfig(folder=str(tmp_path / "new"), devices=[], port=taken.getsockname()[1]))


def test_a_gpu_has_one_worker_at_a_time():
    first = DeviceLock("GPU-of-a-test", wait_s=0.0)
    with pytest.raises(UserError, match="another worker has the GPU"):
        DeviceLock("GPU-of-a-test", wait_s=0.05)
    DeviceLock("another GPU-of-a-test", wait_s=0.0).release()
    waiting = ThreadPoolExecutor(1).submit(DeviceLock, "GPU-of-a-test", 30.0)
    first.release()
    waiting.result(30).release()


def test_a_queue_that_cannot_be_used():
    with pytest.raises(UserError, match=r"queue=redis://\.\.\.@127\.0\.0\.1:1"):
        Queue("redis://me:secret@127.0.0.1:1/0")
