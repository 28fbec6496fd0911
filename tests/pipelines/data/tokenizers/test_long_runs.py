"""Text without a break is cut without loss."""

from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.data.tokenizers.long_runs import WINDOW, split_long_runs


@given(st.lists(st.tuples(st.sampled_from(["a", " ", "b c ", "\n"]), st.integers(1, 4 * WINDOW)), max_size=4))
def test_bounded_keeps_the_text_and_bounds_runs(runs: list[tuple[str, int]]) -> None:
    text = "".join(unit * times for unit, times in runs)
    pieces = split_long_runs(text)
    assert "".join(pieces) == text
    assert all(len(run) < 2 * WINDOW for piece in pieces for run in piece.split())
