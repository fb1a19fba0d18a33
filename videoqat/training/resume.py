"""From which checkpoint a run goes on: chosen by rank 0, accepted by all."""

from pathlib import Path

from videoqat.console import say
from videoqat.errors import CheckpointError, UserError
from videoqat.parallel.mesh import Mesh
from videoqat.training import state
from videoqat.training.agreement import together
from videoqat.training.job import Job


def choose_checkpoint(job: Job) -> Path | None:
    """The checkpoint to continue from, or None to begin; says which.

    Raises:
        UserError: going on would overwrite checkpoints that are there, or none of them is whole.
        CheckpointError: the checkpoint asked for is torn, or of another training.
    """
    resume, checkpoints = job.config.train.resume, Path(job.config.out) / "checkpoints"
    kept, broken = state.whole(checkpoints), state.torn(checkpoints)
    present = sorted([*kept, *broken], key=state.step_of)
    if resume == "latest":
        chosen = kept[-1] if kept else None
        if broken and chosen is None:
            path, fault = list(broken.items())[-1]
            raise UserError(f"{checkpoints} holds no whole checkpoint ({path.name}: {fault}); remove what is there, or choose another out")
        for path, fault in broken.items():
            if chosen and state.step_of(path) > state.step_of(chosen):
                say(f"{path} is newer but not whole, so it is passed over: {fault}")
    elif resume == "never":
        chosen = None
        if present:
            raise UserError(f"train.resume=never, but {checkpoints} holds {present[-1].name}; choose another out, or train.resume=latest")
    else:
        chosen = Path(resume)
        step = state.read_meta(chosen)["step"]
        mine = chosen.resolve().parent == checkpoints.resolve()
        in_the_way = [path for path in present if not mine or state.step_of(path) > step]
        if in_the_way:
            held = f"{checkpoints} holds {in_the_way[-1].name}, which would be overwritten"
            raise UserError(f"train.resume={resume!r}: {held}; choose another out, or train.resume=latest")
    if chosen is not None:
        state.check_resumable(chosen, state.read_meta(chosen), job.identity)
        say(f"resuming from {chosen}")
    return chosen


def agreed_checkpoint(job: Job, mesh: Mesh) -> Path | None:
    """`choose_checkpoint` on rank 0, for all ranks. Collective.

    Raises:
        UserError: as there; or a rank doesn't see what rank 0 chose. On all ranks.
    """
    chosen = mesh.on_rank_zero(lambda: choose_checkpoint(job))
    with together(mesh):
        fault = state.problem(chosen) if chosen is not None else None
        if fault is not None:
            raise CheckpointError(f"{chosen} is whole on rank 0, but here {fault}; all processes must see the same folder")
    return chosen
