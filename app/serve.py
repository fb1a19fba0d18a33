"""`videoqat serve`: the HTTP server and its workers, one process each; and `videoqat worker`, one worker alone."""

import contextlib
import dataclasses
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from videoqat.config import RuntimeConfig, ServeConfig, ServiceConfig, WorkerConfig, require
from videoqat.console import say
from videoqat.errors import UserError
from videoqat.files import check_writable, writable_folder
from videoqat.models import embedded

PATIENCE_S = 15.0  # for requests, then for a worker's denoising step, when the server ends
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a worker that ended is started again


def _need_extra(*more: str) -> None:
    names = ("fastapi", "huey", "prometheus_client", "python_multipart", "sqlalchemy", "uvicorn", *more)
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serving needs {missing[0]}, which is not installed; legal: pip install 'videoqat[serve]'")


def plan(config: ServeConfig) -> dict[str, Any]:
    """What `serve` would do, checked without loading weights or opening a port: models, recipes, and the kernel of each recipe on each device.

    Raises:
        UserError: something that can't be served.
    """
    _need_extra(*(["gradio"] if config.page else []))
    names, devices = _check_offer(config), _devices(config)
    shown = [_plan_device(config, device) for device in devices]
    return {"url": f"http://{config.host}:{config.port}", "models": names, "workers": shown}


def plan_worker(config: WorkerConfig) -> dict[str, Any]:
    """What `work` would do, checked likewise."""
    _need_extra()
    _check_group(config)
    return {"models": _check_offer(config), "workers": [_plan_device(config, config.runtime.device)]}


def _check_offer(config: ServiceConfig) -> list[str]:
    """Names of the models on offer, if all can be, and the folder can be written. Raises UserError where not."""
    from app.catalogue import describe

    check_writable("folder", config.folder)
    return [describe(model).name for model in config.models] or [embedded.NAME]


def _plan_device(config: ServiceConfig, device: str) -> dict[str, Any]:
    from videoqat.attention.backends import resolve
    from videoqat.models.spec import family_of
    from videoqat.recipes import get_recipe

    runtime = dataclasses.replace(config.runtime, device=device)
    where, dtype = runtime.resolve()
    kernels: dict[str, Any] = {}
    heads = {model.name: family_of(model.path).geometry(model.path).head_dim for model in config.models}
    heads = heads or {embedded.NAME: embedded.known()["sizes"]["head_dim"]}
    for model, head_dim in heads.items():
        for name in config.compare:
            recipe = get_recipe("bf16" if name == "checkpoint" else dict(zip(config.recipe_names(), config.recipes, strict=True))[name])
            receipt = resolve(recipe, where, dtype, head_dim, runtime.kernel if recipe.is_quantised else "auto")
            kernels[f"{model}: {name}"] = {"kernel": receipt.kernel, "native": receipt.native}
    return {"device": str(where), "dtype": str(dtype), "kernels": kernels}


def _devices(config: ServeConfig) -> list[str]:
    """One for each worker."""
    import torch

    if config.devices != ["auto"]:
        for device in config.devices:
            RuntimeConfig(device=device).resolve()
        return list(config.devices)
    if config.runtime.device != "auto":
        return [config.runtime.device]
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]


class _Crew:
    """The worker processes of one server: each is started again when it ends, and its video taken from it at once."""

    def __init__(self, config: ServeConfig, devices: list[str], reap: Callable[..., None]) -> None:
        self.config, self.reap = config, reap
        self._context = get_context("spawn")
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._keep, args=(device,), daemon=True) for device in devices]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _keep(self, device: str) -> None:
        """Has one worker on a device, always."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                self._one(device)
            except OSError as error:  # no memory for another process, say; later there may be
                say(f"a worker on {device} can't be started: {error}")
            if self._stopping.is_set():
                return
            pause_s = FIRST_PAUSE_S if time.monotonic() - started > LONGEST_PAUSE_S else min(2 * pause_s, LONGEST_PAUSE_S)
            self._stopping.wait(pause_s)

    def _one(self, device: str) -> None:
        """One worker's life."""
        from app.jobs import new_identity

        identity = new_identity(device)
        runtime = dataclasses.replace(self.config.runtime, device=device)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_worker_process, args=(dataclasses.replace(self.config, runtime=runtime), identity, theirs), name=identity
        )
        process.start()
        theirs.close()
        by_itself = False  # else it is us who end it, with force if its step takes too long, which is no crash
        while not by_itself and not self._stopping.is_set():
            by_itself = bool(connection.wait([process.sentinel], timeout=0.2))
        if not by_itself:
            with contextlib.suppress(OSError):
                ours.send("stop")
        _end(process)
        ours.close()
        if process.exitcode:
            say(f"worker {identity} ended with exit code {process.exitcode}")
        with contextlib.suppress(Exception):  # a database that is away: its lease runs out
            self.reap(identity, crashed=by_itself)


