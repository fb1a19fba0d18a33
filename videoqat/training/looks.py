"""What is looked at while a training goes on: quantisation health, validation losses, sample videos.

All of it is forwards alone, by the weights as they are being trained (not their moving average). Sharded weights are gathered by all ranks together,
so all of them look at the same time and do equally many forwards; nobody waits for rank 0. Training's numbers are the same, bit for bit, whether
anything was looked at or not.
"""

import contextlib
from typing import Any

from videoqat.console import say
from videoqat.data.dataset import CachedVideos
from videoqat.errors import NonFiniteError
from videoqat.models.install import computing_by
from videoqat.parallel.mesh import Mesh
from videoqat.recipes import RECIPES
from videoqat.training import validation
from videoqat.training.health import forwards_alone, quantisation_health
from videoqat.training.job import Job
from videoqat.training.runlog import RunLog
from videoqat.training.samples import Prompts, Sampler, check_samples
from videoqat.training.step import Run, batch_loss


def check_looks(job: Job) -> CachedVideos | None:
    """The held-out cache of `validation.cache`, if there is one; and that everything asked for can be looked at.

    Raises:
        UserError: a cache of another VAE or text encoder, or samples that can't be rendered.
    """
    check_samples(job)
    config = job.config.validation
    return validation.check_cache(config.cache, [job.config.model.path], "validation.cache") if config.every and config.cache else None


class _Interrupted(Exception):
    """A signal came: on all ranks together."""


class Looks:
    """The looks of one run. Every method is collective.

    Args:
        job, mesh: of the run.
        held_out: from `check_looks`.
    """

    def __init__(self, job: Job, mesh: Mesh, held_out: CachedVideos | None) -> None:
        self._job, self._mesh, self._held_out = job, mesh, held_out
        config = job.config.validation
        # Before the transformer is loaded: two large models need not fit together.
        self._prompts = Prompts(job, mesh) if config.every and config.prompts else None
        self._sampler: Sampler | None = None

    def attach(self, run: Run) -> None:
        """Looks at this run's transformer from now on."""
        self._run = run
        if self._prompts:
            self._sampler = Sampler(self._job, self._mesh, run.engine.transformer, self._prompts)

    def health(self, step: int) -> dict[str, Any]:
        """`health` for the row of `step`, which is still to be taken: of each quantised layer, on the step's first samples. Empty if not due.

        Rank 0's view: its samples, and, where a sequence is divided, the heads that it attends with.
        """
        run, every = self._run, self._job.config.train.health_every
        if every == 0 or not run.engine.layers or not (step == 1 or step % every == 0):
            return {}
        batch = run.ahead.take(step, self._mesh.device)[0]
        watch: contextlib.AbstractContextManager[dict[str, Any]] = contextlib.nullcontext({})
        if self._mesh.rank == 0:
            watch = quantisation_health(run.engine.transformer, self._job.recipe, run.engine.layers)
        with forwards_alone(run.engine.transformer), watch as found:
            batch_loss(run, batch)
        return {"health": found}

    def due(self, step: int) -> bool:
        """Whether validation is due after `step`: every `validation.every` steps, and after the last."""
        every = self._job.config.validation.every
        return every > 0 and (step % every == 0 or step == self._job.config.train.steps)

    def validate(self, step: int, log: RunLog | None) -> dict[str, Any]:
        """Validation losses and sample videos after `step`, to disk and, with `log`, to the logs. A signal ends it early; NaN is said and recorded.

        Returns:
            `validation` for the row of `step`: recipe -> `validation.summarise`'s numbers; empty without a held-out cache.
        """
        found: dict[str, Any] = {}
        try:
            with forwards_alone(self._run.engine.transformer):
                if self._held_out is not None:
                    found = self._losses(step, self._held_out, log)
                if self._sampler is not None:
                    strips = self._sampler.render(step, self._run.faults, self._heed)
                    if log:
                        with self._run.faults.noted():
                            for name, picture_HWC in strips.items():
                                log.show(f"samples/{name}", picture_HWC, step)
        except _Interrupted:
            say(f"validation of step {step} was cut short by a signal")
        except NonFiniteError as error:  # the training itself will say if it is broken; what is only looked at must not end it
            say(f"WARNING: validation of step {step}: {error}")
            if log:
                with self._run.faults.noted():
                    log.write_validation({"step": step, "error": str(error)})
        return found

    def _heed(self) -> None:
        if self._mesh.any(self._run.stop.signal is not None):
            raise _Interrupted

    def _losses(self, step: int, cache: CachedVideos, log: RunLog | None) -> dict[str, Any]:
        job, engine = self._job, self._run.engine
        losses = {}
        for recipe in dict.fromkeys((RECIPES["bf16"], job.recipe)):
            with computing_by(engine.layers, recipe, job.config.runtime.kernel if recipe.is_quantised else "auto"):
                losses[recipe.name] = validation.paired_losses(
                    job.family,
                    job.config.model.path,
                    {job.config.model.component: engine.transformer},
                    cache,
                    job.config.objective,
                    samples=validation.choose_samples(len(cache), job.config.validation.samples),
                    num_times=job.config.validation.timesteps,
                    time_range=job.time_range,
                    batch_size=job.config.train.batch_size,
                    mesh=self._mesh,
                    before_forward=self._heed,
                    desc=f"step {step}: validation loss, {recipe.name}",
                )
        summary = validation.summarise(losses, RECIPES["bf16"].name)
        if log:
            with self._run.faults.noted():
                log.write_validation({"step": step, **summary, "losses": {name: values.tolist() for name, values in losses.items()}})
        return {"validation": summary}
