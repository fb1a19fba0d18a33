"""The samples of a step, and what is drawn for them.

Step s takes the batches number (s - 1) * n to s * n - 1 of the data's order, n = accumulation * dp, and deals them out to the data-parallel ranks
in turn. So which samples a step sees is a pure function of (seed, s, train.global_batch_size, train.batch_size), whatever the layout; ranks that
divide one sequence (sp) get the same ones.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from videoqat.config import parse_bucket
from videoqat.models.spec import Condition
from videoqat.training.agreement import Faults
from videoqat.training.job import Job
from videoqat.training.objective import draw


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the transformer together. Latents and noise (B, C, F, H, W), t (B,), and the condition; all floats fp32."""

    epoch: int
    samples: list[int]
    latents_BCFHW: Tensor
    noise_BCFHW: Tensor
    t_B: Tensor
    condition: Condition

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Condition]:
        """In the order of `denoising_loss`."""
        return self.latents_BCFHW, self.noise_BCFHW, self.t_B, self.condition

    def _with(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        return replace(
            self,
            latents_BCFHW=change(self.latents_BCFHW),
            noise_BCFHW=change(self.noise_BCFHW),
            t_B=change(self.t_B),
            condition={part: change(tensor) for part, tensor in self.condition.items()},
        )

    def pinned(self) -> "MicroBatch":
        """In memory from which a GPU copies while the host goes on."""
        return self._with(Tensor.pin_memory)

    def to(self, device: torch.device) -> "MicroBatch":
        """On `device`."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))


def load_batch(job: Job, epoch: int, samples: list[int]) -> MicroBatch:
    """Samples of the cache with what is drawn for them in `epoch`, on the CPU."""
    config = job.config
    loaded = [job.cache.load(index) for index in samples]
    draws = [
        draw(config.objective, config.train.seed, epoch, index, sample["latents"], job.time_range)
        for index, sample in zip(samples, loaded, strict=True)
    ]
    conditions = [
        {part: tensor for part, tensor in sample.items() if part != "latents"} | (job.cache.null_condition if d.drop_caption else {})
        for d, sample in zip(draws, loaded, strict=True)
    ]
    condition = job.family.batch_conditions(conditions, job.cache.settings["max_text_tokens"])
    return MicroBatch(
        epoch=epoch,
        samples=samples,
        latents_BCFHW=torch.stack([sample["latents"] for sample in loaded]).float(),
        noise_BCFHW=torch.stack([d.noise_CFHW for d in draws]),
        t_B=torch.tensor([d.t for d in draws]),
        condition={part: tensor.float() if tensor.is_floating_point() else tensor for part, tensor in condition.items()},
    )


def batches_of(job: Job, step: int) -> list[tuple[int, list[int]]]:
    """(epoch, samples) of every micro-batch of `step` (counted from 1): those of rank 0, 1, ..., dp - 1, and again for each accumulated one."""
    count = job.accumulation * job.layout.dp
    return [job.order.batch(i) for i in range((step - 1) * count, step * count)]


def work_of(job: Job, step: int, per_sample: Callable[[str], float]) -> float:
    """The sum of `per_sample(bucket)`, such as its tokens, over all samples of `step` on all ranks."""
    return sum(per_sample(job.cache.samples[index].bucket) for _, samples in batches_of(job, step) for index in samples)


def tokens_of(job: Job, bucket: str) -> int:
    """Video tokens of a sample of this bucket."""
    return job.geometry.num_tokens(*parse_bucket("bucket", bucket))


class Ahead:
    """This rank's micro-batches, loaded a step ahead in a thread: a small model keeps the host as busy as the GPU with one step after another.

    Args:
        job, dp_rank: whose samples.
        pin: into pinned memory.
        faults: where errors go while other ranks would wait (a shard that can't be read); the step that follows must not be taken then.
    """

    def __init__(self, job: Job, dp_rank: int, *, pin: bool, faults: Faults) -> None:
        self._job, self._dp_rank, self._pin, self._faults = job, dp_rank, pin, faults
        self._step = self._next = 0
        self._batches: list[MicroBatch] = []
        self._thread = ThreadPoolExecutor(1, "batches")
        self._loading: Future[list[MicroBatch]] | None = None

    def begin(self, step: int) -> None:
        """Begins to load what `take(step)` will return once `finish` was called."""
        self._loading, self._next = self._thread.submit(self._load, step), step

    def finish(self) -> None:
        """Waits for what was begun. If it failed, the fault is noted now, and nothing can be taken."""
        if self._loading is not None:
            loading, self._loading = self._loading, None
            with self._faults.noted():
                self._batches, self._step = loading.result(), self._next

    def _load(self, step: int) -> list[MicroBatch]:
        batches = [load_batch(self._job, *chosen) for chosen in batches_of(self._job, step)[self._dp_rank :: self._job.layout.dp]]
        return [batch.pinned() for batch in batches] if self._pin else batches

    def take(self, step: int, device: torch.device) -> list[MicroBatch]:
        """This rank's micro-batches of `step`, on `device`."""
        assert self._step == step, f"step {step} was not loaded"
        return [batch.to(device) for batch in self._batches]
