"""Bundles: every example in exactly one, none over the budget, little padding, deterministic."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.data.feed.samples import bundle_examples

SIZES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=200).map(np.array)


@given(sizes=SIZES, most=st.integers(1, 500), seed=st.integers(0, 3))
def test_each_example_is_in_one_bundle_that_fits(sizes: np.ndarray, most: int, seed: int) -> None:
    bundles = bundle_examples(sizes, most, seed)
    members = [bundles.members(number) for number in range(bundles.num_bundles)]
    assert sorted(np.concatenate(members).tolist()) == list(range(len(sizes)))
    held = [len(each) * int(sizes[each].max(0).sum()) for each in members]
    assert all(tokens <= most or len(each) == 1 for tokens, each in zip(held, members, strict=True))
    assert bundles.padding == 1 - sizes.sum() / sum(held)


@given(sizes=SIZES, most=st.integers(50, 500))
def test_a_bundle_ends_where_one_more_would_not_fit(sizes: np.ndarray, most: int) -> None:
    bundles = bundle_examples(sizes, most)
    for number in range(bundles.num_bundles - 1):
        more = bundles.order[bundles.edges[number] : bundles.edges[number + 1] + 1]
        assert len(more) * int(sizes[more].max(0).sum()) > most


def test_little_is_padding_and_equal_lengths_are_mixed_by_the_seed() -> None:
    lengths = np.random.default_rng(0).poisson(15, (20_000, 2)) + 1
    one, other = bundle_examples(lengths, 2048, seed=1), bundle_examples(lengths, 2048, seed=2)
    assert one.padding < 0.04
    assert not np.array_equal(one.order, other.order)
    assert np.array_equal(one.order, bundle_examples(lengths, 2048, seed=1).order)
    assert np.array_equal(lengths[one.order, 0], np.sort(lengths[:, 0]))
