"""The right of an attempt to write its run's files, which every writer tests before each write.

permit = Permit(partial(find_successor, folder, attempt, term))   # `run_store.lease` makes it; writers share or unpickle it
permit.check()                                            # looks, and raises once another driver owns the run
permit.raise_if_revoked()                                 # the same without looking, for each step
"""

from collections.abc import Callable

LOOK_S = 5.0
"""Seconds between two looks of a process that writes nothing itself, such as a worker between two checkpoints."""


def _find_nobody() -> None:
    """Finds no other owner: for runs that nobody owns."""


class Permit:
    """The right to write. Once it is lost, by what a look finds or by `revoke`, it stays lost.

    Pickled to another process, it loses by what it finds there. Thread-safe.
    """

    def __init__(self, find_loss: Callable[[], Exception | None] = _find_nobody) -> None:
        """`find_loss` looks into the storage and returns the error of a run that was lost; it may raise OSError."""
        self._find_loss = find_loss
        self._error: Exception | None = None

    @property
    def is_revoked(self) -> bool:
        """Whether the right is known to be lost."""
        return self._error is not None

    def revoke(self, error: Exception) -> None:
        """Takes the right away for good; `error` is raised from now on, unless an earlier one is."""
        self._error = self._error or error

    def look(self) -> bool:
        """Looks whether the right is lost, and returns that. Raises OSError if the storage cannot be read."""
        if self._error is None and (loss := self._find_loss()):
            self.revoke(loss)
        return self.is_revoked

    def check(self) -> None:
        """Looks, and raises the error of a lost right, or OSError if the storage cannot be read."""
        self.look()
        self.raise_if_revoked()

    def raise_if_revoked(self) -> None:
        """Raises the error of a right that is known to be lost."""
        if self._error:
            raise self._error
