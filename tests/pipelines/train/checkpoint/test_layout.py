"""Names of checkpoints' folders: by their steps, however many digits these have."""

from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.train.checkpoint.layout import checkpoint_names, parse_step, step_name


@given(steps=st.lists(st.integers(0, 10**12), unique=True))
def test_checkpoints_stand_in_the_order_of_their_steps(steps: list[int]) -> None:
    names = [step_name(step) for step in steps]
    found = checkpoint_names([*names, *names, "best", "step-5/x", "step-", "step-5x"])
    assert [parse_step(name) for name in found] == sorted(steps)


def test_other_names_are_no_checkpoints() -> None:
    assert [parse_step(name) for name in ("step-00000005", "last", "step-", "step-x", "step--5", "xstep-5")] == [5] + [
        None
    ] * 5
