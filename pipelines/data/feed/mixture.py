"""Weighted mixture of data sources: maps each position to a source and one of its samples, deterministically.

Positions are assigned to sources by Tijdeman's rule (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics
32, 1980): in every prefix of n positions a source has n times its share, within 1, so in every window within 2. Shares are
multiples of 1/4096, or of a smaller power of two if a source has less than that (`quantize_shares`), so the schedule is
periodic. One table gives in O(1) the number of positions of a source before any position, and its n-th position. A source's
n-th position holds the n-th sample of its own order, epoch after epoch. So the position of a run is one integer, as it is
with one source.

A phase begins when weights change: in a curriculum, on resume, or when a source is exhausted.

    web = MixtureSource("web", Order(10**9, seed=1))
    code = MixtureSource("code", Order(10**6, seed=2), max_samples=4 * 10**6)
    mixture = Mixture.from_weights((web, code), [(0, (0.8, 0.2)), (64_000, (0.5, 0.5))])
    sources, samples = split_samples(mixture.sample_ids_at(np.arange(64)))     # source numbers, and sample numbers in each
    mixture.counts(10**6)                                         # samples taken from each source before
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from typing import Any, Self

import numpy as np

from raystride.pipelines.data.feed.order import MAX_SAMPLES, Order

PERIOD = 4096
"""Default period of a schedule in positions, unless a share is smaller than its inverse."""
MAX_PERIOD = 1 << 20
"""Maximum period of a schedule: its table takes a second to build, and 24 MB."""
MAX_TABLE_POSITIONS = 1 << 23
"""Maximum total length of a mixture's tables; it bounds the period if many sources may be exhausted."""
MIN_UNITS = 16
"""Units of the smallest share if the period is chosen by it: rounding then changes no share by more than 1/16."""
SHARE_TOLERANCE = 0.1
"""Relative deviation of a quantized share from the wanted one up to which no note is given."""
SAMPLE_BITS = 48
"""Low bits of a mixture's sample number, for the sample's number in its source; the source's number is above them."""
MAX_SOURCES = 1 << 12


@dataclass(frozen=True)
class MixtureSource:
    """A source in a mixture."""

    name: str
    order: Order
    """Order of its own samples, epoch by epoch."""
    max_samples: float = math.inf
    """Maximum number of samples taken from it, over all of its epochs."""


@dataclass(frozen=True)
class WeightPhase:
    """Positions from `first` to the beginning of the next phase, with constant shares."""

    first: int
    units: tuple[int, ...]
    """Integer shares of the sources, relative to their sum; 0 for an unused source."""


