"""Forms for `POST /v1/videos`, as OpenAI's library and curl send them: the same videos as of JSON, or an answer that says what is legal."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from fastapi.testclient import TestClient
from helpers.service import service_of

from app.server import Service, create_app
from app.ui import add_page
from videoqat.config import LimitsConfig, ServeConfig, ServedModel

LIMITS = LimitsConfig(max_pixels=64 * 64, max_frames=17, max_queued=1000, max_body_bytes=8192)
BEARER = {"authorization": "Bearer sk-anything"}
Fields = list[tuple[str, Any]]


@pytest.fixture(scope="module")
def config(tiny_pipeline, tmp_path_factory) -> ServeConfig:
    return ServeConfig(models=[ServedModel("tiny", str(tiny_pipeline)), ServedModel("other", str(tiny_pipeline))], devices=[], limits=LIMITS)


@pytest.fixture(scope="module")
def service(config, tmp_path_factory) -> Service:
    return service_of(config, tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def http(service) -> Iterator[TestClient]:
    app = create_app(service)
    add_page(app)
    with TestClient(app, "http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client


def multipart(http: TestClient, fields: Fields, headers: dict[str, str] = BEARER) -> httpx.Response:
    return http.post("/v1/videos", files=[(name, value if isinstance(value, tuple) else (None, value)) for name, value in fields], headers=headers)


def url_encoded(http: TestClient, fields: Fields, headers: dict[str, str] = BEARER) -> httpx.Response:
    return http.post("/v1/videos", content=urlencode(fields), headers={"content-type": "application/x-www-form-urlencoded", **headers})


def jobs_of(service: Service, answer: httpx.Response) -> list[dict[str, Any]]:
    """What workers are given of a video and those that it is compared with, but for what no two videos share."""
    assert answer.status_code == 200, answer.text
    video = answer.json()
    rows = service.comparison(video["comparison_id"])["videos"] if video["comparison_id"] else [service.jobs.get(video["id"])]
    return [{key: value for key, value in row.items() if key not in ("seq", "id", "comparison_id", "created_at")} for row in rows]


@pytest.mark.parametrize("send", [multipart, url_encoded])
@pytest.mark.parametrize(
    "wanted",
    [
        {"prompt": "a sneaker moves left", "model": "other", "seconds": "1", "size": "32x32", "seed": 5},  # OpenAI's, and a seed that isn't drawn
        {"prompt": "Schöne Grüße & 50 % = \"née\"\r\n+ 'ß', 今日は", "seed": 0, "size": "48x32", "num_frames": 5, "negative_prompt": ""},
        {"prompt": "a", "seed": 2**53 - 1, "num_frames": 9, "fps": 8, "num_inference_steps": 3, "guidance_scale": 4.5, "flow_shift": 3},
        {"prompt": "a", "seed": 1, "num_frames": 5, "size": "32x32", "compare": True, "floor": True, "attention": "attn_qat"},
        {"prompt": "a", "seed": 1, "num_frames": 5, "size": "32x32", "compare": False, "floor": False},
    ],
    ids=["openai", "text", "numbers", "true", "false"],
)
def test_a_form_with_a_bearer_makes_the_very_jobs_of_its_json(http, service, send, wanted):
    as_json = jobs_of(service, http.post("/v1/videos", json=wanted))
    words = [(name, str(value).lower() if isinstance(value, bool) else str(value)) for name, value in wanted.items()]
    assert jobs_of(service, send(http, words)) == as_json
    assert (len(as_json), as_json[0]["prompt"], as_json[0]["seed"]) == (3 if wanted.get("compare") else 1, wanted["prompt"], wanted["seed"])


def refused(service: Service, answer: httpx.Response, status: int, param: str | None, words: list[str]) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (status, "invalid_request_error", param), answer.text
    assert all(word in error["message"] for word in words), error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize("send", [multipart, url_encoded])
@pytest.mark.parametrize("sent", [None, "Basic c2s6YW55dGhpbmc=", "Negotiate Bearer", "Digest Bearer", "BearerX y", "sk-anything", "", "xBearer y"])
def test_what_a_browser_sends_without_being_granted_it_opens_nothing_to_forms(http, service, send, sent):
    before = service.jobs.counts()
    answer = send(http, [("prompt", "a")], {} if sent is None else {"authorization": sent})
    refused(service, answer, 415, None, ["legal: a form with the header Authorization: Bearer", "or JSON, with Content-Type: application/json"])
    assert service.jobs.counts() == before
    assert send(http, [("prompt", "a")], {"authorization": "bearer a"}).status_code == 200  # HTTP knows no case in names of schemes


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/video_none", "/v1/ballots/ballot_none/vote", "/", "/docs", "/openapi.json", "/theme.css"])
@pytest.mark.parametrize("origin", ["https://pages.example", "null", "http://127.0.0.1:9000"])
def test_no_page_from_elsewhere_is_granted_the_header(http, path, origin):
    """The page is there, too, since Gradio has its own idea of whom to grant what."""
    asked = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = http.options(path, headers=asked)
    assert answer.status_code in (404, 405)
    assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_votes_take_no_form(http, service):
    answer = http.post("/v1/ballots/ballot_none/vote", data={"choice": "a"}, headers=BEARER)
    refused(service, answer, 415, None, ["legal: JSON", '{"choice": "a"}'])


BAD: list[tuple[Fields, str, list[str]]] = [
    ([("size", "32x32")], "prompt", ["prompt", "required"]),
    ([("prompt", "")], "prompt", ["prompt"]),
    ([("prompt", "a"), ("seed", "five")], "seed", ['seed="five"', "integer"]),
    ([("prompt", "a"), ("seed", "-1")], "seed", ["seed", "0"]),
    ([("prompt", "a"), ("num_frames", "1e1")], "num_frames", ["num_frames", "integer"]),
    ([("prompt", "a"), ("num_frames", "")], "num_frames", ["num_frames", "integer"]),
    ([("prompt", "a"), ("num_frames", "6")], "num_frames", ["num_frames", "5 or 9"]),
    ([("prompt", "a"), ("guidance_scale", "nan")], "guidance_scale", ["guidance_scale", "finite"]),
    ([("prompt", "a"), ("seconds", "long")], "seconds", ["seconds", "long"]),
    ([("prompt", "a"), ("size", "32")], "size", ["size", "32"]),
    ([("prompt", "a"), ("floor", "perhaps")], "floor", ["floor", "boolean"]),
    ([("prompt", "a"), ("compare", "bf16,attn_qat")], "compare", ["compare", "boolean"]),
    ([("prompt", "a"), ("compare[]", "bf16"), ("compare[]", "attn_qat")], "compare[]", ["unknown field 'compare[]'", "JSON"]),
    ([("prompt", "a"), ("stpes", "5")], "stpes", ["unknown field 'stpes'"]),
    ([("prompt", "a"), ("self", "5")], "self", ["unknown field 'self'"]),
    ([("prompt", "a"), ("prompt", "b")], "prompt", ["prompt", "more than once"]),
    ([("prompt", "a"), ("seed", "5"), ("seed", "5")], "seed", ["seed", "more than once"]),
    (
        [("prompt", "a"), ("input_reference[image_url]", "https://pages.example/a.png")],
        "input_reference[image_url]",
        ["input_reference", "prompt alone"],
    ),
]


@pytest.mark.parametrize("send", [multipart, url_encoded])
@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_fields_that_cannot_be_used_are_named(http, service, send, fields, param, words):
    before = service.jobs.counts()
    refused(service, send(http, fields), 422, param, words)
    assert service.jobs.counts() == before


@pytest.mark.parametrize(
    ("name", "words"),
    [("input_reference", ["input_reference", "prompt alone"]), ("prompt", ["prompt is a file", "text"]), ("x", ["unknown field 'x'"])],
)
def test_files_are_refused(http, service, name, words):
    before = service.jobs.counts()
    fields: Fields = [("prompt", "a")] if name != "prompt" else []
    refused(service, multipart(http, [*fields, (name, ("a.png", b"\x89PNG\xff", "image/png"))]), 422, name, words)
    assert service.jobs.counts() == before
    refused(service, http.post("/v1/videos", json={"prompt": "a", "input_reference": {"file_id": "a"}}), 422, "input_reference", ["prompt alone"])


def part(name: str, value: bytes) -> bytes:
    return b'--XX\r\nContent-Disposition: form-data; name="' + name.encode() + b'"\r\n\r\n' + value + b"\r\n"


MULTIPART, URL_ENCODED = "multipart/form-data; boundary=XX", "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        (MULTIPART, part("prompt", b"a") + b"--XX--\r\n", 200),
        ('Multipart/Form-Data;boundary="XX";charset=UTF-8', part("prompt", b"a") + b"--XX--", 200),
        (MULTIPART, part("prompt", b"a") + part("num_frames", b"5"), 400),  # cut off, it would be another video
        (MULTIPART, part("prompt", b"a") + b'--XX\r\nContent-Disposition: form-data; name="num_frames"\r\n\r\n5', 400),
        (MULTIPART, part("prompt", b"a") + b'--XX\r\nContent-Disposition: form-data; name="negative_prompt"\r\n\r\nb--', 400),
        (MULTIPART, part("prompt", b"a") + b"--XX--\r\n" + part("num_frames", b"5"), 400),
        (MULTIPART, b"", 400),
        (MULTIPART, b"prompt=a", 400),
        (MULTIPART, b"prompt--XX--", 400),
        (MULTIPART, b"--XX\r\n\r\na\r\n--XX--", 400),
        ("multipart/form-data", part("prompt", b"a") + b"--XX--", 400),
        ("multipart/form-data; boundary=" + "X" * 300, b"--" + b"X" * 300 + b"--", 400),
        (MULTIPART, part("prompt", b"a\xff") + b"--XX--", 400),
        (MULTIPART + "; charset=utf-7", part("prompt", b"+2AA-") + b"--XX--", 400),
        (MULTIPART, b"".join(part(f"n{number}", b"") for number in range(101)) + b"--XX--", 400),
        (URL_ENCODED, "prompt=ü".encode(), 200),  # as curl -d sends it
        (URL_ENCODED + "; charset=UTF-8", b"prompt=%C3%BC&num_frames=5", 200),
        (URL_ENCODED, b"prompt=\xff", 400),
        (URL_ENCODED, b"prompt=%ff", 400),
        (URL_ENCODED, b"prompt" * 500, 400),
        (URL_ENCODED, b"prompt=a&" + b"&".join(b"n%d=" % number for number in range(100)), 400),
        (URL_ENCODED, b"", 422),
        (URL_ENCODED, b"prompt=" + b"a" * 9000, 413),
        ("text/plain", b"prompt=a", 415),
        ("multipart/mixed; boundary=XX", part("prompt", b"a") + b"--XX--", 415),
        ("application/json", b'{"prompt": "a"}', 200),
    ],
)
def test_what_is_no_whole_form_is_not_taken_for_one(http, service, kind, body, status):
    before = service.jobs.counts()
    answer = http.post("/v1/videos", content=body, headers={**BEARER, "content-type": kind})
    assert answer.status_code == status, answer.text
    if status == 200:
        assert answer.json()["prompt"] in ("a", "ü")
    else:
        refused(service, answer, status, {422: "prompt"}.get(status), [])
        assert service.jobs.counts() == before


def test_where_there_is_a_token_a_form_needs_that(config, tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    (tmp_path / "service").mkdir()
    guarded = service_of(dataclasses.replace(config, token_file=str(tmp_path / "token")), tmp_path / "service")
    with TestClient(create_app(guarded)) as http:
        for number, send in enumerate((multipart, url_encoded)):
            for wrong in ({}, BEARER, {"authorization": "Basic 0123456789abcdef"}):
                assert send(http, [("prompt", "a")], wrong).status_code == 401
            assert sum(guarded.jobs.counts().values()) == number
            assert send(http, [("prompt", "a")], {"authorization": "Bearer 0123456789abcdef"}).json()["status"] == "queued"


def test_the_documents_tell_of_forms(http):
    (operation,) = (methods["post"] for path, methods in http.get("/openapi.json").json()["paths"].items() if path == "/v1/videos")
    assert "Authorization: Bearer" in operation["description"]
    assert "multipart/form-data" in operation["description"]
    assert "Authorization: Bearer" in http.get("/docs").text
