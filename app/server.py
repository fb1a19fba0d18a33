"""The HTTP API. `docs/serving.md` describes it; /docs of a running server shows every field."""

import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Response
from fastapi.responses import FileResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import api, views
from app.catalogue import Catalogue
from app.comparisons import Comparisons
from app.forms import FormOrJson
from app.guard import Guard, error_response, tell_errors
from app.jobs import Jobs, QueueFull
from app.keeper import remove
from app.metrics import Metrics
from app.orders import orders_of
from app.queue import Queue
from app.reference import add_reference
from videoqat import __version__
from videoqat.config import ServeConfig
from videoqat.console import say

RETRY_AFTER_S = 10
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
Id = Annotated[str, Query(max_length=64)]
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": api.ErrorResponse, "description": "no token, or a wrong one, where one is needed"},
    421: {"model": api.ErrorResponse, "description": "a Host that isn't this machine's, where it serves itself alone"},
    422: {"model": api.ErrorResponse, "description": "a field that can't be used"},
    503: {"model": api.ErrorResponse, "description": "the database doesn't answer"},
}
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": api.ErrorResponse, "description": "there is none of that id"}}
CONFLICT: dict[int | str, dict[str, Any]] = {409: {"model": api.ErrorResponse, "description": "not in the state that it is in"}}
NEW: dict[int | str, dict[str, Any]] = {
    400: {"model": api.ErrorResponse, "description": "no JSON, or no form"},
    413: {"model": api.ErrorResponse, "description": "the body is too large"},
    415: {"model": api.ErrorResponse, "description": "a body that is no JSON, going by its Content-Type, nor a form that is taken"},
    429: {"model": api.ErrorResponse, "description": "as many videos wait as may wait"},
}
MP4: dict[int | str, dict[str, Any]] = {
    200: {"content": {"video/mp4": {}}, "description": "the video"},
    206: {"content": {"video/mp4": {}}, "description": "a part of it, where the request has a Range"},
    400: {"content": {"text/plain": {}}, "description": "a Range that is none"},
    416: {"content": {"text/plain": {}}, "description": "a Range beyond the end"},
}


class _Content(FileResponse):
    """A file that may be deleted in the moment in which it is asked for."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except RuntimeError:  # what starlette says, before it has sent anything, of a file that isn't there
            if Path(self.path).exists():
                raise
            await error_response(404, "the video is being deleted")(scope, receive, send)


class Service:
    """What the endpoints work with.

    Args:
        config: the server's.
        catalogue: what is on offer.
        jobs, comparisons: the database.
        queue: where messages go.
        sending: held while a message is sent, so that messages stand in the order of the videos.
    """

    def __init__(
        self, config: ServeConfig, catalogue: Catalogue, jobs: Jobs, comparisons: Comparisons, queue: Queue, sending: threading.Lock
    ) -> None:
        self.config, self.catalogue, self.jobs, self.comparisons = config, catalogue, jobs, comparisons
        self.queue, self.sending = queue, sending
        self.limits = config.request_limits()
        self.videos = Path(config.folder).absolute() / "videos"
        self.keep_s = config.keep_hours * 3600

    def submit(self, request: api.CreateVideo) -> str:
        """Queues what is asked for. Returns the (first) video's id."""
        orders, floor = orders_of(request, self.catalogue, self.limits)
        with self.sending:
            try:
                ids = self.jobs.submit(orders, self.limits.max_queued, floor)
            except QueueFull as error:
                full = f"{self.limits.max_queued} videos wait already; try again later"
                raise HTTPException(429, full, headers={"Retry-After": str(RETRY_AFTER_S)}) from error
            try:
                for video in ids:
                    self.queue.send(video)
            except Exception as error:  # they are in the database: the keeper sends for them when the queue is back
                say(f"server: the queue doesn't answer: {error}")
        return ids[0]

    def video(self, video: str) -> api.Video:
        """A video as it is now."""
        row = self.jobs.get(video)
        if row is None:
            raise HTTPException(404, f"video {video!r} does not exist")
        return views.show_video(row, self.jobs.waiting() if row["status"] == "queued" else [], self.keep_s)

    def content(self, video: str, what: str) -> FileResponse:
        """A completed video's file."""
        row = self.jobs.get(video)
        if row is None:
            raise HTTPException(404, f"{what} does not exist")
        if row["status"] != "completed":
            raise HTTPException(409, f"{what} is {row['status']}; legal: a completed one")
        path = self.videos / row["file"]
        if not path.is_file():
            raise HTTPException(404, f"the file of {what} is gone")
        return _Content(path, media_type="video/mp4", filename=f"{what.split()[-1]}.mp4", content_disposition_type="inline")

    def comparison(self, comparison: str) -> dict[str, Any]:
        """A comparison's row."""
        row = self.comparisons.get(comparison)
        if row is None:
            raise HTTPException(404, f"comparison {comparison!r} does not exist")
        return row


