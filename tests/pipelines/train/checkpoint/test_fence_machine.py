"""Drivers and their groups claim and commit in any order, beside the rule: the newest claim of the highest term may."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.fence import (
    AttemptSuperseded,
    Claim,
    check_claim,
    claim_checkpoints,
    commit_fence,
    read_claim,
)

DRIVERS = {"first": 1, "second": 2, "third": 3, "alone": 0}
"""Terms of drivers, as leases give them; 0 is that of one without a lease."""


class Fence(RuleBasedStateMachine):
    """Each driver may start several groups, also after another driver has begun."""

    groups = Bundle("groups")

    @initialize(on_disk=st.booleans())
    def begin(self, on_disk: bool) -> None:
        self.place = tempfile.mkdtemp()
        self.folder = Folder(self.place if on_disk else f"memory://fence{self.place}")
        self.tokens = 0
        self.newest: Claim | None = None

    @rule(target=groups, driver=st.sampled_from(sorted(DRIVERS)))
    def start_group(self, driver: str) -> Claim:
        attempt, term = driver, DRIVERS[driver]
        self.tokens += 1
        claim = Claim(attempt, f"{self.tokens:08x}", term)
        if term and self.newest and self.newest.term > term:
            with pytest.raises(AttemptSuperseded, match=f"attempt {self.newest.attempt} has taken"):
                claim_checkpoints(self.folder, claim)
            return claim
        written = claim_checkpoints(self.folder, claim)
        assert written == Claim(attempt, claim.token, term or (self.newest.term if self.newest else 0))
        self.newest = written
        locks = Path(self.folder.local or "/nowhere").glob(".attempt-*")
        assert {path.name for path in locks} <= {f".attempt-{claim.token}.lock"}, "those of groups before are gone"
        return written

    @rule(group=groups)
    def commit(self, group: Claim) -> None:
        if group == self.newest:
            with commit_fence(self.folder, group):
                self.folder.put("committed", str(group))
            return
        with pytest.raises(AttemptSuperseded), commit_fence(self.folder, group):
            self.folder.put("committed", "of a group that was replaced")
        with pytest.raises(AttemptSuperseded):
            check_claim(self.folder, group)

    def teardown(self) -> None:
        if hasattr(self, "place"):
            shutil.rmtree(self.place)

    @invariant()
    def the_newest_claim_stands(self) -> None:
        assert read_claim(self.folder) == self.newest
        with suppress(FileNotFoundError):
            assert not self.folder.read("committed").startswith(b"of a group")


TestFence = Fence.TestCase
TestFence.settings = settings(derandomize=True, max_examples=20, stateful_step_count=15, deadline=None)
