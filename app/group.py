"""One worker that is several processes, started by torchrun: they make each video together (`generation.division`).

The first is the worker: it takes videos from the queue and speaks to the database. The others follow: they hear what is to be made, make it with
the first, and hear after each denoising step whether it is still wanted. What all of them meet alike (a request that can't be, NaN, a video that
nobody wants any more) ends that video; what one meets alone ends them all, and the video's lease runs out.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from videoqat.config import GenerateConfig, SamplingConfig, ServiceConfig
from videoqat.errors import GenerationCancelled, NonFiniteError, UserError, WorkerLost
from videoqat.generation import single
from videoqat.generation.division import Division
from videoqat.generation.pool import EnginePool, warm_up

SIGN_OF_LIFE_S = 3600.0  # followers that wait for a week would think the first one lost


@dataclass(frozen=True)
class WarmUp:
    """An order to warm a model up; see `pool.warm_up`."""

    model: str
    sampling: SamplingConfig
    recipes: list[str]


@dataclass(frozen=True)
class Wait:
    """An order to wait for the next one."""


class Group:
    """The processes of one worker, as one of them sees it. A worker of one process is a group, too, and talks to nobody."""

    def __init__(self, division: Division | None = None) -> None:
        self.division = division or Division()
        self._spoke = time.monotonic()

    def tell(self, order: "GenerateConfig | WarmUp | Wait | None") -> None:
        """On the first: what the others are to do with it now; None: end."""
        self._spoke = time.monotonic()
        self._pass_on(order)

    def idle(self) -> None:
        """On the first, now and then while there is nothing to do."""
        if time.monotonic() - self._spoke > SIGN_OF_LIFE_S:
            self.tell(Wait())

    def hear(self) -> "GenerateConfig | WarmUp | Wait | None":
        """On the others: what the first has told."""
        order: GenerateConfig | WarmUp | Wait | None = self._pass_on(None)
        return order

    def _pass_on(self, thing: Any) -> Any:
        if self.division.group is None:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, group=self.division.group, group_src=0)
        return box[0]

    def agreeing(self, on_step: Callable[[int, int], None] | None = None) -> Callable[[int, int], None]:
        """`on_step` (the first one's; the others have none) so that the `GenerationCancelled` which it raises is raised on all."""

        def told(done: int, total: int) -> None:
            cancelled = False
            try:
                if on_step is not None:
                    on_step(done, total)
            except GenerationCancelled:
                cancelled = True
            if self.division.any(cancelled):
                raise GenerationCancelled

        return told

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """While a video is made. Of several processes, what one may meet alone becomes `WorkerLost`: the others can't be told, they are in the middle
        of a step."""
        try:
            yield
        except (UserError, NonFiniteError, GenerationCancelled, WorkerLost):
            raise
        except Exception as error:
            if self.division.size == 1:
                raise
            raise WorkerLost(f"a process of this worker's group failed, and with it the group: {type(error).__name__}: {error}") from error


def follow(config: ServiceConfig, group: Group) -> None:
    """What the processes of a group do that aren't its first, until that tells them to end; signals to stop are its business."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    pool = EnginePool(config.runtime, config.memory.device_gib, config.memory.host_gib, group.division)
    while (order := group.hear()) is not None:
        if isinstance(order, Wait):
            continue
        with group.together(), contextlib.suppress(UserError, NonFiniteError, GenerationCancelled):
            engine = pool.get(order.model)
            if isinstance(order, WarmUp):
                warm_up(engine, order.sampling, order.recipes)
            else:
                single.render(engine, order, "", group.agreeing())