def create_app(service: Service) -> FastAPI:
    """The application around a service."""
    app = FastAPI(title="videoqat", version=__version__, description="Videos, and what 4-bit attention makes of them.", docs_url=None, redoc_url=None)
    app.state.service = service
    metrics = Metrics(service.jobs)
    tell_errors(app)
    add_reference(app)
    app.include_router(_videos(service))
    app.include_router(_comparisons(service))
    app.include_router(_about(service))
    app.include_router(_operation(service, metrics))
    app.add_middleware(_Measured, metrics=metrics)
    config = service.config
    app.add_middleware(Guard, max_body_bytes=service.limits.max_body_bytes, token=config.token(), local_only=config.for_this_machine_alone())
    return app


def _router() -> APIRouter:
    bearer = HTTPBearer(auto_error=False, description="where the service has a token")  # for the documents; `Guard` does it
    return APIRouter(prefix="/v1", responses=ERRORS, dependencies=[Depends(bearer)])


def _videos(service: Service) -> APIRouter:
    router = _router()

    def create_video(request: api.CreateVideo) -> api.Video:
        """Queues a video, or a comparison, of which this answers with the first video. Takes JSON or, with `Authorization: Bearer`, a form
        of the same fields (multipart/form-data or application/x-www-form-urlencoded), in which `compare` is true or false."""
        return service.video(service.submit(request))

    router.add_api_route("/videos", create_video, methods=["POST"], responses=NEW, tags=["videos"], route_class_override=FormOrJson)

    @router.get("/videos", tags=["videos"])
    def list_videos(limit: Limit = 20, order: Order = "desc", after: Id | None = None, status: api.Status | None = None) -> api.VideoList:
        """Videos, the newest first, from behind the one called `after`."""
        page = service.jobs.page(after=after, limit=limit, newest_first=order == "desc", status=status)
        if page is None:
            raise HTTPException(422, f"after={after!r} is no video")
        waiting = service.jobs.waiting() if any(row["status"] == "queued" for row in page[0]) else []
        data = [views.show_video(row, waiting, service.keep_s) for row in page[0]]
        return api.VideoList(data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None, has_more=page[1])

    @router.get("/videos/{video_id}", responses=NOT_FOUND, tags=["videos"])
    def get_video(video_id: str) -> api.Video:
        """A video, and how far it is."""
        return service.video(video_id)

    @router.post("/videos/{video_id}/cancel", responses=NOT_FOUND | CONFLICT, tags=["videos"])
    def cancel_video(video_id: str) -> api.Video:
        """Ends a video that waits at once, and one in progress after its denoising step; it stays in the list, as `cancelled`."""
        status = service.jobs.cancel(video_id)
        if status in ("completed", "failed"):
            raise HTTPException(409, f"video {video_id!r} is {status}; legal: one that is queued or in_progress")
        return service.video(video_id)

    @router.delete("/videos/{video_id}", responses=NOT_FOUND, tags=["videos"])
    def delete_video(video_id: str) -> api.Deleted:
        """Takes a video out, whatever its state: one in progress ends after its denoising step."""
        row = service.jobs.delete(video_id)
        if row is None:
            raise HTTPException(404, f"video {video_id!r} does not exist")
        if row["file"]:
            remove(service.videos, row["file"])
        return api.Deleted(id=row["id"])

    @router.get("/videos/{video_id}/content", responses=NOT_FOUND | CONFLICT | MP4, response_class=FileResponse, tags=["videos"])
    def get_content(video_id: str, variant: Literal["video"] = "video") -> FileResponse:
        """The mp4 of a completed video, or a range of its bytes. Of OpenAI's variants there is this one alone: no thumbnail, no spritesheet."""
        return service.content(video_id, f"video {video_id}")

    router.add_api_route("/videos/{video_id}/content", get_content, methods=["HEAD"], include_in_schema=False)
    return router


