"""Hang detection from heartbeats; time is a plain number, since the detector takes it as an argument."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.launch.hang import detector
from raystride.pipelines.launch.hang.detector import Hang, HangDetector, describe_hang
from raystride.pipelines.launch.hang.heartbeat import ENDED, Heartbeat, HeartbeatTable
from raystride.pipelines.launch.hang.process import Process
from tests.errors import refused

EVERY_S = 1.0


def process(rank: int, world: int = 2, pid: int = 0) -> Process:
    """A worker of a group; the pid tells one group from the next."""
    return Process(rank=rank, world=world, node="a", node_id="", pid=pid or 100 + rank, started=1.0)


class Group:
    """Workers with heartbeats, and a detector that checks once a second."""

    def __init__(self, hang_s: detector.HangTimeout = 20, world: int = 2) -> None:
        self.detector = HangDetector(hang_s, EVERY_S)
        self.world = world
        self.phases = dict.fromkeys(range(world), "step")
        self.heard = set(range(world))
        """The ranks whose heartbeats arrive."""
        self.now = self.progress_mark = 0.0
        self._beats: dict[int, Heartbeat] = {}
        self._number = 0

    def check(self, moving: bool, seconds: float = EVERY_S) -> Hang | None:
        """Checks once more, `seconds` after the last check."""
        self.now += seconds
        self._number += 1
        self.progress_mark += moving
        for rank in self.heard:
            self._beats[rank] = Heartbeat(
                process=process(rank, self.world),
                number=self._number,
                current_phase=self.phases[rank],
                progress_mark=self.progress_mark,
                step_s=self.progress_mark,
            )
        return self.detector.check(self._beats, self.now)

    def warm_up(self) -> "Group":
        """The first steps."""
        for _ in range(5):
            assert self.check(moving=True) is None
        return self

    def stand_still(self, most: int) -> tuple[int, Hang | None]:
        """Checks without progress until a hang is found; returns the number of checks and the hang."""
        for count in range(1, most + 1):
            if found := self.check(moving=False):
                return count, found
        return most, None


def test_a_worker_that_is_not_heard_of_is_the_one() -> None:
    group = Group().warm_up()
    group.heard = {0}
    group.phases = {0: "reduce", 1: "forward"}
    count, found = group.stand_still(100)
    assert found
    assert (count, found.culprits, found.silent) == (11, (1,), True)
    assert (
        describe_hang(found)
        == "rank 1 on a (pid 101) has not been heard of, last in step, for 11 s (half of launch.hang_s 20)"
    )


def test_a_worker_that_lives_and_has_not_come_to_the_others_is_the_one() -> None:
    group = Group(world=3).warm_up()
    group.phases = {0: "reduce", 1: "data", 2: "reduce"}
    count, found = group.stand_still(100)
    assert found
    assert (count, found.culprits, found.silent) == (21, (1,), False)
    assert describe_hang(found) == "rank 1 on a (pid 101) has stood still in data for 21 s (launch.hang_s 20)"


def test_where_all_stand_alike_nobody_is_named() -> None:
    group = Group().warm_up()
    group.phases = dict.fromkeys(range(2), "reduce")
    _, found = group.stand_still(100)
    assert found
    assert not found.culprits
    assert "all 2 workers have stood still (reduce) and none stands out" in describe_hang(found)


@pytest.mark.parametrize("current_phase", ["validation", "checkpoint", "", ENDED])
def test_outside_of_steps_only_silence_counts_and_after_the_end_nothing(current_phase: str) -> None:
    group = Group().warm_up()
    group.phases = dict.fromkeys(range(2), current_phase)
    assert group.stand_still(500)[1] is None
    group.heard = {0}
    assert (group.stand_still(500)[1] is None) == (current_phase == ENDED)


def test_a_worker_that_cannot_be_heard_while_the_others_train_does_not_hang() -> None:
    group = Group().warm_up()
    group.heard = {0}
    assert not any(group.check(moving=True) for _ in range(500))


def test_the_first_steps_have_half_an_hour() -> None:
    count, found = Group().stand_still(5_000)
    assert found
    assert count == detector.FIRST_STEPS_S + 2  # the first look is no time yet


def test_a_pause_that_ended_by_itself_lengthens_the_automatic_limit() -> None:
    group = Group("auto").warm_up()
    assert group.detector.limit_s == detector.AUTO_S
    assert group.stand_still(500)[1] is None
    group.check(moving=True)
    assert group.detector.limit_s == 3 * 500


def test_what_was_not_watched_does_not_count() -> None:
    group = Group().warm_up()
    assert group.check(moving=False, seconds=3600.0) is None, "a laptop that slept"
    assert group.stand_still(17)[1] is None


def test_another_group_begins_anew() -> None:
    table = HeartbeatTable()
    for rank in range(2):
        table.record(Heartbeat(process=process(rank), number=1, current_phase="step", progress_mark=1.0, step_s=1.0))
    assert set(table.heartbeats()) == {0, 1}
    table.record(Heartbeat(process=process(0, pid=7), number=1, current_phase="", progress_mark=0.0, step_s=0.0))
    assert set(table.heartbeats()) == {0}, "the worker was started again, and so were the others"
    table.record(Heartbeat(process=process(0, world=1, pid=7), number=1, current_phase="", progress_mark=0.0, step_s=0.0))
    assert set(table.heartbeats()) == {0}


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 2), max_size=3)), max_size=200))
def test_no_group_is_ended_within_half_its_limit_of_a_move(looks: list[tuple[bool, set[int]]]) -> None:
    group = Group(world=3).warm_up()
    still = 0.0
    for moving, heard in looks:
        group.heard = heard
        still = 0.0 if moving and heard else still + EVERY_S
        if group.check(moving):
            assert still > 10
            return


def test_a_limit_that_any_machine_would_exceed_is_refused() -> None:
    with refused("launch.hang_s", 2):
        LaunchConfig(hang_s=2)
    assert LaunchConfig(hang_s=0).hang_s == 0