def _worker_process(config: ServiceConfig, identity: str, parent: Any) -> None:
    from app.worker import main

    code = main(config, identity, parent)
    # All that counts is in the database by now. Taking torch and its kin apart, as the interpreter would, takes seconds on a busy machine.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(process: BaseProcess) -> None:
    process.join(PATIENCE_S)
    if process.is_alive():
        process.kill()
        process.join()


def serve(config: ServeConfig) -> dict[str, Any]:
    """Serves until it is told to stop (SIGTERM, or Ctrl-C). What is in progress then waits again, and is made after the next start.

    Raises:
        UserError: port, folder, database, queue or models can't be used.
    """
    _need_extra(*(["gradio"] if config.page else []))
    import uvicorn

    from app.comparisons import Comparisons
    from app.jobs import Jobs
    from app.keeper import Keeper
    from app.queue import Queue
    from app.tables import open_database

    writable_folder("folder", config.folder)
    videos = writable_folder("folder", Path(config.folder).absolute() / "videos")
    listening = _listen(config)
    database = open_database(config.database_url())
    jobs, comparisons = Jobs(database, config.retries, config.lease_s), Comparisons(database)
    queue, sending = Queue(config.queue_url()), threading.Lock()
    keeper = Keeper(jobs, comparisons, queue, sending, videos, config.keep_hours * 3600)
    crew = _Crew(config, _devices(config), keeper.reap)
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    _when_told_to_stop(_stop_starting)
    crew.start()
    try:
        # Heavy imports here and in the workers, at the same time.
        from app.catalogue import open_catalogue
        from app.server import Service, create_app

        app = create_app(Service(config, open_catalogue(config), jobs, comparisons, queue, sending))
        if config.page:
            from app.ui import add_page

            add_page(app)
        keeper.start()
        options: dict[str, Any] = {"log_level": "warning", "access_log": config.access_log, "server_header": False}
        say(f"videoqat serves at {url} (its API: {url}/docs); workers are starting")
        server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=int(PATIENCE_S), **options))
        # uvicorn listens to signals itself, and sends them on to us when it has ended; this is for one that comes before it does.
        _when_told_to_stop(lambda *_: setattr(server, "should_exit", True))
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        say("videoqat serve: told to stop while it was starting")
    finally:
        crew.stop()
        keeper.stop()
        database.dispose()
    return {"url": url, "stopped": True}


def _when_told_to_stop(handler: Callable[[int, Any], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _stop_starting(*_: Any) -> None:
    raise KeyboardInterrupt


def work(config: WorkerConfig) -> dict[str, Any]:
    """One worker, until it is told to stop (SIGTERM, or Ctrl-C). Under torchrun its processes make each video together (`app.group`).

    Raises:
        UserError: device, folder, database, queue or models can't be used, or not by so many processes.
        WorkerLost: under torchrun, another process ended.
    """
    _need_extra()
    _check_group(config)
    from app.group import Group, follow
    from app.jobs import new_identity
    from app.worker import lock_device, main
    from videoqat.generation.division import open_division
    from videoqat.parallel.mesh import collective_errors, world_size_from_launcher

    writable_folder("folder", config.folder)
    if world_size_from_launcher() == 1:
        return {"exit_code": main(config, new_identity(config.runtime.device))}
    together = open_division(config.parallel, config.folder, [], config.runtime.resolve()[0], world_size_from_launcher())
    with together as (mesh, division), collective_errors("worker"):
        config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, device=str(mesh.device)))
        group = Group(division)
        if division.rank > 0:
            lock = lock_device(mesh.device)
            follow(config, group)
            if lock is not None:
                lock.release()
            return {"exit_code": 0}
        code = main(config, new_identity(str(mesh.device)), group=group)
        group.tell(None)
        return {"exit_code": code}


def _check_group(config: WorkerConfig) -> None:
    """Requires as many processes as `config.parallel` wants, and that they can divide the videos of each model."""
    from videoqat.parallel.mesh import world_size_from_launcher

    processes = world_size_from_launcher()
    need = config.parallel.sp * config.parallel.cfg
    legal = f"a product of {processes}, the number of processes; or torchrun --nproc-per-node {need}"
    require(need == processes, "parallel.sp * parallel.cfg", need, legal)
    if need > 1:
        from videoqat.generation.division import check_division

        for model in config.models:
            check_division(config.parallel, model.path, processes, many=False)


def _listen(config: ServeConfig) -> socket.socket:
    """The server's socket: taken before anything else is done, so that a port in use is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise UserError(f"host={config.host!r} port={config.port} can't be listened on: {error.strerror or error}") from error
    return listening
