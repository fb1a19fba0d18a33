"""The API without workers: what is accepted and what is refused, with which words; tokens, pages, limits; and arbitrary requests find no 500."""

import dataclasses
import html
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi.testclient import TestClient
from helpers.service import SMALL, service_of
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from app.keeper import Keeper
from app.server import Service, create_app
from app.tables import metadata, videos
from videoqat.config import LimitsConfig, ServeConfig, ServedModel

LIMITS = LimitsConfig(max_pixels=64 * 64, max_frames=17, max_steps=20, max_prompt_characters=200, max_queued=6, max_body_bytes=4096)
RESULT = {
    "receipts": [{"kernel": "sdpa", "native": True, "reason": "plain", "device": "cpu", "recipe": "bf16", "calls": 4}],
    "timings": {"text_s": 1.0, "denoise_s": 2.0, "steps_s": [1.0, 1.0], "vae_s": 3.0, "encode_s": 4.0, "total_s": 6.0},
    "peak_memory_bytes": 1, "recipe": {}, "checkpoint_recipe": None, "warnings": [], "num_tokens": 32, "dtype": "torch.float32",
    "video_sha256": "0", "model_fingerprint": "1", "provenance": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tiny_pipeline, tmp_path_factory) -> ServeConfig:
    folder = tmp_path_factory.mktemp("service")
    models = [ServedModel("tiny", str(tiny_pipeline), sampling={"num_inference_steps": 7}), ServedModel("other", str(tiny_pipeline))]
    config = ServeConfig(folder=str(folder), models=models, devices=[], limits=LIMITS)
    config.validate()
    return config


