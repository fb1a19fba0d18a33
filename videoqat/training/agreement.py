"""What no rank may decide alone. A rank that stops while the others go on leaves them waiting in their next collective until its timeout."""

import contextlib
from collections.abc import Iterator

from videoqat.errors import UserError
from videoqat.parallel.mesh import Mesh


class Faults:
    """Errors of this rank, kept until all ranks can raise them together (`settle`). Of several the first counts."""

    def __init__(self) -> None:
        self.first: UserError | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A `UserError` of the block is kept instead of raised. Only for work without collectives."""
        try:
            yield
        except UserError as error:
            self.first = self.first or error

    def settle(self, mesh: Mesh) -> None:
        """Collective: raises what was noted, on all ranks; of several ranks the lowest one's. On other ranks than its own it names its rank."""
        for rank, error in enumerate(mesh.gather_objects(self.first)):
            if error is not None:
                if rank == mesh.rank and self.first is not None:
                    raise self.first
                raise type(error)(f"rank {rank}: {error}")


@contextlib.contextmanager
def together(mesh: Mesh) -> Iterator[None]:
    """Collective: a `UserError` that one rank meets in the block ends all ranks, each with its text. Only for work without collectives."""
    faults = Faults()
    with faults.noted():
        yield
    faults.settle(mesh)
