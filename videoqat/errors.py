"""The one kind of error that is the user's to mend.

Everything raised for bad input is a `UserError`: its text is one line that names the thing, its value and the legal values. The command
line prints that line and exits with code 2; anything else is a fault of ours and keeps its traceback.
"""


class UserError(ValueError):
    """Bad input. `str(error)` is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(UserError):
    """A configuration key or value that can't be used."""


class AttentionError(UserError):
    """Attention that was asked for and can't be had: shape, dtype, recipe or kernel."""


class CheckpointError(UserError):
    """A checkpoint that is torn, of another model, or not there."""


class DataError(UserError):
    """A data folder that holds nothing usable, or a cache that doesn't fit the settings."""


class NonFiniteError(RuntimeError):
    """NaN or inf where numbers should be. `str(error)` is one line; the command ends with exit code 1, and nothing broken is written."""


class TrainingDiverged(NonFiniteError):
    """Loss or gradient became NaN or inf. Names the step, the first layer and the last good checkpoint."""


class NonFiniteVideo(NonFiniteError):
    """A model generated NaN or inf. Names the stage (and the denoising step) at which it was first seen, the model, the recipe and the seed."""


class NonFiniteLoss(NonFiniteError):
    """A validation loss came out as NaN or inf. Names the model and the clip."""


class GenerationCancelled(RuntimeError):
    """Raised by whoever watches a video being made, after a denoising step, when it isn't wanted any more: the device is free within one step."""


class WorkerLost(RuntimeError):
    """Another process of this run ended or stopped answering. `str(error)` is one line; the command ends with exit code 1."""