@pytest.fixture(scope="module")
def shared(base, tmp_path_factory) -> Iterator[tuple[Service, TestClient]]:
    service = service_of(base, tmp_path_factory.mktemp("shared"))
    with TestClient(create_app(service), "http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield service, client


@pytest.fixture
def service(shared) -> Service:
    service, _ = shared
    empty(service)
    return service


@pytest.fixture
def http(service, shared) -> TestClient:
    return shared[1]


def empty(service: Service) -> None:
    with service.jobs.write.begin() as connection:
        for table in metadata.sorted_tables:
            if table.name != "schema_version":
                connection.execute(table.delete())
    service.queue.huey.flush()
    for path in service.videos.iterdir():
        path.unlink()


def post(http: TestClient, **changes: Any) -> httpx.Response:
    return http.post("/v1/videos", json={"prompt": "a bag moves up", **SMALL, **changes})


def complete(service: Service, video: str, **timings: float) -> None:
    """As a worker would."""
    row = service.jobs.claim(video, "here")
    assert row is not None
    (service.videos / f"{video}.mp4").write_bytes(b"0123456789")
    service.jobs.complete(row["lease"], f"{video}.mp4", {**RESULT, "timings": {**RESULT["timings"], **timings}})


def test_a_video_as_asked_for(http):
    answer = post(http, seed=5, attention="attn_qat", model="other", guidance_scale=4, negative_prompt="blurred", fps=8, flow_shift=5.0)
    assert answer.status_code == 200
    video = answer.json()
    expected = {"object": "video", "status": "queued", "progress": 0, "model": "other", "attention": "attn_qat", "seed": 5, "size": "32x32"}
    expected |= {"seconds": "0.625", "num_frames": 5, "fps": 8, "guidance_scale": 4.0, "negative_prompt": "blurred", "flow_shift": 5.0}
    expected |= {"num_inference_steps": 2, "queue_position": 1, "error": None, "content_url": None, "result": None, "stage": None, "restarts": 0}
    assert {key: video[key] for key in expected} == expected
    assert isinstance(video["created_at"], int)
    assert http.get(f"/v1/videos/{video['id']}").json() == video


def test_requests_win_over_the_operator_who_wins_over_defaults(http):
    assert post(http, num_inference_steps=None).json()["num_inference_steps"] == 7  # the operator's
    assert post(http, num_inference_steps=3).json()["num_inference_steps"] == 3  # the request's
    assert post(http, num_inference_steps=None, model="other").json()["num_inference_steps"] == 20  # the default
    assert {post(http).json()["seed"], post(http).json()["seed"]} != {0}  # drawn where none is given


def test_seconds_become_frames(http):
    for seconds, frames in (("1", 17), (0.3, 5), ("0.01", 5), (0.6, 9)):
        assert post(http, seconds=seconds, num_frames=None).json()["num_frames"] == frames


BAD: list[tuple[dict[str, Any], int, list[str]]] = [
    ({"prompt": ""}, 422, ["prompt"]),
    ({"prompt": " \n"}, 422, ["prompt", "empty"]),
    ({"prompt": "a" * 201}, 422, ["prompt", "201", "200"]),
    ({"prompt": "a" * 100_000}, 413, ["4096"]),
    ({"prompt": "a\0b"}, 422, ["prompt", "NUL"]),
    ({"prompt": 5}, 422, ["prompt", "5"]),
    ({"prompt": None}, 422, ["prompt"]),
    ({"negative_prompt": "a" * 201}, 422, ["negative_prompt", "201"]),
    ({"stpes": 5}, 422, ["stpes", "unknown"]),
    ({"model": "../../etc/passwd"}, 422, ["model", "tiny", "other"]),
    ({"attention": "fp3"}, 422, ["attention", "fp3", "attn_qat_search"]),
    ({"attention": "configs/recipe/attn_qat_search_keep_ends.yaml"}, 422, ["attention"]),
    ({"size": "32"}, 422, ["size"]),
    ({"size": "-32x32"}, 422, ["size"]),
    ({"size": "40x32"}, 422, ["width", "40", "32 or 48"]),
    ({"size": "64x80"}, 422, ["size", "4096"]),
    ({"size": "99999x99999"}, 422, ["size", "4096"]),
    ({"num_frames": 6}, 422, ["num_frames", "6", "5 or 9"]),
    ({"num_frames": 21}, 422, ["21", "17"]),
    ({"num_frames": 0}, 422, ["num_frames"]),
    ({"num_frames": "5"}, 422, ["num_frames"]),
    ({"num_frames": 10**30}, 422, ["num_frames"]),
    ({"num_frames": True}, 422, ["num_frames"]),
    ({"seconds": 1, "num_frames": 5}, 422, ["seconds", "num_frames"]),
    ({"seconds": "long", "num_frames": None}, 422, ["seconds", "long"]),
    ({"seconds": "nan", "num_frames": None}, 422, ["seconds"]),
    ({"seconds": 2, "num_frames": None}, 422, ["33", "17"]),
    ({"num_inference_steps": 21}, 422, ["num_inference_steps", "21", "20"]),
    ({"num_inference_steps": 0}, 422, ["num_inference_steps"]),
    ({"guidance_scale": -1}, 422, ["guidance_scale"]),
    ({"seed": -1}, 422, ["seed"]),
    ({"seed": 2**53}, 422, ["seed"]),
    ({"fps": 0}, 422, ["fps"]),
    ({"compare": ["bf16"]}, 422, ["compare", "two"]),
    ({"compare": []}, 422, ["compare"]),
    ({"compare": ["bf16", "bf16"]}, 422, ["compare", "twice"]),
    ({"compare": ["bf16", "fp3"]}, 422, ["compare", "fp3"]),
    ({"compare": ["bf16", "attn_qat", "mxfp4", "sage3", "sagebwd"]}, 422, ["compare", "5", "4"]),
    ({"compare": ["bf16", "attn_qat"], "attention": "bf16"}, 422, ["attention", "compare"]),
    ({"compare": ["bf16", {"attention": "bf16", "modle": "tiny"}]}, 422, ["modle"]),
    ({"floor": True}, 422, ["floor", "compare"]),
]


@pytest.mark.parametrize(("changes", "status", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_are_told_what_is_legal(http, service, changes, status, words):
    answer = post(http, **changes)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert all(word in f"{error['param']} {error['message']}" for word in words), error
    assert "\n" not in error["message"]
    assert service.config.models[0].path not in error["message"], "how this machine is laid out is nobody's business"
    assert service.jobs.counts() == {}


def test_bodies_that_are_no_requests(http):
    headers = {"content-type": "application/json"}
    for body, status in (
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[]", 422),
        (b"", 422),
        (b'{"prompt": "\\ud800"}', 422),
        (b'{"seed": NaN, "prompt": "a"}', 422),
    ):
        answer = http.post("/v1/videos", content=body, headers=headers)
        assert (answer.status_code, "message" in answer.json()["error"]) == (status, True), body

    def endless() -> Iterator[bytes]:
        yield from [b" " * 1000] * 100

    assert http.post("/v1/videos", content=endless(), headers=headers).status_code == 413
    assert http.post("/v1/videos", content=iter([b'{"prompt": ', b'"a"}']), headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("is text/plain", {"content": b'{"prompt": "a"}', "headers": {"content-type": "text/plain"}}),
        ("has no Content-Type", {"content": b'{"prompt": "a"}'}),
        ("is application/x-www-form-urlencoded", {"data": {"prompt": "a", "seconds": "1"}}),
        ("is multipart/form-data", {"files": {"prompt": (None, "a"), "size": (None, "32x32")}}),  # as curl -F and OpenAI's library
        ("is multipart/form-data", {"files": {"prompt": (None, "a"), "input_reference": ("a.png", b"picture", "image/png")}}),
    ],
)
def test_what_a_page_from_elsewhere_may_send_without_being_asked_for_leave_is_refused(http, service, kind, sent):
    for path, example in (("/v1/videos", {"prompt": "a sneaker moves left"}), ("/v1/ballots/ballot_none/vote", {"choice": "a"})):
        answer = http.post(path, **sent)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (415, "invalid_request_error", "content_type")
        assert error["message"].startswith(f"the body {kind}; legal: ")
        assert ("a form with the header Authorization: Bearer" in error["message"]) == (path == "/v1/videos")
        assert "JSON, with Content-Type: application/json, such as " in error["message"]
        assert json.loads(error["message"].partition("such as ")[2]) == example
    assert service.jobs.counts() == {}
    assert http.post("/v1/videos", json={"prompt": "a sneaker moves left"}).status_code == 200  # the example itself


@pytest.mark.parametrize("name", ["video_none", "..%2f..%2fservice.db", "%00", "a" * 3000, "video_%ff", "*", "'; DROP TABLE videos;--"])
def test_ids_that_are_none(http, name):
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/content")):
        answer = http.request(method, f"/v1/videos/{name}{path}")
        assert (answer.status_code, "message" in answer.json()["error"]) == (404, True)
    assert http.get(f"/v1/comparisons/{name}").status_code == 404
    assert http.post(f"/v1/comparisons/{name}/ballots").status_code == 404
    assert http.post(f"/v1/ballots/{name}/vote", json={"choice": "a"}).status_code == 404
    assert http.get("/v1/videos", params={"after": name}).status_code == 422
    assert http.get("/v1/comparisons", params={"after": name}).status_code == 422


def test_methods_and_paths_that_are_none(http):
    assert http.put("/v1/videos").status_code == 405
    assert http.get("/v1/nothing").json()["error"]["message"] == "Not Found"


def test_the_queue_has_a_limit(http):
    assert [post(http).status_code for _ in range(7)] == [200] * 6 + [429]
    answer = post(http, compare=True)
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) > 0
    listed = http.get("/v1/videos", params={"order": "asc"}).json()["data"]
    assert [video["queue_position"] for video in listed] == [1, 2, 3, 4, 5, 6]
    assert http.post(f"/v1/videos/{listed[0]['id']}/cancel").json()["status"] == "cancelled"
    assert post(http).status_code == 200


def test_a_comparison_for_which_the_queue_is_never_long_enough_is_not_told_to_try_again(http, service, monkeypatch):
    monkeypatch.setattr(service, "limits", dataclasses.replace(LIMITS, max_queued=2))
    answer = post(http, compare=True, floor=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "compare")
    assert "makes 3 videos; legal: at most 2" in answer.json()["error"]["message"]
    assert post(http, compare=True).status_code == 200


def test_lists_come_in_pages(http):
    ids = [post(http).json()["id"] for _ in range(5)]
    first = http.get("/v1/videos", params={"limit": 2}).json()
    assert (first["object"], first["first_id"], first["last_id"], first["has_more"]) == ("list", ids[4], ids[3], True)
    rest = http.get("/v1/videos", params={"limit": 9, "after": ids[3]}).json()
    assert ([video["id"] for video in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
    assert http.get("/v1/videos", params={"status": "failed"}).json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"status": "done"}):
        assert http.get("/v1/videos", params=query).status_code == 422


def test_content_comes_when_it_is_complete(http, service, monkeypatch):
    video = post(http).json()["id"]
    for expected in ("queued", "in_progress"):
        answer = http.get(f"/v1/videos/{video}/content")
        assert (answer.status_code, expected in answer.json()["error"]["message"]) == (409, True)
        if expected == "queued":
            lease = service.jobs.claim(video, "here")["lease"]
    service.jobs.report(lease, stage="denoising", step=1)
    now = http.get(f"/v1/videos/{video}").json()
    assert (now["progress"], now["stage"]) == (50, {"name": "denoising", "step": 1, "steps": 2})
    service.jobs.report(lease, stage="decoding", step=2)
    assert http.get(f"/v1/videos/{video}").json()["progress"] == 99  # not before it is there
    service.jobs.fail(lease, "non_finite", "NaN")
    failed = http.get(f"/v1/videos/{video}").json()
    assert (failed["status"], failed["error"]) == ("failed", {"code": "non_finite", "message": "NaN"})
    assert http.get(f"/v1/videos/{video}/content").status_code == 409
    video = post(http).json()["id"]
    complete(service, video)
    answer = http.get(f"/v1/videos/{video}/content")
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, b"0123456789", "video/mp4")
    part = http.get(f"/v1/videos/{video}/content", headers={"range": "bytes=2-4"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    assert http.get(f"/v1/videos/{video}/content", headers={"range": "bytes=7-"}).content == b"789"
    assert http.get(f"/v1/videos/{video}/content", headers={"range": "bytes=50-"}).status_code == 416
    head = http.head(f"/v1/videos/{video}/content")
    assert (head.content, head.headers["content-length"], head.headers["accept-ranges"]) == (b"", "10", "bytes")
    assert http.get(f"/v1/videos/{video}/content", params={"variant": "video"}).status_code == 200
    for variant in ("thumbnail", "spritesheet", ""):  # the first two are legal at OpenAI's
        answer = http.get(f"/v1/videos/{video}/content", params={"variant": variant})
        assert (answer.status_code, answer.json()["error"]["message"]) == (422, f"variant={json.dumps(variant)}: Input should be 'video'")
    assert http.post(f"/v1/videos/{video}/cancel").status_code == 409
    (service.videos / f"{video}.mp4").unlink()
    assert http.get(f"/v1/videos/{video}/content").status_code == 404
    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_file", lambda _: True)  # as if it had gone a moment later
        assert http.get(f"/v1/videos/{video}/content").status_code == 404


def test_comparisons_ballots_and_votes(http, service):
    first = post(http, compare=["bf16", {"attention": "attn_qat", "model": "other"}], floor=True, seed=9).json()
    url = f"/v1/comparisons/{first['comparison_id']}"
    comparison = http.get(url).json()
    videos = comparison["videos"]
    assert [(v["model"], v["attention"], v["seed"]) for v in videos] == [("tiny", "bf16", 9), ("other", "attn_qat", 9), ("tiny", "bf16", 9)]
    assert (comparison["status"], comparison["reference"], comparison["floor"]) == ("in_progress", first["id"], videos[2]["id"])
    assert http.post(f"{url}/ballots").status_code == 409
    for video, seconds in zip(videos, (2.0, 1.0, 2.0), strict=True):
        complete(service, video["id"], denoise_s=seconds)
    comparison = http.get(url).json()
    assert (comparison["status"], list(comparison["speedup"].values())) == ("completed", [1.0, 2.0, 1.0])
    assert [c["id"] for c in http.get("/v1/comparisons").json()["data"]] == [comparison["id"]]
    ballot = http.post(f"{url}/ballots").json()
    assert "bf16" not in json.dumps(ballot), "a ballot is blind"
    assert not any(video["id"] in json.dumps(ballot) for video in videos)
    assert http.get(ballot["a"]).content == b"0123456789"
    assert "video_" not in str(http.get(ballot["a"]).headers)
    assert http.get(f"/v1/ballots/{ballot['id']}/c").status_code == 422
    assert http.post(f"/v1/ballots/{ballot['id']}/vote", json={"choice": "c"}).status_code == 422
    voted = http.post(f"/v1/ballots/{ballot['id']}/vote", json={"choice": "tie"}).json()
    assert {voted["label_a"], voted["label_b"]} == {"tiny: bf16", "other: attn_qat"}
    assert http.post(f"/v1/ballots/{ballot['id']}/vote", json={"choice": "a"}).status_code == 409
    (result,) = http.get("/v1/votes").json()["data"]
    assert (result["votes"], result["ties"], result["first_share"]) == (1, 1, 0.5)
    for video in videos:
        assert http.delete(f"/v1/videos/{video['id']}").status_code == 200
    assert http.get(url).status_code == 404
    assert http.get("/v1/votes").json()["data"] == [result]  # votes outlive videos


def test_compare_true_renders_the_services_pair_or_bf16_beside_what_is_asked_for(http):
    for changes, expected in (({}, ["bf16", "attn_qat_search"]), ({"attention": "mxfp4"}, ["bf16", "mxfp4"])):
        first = post(http, compare=True, **changes).json()
        shown = http.get(f"/v1/comparisons/{first['comparison_id']}").json()["videos"]
        assert [video["attention"] for video in shown] == expected
        assert len({video["seed"] for video in shown}) == 1


def test_what_is_on_offer(http):
    models = http.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny", "other"]
    assert (models["data"][0]["defaults"]["size"], models["data"][0]["defaults"]["num_inference_steps"]) == ("64x64", 7)
    assert models["limits"]["max_frames"] == 17
    recipes = http.get("/v1/recipes").json()
    assert {"bf16", "attn_qat_search"} <= {recipe["id"] for recipe in recipes["data"]}
    assert recipes["compare"] == ["bf16", "attn_qat_search"]


def test_every_request_and_field_is_in_the_docs_which_ask_nobody(http):
    answer = http.get("/docs")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    document = http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        assert all(f"<code>{method.upper()} {path}</code>" in answer.text for method in methods)
    sections = dict(re.findall(r'<h2 id="(\w+)">(.*?)(?=<h2|</html>)', answer.text, re.DOTALL))
    assert set(re.findall(r'href="#(\w+)"', answer.text)) <= set(sections)
    for name, schema in document["components"]["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            assert f"<code>{field}</code>" in sections[name]
            assert about.get("description", "") in html.unescape(sections[name])
    assert re.search(r"<code>seed</code>.*?integer, at least 0, at most 9007199254740991 or null", sections["CreateVideo"])
    assert not re.search(r"https?://|<script|src=|@import|url\(", answer.text)
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_health_readiness_and_metrics(http, service):
    assert http.get("/health").json()["status"] == "ok"
    assert http.get("/ready").status_code == 503
    service.jobs.register("here", "host", 1, "cpu")
    assert http.get("/ready").status_code == 503
    service.jobs.alive("here", "ready", ["tiny"])
    assert http.get("/ready").status_code == 200
    assert http.get("/v1/queue").json()["workers"][0]["state"] == "ready"
    before = http.get("/metrics").text
    post(http)
    text = http.get("/metrics").text
    assert 'videoqat_videos_stored{status="queued"} 1.0' in text
    assert 'videoqat_workers{state="ready"} 1.0' in text
    http.request("MADE-UP", "/v1/videos")
    assert "MADE-UP" not in http.get("/metrics").text, "anybody could fill the memory with series"
    pattern = r'videoqat_requests_total\{method="POST",route="/v1/videos",status="200"\} (\d+)'
    assert float(re.search(pattern, text)[1]) == float((re.search(pattern, before) or [0, 0])[1]) + 1


def test_a_token_is_needed_where_one_is_set(base, tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    (tmp_path / "service").mkdir()
    with TestClient(create_app(service_of(dataclasses.replace(base, token_file=str(tmp_path / "token")), tmp_path / "service"))) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "0123456789abcdef"}, {"authorization": "Basic 0123456789abcdef"}):
            for answer in (
                http.get("/v1/videos", headers=headers),
                http.post("/v1/videos", content=b"{", headers=headers),
                http.get("/metrics", headers=headers),
            ):
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert http.get("/v1/videos", headers={"authorization": "Bearer 0123456789abcdef"}).status_code == 200
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("host", ["pages.example", "127.0.0.1.pages.example", "192.168.0.5:8000", "0.0.0.0", "[::2]", "[", ""])
def test_a_page_from_elsewhere_cannot_make_its_name_lead_here(http, host):
    for method, path in (("GET", "/v1/videos"), ("POST", "/v1/videos"), ("GET", "/metrics")):
        answer = http.request(method, path, headers={"host": host}, json={"prompt": "a"} if method == "POST" else None)
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "host"), host
    assert http.get("/v1/queue").json()["videos"] == {}


def test_names_of_this_machine_and_who_else_may_ask(http, base, tmp_path):
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.2:1", "[::1]:8000"):
        assert http.get("/v1/videos", headers={"host": host}).status_code == 200, host
    assert http.get("/health", headers={"host": "pages.example"}).status_code == 200  # it tells nothing
    for name, changes in (("open", {"open_to_all": True}), ("all", {"open_to_all": True, "host": "0.0.0.0"})):
        (tmp_path / name).mkdir()
        with TestClient(create_app(service_of(dataclasses.replace(base, **changes), tmp_path / name))) as other:
            assert other.get("/v1/videos", headers={"host": "videos.example"}).status_code == 200


def test_the_keeper_sends_lost_messages_again_and_clears_files_that_belong_to_nothing(http, service):
    ids = [post(http).json()["id"] for _ in range(2)]
    assert service.queue.pending() == set(ids)
    while service.queue.take():
        pass  # as if their worker had died at once
    keeper = Keeper(service.jobs, service.comparisons, service.queue, service.sending, service.videos, 3600.0)
    keeper.resend()
    keeper.resend()
    assert service.queue.pending() == set(ids)
    complete(service, ids[0])
    lease = service.jobs.claim(ids[1], "here")["lease"]
    kept = [f"{ids[0]}.mp4", f"{ids[1]}.{lease}.mp4", f".{ids[1]}.{lease}.12.partial.mp4"]
    stray = ["video_1.deadbeef.mp4", "video_1.deadbeef.json", ".video_1.deadbeef.7.partial.mp4"]
    for name in [*kept, *stray]:
        (service.videos / name).touch()
        os.utime(service.videos / name, (0, 0))
    keeper.clear()
    assert sorted(path.name for path in service.videos.iterdir()) == sorted(kept)


def test_a_thousand_stored_videos_are_listed_right_and_timed(http, service):
    """Times are told, with `-s`, not judged."""
    first = service.jobs.get(post(http).json()["id"])
    with service.jobs.write.begin() as connection:
        for index in range(999):
            status = "completed" if index < 899 else "queued"
            row = first | {"seq": first["seq"] + 1 + index, "id": f"video_{index}", "status": status, "result": RESULT, "ended_at": 1.0}
            connection.execute(videos.insert().values(**row))
    times: dict[str, list[float]] = {}
    for _ in range(20):
        for path in ("/v1/videos/video_5", "/v1/videos/video_950", "/v1/videos", "/v1/videos?limit=100", "/v1/queue"):
            started = time.perf_counter()
            assert http.get(path).status_code == 200
            times.setdefault(path, []).append(time.perf_counter() - started)
    for path, seconds in times.items():
        print(f"{path}: {1e3 * statistics.median(seconds):.1f} ms with 1,000 videos")
    page = http.get("/v1/videos").json()
    assert ([video["id"] for video in page["data"]][::19], page["has_more"]) == (["video_998", "video_979"], True)
    assert [video["queue_position"] for video in page["data"]] == list(range(101, 81, -1))
    assert http.get("/v1/queue").json()["videos"] == {"completed": 899, "queued": 101}


@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_is_answered_by_a_500(service, http, mode):
    """Requests that schemathesis makes of the OpenAPI document, legal ones and others. And every status is one that the document names."""
    document = schemathesis.openapi.from_asgi("/openapi.json", http.app)
    asked = 0
    for found in document.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.POSITIVE or operation.query or operation.body or operation.path_parameters:
            empty(service)
            there = post(http, compare=True).json()
            ask(operation, mode, {"video_id": there["id"], "comparison_id": there["comparison_id"]})
            asked += 1
    assert asked >= 12


def ask(operation: Any, mode: GenerationMode, known: dict[str, str]) -> None:
    number = itertools.count()

    @settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        if next(number) % 2:  # every other one names something that is there
            case.path_parameters = {name: known.get(name, value) for name, value in (case.path_parameters or {}).items()}
        answer = case.call()
        assert answer.status_code < 500 or operation.path == "/ready", answer.text
        assert str(answer.status_code) in operation.definition.raw["responses"], f"{operation.label}: {answer.status_code} {answer.text}"

    one()
