"""Samples of several sources by their weights: which source a position has, and which of its samples, computed.

Positions are dealt to sources by Tijdeman's rule (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32,
1980): in every prefix of n positions a source has n times its share, within 1, so in every window within 2. Shares are
multiples of 1/4096, or of a smaller power of two if a source has less than that (`in_units`), so the schedule repeats, and
one table tells in O(1) how many positions a source has had before any one, and which position is its n-th. A source's n-th
position holds the n-th sample of its own order, epoch after epoch. So the position of a run is one integer, as it is with
one source.

A phase begins where weights change: in a curriculum, on resume, or where a source has given all that it may.

    web, code = MixtureSource("web", Order(10**9, seed=1)), MixtureSource("code", Order(10**6, seed=2), most=4 * 10**6)
    mixture = Mixture.planned((web, code), [(0, (0.8, 0.2)), (64_000, (0.5, 0.5))])
    source, inside = split_samples(mixture.at(np.arange(64)))     # numbers of sources, and of samples in each
    mixture.counts(10**6)                                         # how many samples each source has given before
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from typing import Any, Self

import numpy as np

from raystride.pipelines.feed.order import MOST, Order

PERIOD = 4096
"""Positions after which a schedule repeats, unless a share is smaller than its inverse."""
MAX_PERIOD = 1 << 20
"""Positions after which every schedule repeats: a table of these takes a second to make, and 24 MB."""
MAX_DEALT = 1 << 23
"""Positions of all tables of a mixture together, which bounds the period where many sources may be used up."""
FINE = 16
"""Units that the smallest share has, where the period is chosen by it: rounding then changes no share by more than 1/16."""
TOLERANCE = 0.1
"""The part of a share by which what is dealt may differ from it unmentioned."""
SHIFT = 48
"""A mixture's sample number has its source's number above so many bits, and the sample's own in them."""
MOST_SOURCES = 1 << 12


@dataclass(frozen=True)
class MixtureSource:
    """A source in a mixture."""

    name: str
    order: Order
    """Its own samples, epoch by epoch."""
    most: float = math.inf
    """Samples that it gives at most, over all of its epochs."""


@dataclass(frozen=True)
class WeightPhase:
    """Positions from `first` on, up to where the next phase begins."""

    first: int
    units: tuple[int, ...]
    """The sources' shares, in units of the inverse of their sum; 0 for one that gives nothing here."""


