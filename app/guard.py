"""What stands before the API: a bearer token where one is set, this machine's own names where others are kept out, bodies no larger than allowed, and
errors in one form."""

import hmac
import json
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import ErrorDetail, ErrorResponse
from app.orders import BadRequest
from videoqat.config.serving import is_loopback
from videoqat.console import say

PROTECTED = ("/v1/", "/metrics")


def error_response(
    status: int, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """An answer that says what is wrong."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = ErrorResponse(error=ErrorDetail(message=message, type=kind, param=param, code=code))
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


class Guard:
    """Around the application: refuses what is too large, has no token or is meant for another machine, before anything is read.

    Args:
        app: what it guards.
        max_body_bytes: of a request to the API.
        token: None: anybody may ask.
        local_only: whether requests must call this machine localhost, or by a loopback address. Without a token that is what keeps out a web page
            somewhere else whose own name was made to lead here (DNS rebinding): to the browser, this server would be that page's.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, token: str | None, local_only: bool) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.token = token
        self.local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `starlette.types.ASGIApp`."""
        if scope["type"] != "http" or not scope["path"].startswith(PROTECTED):
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self.token is not None and not self._has_token(headers.get(b"authorization", b"")):
            challenge = {"WWW-Authenticate": "Bearer"}
            await error_response(401, "this service needs a bearer token: Authorization: Bearer TOKEN", headers=challenge)(scope, receive, send)
            return
        if self.local_only and not _is_local(host := headers.get(b"host", b"").decode("latin-1")):
            legal = "localhost or 127.0.0.1; others when the service runs with token_file=FILE or open_to_all=true"
            await error_response(421, f"Host={_short(host)} is not this machine's own name; legal: {legal}", code="host")(scope, receive, send)
            return
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self.max_body_bytes:
            await self._too_large(scope, receive, send)
            return
        # Without a declared length the body comes in pieces; it is gathered here, so that a request is judged before anything is done about it.
        body, more = b"", scope["method"] not in ("GET", "HEAD", "DELETE")
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return  # whoever asked is gone
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > self.max_body_bytes:
                await self._too_large(scope, receive, send)
                return
        told = False

        async def replay() -> Message:
            nonlocal told
            if told:
                return await receive()
            told = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    def _has_token(self, authorization: bytes) -> bool:
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), (self.token or "").encode())

    async def _too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(413, f"the body is too large; legal: at most {self.max_body_bytes} bytes", code="body_too_large")(scope, receive, send)


def _is_local(host: str) -> bool:
    """Whether a Host header, with or without a port, means this machine to whoever sent it."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def tell_errors(app: FastAPI) -> None:
    """Has every error answered as an `ErrorResponse`."""

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, str(error.detail), headers=dict(error.headers or {}))

    @app.exception_handler(BadRequest)
    async def bad(_: Request, error: BadRequest) -> JSONResponse:
        return error_response(422, str(error), param=error.param)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        if isinstance(error.body, bytes):  # which FastAPI leaves as it came where its type isn't JSON
            return error_response(415, _explain_type(request), code="content_type")
        problem = max(error.errors(), key=lambda problem: len(problem["loc"]))  # of what a field could have been, the one that fits best
        if problem["type"] == "json_invalid":
            return error_response(400, f"the body is no JSON: {problem.get('ctx', {}).get('error', problem['msg'])}", code="json_invalid")
        names = [str(part) for part in problem["loc"][1:]]
        param = ".".join(name for name in names if name.isidentifier() or name.isdigit() or problem["type"] == "extra_forbidden") or None
        return error_response(422, _explain(problem, param), param=param, code=problem["type"])

    @app.exception_handler(SQLAlchemyError)
    async def database(_: Request, error: SQLAlchemyError) -> JSONResponse:
        say(f"server: the database doesn't answer: {error}")
        return error_response(503, "the database doesn't answer; try again later", headers={"Retry-After": "5"})


def _explain_type(request: Request) -> str:
    kind = request.headers.get("content-type", "").partition(";")[0].strip()[:60]
    vote = request.url.path.endswith("/vote")
    example = {"choice": "a"} if vote else {"prompt": "a sneaker moves left"}
    form = "" if vote else "a form with the header Authorization: Bearer ANYTHING, or "
    given = f"is {kind}" if kind else "has no Content-Type"
    return f"the body {given}; legal: {form}JSON, with Content-Type: application/json, such as {json.dumps(example)}"


def _explain(problem: dict[str, Any], param: str | None) -> str:
    if problem["type"] == "extra_forbidden":
        if str(param).startswith("input_reference"):  # OpenAI's, which a form also has as input_reference[image_url]
            return f"{param}: requests have no picture to begin with; legal: a prompt alone (on the command line: videoqat generate image=FILE)"
        lists = "; lists go in JSON" if str(param).endswith("]") else ""
        return f"unknown field {param!r}; legal fields: see /docs{lists}"
    given = problem.get("input")
    shown = "" if isinstance(given, dict | list) or given is None else f"={_short(given)}"
    return f"{param or 'the body'}{shown}: {problem['msg']}"


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
