"""The fence of a run's checkpoints: a monotonic term decides which group of workers may commit one.

A driver has a higher term than its predecessor (`run_store.lease`); a token distinguishes the groups of one driver.

    claim = claim_checkpoints(folder, Claim("20261125-101112-abcd", "0f3e", term=3))
    with commit_fence(folder, claim):                         # raises AttemptSuperseded if a later group has claimed them
        folder.put_json(...)
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.locks import file_lock
from raystride.pipelines.system.storage.sealed import SealBroken

FILE = "attempt"
"""The claim's file, beside the checkpoints."""
_FORM = re.compile(r"(\S+) (\S+)(?: ([0-9]+))?( [0-9a-f]{64})?\n")
LOCK_S = 5.0
"""Seconds to wait for another process's lock, held for the time of a manifest's put; it may hang there."""


class AttemptSuperseded(RuntimeError):
    """A later start of the run has replaced this one."""


class ClaimBroken(AttemptSuperseded, SealBroken):
    """The claim is not as it was written: nobody can know whether a later start has replaced this one."""


@dataclass(frozen=True)
class Claim:
    """The group that may commit."""

    attempt: str
    token: str
    """Distinguishes the groups of one attempt."""
    term: int = 0
    """The driver's term; 0: unknown, and every other claim may be replaced."""

    def __str__(self) -> str:
        """Returns the file's line; it ends with the SHA-256 of the text before it."""
        text = f"{self.attempt} {self.token} {self.term}"
        return f"{text} {hashlib.sha256(text.encode()).hexdigest()}\n"


def read_claim(folder: Folder) -> Claim | None:
    """Returns the newest claim; None if there is none yet. Claims of 0.3 have no seal, earlier ones no term.

    Raises ClaimBroken if the file is not as it was written.
    """
    try:
        text = folder.read(FILE).decode(errors="replace")
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        text = ""
    found = _FORM.fullmatch(text)
    claim = Claim(found[1], found[2], int(found[3] or 0)) if found else None
    if claim is None or (found and found[4] and text != str(claim)):
        raise ClaimBroken(
            f"{folder / FILE} is not as it was written, so nobody knows which driver may save checkpoints: remove it if no "
            "other driver trains this run"
        )
    return claim


def claim_checkpoints(folder: Folder, claim: Claim) -> Claim:
    """Prevents all other groups from committing; returns the claim as written. Raises AttemptSuperseded."""
    last = read_claim(folder)
    with _claim_lock(folder, last):
        before = read_claim(folder)
        if before and claim.term and before.term > claim.term:
            raise _superseded_error(before, claim)
        claim = claim if claim.term or not before else replace(claim, term=before.term)
        folder.put(FILE, str(claim))
    if folder.local:  # of groups that this one replaces: they look at the claim before they write
        for path in folder.local.glob(f".{FILE}-*.lock"):
            if path != _lock_path(folder.local, claim):
                path.unlink(missing_ok=True)
    return claim


def check_claim(folder: Folder, claim: Claim) -> None:
    """Raises AttemptSuperseded if another group has claimed the checkpoints since."""
    current = read_claim(folder)
    if current != claim:
        raise _superseded_error(current, claim)


@contextmanager
def commit_fence(folder: Folder, claim: Claim) -> Iterator[None]:
    """Checks the claim around a commit: on a disk it blocks other claims meanwhile, on a store it checks again afterwards.

    Raises AttemptSuperseded.
    """
    with _claim_lock(folder, claim):
        check_claim(folder, claim)
        yield
    if not folder.local:
        check_claim(folder, claim)


@contextmanager
def _claim_lock(folder: Folder, claim: Claim | None) -> Iterator[None]:
    """Holds a claim's lock on a disk: a holder that hangs delays those who replace the claim, and nobody later."""
    with ExitStack() as held:
        if folder.local and claim:
            with suppress(OSError):  # a disk that accepts no files fails at the write itself
                held.enter_context(file_lock(_lock_path(folder.local, claim), LOCK_S))
        yield


def _lock_path(folder: Path, claim: Claim) -> Path:
    return folder / f".{FILE}-{claim.token}.lock"


def _superseded_error(current: Claim | None, claim: Claim) -> AttemptSuperseded:
    other = f"attempt {current.attempt}" if current else "nobody knows who"
    return AttemptSuperseded(f"{other} has taken this run over from {claim.attempt}, which therefore ends")