@dataclass(frozen=True)
class Schedule:
    """The positions of one period, dealt to sources; all that follows from it in O(1)."""

    units: np.ndarray
    """The sources' positions in it, (sources) int64."""
    source: np.ndarray
    """Each position's source, (period) int64."""
    nth: np.ndarray
    """How many positions before it in the period have that source, (period) int64."""
    places: np.ndarray
    """The positions of the first source, ascending, then those of the second, and so on, (period) int64."""
    firsts: np.ndarray
    """Where in `places` those of each source begin, (sources) int64."""

    @property
    def period(self) -> int:
        """Positions after which it repeats."""
        return len(self.source)

    def place(self, sources: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The positions, from the phase's beginning on, at which sources have given so many samples; the inverse."""
        periods, inside = np.divmod(numbers, self.units[sources])
        found: np.ndarray = periods * self.period + self.places[self.firsts[sources] + inside]
        return found

    def counts(self, positions: int) -> np.ndarray:
        """Samples that each source gives in so many first positions, (sources) int64."""
        periods, inside = divmod(positions, self.period)
        found: np.ndarray = periods * self.units + np.bincount(self.source[:inside], minlength=len(self.units))
        return found


@lru_cache(maxsize=64)
def schedule(units: tuple[int, ...]) -> Schedule:
    """Tijdeman's schedule of one period for these shares, whose sum is the period.

    At each position, of the sources that would not be ahead of their share by as much as 1, that one comes whose time is up
    first. All in whole numbers, or quotients of such that are exact enough to tell any two apart: the same on every machine.
    """
    weights = np.array(units, np.int64)
    period, sources = int(weights.sum()), int(np.count_nonzero(weights))
    slack = max(1, 2 * sources - 2)
    # A job for each sample of a period: the source's number, and how many samples the source has given before.
    source = np.repeat(np.arange(len(units)), weights)
    firsts = weights.cumsum() - weights
    before = np.arange(period) - firsts[source]
    # From which position on it may come, and when the source would be 1 - 1/slack behind without it.
    release = -((-period * (before * slack + 1)) // (slack * weights[source])) - 1
    late = period * (slack - 1 + slack * before) / weights[source]
    by_deadline = np.lexsort((source, late))
    rank = np.empty(period, np.int64)
    rank[by_deadline] = np.arange(period)
    dealt = source[by_deadline[_earliest_deadline_first(release, rank)]] if sources > 1 else source
    places = np.argsort(dealt, kind="stable")
    nth = np.empty(period, np.int64)
    nth[places] = before
    return Schedule(weights, dealt, nth, places, firsts)


def _earliest_deadline_first(release: np.ndarray, rank: np.ndarray) -> list[int]:
    """The ranks of unit jobs in the order in which they are done: at each position, of those released, the smallest."""
    by_release = np.argsort(release, kind="stable")
    ranks = rank[by_release].tolist()
    ends = np.searchsorted(release[by_release], np.arange(len(rank)), "right").tolist()
    waiting: list[int] = []
    done, at = [], 0
    for end in ends:
        while at < end:
            heappush(waiting, ranks[at])
            at += 1
        done.append(heappop(waiting))
    return done


def in_units(weights: Sequence[float], max_period: int = PERIOD) -> tuple[int, ...]:
    """Weights, of which one is above 0, as whole shares of a period, which is their sum; the least of them has one unit.

    The period is PERIOD if every share is 1/PERIOD at least; else the smallest power of two in which the smallest share has
    FINE units, `max_period` at most. What is left over by rounding down goes to those that lost most by it (largest
    remainders). Raises ValueError where there are more sources with weights than MOST_SOURCES.
    """
    total, wanted = math.fsum(weights), [weight > 0 for weight in weights]
    if sum(wanted) > MOST_SOURCES:
        raise ValueError(f"a mixture has at most {MOST_SOURCES} sources")
    period, smallest = PERIOD, min(weight for weight in weights if weight > 0) / total
    if smallest * PERIOD < 1 - 1e-9:  # a sum of floating-point weights is not exact
        while period < max_period and smallest * period < FINE:
            period *= 2
    exact = [weight / total * period for weight in weights]
    # In a chosen period, one unit more or less goes to those that it changes least.
    small = [period > PERIOD and share < FINE for share in exact]
    units = [
        max(round(share) if few else int(share), 1) if there else 0
        for share, few, there in zip(exact, small, wanted, strict=True)
    ]
    left = period - sum(units)
    for number in sorted(range(len(units)), key=lambda number: (small[number], units[number] - exact[number], number)):
        if left > 0 and wanted[number] and not small[number]:
            units[number] += 1
            left -= 1
    while left < 0:  # where many had less than one unit
        largest = max(range(len(units)), key=units.__getitem__)
        taken = min(-left, units[largest] // 2)
        units[largest] -= taken
        left += taken
    units[max(range(len(units)), key=units.__getitem__)] += left
    return tuple(units)


def unlike_shares(weights: Sequence[float], units: Sequence[int]) -> list[tuple[int, float, float]]:
    """The sources whose shares in units differ from those by weight by more than TOLERANCE: number, wanted, dealt."""
    total, period = math.fsum(weights), sum(units)
    shares = [
        (number, weight / total, unit / period) for number, (weight, unit) in enumerate(zip(weights, units, strict=True))
    ]
    return [each for each in shares if abs(each[2] - each[1]) > TOLERANCE * each[1]]


@dataclass(frozen=True)
class Mixture:
    """The order of a mixture's samples, the same on every rank; positions at and beyond `end` have none."""

    sources: tuple[MixtureSource, ...]
    phases: tuple[WeightPhase, ...]
    end: float = math.inf
    """Positions after which no source of the last phase has samples left to give."""
    last: tuple[int, ...] = field(default=(), compare=False)
    """The shares that are wanted last, whatever a source may still give; none where only what was planned is known."""
    max_period: int = PERIOD
    """The largest period that a phase of it may have."""

    @cached_property
    def _before(self) -> tuple[np.ndarray, ...]:
        """Samples that each source has given before each phase."""
        before = [np.zeros(len(self.sources), np.int64)]
        for phase, after in zip(self.phases, self.phases[1:], strict=False):
            before.append(before[-1] + schedule(phase.units).counts(after.first - phase.first))
        return tuple(before)

    @classmethod
    def planned(
        cls,
        sources: Sequence[MixtureSource],
        wanted: Sequence[tuple[int, Sequence[float]]],
        past: "Mixture | None" = None,
        since: int = 0,
    ) -> Self:
        """The mixture in which weights hold from positions on, ascending from 0: (position, a weight for each source).

        Of a resumed run, `past` holds before position `since`, and the weights that are wanted there from then on. Its
        sources come first, in their order; one that is not among `sources` any more has weight 0 from then on. Weights that
        did not change go on in the middle of their phase. Raises ValueError for more sources than a mixture can have.
        """
        known = {each.name: each for each in sources}
        ended = [each for each in (past.sources if past else ()) if each.name not in known]
        names = list(dict.fromkeys([each.name for each in (past.sources if past else ())] + list(known)))
        if len(names) > MOST_SOURCES:
            raise ValueError(f"a mixture has at most {MOST_SOURCES} sources, those that have ended among them")
        everyone = tuple((known | {each.name: each for each in ended})[name] for name in names)
        places = {each.name: number for number, each in enumerate(sources)}
        padded = [(first, [weights[places[name]] if name in places else 0.0 for name in names]) for first, weights in wanted]
        phases = [
            WeightPhase(each.first, each.units + (0,) * (len(names) - len(each.units)))
            for each in (past.phases if past else ())
            if each.first < since
        ]
        # A run that began with a smaller one keeps to it: what is dealt from here on does not move.
        max_period = min(past.max_period if past else MAX_PERIOD, period_bound(sources, len(wanted)))
        planner = _Planner(everyone, padded, phases, _padded(past, len(names), len(phases)), since, max_period)
        end = planner.plan()
        mixture = cls(everyone, tuple(planner.phases), end, in_units(padded[-1][1], max_period), max_period)
        mixture.__dict__["_before"] = tuple(planner.before)  # counted while it was planned
        return mixture

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Sample numbers (int64) at positions (int64, any shape) below `end`; see `split_samples`."""
        numbers, inside = self._dealt(positions)
        result = np.empty_like(positions)
        for number in np.unique(numbers):
            here = numbers == number
            result[here] = self.sources[number].order.at(inside[here]) + (int(number) << SHIFT)
        return result

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epochs, each that of the position's own source, (int64, any shape)."""
        numbers, inside = self._dealt(positions)
        samples = np.array([each.order.samples for each in self.sources], np.int64)
        epochs: np.ndarray = inside // samples[numbers]
        return epochs

    def counts(self, position: int) -> np.ndarray:
        """How many samples each source has given before a position, (sources) int64."""
        number = max(0, bisect.bisect_right(self._firsts, position) - 1)
        phase = self.phases[number]
        given: np.ndarray = self._before[number] + schedule(phase.units).counts(position - phase.first)
        return given

    def length(self, epochs: float) -> float:
        """Positions that there are; a mixture ends where its sources do, since each has epochs of its own."""
        return self.end

    def progress(self, position: int) -> dict[str, float]:
        """Epochs by metric's name: of all samples together, and of each source's own."""
        counts, total = self.counts(position), sum(each.order.samples for each in self.sources)
        own = {
            f"epoch/{each.name}": int(count) / each.order.samples for each, count in zip(self.sources, counts, strict=True)
        }
        return {"epoch": position / total} | own

    def names(self, samples: np.ndarray) -> list[str]:
        """What people call samples of these numbers (int64, a vector): `web 17`."""
        return [
            f"{self.sources[number].name} {inside}"
            for number, inside in zip(*map(list, split_samples(samples)), strict=True)
        ]

    def ready(self, end: int) -> bool:
        """True: all is prepared."""
        return True

    def shares(self) -> dict[str, float]:
        """The shares by name that are wanted last, of sources that have one."""
        units = self.last or self.phases[-1].units
        return {each.name: unit / sum(units) for each, unit in zip(self.sources, units, strict=True) if unit}

    def to_json(self) -> dict[str, Any]:
        """All of it, for a checkpoint's manifest: what was before stays known, whatever the settings become."""
        sources = [
            {"name": each.name, "most": None if math.isinf(each.most) else int(each.most), "order": each.order.to_json()}
            for each in self.sources
        ]
        phases = [[phase.first, *phase.units] for phase in self.phases]
        end = None if math.isinf(self.end) else int(self.end)
        return {"sources": sources, "phases": phases, "end": end, "max_period": self.max_period}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The mixture from what `to_json` gave. Raises KeyError, TypeError for something else."""
        sources = tuple(
            MixtureSource(each["name"], Order(**each["order"]), math.inf if each["most"] is None else each["most"])
            for each in content["sources"]
        )
        phases = tuple(WeightPhase(first, tuple(units)) for first, *units in content["phases"])
        end = math.inf if content["end"] is None else content["end"]
        # An older version had one period for all, and wrote none.
        return cls(sources, phases, end, max_period=content.get("max_period", PERIOD))

    @cached_property
    def _firsts(self) -> list[int]:
        return [phase.first for phase in self.phases]

    def _dealt(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each position's source, and how many samples that source has given before, in all phases."""
        phases = np.searchsorted(np.array(self._firsts, np.int64), positions, "right") - 1
        numbers, inside = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(phases):
            here, phase = phases == number, self.phases[number]
            table = schedule(phase.units)
            periods, places = np.divmod(positions[here] - phase.first, table.period)
            numbers[here] = source = table.source[places]
            given = self._before[number][source] + periods * table.units[source]
            inside[here] = given + table.nth[places]
        return numbers, inside


def _padded(past: Mixture | None, sources: int, phases: int) -> list[np.ndarray]:
    """What each of so many sources has given before each of the first phases."""
    before = past._before[:phases] if past else ()
    return [np.pad(given, (0, sources - len(given))) for given in before]


def period_bound(sources: Sequence[MixtureSource], phases: int) -> int:
    """The period that these sources' tables may have, in so many phases and those that begin where a source is used up."""
    tables = phases + sum(not math.isinf(each.most) for each in sources)
    return max(PERIOD, min(MAX_PERIOD, 1 << (MAX_DEALT // tables | 1).bit_length() - 1))


@dataclass
class _Planner:
    """Finds where phases begin: at the positions that are wanted, and where a source has given all that it may."""

    sources: tuple[MixtureSource, ...]
    wanted: list[tuple[int, list[float]]]
    phases: list[WeightPhase]
    before: list[np.ndarray]
    """Samples that each source has given before each phase, (sources) int64."""
    since: int
    max_period: int

    def plan(self) -> float:
        """Adds the phases; where the last of them ends."""
        at, bounds = self.since, np.array([each.most for each in self.sources])
        while True:
            given = self._given(at)
            weights = next(weights for first, weights in reversed(self.wanted) if first <= at)
            left = np.where(given < bounds, weights, 0.0).tolist()
            if not any(left):
                return at
            units = in_units(left, self.max_period)
            if not self.phases or self.phases[-1].units != units:
                self.phases.append(WeightPhase(at, units))
                self.before.append(given)
            stop = min([first for first, _ in self.wanted if first > at] + [self._used_up(bounds)])
            if math.isinf(stop):
                return math.inf
            at = int(stop)

    def _given(self, position: int) -> np.ndarray:
        """Samples that each source has given before a position in the last phase, (sources) int64."""
        if not self.phases:
            return np.zeros(len(self.sources), np.int64)
        last = self.phases[-1]
        given: np.ndarray = self.before[-1] + schedule(last.units).counts(position - last.first)
        return given

    def _used_up(self, bounds: np.ndarray) -> float:
        """The position from which on a source of the last phase has nothing to give."""
        last, table = self.phases[-1], schedule(self.phases[-1].units)
        # Beyond what an order can hold nothing is used up.
        bounded = np.flatnonzero((table.units > 0) & (bounds < MOST // table.period))
        if not bounded.size:
            return math.inf
        numbers = bounds[bounded].astype(np.int64) - self.before[-1][bounded] - 1
        return last.first + int(table.place(bounded, numbers).min()) + 1


def split_samples(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of sources, and of samples in these, of a mixture's sample numbers (int64, any shape)."""
    return samples >> SHIFT, samples & ((1 << SHIFT) - 1)
