"""What goes over HTTP, as types: requests, which are checked strictly, and responses. docs/serving.md tells the same in words."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

LARGEST_SEED = 2**53 - 1  # what a browser's numbers hold exactly
Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
Size = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Compared(_Strict):
    """One side of a comparison."""

    attention: Name = Field(description="a recipe's name, or `checkpoint`")
    model: Name | None = Field(None, description="the request's model if not given")


class CreateVideo(_Strict):
    """A video, or with `compare` several of the same prompt and seed. `prompt`, `model`, `size` and `seconds` are as in OpenAI's API."""

    prompt: str = Field(min_length=1, examples=["a sneaker moves left"])
    model: Name | None = Field(None, description="one of /v1/models; the first of them if not given")
    size: Size | None = Field(None, description="WIDTHxHEIGHT in pixels", examples=["64x64"])
    seconds: str | float | None = Field(None, description="of the video; becomes the nearest number of frames that the model can do", examples=["1"])
    attention: Name | None = Field(None, description="a recipe's name, one of /v1/recipes, or `checkpoint`: what the model was trained for")
    compare: bool | list[Name | Compared] | None = Field(
        None, description="true: bf16 and `attention`, or without it the service's own pair; or a list, of which the first is the reference"
    )
    floor: bool = Field(False, description="with `compare`: also render the reference a second time, as the floor beside which differences are read")
    seed: int | None = Field(None, ge=0, le=LARGEST_SEED, description="of the noise; drawn, and told, if not given")
    num_frames: int | None = Field(None, ge=1, description="instead of `seconds`")
    fps: int | None = Field(None, ge=1, le=120)
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    negative_prompt: str | None = None
    flow_shift: float | None = Field(None, ge=0, le=100, description="0: the model's own")


class VideoError(BaseModel):
    """Why a video failed."""

    code: str
    message: str


class Stage(BaseModel):
    """Where a video in progress stands."""

    name: str = Field(description="loading, text, denoising or decoding")
    step: int
    steps: int


class Timings(BaseModel):
    """Seconds by stage; on a GPU by its own events."""

    text_s: float
    denoise_s: float
    steps_s: list[float]
    vae_s: float
    encode_s: float
    total_s: float = Field(description="text to frames on the host; the encoding of the mp4 comes after it")


class Receipt(BaseModel):
    """An attention kernel that ran."""

    kernel: str
    native: bool = Field(description="whether the hardware computed in the recipe's formats; false: emulated")
    reason: str
    device: str
    recipe: str
    calls: int


class Result(BaseModel):
    """What really ran."""

    receipts: list[Receipt]
    timings: Timings
    peak_memory_bytes: int | None = Field(description="on a GPU what torch had allocated; on a CPU what the worker's process held")
    recipe: dict[str, Any]
    checkpoint_recipe: dict[str, Any] | None = Field(description="what the model was trained for")
    warnings: list[str]
    num_tokens: int = Field(description="video tokens in attention")
    dtype: str
    video_sha256: str
    model_fingerprint: str
    provenance: dict[str, Any]


class Video(BaseModel):
    """A video and how far it is."""

    id: str
    object: Literal["video"] = "video"
    status: Status
    progress: int = Field(description="percent")
    model: str
    prompt: str
    size: str
    seconds: str
    created_at: int
    started_at: float | None
    completed_at: int | None = Field(description="when it ended, however it did")
    expires_at: int | None
    error: VideoError | None
    attention: str
    seed: int
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    negative_prompt: str
    flow_shift: float
    queue_position: int | None = Field(description="1: the next one; null where it doesn't wait")
    stage: Stage | None
    cancel_requested: bool
    restarts: int = Field(description="how often it was begun again because its worker had died")
    worker: str | None
    comparison_id: str | None
    content_url: str | None
    result: Result | None


class VideoList(BaseModel):
    """A page of videos."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """That something is gone."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class Comparison(BaseModel):
    """Videos of one prompt and seed."""

    id: str
    object: Literal["comparison"] = "comparison"
    created_at: int
    status: Literal["in_progress", "completed", "failed"] = Field(description="completed: all have ended, two or more of them well")
    prompt: str
    reference: str | None = Field(description="id of the video that the others are held against")
    floor: str | None = Field(description="id of the reference's second rendering")
    videos: list[Video]
    differences: dict[str, Any] | None = Field(
        description="by video: `identical`, `psnr_mean`, `psnr_min` (dB), `ssim_mean`, `ssim_min` to the reference, `flicker`; null until measured"
    )
    speedup: dict[str, float] = Field(description="by video's id: the reference's denoising time over its own")


class ComparisonList(BaseModel):
    """A page of comparisons."""

    object: Literal["list"] = "list"
    data: list[Comparison]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Ballot(BaseModel):
    """Two videos, a and b, of which one doesn't know which is which."""

    id: str
    object: Literal["ballot"] = "ballot"
    prompt: str | None
    a: str = Field(description="where the video is")
    b: str = Field(description="where the video is")
    choice: Literal["a", "b", "tie"] | None
    label_a: str | None = Field(description="model and recipe; null until voted")
    label_b: str | None


class Vote(_Strict):
    """Which is better."""

    choice: Literal["a", "b", "tie"]


class VoteResult(BaseModel):
    """How a pair was judged; a tie counts half for each."""

    first: str
    second: str
    votes: int
    first_better: int
    second_better: int
    ties: int
    first_share: float
    interval_95: list[float]


class VoteResults(BaseModel):
    """How all pairs were judged."""

    object: Literal["list"] = "list"
    data: list[VoteResult]


class Model(BaseModel):
    """A model on offer."""

    id: str
    object: Literal["model"] = "model"
    family: str
    attention: str = Field(description="what runs where a request names no attention")
    trained_for: str | None
    defaults: dict[str, Any]


class Models(BaseModel):
    """All models on offer, the default first, and what may be asked of them."""

    object: Literal["list"] = "list"
    data: list[Model]
    limits: dict[str, int]


class Recipe(BaseModel):
    """A recipe on offer."""

    id: str
    object: Literal["recipe"] = "recipe"
    quantised: bool
    fields: dict[str, Any]


class Recipes(BaseModel):
    """All recipes on offer, and which of them `compare: true` renders."""

    object: Literal["list"] = "list"
    data: list[Recipe]
    compare: list[str]


class WorkerState(BaseModel):
    """A worker that lives."""

    id: str
    host: str
    pid: int
    device: str
    state: Literal["starting", "ready", "busy"]
    models: list[str] = Field(description="those on its device")
    started_at: float


class QueueState(BaseModel):
    """Who works, and how much there is to do."""

    object: Literal["queue"] = "queue"
    workers: list[WorkerState]
    videos: dict[str, int]


class ErrorDetail(BaseModel):
    """What is wrong, and where."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Every answer that isn't what was asked for."""

    error: ErrorDetail
