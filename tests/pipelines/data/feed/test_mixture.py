"""Mixtures: counts, positions and what is before a change, for any weights, sources and changes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.data.feed.mixture import (
    MAX_PERIOD,
    MIN_UNITS,
    PERIOD,
    SAMPLE_BITS,
    Mixture,
    MixtureSource,
    WeightPhase,
    build_schedule,
    distorted_shares,
    quantize_shares,
    split_samples,
)
from raystride.pipelines.data.feed.open_dataset import build_mixture, share_notes
from raystride.pipelines.data.feed.order import Order, digest
from tests.errors import refused

WEIGHTS = st.lists(st.floats(0, 1).map(lambda x: 0.0 if x < 1e-3 else x**3), min_size=1, max_size=9).filter(any)


def _sources(sizes: list[int], max_samples: list[float] | None = None) -> list[MixtureSource]:
    bounds = max_samples or [math.inf] * len(sizes)
    return [
        MixtureSource(f"s{number}", Order(size, number), bound)
        for number, (size, bound) in enumerate(zip(sizes, bounds, strict=True))
    ]


def _count_by_position(mixture: Mixture, end: int) -> np.ndarray:
    """Counts each source at the positions before `end`, (end + 1, sources), position by position."""
    numbers, _ = split_samples(mixture.sample_ids_at(np.arange(end, dtype=np.int64)))
    once = np.eye(len(mixture.sources), dtype=np.int64)[numbers]
    return np.concatenate((np.zeros((1, len(mixture.sources)), np.int64), once.cumsum(0)))


@given(WEIGHTS)
@settings(max_examples=25, deadline=None)
def test_in_every_prefix_each_source_is_within_one_of_its_share(weights: list[float]) -> None:
    units = quantize_shares(weights)
    assert sum(units) == PERIOD
    assert [unit > 0 for unit in units] == [weight > 0 for weight in weights]
    # Three periods, from one that is not the first: what repeats is counted, too.
    mixture = Mixture(tuple(_sources([97] * len(weights))), (WeightPhase(0, units),))
    counts = _count_by_position(mixture, 3 * PERIOD + 17)
    due = np.arange(len(counts))[:, None] * np.array(units) / PERIOD
    assert np.abs(counts - due).max() < 1
    assert len(build_schedule(units).source) == PERIOD


@given(WEIGHTS)
@settings(max_examples=15, deadline=None)
def test_a_schedule_is_tijdemans_by_its_definition(weights: list[float]) -> None:
    """As the first version computed it, position by position: the orders of earlier runs are those of today."""
    units = np.array(quantize_shares(weights))
    sources, given_before = np.flatnonzero(units), np.zeros(len(units), np.int64)
    slack, dealt = 2 * len(sources) - 2, []
    for position in range(PERIOD):
        due = slack * ((position + 1) * units - PERIOD * given_before)
        may = sources[due[sources] >= PERIOD] if slack else sources
        dealt.append(int(may[np.argmin(((slack - 1) * PERIOD - due[may]) / units[may])]))
        given_before[dealt[-1]] += 1
    np.testing.assert_array_equal(build_schedule(tuple(units.tolist())).source, dealt)


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=9), st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_small_shares_are_dealt_within_a_tenth(sizes: list[int], times: int) -> None:
    weights = [*map(float, sizes), *[min(sizes) / times] * times]
    units = quantize_shares(weights, 1 << 40)
    smallest = min(weights) / sum(weights)
    if smallest * PERIOD >= 1:
        assert units == quantize_shares(weights), "what could be dealt before is dealt as before"
    else:
        assert smallest * sum(units) >= MIN_UNITS
        assert sum(units).bit_count() == 1
        assert not distorted_shares(weights, units)


def test_a_thousand_small_sources_are_dealt_what_they_are_due() -> None:
    sizes = [10**8] + [100] * 1_000
    mixture = Mixture.from_weights(_sources(sizes), [(0, sizes)])
    (phase,) = mixture.phases
    assert sum(phase.units) == MAX_PERIOD
    assert not distorted_shares(sizes, phase.units)
    counts = mixture.counts(10**8)
    assert counts[1:].sum() / 10**8 == pytest.approx(0.001, rel=0.06), "24 % before"
    assert set(counts[1:].tolist()) <= set(range(94, 101))
    positions = np.concatenate([mixture.phases[0].first + np.arange(3_000), 10**8 + np.arange(3_000)])
    numbers, inside = split_samples(mixture.sample_ids_at(positions))
    for number in np.unique(numbers):
        here = np.flatnonzero(numbers == number)
        nth = mixture.counts(int(positions[here[0]]))[number]
        assert inside[here[0]] == Order(sizes[number], int(number)).sample_ids_at(np.array([nth]))[0]


def test_a_run_of_an_older_version_keeps_the_period_it_began_with() -> None:
    sizes = [10**6, 10, 10]
    earlier = Mixture.from_weights(_sources(sizes), [(0, sizes)]).to_json()
    del earlier["max_period"]
    earlier["phases"] = [[0, *quantize_shares(sizes)]]
    past = Mixture.from_json(earlier)
    resumed = Mixture.from_weights(_sources(sizes), [(0, sizes)], past, 5_000)
    assert resumed.phases == past.phases
    assert Mixture.from_json(resumed.to_json()) == resumed
    assert Mixture.from_weights(_sources(sizes), [(0, sizes)], resumed, 9_000).phases == past.phases
    assert sum(Mixture.from_weights(_sources(sizes), [(0, sizes)]).phases[0].units) > PERIOD


def test_another_share_than_the_weights_say_is_told_with_both() -> None:
    config = Config(data=DataConfig(sources={"web": {"source": "web"}, "rare": {"source": "rare", "weight": 1e-8}}))
    (note,) = share_notes(config.data, {"web": 1, "rare": 1})
    assert note.startswith("data.sources: 1 of 2 sources have another share")
    assert "rare has 9.54e-07 where 1e-08 is wanted" in note
    by_size = Config(
        data=replace(config.data, weights="temperature 1", curriculum=({"from_step": 7, "weights": {"web": 1}},))
    )
    assert not share_notes(by_size.data, {"web": 10**6, "rare": 10})
    (note,) = share_notes(by_size.data, {"web": 10**6, "rare": 10}, PERIOD)
    assert "rare has 0.000244 where 1e-05 is wanted" in note


def test_phases_are_counted_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighty did not open within 390 s: every phase went through all that were before it."""
    asked: list[tuple[int, ...]] = []

    def counting_build(units: tuple[int, ...]) -> object:
        asked.append(units)
        return build_schedule(units)

    monkeypatch.setattr("raystride.pipelines.data.feed.mixture.build_schedule", counting_build)
    sizes = [50 + 3 * number for number in range(150)]
    sources, wanted = _sources(sizes, [4 * size for size in sizes]), [(0, sizes)]
    mixture = Mixture.from_weights(sources, wanted)
    assert len(mixture.phases) > 100
    assert len(asked) <= 3 * len(mixture.phases)
    assert mixture.end == sum(4 * size for size in sizes)
    again = Mixture.from_json(mixture.to_json())
    asked.clear()
    half = mixture.phases[len(mixture.phases) // 2].first + 1
    assert Mixture.from_weights(sources, wanted, again, half) == mixture
    assert len(asked) <= 3 * len(mixture.phases)
    np.testing.assert_array_equal(again.counts(half), mixture.counts(half))


def test_a_case_that_breaks_plain_error_diffusion() -> None:
    mixture = Mixture.from_weights(_sources([10, 10, 10]), [(0, [0.4, 0.3, 0.3])])
    counts = _count_by_position(mixture, 4 * PERIOD)
    windows = [
        counts[length:] - counts[:-length] - length * np.array(mixture.phases[0].units) / PERIOD for length in (1, 7, 999)
    ]
    assert max(np.abs(each).max() for each in windows) < 2


@given(WEIGHTS)
@settings(deadline=None)
def test_shares_are_as_near_to_weights_as_units_are(weights: list[float]) -> None:
    exact, units = np.array(weights) / sum(weights) * PERIOD, np.array(quantize_shares(weights))
    assert np.all(np.abs(units - exact)[exact >= 1] < len(weights) + 1)


@given(
    sizes=st.lists(st.integers(1, 300), min_size=3, max_size=3),
    phases=st.lists(st.tuples(st.integers(1, 900), WEIGHTS.filter(lambda w: len(w) >= 3)), max_size=3),
    max_samples=st.lists(st.one_of(st.just(math.inf), st.integers(0, 700)), min_size=3, max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_each_source_s_samples_come_in_its_own_order_whatever_the_phases(
    sizes: list[int], phases: list[tuple[int, list[float]]], max_samples: list[float]
) -> None:
    sources = _sources(sizes, max_samples)
    wanted = [
        (0, [0.5, 0.2, 0.3]),
        *dict(sorted((first, weights[:3]) for first, weights in phases if any(weights[:3]))).items(),
    ]
    mixture = Mixture.from_weights(sources, wanted)
    end = int(min(mixture.end, 1_200))
    positions = np.arange(end, dtype=np.int64)
    numbers, inside = split_samples(mixture.sample_ids_at(positions))
    epochs = mixture.epochs(positions)
    for number, source in enumerate(sources):
        here = np.flatnonzero(numbers == number)
        assert len(here) <= source.max_samples
        np.testing.assert_array_equal(inside[here], source.order.sample_ids_at(np.arange(len(here))))
        np.testing.assert_array_equal(epochs[here], np.arange(len(here)) // source.order.samples)
    counts = _count_by_position(mixture, end)
    for position in {0, end // 3, end // 2, end}:
        np.testing.assert_array_equal(mixture.counts(position), counts[position])
    again = Mixture.from_json(mixture.to_json())
    assert again == mixture
    # Any position by itself is what it is among others: seeking costs nothing.
    for position in positions[:: max(1, end // 7)].tolist():
        assert again.sample_ids_at(np.array([position]))[0] == (numbers[position] << SAMPLE_BITS) + inside[position]


def test_what_a_source_may_not_give_any_more_goes_to_the_others() -> None:
    sources = _sources([100, 10, 10], [math.inf, 25, 15])
    mixture = Mixture.from_weights(sources, [(0, [0.5, 0.25, 0.25])])
    counts = _count_by_position(mixture, 2_000)
    assert counts[-1].tolist() == [2_000 - 40, 25, 15]
    assert mixture.end == math.inf
    assert [phase.units for phase in mixture.phases] == [(2048, 1024, 1024), (2731, 1365, 0), (4096, 0, 0)]
    ended = Mixture.from_weights(_sources([10, 10], [30, 50]), [(0, [0.5, 0.5])])
    assert ended.end == ended.num_positions(math.inf) == 80
    assert ended.counts(80).tolist() == [30, 50]
    assert ended.epoch_progress(80) == {"epoch": 4.0, "epoch/s0": 3.0, "epoch/s1": 5.0}


@given(at=st.integers(0, 6_000), then=WEIGHTS, new=st.booleans(), gone=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_change_leaves_what_was_before_it_and_each_source_goes_on(
    at: int, then: list[float], new: bool, gone: bool
) -> None:
    past = Mixture.from_weights(
        _sources([50, 70, 90], [math.inf, 900, math.inf]), [(0, [0.2, 0.5, 0.3]), (1_000, [0.6, 0.2, 0.2])]
    )
    sources = [*past.sources[1 if gone else 0 :], *([MixtureSource("new", Order(33, 9))] if new else [])]
    weights = [*then, 0.1, 0.2, 0.3, 0.4][: len(sources)]
    assume(any(weights))
    changed = Mixture.from_weights(sources, [(0, weights)], past, at)
    before, after = np.arange(at, dtype=np.int64), np.arange(at, at + 500, dtype=np.int64)
    np.testing.assert_array_equal(changed.sample_ids_at(before), past.sample_ids_at(before))
    np.testing.assert_array_equal(changed.epochs(before), past.epochs(before))
    given_before = changed.counts(at)
    numbers, inside = split_samples(changed.sample_ids_at(after[after < changed.end]))
    for number, source in enumerate(changed.sources):
        here = inside[numbers == number]
        first = int(given_before[number])
        np.testing.assert_array_equal(here, source.order.sample_ids_at(np.arange(first, first + len(here))))
        if source.name not in {each.name for each in sources}:
            assert not len(here), "it has ended"


def test_weights_that_stay_go_on_in_the_middle_of_their_schedule() -> None:
    wanted = [(0, [0.2, 0.5, 0.3]), (1_000, [0.6, 0.2, 0.2])]
    sources = _sources([50, 70, 90], [math.inf, 900, math.inf])
    past = Mixture.from_weights(sources, wanted)
    for at in (1, 700, 1_000, 1_001, 5_000):
        assert Mixture.from_weights(sources, wanted, past, at) == past
    grown = Mixture.from_weights([*sources, MixtureSource("new", Order(5))], [(0, [0.6, 0.2, 0.2, 0.0])], past, 1_500)
    positions = np.arange(9_000, dtype=np.int64)
    np.testing.assert_array_equal(grown.sample_ids_at(positions), past.sample_ids_at(positions))


def test_shares_are_those_that_are_wanted_last() -> None:
    sources = _sources([100, 10, 10], [math.inf, 25, 15])
    past = Mixture.from_weights(sources, [(0, [0.5, 0.25, 0.25]), (64, [0.25, 0.0, 0.75])])
    assert past.shares() == {"s0": 0.25, "s2": 0.75}, "also once s2 has given all that it may"
    fewer = Mixture.from_weights(sources[:2], [(0, [0.75, 0.25])], past, 500)
    assert fewer.shares() == {"s0": 0.75, "s1": 0.25}
    assert Mixture.from_json(fewer.to_json()).shares() == {"s0": 1.0}, "what is dealt out by then"


def test_sources_of_one_size_have_sample_numbers_of_their_own() -> None:
    mixture = Mixture.from_weights(_sources([8, 8]), [(0, [0.5, 0.5])])
    first_epochs = mixture.sample_ids_at(np.arange(16, dtype=np.int64))
    assert len(set(first_epochs.tolist())) == 16
    assert digest(np.array(0), first_epochs) == digest(np.array(0), np.sort(first_epochs))
    assert mixture.names(np.array([3, (1 << SAMPLE_BITS) + 5])) == ["s0 3", "s1 5"]


def test_positions_of_ten_to_the_twelve_are_found_at_once() -> None:
    mixture = Mixture.from_weights(_sources([10**10, 10**9, 3]), [(0, [0.8, 0.1, 0.1]), (10**12, [0.4, 0.4, 0.2])])
    far = np.array([10**12 - 1, 10**12, 2 * 10**12], np.int64)
    assert mixture.counts(10**12).sum() == 10**12
    numbers, inside = split_samples(mixture.sample_ids_at(far))
    assert ((inside >= 0) & (inside < np.array([10**10, 10**9, 3])[numbers])).all()


def test_a_source_that_comes_back_as_another_one_is_refused() -> None:
    config = Config(data=DataConfig(sources={name: {"source": name} for name in ("web", "code")}))
    past = build_mixture(config.train, config.data, config.seed, {"web": 100, "code": 50})
    without = build_mixture(
        config.train, DataConfig(sources={"code": {"source": "code"}}), config.seed, {"code": 50}, past, 40
    )
    assert build_mixture(config.train, config.data, config.seed, {"web": 100, "code": 50}, without, 60).counts(
        40
    ).tolist() == [20, 20]
    with refused("data.sources.web", 101, names=[" 101 ", " 100 "]):
        build_mixture(config.train, config.data, config.seed, {"web": 101, "code": 50}, without, 60)


def test_more_sources_than_shares_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 4096 sources"):
        quantize_shares([1.0] * (PERIOD + 1))