@dataclass(frozen=True)
class Schedule:
    """Assignment of one period's positions to sources, with tables for O(1) lookups."""

    units: np.ndarray
    """Number of positions of each source, (sources) int64."""
    source: np.ndarray
    """Source of each position, (period) int64."""
    nth: np.ndarray
    """Number of earlier positions in the period with the same source, (period) int64."""
    positions_by_source: np.ndarray
    """Positions of the first source, ascending, then those of the second, and so on, (period) int64."""
    source_offsets: np.ndarray
    """Start of each source in `positions_by_source`, (sources) int64."""

    @property
    def period(self) -> int:
        """Number of positions after which the schedule repeats."""
        return len(self.source)

    def positions_of(self, sources: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Returns the positions, relative to the phase's start, of sources' samples by number (inverse lookup)."""
        periods, offset = np.divmod(numbers, self.units[sources])
        positions: np.ndarray = periods * self.period + self.positions_by_source[self.source_offsets[sources] + offset]
        return positions

    def counts(self, positions: int) -> np.ndarray:
        """Returns the number of samples of each source in the first `positions` positions, (sources) int64."""
        periods, offset = divmod(positions, self.period)
        found: np.ndarray = periods * self.units + np.bincount(self.source[:offset], minlength=len(self.units))
        return found


@lru_cache(maxsize=64)
def build_schedule(units: tuple[int, ...]) -> Schedule:
    """Builds Tijdeman's schedule of one period for integer shares that sum to the period.

    At each position, among the sources that would stay less than 1 ahead of their share, the one with the earliest deadline
    is chosen. Arithmetic is in integers, or quotients of integers exact enough to be distinguished: equal on every machine.
    """
    weights = np.array(units, np.int64)
    period, sources = int(weights.sum()), int(np.count_nonzero(weights))
    slack = max(1, 2 * sources - 2)
    # A job for each sample of a period: the source's number, and the number of earlier samples of the source.
    source = np.repeat(np.arange(len(units)), weights)
    source_offsets = weights.cumsum() - weights
    num_before = np.arange(period) - source_offsets[source]
    # The first position allowed for a job, and the deadline at which its source would be 1 - 1/slack behind without it.
    release = -((-period * (num_before * slack + 1)) // (slack * weights[source])) - 1
    deadline = period * (slack - 1 + slack * num_before) / weights[source]
    by_deadline = np.lexsort((source, deadline))
    rank = np.empty(period, np.int64)
    rank[by_deadline] = np.arange(period)
    dealt = source[by_deadline[_schedule_by_deadline(release, rank)]] if sources > 1 else source
    positions_by_source = np.argsort(dealt, kind="stable")
    nth = np.empty(period, np.int64)
    nth[positions_by_source] = num_before
    return Schedule(weights, dealt, nth, positions_by_source, source_offsets)


def _schedule_by_deadline(release: np.ndarray, rank: np.ndarray) -> list[int]:
    """Schedules unit jobs: returns their ranks in execution order, at each position the smallest rank of those released."""
    by_release = np.argsort(release, kind="stable")
    ranks = rank[by_release].tolist()
    ends = np.searchsorted(release[by_release], np.arange(len(rank)), "right").tolist()
    waiting: list[int] = []
    ranks_in_order, job = [], 0
    for end in ends:
        while job < end:
            heappush(waiting, ranks[job])
            job += 1
        ranks_in_order.append(heappop(waiting))
    return ranks_in_order


def quantize_shares(weights: Sequence[float], max_period: int = PERIOD) -> tuple[int, ...]:
    """Quantizes weights, at least one of them positive, to integer shares of a period (their sum), at least 1 if positive.

    The period is PERIOD if every share is at least 1/PERIOD; else the smallest power of two in which the smallest share has
    MIN_UNITS units, at most `max_period`. Units left over by rounding down are assigned by largest remainders. Raises
    ValueError for more than MAX_SOURCES sources with weights.
    """
    total, has_weights = math.fsum(weights), [weight > 0 for weight in weights]
    if sum(has_weights) > MAX_SOURCES:
        raise ValueError(f"a mixture has at most {MAX_SOURCES} sources")
    period, smallest = PERIOD, min(weight for weight in weights if weight > 0) / total
    if smallest * PERIOD < 1 - 1e-9:  # a sum of floating-point weights is not exact
        while period < max_period and smallest * period < MIN_UNITS:
            period *= 2
    exact = [weight / total * period for weight in weights]
    # In a larger period, surplus or missing units go to the shares that they change least.
    is_small_share = [period > PERIOD and share < MIN_UNITS for share in exact]
    units = [
        max(round(share) if is_small else int(share), 1) if has_weight else 0
        for share, is_small, has_weight in zip(exact, is_small_share, has_weights, strict=True)
    ]
    remaining = period - sum(units)
    for number in sorted(
        range(len(units)), key=lambda number: (is_small_share[number], units[number] - exact[number], number)
    ):
        if remaining > 0 and has_weights[number] and not is_small_share[number]:
            units[number] += 1
            remaining -= 1
    while remaining < 0:  # many shares had less than one unit
        largest = max(range(len(units)), key=units.__getitem__)
        excess = min(-remaining, units[largest] // 2)
        units[largest] -= excess
        remaining += excess
    units[max(range(len(units)), key=units.__getitem__)] += remaining
    return tuple(units)


def distorted_shares(weights: Sequence[float], units: Sequence[int]) -> list[tuple[int, float, float]]:
    """Returns (source number, wanted share, quantized share) if they differ by more than SHARE_TOLERANCE."""
    total, period = math.fsum(weights), sum(units)
    shares = [
        (number, weight / total, unit / period) for number, (weight, unit) in enumerate(zip(weights, units, strict=True))
    ]
    return [share for share in shares if abs(share[2] - share[1]) > SHARE_TOLERANCE * share[1]]


@dataclass(frozen=True)
class Mixture:
    """Sample order of a mixture, the same on every rank; there are no samples at or beyond position `end`."""

    sources: tuple[MixtureSource, ...]
    phases: tuple[WeightPhase, ...]
    end: float = math.inf
    """Number of positions until all sources of the last phase are exhausted."""
    final_units: tuple[int, ...] = field(default=(), compare=False)
    """Shares by the last weights, ignoring exhausted sources; empty if the mixture was restored from its plan."""
    max_period: int = PERIOD
    """Maximum period of a phase."""

    @cached_property
    def _counts_before(self) -> tuple[np.ndarray, ...]:
        """Number of samples of each source before each phase."""
        before = [np.zeros(len(self.sources), np.int64)]
        for phase, after in zip(self.phases, self.phases[1:], strict=False):
            before.append(before[-1] + build_schedule(phase.units).counts(after.first - phase.first))
        return tuple(before)

    @classmethod
    def from_weights(
        cls,
        sources: Sequence[MixtureSource],
        wanted: Sequence[tuple[int, Sequence[float]]],
        past: "Mixture | None" = None,
        since: int = 0,
    ) -> Self:
        """Plans the mixture for weights by position, ascending from 0: (first position, a weight for each source).

        On resume, `past` applies before position `since`, and the new weights from there on. The sources of `past` come
        first, in their order; one that is no longer among `sources` has weight 0 from then on. If weights did not change,
        their phase continues. Raises ValueError for more than MAX_SOURCES sources.
        """
        known = {source.name: source for source in sources}
        ended = [source for source in (past.sources if past else ()) if source.name not in known]
        names = list(dict.fromkeys([source.name for source in (past.sources if past else ())] + list(known)))
        if len(names) > MAX_SOURCES:
            raise ValueError(f"a mixture has at most {MAX_SOURCES} sources, those that have ended among them")
        all_sources = tuple((known | {source.name: source for source in ended})[name] for name in names)
        source_numbers = {source.name: number for number, source in enumerate(sources)}
        padded_weights = [
            (first, [weights[source_numbers[name]] if name in source_numbers else 0.0 for name in names])
            for first, weights in wanted
        ]
        phases = [
            WeightPhase(phase.first, phase.units + (0,) * (len(names) - len(phase.units)))
            for phase in (past.phases if past else ())
            if phase.first < since
        ]
        # A run that began with a smaller period keeps it, so that later assignments do not move.
        max_period = min(past.max_period if past else MAX_PERIOD, max_period_for(sources, len(wanted)))
        planner = _PhasePlanner(
            all_sources, padded_weights, phases, _pad_counts(past, len(names), len(phases)), since, max_period
        )
        end = planner.plan_phases()
        mixture = cls(
            all_sources, tuple(planner.phases), end, quantize_shares(padded_weights[-1][1], max_period), max_period
        )
        mixture.__dict__["_counts_before"] = tuple(planner.before)  # already counted by the planner
        return mixture

    def sample_ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the sample numbers (int64) at positions (int64, any shape) below `end`; see `split_samples`."""
        numbers, sample_counts = self._locate(positions)
        result = np.empty_like(positions)
        for number in np.unique(numbers):
            mask = numbers == number
            result[mask] = self.sources[number].order.sample_ids_at(sample_counts[mask]) + (int(number) << SAMPLE_BITS)
        return result

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """Returns the epoch of each position in its own source, (int64, any shape)."""
        numbers, sample_counts = self._locate(positions)
        samples = np.array([source.order.samples for source in self.sources], np.int64)
        epochs: np.ndarray = sample_counts // samples[numbers]
        return epochs

    def counts(self, position: int) -> np.ndarray:
        """Returns the number of samples of each source before a position, (sources) int64."""
        number = max(0, bisect.bisect_right(self._phase_starts, position) - 1)
        phase = self.phases[number]
        given: np.ndarray = self._counts_before[number] + build_schedule(phase.units).counts(position - phase.first)
        return given

    def num_positions(self, epochs: float) -> float:
        """Returns the number of positions: a mixture ends with its sources, since each has epochs of its own."""
        return self.end

    def epoch_progress(self, position: int) -> dict[str, float]:
        """Returns the epochs by metric name: over all samples, and for each source."""
        counts, total = self.counts(position), sum(source.order.samples for source in self.sources)
        own = {
            f"epoch/{source.name}": int(count) / source.order.samples
            for source, count in zip(self.sources, counts, strict=True)
        }
        return {"epoch": position / total} | own

    def names(self, samples: np.ndarray) -> list[str]:
        """Returns display names of samples by number (int64, a vector): `web 17`."""
        return [
            f"{self.sources[number].name} {sample_number}"
            for number, sample_number in zip(*map(list, split_samples(samples)), strict=True)
        ]

    def is_ready(self, end: int) -> bool:
        """Returns True: all data is prepared."""
        return True

    def shares(self) -> dict[str, float]:
        """Returns the final shares by source name, of sources with a positive share."""
        units = self.final_units or self.phases[-1].units
        return {source.name: unit / sum(units) for source, unit in zip(self.sources, units, strict=True) if unit}

    def to_json(self) -> dict[str, Any]:
        """Returns the full plan for a checkpoint's manifest: the past stays known even if the settings change."""
        sources = [
            {
                "name": source.name,
                "most": None if math.isinf(source.max_samples) else int(source.max_samples),
                "order": source.order.to_json(),
            }
            for source in self.sources
        ]
        phases = [[phase.first, *phase.units] for phase in self.phases]
        end = None if math.isinf(self.end) else int(self.end)
        return {"sources": sources, "phases": phases, "end": end, "max_period": self.max_period}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Restores the mixture from `to_json`'s result. Raises KeyError, TypeError for other content."""
        sources = tuple(
            MixtureSource(source["name"], Order(**source["order"]), math.inf if source["most"] is None else source["most"])
            for source in content["sources"]
        )
        phases = tuple(WeightPhase(first, tuple(units)) for first, *units in content["phases"])
        end = math.inf if content["end"] is None else content["end"]
        # An older version had one fixed period and did not store it.
        return cls(sources, phases, end, max_period=content.get("max_period", PERIOD))

    @cached_property
    def _phase_starts(self) -> list[int]:
        return [phase.first for phase in self.phases]

    def _locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns each position's source, and the number of earlier samples of that source in all phases."""
        phases = np.searchsorted(np.array(self._phase_starts, np.int64), positions, "right") - 1
        numbers, sample_counts = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(phases):
            mask, phase = phases == number, self.phases[number]
            table = build_schedule(phase.units)
            periods, positions_in_period = np.divmod(positions[mask] - phase.first, table.period)
            numbers[mask] = source = table.source[positions_in_period]
            given = self._counts_before[number][source] + periods * table.units[source]
            sample_counts[mask] = given + table.nth[positions_in_period]
        return numbers, sample_counts


def _pad_counts(past: Mixture | None, sources: int, phases: int) -> list[np.ndarray]:
    """Pads the counts of samples before each of the first phases to the new number of sources."""
    before = past._counts_before[:phases] if past else ()
    return [np.pad(given, (0, sources - len(given))) for given in before]


def max_period_for(sources: Sequence[MixtureSource], phases: int) -> int:
    """Returns the maximum period for the tables of all phases, including those that begin when a source is exhausted."""
    tables = phases + sum(not math.isinf(source.max_samples) for source in sources)
    return max(PERIOD, min(MAX_PERIOD, 1 << (MAX_TABLE_POSITIONS // tables | 1).bit_length() - 1))


@dataclass
class _PhasePlanner:
    """Planner of phases: they begin at the positions of new weights, and when a source is exhausted."""

    sources: tuple[MixtureSource, ...]
    wanted: list[tuple[int, list[float]]]
    phases: list[WeightPhase]
    before: list[np.ndarray]
    """Number of samples of each source before each phase, (sources) int64."""
    since: int
    max_period: int

    def plan_phases(self) -> float:
        """Appends the phases; returns the end of the last one."""
        position, bounds = self.since, np.array([source.max_samples for source in self.sources])
        while True:
            given = self._counts_at(position)
            weights = next(weights for first, weights in reversed(self.wanted) if first <= position)
            remaining_weights = np.where(given < bounds, weights, 0.0).tolist()
            if not any(remaining_weights):
                return position
            units = quantize_shares(remaining_weights, self.max_period)
            if not self.phases or self.phases[-1].units != units:
                self.phases.append(WeightPhase(position, units))
                self.before.append(given)
            stop = min([first for first, _ in self.wanted if first > position] + [self._exhausted_at(bounds)])
            if math.isinf(stop):
                return math.inf
            position = int(stop)

    def _counts_at(self, position: int) -> np.ndarray:
        """Returns the number of samples of each source before a position in the last phase, (sources) int64."""
        if not self.phases:
            return np.zeros(len(self.sources), np.int64)
        last = self.phases[-1]
        counts: np.ndarray = self.before[-1] + build_schedule(last.units).counts(position - last.first)
        return counts

    def _exhausted_at(self, bounds: np.ndarray) -> float:
        """Returns the first position at which a source of the last phase is exhausted."""
        last, table = self.phases[-1], build_schedule(self.phases[-1].units)
        # Sources with bounds beyond an order's capacity are never exhausted.
        bounded = np.flatnonzero((table.units > 0) & (bounds < MAX_SAMPLES // table.period))
        if not bounded.size:
            return math.inf
        numbers = bounds[bounded].astype(np.int64) - self.before[-1][bounded] - 1
        return last.first + int(table.positions_of(bounded, numbers).min()) + 1


def split_samples(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits a mixture's sample numbers (int64, any shape) into source numbers and sample numbers in the sources."""
    return samples >> SAMPLE_BITS, samples & ((1 << SAMPLE_BITS) - 1)
