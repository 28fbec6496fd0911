"""Which jobs are submitted again, and under which name; tests/cluster has real ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.cluster.resubmission import next_name, number_of, was_lost


@given(st.text(max_size=20), st.integers(1, 20))
def test_names_tell_how_often_it_was(name: str, times: int) -> None:
    before = number_of(name)
    names = [name]
    for _ in range(times):
        names.append(next_name(names[-1]))
    assert number_of(names[-1]) == before + times
    assert len(set(names)) == times + 1


@pytest.mark.parametrize(
    ("error_type", "exit_code", "lost"),
    [
        ("JOB_SUPERVISOR_ACTOR_DIED", None, True),
        ("JOB_ENTRYPOINT_COMMAND_ERROR", -9, True),
        ("JOB_ENTRYPOINT_COMMAND_ERROR", 137, True),
        ("JOB_ENTRYPOINT_COMMAND_ERROR", 1, False),
        ("JOB_ENTRYPOINT_COMMAND_ERROR", 3, False),
        ("RUNTIME_ENV_SETUP_FAILURE", None, False),
        (None, None, False),
    ],
)
def test_a_job_that_could_say_how_it_ended_was_not_lost(error_type: str | None, exit_code: int | None, lost: bool) -> None:
    assert was_lost(error_type, exit_code) is lost
