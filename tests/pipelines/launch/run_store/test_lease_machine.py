"""Drivers of a run that end, are killed, hang and come back in any order, beside the plain rule: one owner, rising terms."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raystride.pipelines.launch.run_store import lease as module
from raystride.pipelines.launch.run_store.lease import OWNER_FILE, DriverIsolated, RunLease, RunLocked, read_owner
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import read_sealed
from raystride.pipelines.train.checkpoint.fence import Claim, claim_checkpoints, read_claim


class Leases(RuleBasedStateMachine):
    """All drivers are this process; one that is killed leaves a file whose process has another start.

    Clocks and threads stay out: a renewal is a rule, and no driver is on another machine, whose lease takes a minute to end.
    """

    @initialize(begun=st.booleans())
    def begin(self, begun: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "RENEW_S", 3600.0)  # a renewal is a rule here
        self.place = Path(tempfile.mkdtemp())
        self.folder = Folder(str(self.place / "run"))
        if begun:
            self.folder.put("config.yaml", "a run")
        self.begun, self.drivers, self.owner = begun, list[RunLease](), -1
        """The drivers so far, and which of them owns the run, -1 if none."""
        self.killed, self.term = False, 0
        self.file_term, self.ended, self.dead = 0, set[int](), set[int]()
        """The term in the owner file, 0 without one; drivers that have ended by themselves; those that never come back."""

    def _forget_owner(self) -> None:
        """Once the owner file is gone, only a claim says that a driver was replaced: any other would own the run again."""
        terms = {number: driver.owner.term for number, driver in enumerate(self.drivers)}
        self.owner, self.killed, self.term, self.file_term = -1, False, self._claimed(), 0
        self.dead |= {number for number in terms if number not in self.ended and terms[number] >= self.term}

    def teardown(self) -> None:
        for driver in getattr(self, "drivers", []):
            driver._renewal.stop()
        if hasattr(self, "place"):
            shutil.rmtree(self.place)
            self.patch.undo()

    @rule(claims=st.booleans())
    def start(self, claims: bool) -> None:
        """With `claims` its workers fence the groups before, by a term that outlives an owner file that is removed."""
        attempt = f"a{len(self.drivers)}"
        if self.owner >= 0 and not self.killed:
            with pytest.raises(RunLocked, match=f"attempt a{self.owner}"):
                RunLease.acquire(self.folder, attempt)
            return
        driver = RunLease.acquire(self.folder, attempt)
        assert driver.owner.term == self.term + 1
        self.owner, self.killed, self.term = len(self.drivers), False, driver.owner.term
        self.file_term = self.term
        self.drivers.append(driver)
        if claims:
            claim_checkpoints(self.folder / "checkpoints", Claim(attempt, "0f3e", self.term))

    @precondition(lambda self: self.owner >= 0 and not self.killed)
    @rule()
    def kill(self) -> None:
        """Its file stays; the driver itself comes back below, as one that hung does."""
        owner = read_sealed(self.folder, OWNER_FILE)
        self.folder.put_json(OWNER_FILE, owner | {"ticks": owner["ticks"] - 1})
        self.killed = True

    @precondition(lambda self: self.owner >= 0)
    @rule(gives_up=st.booleans())
    def end(self, gives_up: bool) -> None:
        driver = self.drivers[self.owner]
        driver.give_up("no cluster") if gives_up else driver.release()
        with pytest.raises(DriverIsolated if gives_up else RunLocked):
            driver.permit.raise_if_revoked()
        self.ended.add(self.owner)
        self.owner, self.killed = -1, False
        if not self.begun:
            self._forget_owner()

    @precondition(lambda self: self.drivers)
    @rule(number=st.integers(0, 9), releases=st.booleans())
    def come_back(self, number: int, releases: bool) -> None:
        """A driver that was replaced, or has ended, renews or ends once more: it takes nothing back."""
        number %= len(self.drivers)
        if number == self.owner or number in self.dead:
            return
        driver, before = self.drivers[number], self._files()
        driver.release() if releases else driver._renew_once()
        self.ended |= {number} if releases else set()
        assert self._files() == before

    @precondition(lambda self: self.owner >= 0 and not self.killed)
    @rule()
    def renew(self) -> None:
        assert not self.drivers[self.owner]._renew_once()

    @precondition(lambda self: self.owner >= 0 and not self.killed)
    @rule()
    def remove_run(self) -> None:
        with self.drivers[self.owner] as driver:
            driver.remove_run()
        for late in self.drivers:  # its own renewal had begun before, others hung
            late._renew_once()
            with pytest.raises((RunLocked, DriverIsolated)):
                late.permit.raise_if_revoked()
        assert not (self.place / "run").exists()
        self.ended |= {*range(len(self.drivers))}
        self.begun = False
        self._forget_owner()

    @precondition(lambda self: self.owner < 0 or self.killed)
    @rule()
    def remove_file_by_hand(self) -> None:
        self.folder.remove(OWNER_FILE)
        self._forget_owner()

    def _files(self) -> dict[str, bytes]:
        paths = [path for path in (self.place / "run").rglob("*") if path.is_file()]
        return {"": b"" if (self.place / "run").exists() else b"gone"} | {str(path): path.read_bytes() for path in paths}

    def _claimed(self) -> int:
        claim = read_claim(self.folder / "checkpoints")
        return claim.term if claim else 0

    @precondition(lambda self: self.drivers)
    @rule(number=st.integers(0, 9))
    def look(self, number: int) -> None:
        """A driver that was replaced learns of it whenever it looks, also after its successor has ended."""
        number %= len(self.drivers)
        known = max(self.file_term, self._claimed())
        if number != self.owner and (number in self.ended or self.drivers[number].owner.term < known):
            with pytest.raises((RunLocked, DriverIsolated)):
                self.drivers[number].permit.check()

    @invariant()
    def one_may_write(self) -> None:
        owner = read_owner(self.folder)
        assert (owner.attempt if owner else "") == (f"a{self.owner}" if self.owner >= 0 else "")
        if owner:
            self.drivers[self.owner].permit.check()
            assert (owner.term, owner.is_dead) == (self.term, self.killed)


TestLeases = Leases.TestCase
TestLeases.settings = settings(derandomize=True, max_examples=100, stateful_step_count=14, deadline=None)
