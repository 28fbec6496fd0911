"""Two hundred cases of the walk, other ones each day: right, or refused with the file's name."""

import os
from collections.abc import Iterator
from random import Random

import pytest

from tests.faults.walk import Walk, walk

GROUPS, CASES = 20, 10


@pytest.fixture(scope="module")
def walked() -> Iterator[Walk]:
    """The storage, built once a process."""
    with walk() as built:
        yield built


@pytest.mark.long
def test_a_run_leaves_more_than_forty_kinds_of_files(walked: Walk) -> None:
    assert len(walked.files) >= 40, sorted(walked.files)


@pytest.mark.long
@pytest.mark.parametrize("group", range(GROUPS))
def test_a_damaged_file_changes_nothing_or_is_named(walked: Walk, group: int) -> None:
    seed = os.environ["RAYSTRIDE_SEED"]
    random, kinds = Random(f"{seed} {group}"), sorted(walked.files)
    outcomes = [walked.run(walked.draw(random, random.choice(kinds))) for _ in range(CASES)]
    wrong = [f"{outcome.case}\n{outcome.message}" for outcome in outcomes if outcome.ended == "wrong"]
    assert not wrong, f"RAYSTRIDE_SEED={seed}\n" + "\n\n".join(wrong)
