"""The fence of a run's checkpoints: which group of workers may commit one, by a term that only grows.

A driver has a higher term than the one before it (`launch.owner`); the groups of one driver are told apart by a token.

    claim = claim_checkpoints(folder, Claim("20261125-101112-abcd", "0f3e", term=3))
    with committing(folder, claim):                           # raises Superseded if a later group has claimed them
        folder.put_json(...)
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from raystride.pipelines.files import Folder
from raystride.pipelines.locks import locked

FILE = "attempt"
"""Beside the checkpoints."""
LOCK_S = 5.0
"""Seconds for which another process, which needs the time of a manifest's put, is waited for: it may stand still there."""


class Superseded(RuntimeError):
    """Another start of the run has begun since this one did."""


@dataclass(frozen=True)
class Claim:
    """Who may commit."""

    attempt: str
    token: str
    """Tells the groups of one attempt apart."""
    term: int = 0
    """The driver's; 0: none is known, and every other claim may be replaced."""

    def __str__(self) -> str:
        return f"{self.attempt} {self.token} {self.term}\n"


def read_claim(folder: Folder) -> Claim | None:
    """Returns the newest claim; None if there is none yet. Claims of earlier versions have no term."""
    try:
        attempt, token, *term = folder.read(FILE).decode().split()
    except (FileNotFoundError, ValueError):
        return None
    return Claim(attempt, token, int(term[0]) if term and term[0].isdecimal() else 0)


def claim_checkpoints(folder: Folder, claim: Claim) -> Claim:
    """Lets no other group commit from here on; returns the claim as written. Raises Superseded."""
    last = read_claim(folder)
    with _locked(folder, last):
        before = read_claim(folder)
        if before and claim.term and before.term > claim.term:
            raise _superseded(before, claim)
        claim = claim if claim.term or not before else replace(claim, term=before.term)
        folder.put(FILE, str(claim))
    if last and folder.local:
        _lock_of(folder.local, last).unlink(missing_ok=True)
    return claim


def check_claim(folder: Folder, claim: Claim) -> None:
    """Raises Superseded if another group has claimed the checkpoints since."""
    now = read_claim(folder)
    if now != claim:
        raise _superseded(now, claim)


@contextmanager
def committing(folder: Folder, claim: Claim) -> Iterator[None]:
    """Checks the claim, and on a disk keeps others from claiming in the block; on a store it is checked again after it.

    Raises Superseded.
    """
    with _locked(folder, claim):
        check_claim(folder, claim)
        yield
    if not folder.local:
        check_claim(folder, claim)


@contextmanager
def _locked(folder: Folder, claim: Claim | None) -> Iterator[None]:
    """Holds a claim's lock on a disk: who stands still with it holds up those who replace the claim, and nobody later."""
    with ExitStack() as held:
        if folder.local and claim:
            with suppress(OSError):  # a disk that takes no files says so by what is written
                held.enter_context(locked(_lock_of(folder.local, claim), LOCK_S))
        yield


def _lock_of(folder: Path, claim: Claim) -> Path:
    return folder / f".{FILE}-{claim.token}.lock"


def _superseded(now: Claim | None, claim: Claim) -> Superseded:
    other = f"attempt {now.attempt}" if now else "nobody knows who"
    return Superseded(f"{other} has taken this run over from {claim.attempt}, which therefore ends")
