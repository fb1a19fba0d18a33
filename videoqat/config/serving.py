"""What `videoqat serve` and `videoqat worker` can be told. Both share `ServiceConfig`, so that one file describes a service to all its machines."""

import dataclasses
import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from videoqat.config.checks import choice, existing, require
from videoqat.config.groups import GenerationRuntimeConfig, SamplingConfig, VideoParallelConfig
from videoqat.config.loading import load
from videoqat.config.schemas import GenerateConfig
from videoqat.errors import ConfigError
from videoqat.files import shipped
from videoqat.recipes import RECIPES, get_recipe

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass
class _ModelDefaults(GenerateConfig):
    """A generate configuration of which only the sampling counts."""

    model: str = ""
    prompt: str = "-"
    out: str = "-.mp4"

    def validate(self) -> None:
        self.sampling.validate()


@dataclass
class ServedModel:
    """One model on offer."""

    name: str = MISSING  # what requests call it
    path: str = MISSING  # a diffusers folder, the same on every machine with workers
    recipe: str = "checkpoint"  # where a request names no attention; checkpoint: the one the folder was trained for
    defaults: str = ""  # a configuration of generate whose `sampling` the model has by default, such as generate/wan2.1-1.3b
    sampling: dict[str, Any] = field(default_factory=dict)  # settings of `sampling` that win over those

    def validate(self, key: str) -> None:
        require(MODEL_NAME.fullmatch(self.name) is not None, f"{key}.name", self.name, "letters, digits, '.', '_' and '-', at most 64")
        existing(f"{key}.path", self.path, folder=True)
        found = not self.defaults or Path(self.defaults).is_file() or shipped(self.defaults) is not None
        require(found, f"{key}.defaults", self.defaults, "a configuration file, or the name of one below configs/")
        try:
            self.sampled()
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error

    def sampled(self) -> SamplingConfig:
        """How videos of this model are sampled where a request doesn't say otherwise."""
        overrides = [f"sampling.{key}={value}" for key, value in self.sampling.items()]
        return load(_ModelDefaults, self.defaults or None, overrides).sampling


@dataclass
class LimitsConfig:
    """What a request may ask for at most."""

    max_pixels: int = 1280 * 720  # width times height
    max_frames: int = 129
    max_steps: int = 100
    max_prompt_characters: int = 4000  # of the prompt, and of the negative prompt
    max_compared: int = 4  # videos of one comparison
    max_queued: int = 100  # videos that wait; more are refused (429)
    max_body_bytes: int = 256 * 1024

    def validate(self) -> None:
        for name, value in vars(self).items():
            require(value >= 1, f"limits.{name}", value, "at least 1")
        require(self.max_compared >= 2, "limits.max_compared", self.max_compared, "at least 2")


@dataclass
class MemoryConfig:
    """Budgets, in GiB for each worker, for weights of models that take turns on its device."""

    device_gib: float = 0.0  # 0: 60 % of the device's memory, or of the host's with runtime.offload
    host_gib: float = 0.0  # for models set aside in the host's memory: a GPU gets them back sooner than from disk

    def validate(self) -> None:
        for name, value in vars(self).items():
            require(value >= 0, f"memory.{name}", value, "0 or more")


@dataclass
class ServiceConfig:
    """What server and workers must agree on. `database` and `queue` may be `@FILE`: the URL is that file's first line, and shows up in no log."""

    folder: str = "videoqat-service"  # videos, and by default database, queue and the embedded model; shared by all machines
    database: str = ""  # an SQLAlchemy URL, such as postgresql+psycopg://user:password@host/name; empty: SQLite in `folder`
    queue: str = ""  # redis://host:6379/0; empty: SQLite in `folder`, for one machine
    models: list[ServedModel] = field(default_factory=list)  # the first is the default; empty: the embedded one (models/assets/garments.md)
    recipes: list[str] = field(default_factory=lambda: list(RECIPES))  # names or files of the recipes on offer
    compare: list[str] = field(default_factory=lambda: ["bf16", "attn_qat_search"])  # what `compare: true` renders
    runtime: GenerationRuntimeConfig = field(default_factory=GenerationRuntimeConfig)
    parallel: VideoParallelConfig = field(default_factory=VideoParallelConfig)  # of a `worker` that torchrun starts as several processes
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    warm_up: bool = True  # before a worker calls itself ready: the default model under every recipe of `compare`
    retries: int = 1  # how often a video is begun again whose worker died
    lease_s: float = 30.0  # a worker that hasn't been heard of for so long is dead

    def validate(self) -> None:
        for key in ("database", "queue"):
            if getattr(self, key).startswith("@"):
                existing(key, getattr(self, key)[1:])
        for i, model in enumerate(self.models):
            model.validate(f"models[{i}]")
            require(model.recipe == "checkpoint" or model.recipe in self.recipe_names(), f"models[{i}].recipe", model.recipe, "one of recipes")
        names = [model.name for model in self.models]
        require(len(set(names)) == len(names), "models", names, "names that differ")
        recipes = self.recipe_names()
        require(len(set(recipes)) == len(recipes), "recipes", recipes, "recipes with names that differ")
        require(len(self.compare) >= 2, "compare", self.compare, "two or more of recipes")
        for name in self.compare:
            choice("compare", name, [*recipes, "checkpoint"])
        known = self.database_url().startswith(("sqlite:///", "postgresql+psycopg://"))
        require(known, "database", without_password(self.database_url()), "empty, sqlite:///FILE, postgresql+psycopg://USER:PASSWORD@HOST/NAME")
        known = self.queue_url().startswith(("sqlite:///", "redis://", "rediss://"))
        require(known, "queue", without_password(self.queue_url()), "empty, redis://HOST:PORT/NUMBER, rediss://HOST:PORT/NUMBER")
        require(self.retries >= 0, "retries", self.retries, "0 or more")
        require(self.lease_s >= 1, "lease_s", self.lease_s, "at least 1")
        self.runtime.validate()
        self.parallel.validate()
        self.memory.validate()

    def recipe_names(self) -> list[str]:
        """What requests call the recipes on offer, in order."""
        return [get_recipe(recipe).name for recipe in self.recipes]

    def database_url(self) -> str:
        """Where the database is, for SQLAlchemy."""
        return _url(self.database) or f"sqlite:///{Path(self.folder).absolute() / 'service.db'}"

    def queue_url(self) -> str:
        """Where the queue is: Redis, or an SQLite file."""
        return _url(self.queue) or f"sqlite:///{Path(self.folder).absolute() / 'queue.db'}"