def _comparisons(service: Service) -> APIRouter:
    router = _router()

    @router.get("/comparisons", tags=["comparisons"])
    def list_comparisons(limit: Limit = 20, order: Order = "desc", after: Id | None = None) -> api.ComparisonList:
        """Comparisons, the newest first."""
        page = service.comparisons.page(after=after, limit=limit, newest_first=order == "desc")
        if page is None:
            raise HTTPException(422, f"after={after!r} is no comparison")
        waiting = service.jobs.waiting()
        data = [views.show_comparison(row, waiting, service.keep_s) for row in page[0]]
        return api.ComparisonList(data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None, has_more=page[1])

    @router.get("/comparisons/{comparison_id}", responses=NOT_FOUND, tags=["comparisons"])
    def get_comparison(comparison_id: str) -> api.Comparison:
        """A comparison: its videos, what separates them, and how much faster they were made."""
        return views.show_comparison(service.comparison(comparison_id), service.jobs.waiting(), service.keep_s)

    @router.post("/comparisons/{comparison_id}/ballots", responses=NOT_FOUND | CONFLICT, tags=["votes"])
    def create_ballot(comparison_id: str) -> api.Ballot:
        """The comparison's reference and another of its videos, in random order and without their names."""
        row = service.comparison(comparison_id)
        ballot = service.comparisons.ballot(row)
        if ballot is None:
            raise HTTPException(409, f"comparison {comparison_id!r} has no two videos that are completed")
        return _show_ballot(service, ballot)

    @router.get("/ballots/{ballot_id}", responses=NOT_FOUND, tags=["votes"])
    def get_ballot(ballot_id: str) -> api.Ballot:
        """A ballot."""
        return _show_ballot(service, ballot_id)

    @router.get("/ballots/{ballot_id}/{side}", responses=NOT_FOUND | CONFLICT | MP4, response_class=FileResponse, tags=["votes"])
    def get_ballot_content(ballot_id: str, side: Literal["a", "b"]) -> FileResponse:
        """One of a ballot's two videos."""
        row = service.comparisons.get_ballot(ballot_id)
        if row is None:
            raise HTTPException(404, f"ballot {ballot_id!r} does not exist")
        return service.content(row[f"video_{side}"], f"video {side}")

    @router.post("/ballots/{ballot_id}/vote", responses=NOT_FOUND | CONFLICT | NEW, tags=["votes"])
    def vote(ballot_id: str, choice: api.Vote) -> api.Ballot:
        """Fills in a ballot, once; the answer tells what a and b were."""
        if service.comparisons.get_ballot(ballot_id) is None:
            raise HTTPException(404, f"ballot {ballot_id!r} does not exist")
        if not service.comparisons.vote(ballot_id, choice.choice):
            raise HTTPException(409, f"ballot {ballot_id!r} is filled in already")
        return _show_ballot(service, ballot_id)

    @router.get("/votes", tags=["votes"])
    def get_votes() -> api.VoteResults:
        """How each pair of model and recipe was judged, with a 95 % interval."""
        return api.VoteResults(data=[api.VoteResult(**row) for row in service.comparisons.results()])

    router.add_api_route("/ballots/{ballot_id}/{side}", get_ballot_content, methods=["HEAD"], include_in_schema=False)
    return router


def _show_ballot(service: Service, ballot: str) -> api.Ballot:
    row = service.comparisons.get_ballot(ballot)
    if row is None:
        raise HTTPException(404, f"ballot {ballot!r} does not exist")
    video = service.jobs.get(row["video_a"])
    return views.show_ballot(row, None if video is None else video["prompt"])


def _about(service: Service) -> APIRouter:
    router = _router()

    @router.get("/models", tags=["service"])
    def list_models() -> api.Models:
        """Models on offer with their defaults, and the limits of a request."""
        return views.show_models(service.catalogue, vars(service.limits))

    @router.get("/recipes", tags=["service"])
    def list_recipes() -> api.Recipes:
        """Recipes on offer: what `attention` may say."""
        return views.show_recipes(service.catalogue)

    @router.get("/queue", tags=["service"])
    def get_queue() -> api.QueueState:
        """Workers that live, and how many videos are in each state."""
        workers = [api.WorkerState(**{key: row[key] for key in api.WorkerState.model_fields}) for row in service.jobs.workers()]
        return api.QueueState(workers=workers, videos=service.jobs.counts())

    return router


def _operation(service: Service, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get("/health")
    def health() -> dict[str, str]:
        """That this process answers."""
        return {"status": "ok", "version": __version__}

    @router.get("/ready", responses={503: {"model": api.ErrorResponse, "description": "no worker, or no database"}})
    def ready() -> dict[str, Any]:
        """Whether a video asked for now would be made: the database answers, and a worker is ready."""
        states = [row["state"] for row in service.jobs.workers()]
        if not set(states) & {"ready", "busy"}:
            raise HTTPException(503, f"no worker is ready ({len(states)} starting)", headers={"Retry-After": "2"})
        return {"status": "ready", "workers": len(states)}

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "in Prometheus' form"}, 401: ERRORS[401], 421: ERRORS[421]},
    )
    def show_metrics() -> Response:
        """Figures for Prometheus."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router


class _Measured:
    """Counts and times requests by route, not by path, and by methods that there are: else whoever asks could make endlessly many."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `starlette.types.ASGIApp`."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.requests.labels(method, route, str(status)).inc()
            self.metrics.seconds.labels(method, route).observe(time.perf_counter() - started)
