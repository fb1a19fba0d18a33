"""Forms, as OpenAI's clients send them, where a request is otherwise JSON."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import parse_qsl

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.types import Message

from app.api import CreateVideo
from app.orders import BadRequest

MULTIPART, URL_ENCODED = b"multipart/form-data", b"application/x-www-form-urlencoded"
MOST_FIELDS = 100
Pairs = Sequence[tuple[str, str | UploadFile]]


class FormOrJson(APIRoute):
    """A route for a `CreateVideo` that is JSON or, beside `Authorization: Bearer`, a form of its fields.

    Any web page may have its reader's browser send a form to a server that the browser can reach, such as one on the reader's own machine, which has
    no token. Not so with that header: then the browser asks the server first (CORS), and this one never grants it. `Basic` and its like don't count,
    since a browser sends them by itself.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `fastapi.routing.APIRoute`."""
        handle = super().get_route_handler()

        async def either(request: Request) -> Response:
            kind, options = parse_options_header(request.headers.get("content-type"))
            scheme, _ = get_authorization_scheme_param(request.headers.get("authorization"))
            if kind in (MULTIPART, URL_ENCODED) and scheme.lower() == "bearer":
                request = await _as_json(request, kind, options)
            return await handle(request)

        return either


async def _as_json(request: Request, kind: bytes, options: dict[bytes, bytes]) -> Request:
    """The request, as if what its form says had come as JSON; so everything behind has one kind of request to do with.

    Raises:
        HTTPException: (400) no whole form.
        BadRequest: a field that is there twice, or a file.
        RequestValidationError: other fields that can't be used.
    """
    pairs = _url_encoded(await request.body()) if kind == URL_ENCODED else await _multipart(request, options)
    fields: dict[str, str] = {}
    for name, value in pairs:
        if name in CreateVideo.model_fields:  # what isn't is refused below
            if name in fields:
                raise BadRequest(name, f"{name} stands in the form more than once; legal: once")
            if isinstance(value, UploadFile):
                raise BadRequest(name, f"{name} is a file; legal: text")
        fields[name] = value if isinstance(value, str) else ""
    try:
        wanted = CreateVideo.model_validate_strings(fields)
    except ValidationError as error:
        # Of a field's location the rest says what it could have been, not where in the form it is: a form is flat.
        raise RequestValidationError([{**problem, "loc": ("body", problem["loc"][0])} for problem in error.errors()]) from error
    body = wanted.model_dump_json().encode()

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    others = [header for header in request.scope["headers"] if header[0] not in (b"content-type", b"content-length")]
    return Request({**request.scope, "headers": [*others, (b"content-type", b"application/json")]}, receive)


def _url_encoded(body: bytes) -> Pairs:
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise _no_form(str(error)[:100]) from error


async def _multipart(request: Request, options: dict[bytes, bytes]) -> Pairs:
    """The parser takes a form without its end for one of fewer fields, and reads letters that aren't in its charset as others."""
    body = await request.body()
    if not body.rstrip().endswith(b"--" + options.get(b"boundary", b"") + b"--"):
        raise _no_form("its end, the boundary between two pairs of hyphens, is missing")
    if options.get(b"charset", b"utf-8").lower() != b"utf-8":
        raise _no_form("its charset is not UTF-8")
    async with request.form(max_files=MOST_FIELDS, max_fields=MOST_FIELDS) as form:  # which answers with a 400 where it can't read it
        pairs = form.multi_items()
    if not any(isinstance(value, UploadFile) for _, value in pairs):
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise _no_form(str(error)) from error
    return pairs


def _no_form(why: str) -> HTTPException:
    return HTTPException(400, f"the body is no form: {why}")