def _url(value: str) -> str:
    if not value.startswith("@"):
        return value
    lines = Path(value[1:]).read_text(encoding="utf-8").splitlines()
    return lines[0].strip() if lines else ""


def without_password(url: str) -> str:
    """`url` as it may be shown."""
    return re.sub(r"://[^@/]*@", "://...@", url)


@dataclass
class ServeConfig(ServiceConfig):
    """The HTTP server, with one worker process for each of `devices`.

    Without settings: the embedded model on the CPU, or on all GPUs, for this machine alone. `database` and `queue` take several machines:
    docs/serving.md.
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    token_file: str = ""  # a file whose first line requests must carry as a bearer token; empty: none
    open_to_all: bool = False  # serve other machines without a token; also through a proxy on this one
    devices: list[str] = field(default_factory=lambda: ["auto"])  # of the workers started here; auto: every GPU, or the CPU; empty: none
    keep_hours: float = 168.0  # how long a video is kept after it ended
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    access_log: bool = False
    page: bool = True  # the web page at /; the API is there without it

    def validate(self) -> None:
        super().validate()
        self.limits.validate()
        require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        require(self.keep_hours > 0, "keep_hours", self.keep_hours, "above 0")
        require(len(self.compare) <= self.limits.max_compared, "compare", self.compare, f"at most limits.max_compared={self.limits.max_compared}")
        for device in self.devices:
            dataclasses.replace(self.runtime, device=device).validate()
        gpus = [int(device.partition(":")[2] or 0) for device in self.devices if device.startswith("cuda")]  # cuda is cuda:0
        require(len(set(gpus)) == len(gpus), "devices", self.devices, "each GPU once: two jobs at a time on one would slow both down")
        alone = self.parallel.sp * self.parallel.cfg == 1
        legal = "[] with parallel.sp or parallel.cfg above 1: torchrun starts such workers (docs/serving.md)"
        require(alone or not self.devices, "devices", self.devices, legal)
        require("auto" not in self.devices or len(self.devices) == 1, "devices", self.devices, "auto alone, or devices by name")
        if self.token_file:
            existing("token_file", self.token_file)
            require(len(self.token() or "") >= 16, "token_file", self.token_file, "a file whose first line has at least 16 characters")
        guarded = is_loopback(self.host) or bool(self.token_file) or self.open_to_all
        require(guarded, "host", self.host, "127.0.0.1; or any with token_file=FILE, or with open_to_all=true")

    def request_limits(self) -> LimitsConfig:
        """What a request may ask for. The embedded model alone is not asked for sizes beyond its skill, of which one could take a CPU for days."""
        if self.models:
            return self.limits
        pixels, frames = min(self.limits.max_pixels, 256 * 256), min(self.limits.max_frames, 33)
        return dataclasses.replace(self.limits, max_pixels=pixels, max_frames=frames)

    def for_this_machine_alone(self) -> bool:
        """Whether nothing keeps others out but the address on which the server listens."""
        return is_loopback(self.host) and not self.token_file and not self.open_to_all

    def token(self) -> str | None:
        """What requests must carry; None where anybody may ask."""
        if not self.token_file:
            return None
        lines = Path(self.token_file).read_text(encoding="utf-8").splitlines()
        return lines[0].strip() if lines else ""


def is_loopback(host: str) -> bool:
    """Whether a name or address always means the machine on which it is said."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass
class WorkerConfig(ServiceConfig):
    """One worker of a service, on the device that `runtime.device` says: on a machine of its own, or beside others with a GPU each."""
