"""Samples of several sources by their weights: which source a position has, and which of its samples, computed.

Positions are dealt to sources by Tijdeman's rule (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32,
1980): in every prefix of n positions a source has n times its share, within 1, so in every window within 2. Shares are
multiples of 1/4096, so the schedule repeats, and one table tells in O(1) how many positions a source has had before any one,
and which position is its n-th. A source's n-th position holds the n-th sample of its own order, epoch after epoch. So the
position of a run is one integer, as it is with one source.

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
from typing import Any, Self

import numpy as np

from raystride.pipelines.feed.order import Order

PERIOD = 4096
"""Positions after which a schedule repeats: shares are multiples of its inverse."""
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
    """The sources' shares, in units of 1/PERIOD; 0 for one that gives nothing here."""


@dataclass(frozen=True)
class Schedule:
    """The positions of one period, dealt to sources; all that follows from it in O(1)."""

    source: np.ndarray
    """Each position's source, (PERIOD) int64."""
    nth: np.ndarray
    """How many positions before it in the period have that source, (PERIOD) int64."""
    places: tuple[np.ndarray, ...]
    """The positions of each source, ascending."""

    def place(self, source: int, number: int) -> int:
        """The position, from the phase's beginning on, at which a source has given so many samples; the inverse."""
        periods, inside = divmod(number, len(self.places[source]))
        return periods * PERIOD + int(self.places[source][inside])

    def counts(self, positions: int) -> np.ndarray:
        """Samples that each source gives in so many first positions, (sources) int64."""
        periods, inside = divmod(positions, PERIOD)
        found = [periods * len(places) + np.searchsorted(places, inside) for places in self.places]
        return np.array(found, np.int64)


@lru_cache(maxsize=64)
def schedule(units: tuple[int, ...]) -> Schedule:
    """Tijdeman's schedule of one period for these shares, whose sum is PERIOD.

    At each position, of the sources that would not be ahead of their share by as much as 1, that one comes whose time is up
    first. All in whole numbers: the same on every machine.
    """
    weights = np.array(units, np.int64)
    assert weights.sum() == PERIOD
    sources, given = np.flatnonzero(weights), np.zeros(len(units), np.int64)
    slack = 2 * len(sources) - 2
    dealt = np.empty(PERIOD, np.int64)
    for position in range(PERIOD):
        # slack x PERIOD times Tijdeman's: what a source is due after this position, less what it has been given.
        due = slack * ((position + 1) * weights - PERIOD * given)
        may = sources[due[sources] >= PERIOD] if slack else sources
        # Time left until a source would be 1 - 1/slack behind, as fractions with small whole numbers above and below.
        late = ((slack - 1) * PERIOD - due[may]) / weights[may]
        dealt[position] = may[np.argmin(late)]
        given[dealt[position]] += 1
    places = tuple(np.flatnonzero(dealt == number) for number in range(len(units)))
    nth = np.empty(PERIOD, np.int64)
    for there in places:
        nth[there] = np.arange(len(there))
    return Schedule(dealt, nth, places)


def in_units(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights, of which one is above 0, as shares in units of 1/PERIOD that add up to one; the least of them has one unit.

    What is left over by rounding down goes to those that lost most by it (largest remainders). Raises ValueError where
    there are more sources with weights than units.
    """
    total, wanted = math.fsum(weights), [weight > 0 for weight in weights]
    if sum(wanted) > PERIOD:
        raise ValueError(f"a mixture has at most {PERIOD} sources")
    exact = [weight / total * PERIOD for weight in weights]
    units = [max(int(each), 1) if there else 0 for each, there in zip(exact, wanted, strict=True)]
    by_loss = sorted(range(len(units)), key=lambda number: (units[number] - exact[number], number))
    for number in by_loss:
        if sum(units) < PERIOD and wanted[number]:
            units[number] += 1
    while (over := sum(units) - PERIOD) > 0:  # where many had less than one unit
        largest = max(range(len(units)), key=units.__getitem__)
        units[largest] -= min(over, units[largest] // 2)
    return tuple(units)


@dataclass(frozen=True)
class Mixture:
    """The order of a mixture's samples, the same on every rank; positions at and beyond `end` have none."""

    sources: tuple[MixtureSource, ...]
    phases: tuple[WeightPhase, ...]
    end: float = math.inf
    """Positions after which no source of the last phase has samples left to give."""
    last: tuple[int, ...] = field(default=(), compare=False)
    """The shares that are wanted last, whatever a source may still give; none where only what was planned is known."""
    _before: tuple[np.ndarray, ...] = field(init=False, repr=False, compare=False, default=())
    """Samples that each source has given before each phase."""

    def __post_init__(self) -> None:
        before = [np.zeros(len(self.sources), np.int64)]
        for phase, after in zip(self.phases, self.phases[1:], strict=False):
            before.append(before[-1] + schedule(phase.units).counts(after.first - phase.first))
        object.__setattr__(self, "_before", tuple(before))

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
        planner = _Planner(everyone, padded, phases, since)
        return cls(everyone, *planner.plan(), in_units(padded[-1][1]))

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
        return {each.name: unit / PERIOD for each, unit in zip(self.sources, units, strict=True) if unit}

    def to_json(self) -> dict[str, Any]:
        """All of it, for a checkpoint's manifest: what was before stays known, whatever the settings become."""
        sources = [
            {"name": each.name, "most": None if math.isinf(each.most) else int(each.most), "order": each.order.to_json()}
            for each in self.sources
        ]
        phases = [[phase.first, *phase.units] for phase in self.phases]
        return {"sources": sources, "phases": phases, "end": None if math.isinf(self.end) else int(self.end)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The mixture from what `to_json` gave. Raises KeyError, TypeError for something else."""
        sources = tuple(
            MixtureSource(each["name"], Order(**each["order"]), math.inf if each["most"] is None else each["most"])
            for each in content["sources"]
        )
        phases = tuple(WeightPhase(first, tuple(units)) for first, *units in content["phases"])
        return cls(sources, phases, math.inf if content["end"] is None else content["end"])

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
            periods, places = np.divmod(positions[here] - phase.first, PERIOD)
            numbers[here] = source = table.source[places]
            given = self._before[number][source] + periods * np.array(phase.units, np.int64)[source]
            inside[here] = given + table.nth[places]
        return numbers, inside


@dataclass
class _Planner:
    """Finds where phases begin: at the positions that are wanted, and where a source has given all that it may."""

    sources: tuple[MixtureSource, ...]
    wanted: list[tuple[int, list[float]]]
    phases: list[WeightPhase]
    since: int

    def plan(self) -> tuple[tuple[WeightPhase, ...], float]:
        """The phases, and where the last of them ends."""
        at = self.since
        while True:
            given = Mixture(self.sources, tuple(self.phases)).counts(at) if self.phases else np.zeros(len(self.sources))
            weights = next(weights for first, weights in reversed(self.wanted) if first <= at)
            left = [
                weight if count < each.most else 0.0
                for weight, count, each in zip(weights, given, self.sources, strict=True)
            ]
            if not any(left):
                return tuple(self.phases), at
            units = in_units(left)
            if not self.phases or self.phases[-1].units != units:
                self.phases.append(WeightPhase(at, units))
            stop = min([first for first, _ in self.wanted if first > at] + [self._used_up()])
            if math.isinf(stop):
                return tuple(self.phases), math.inf
            at = int(stop)

    def _used_up(self) -> float:
        """The position from which on a source of the last phase has nothing to give."""
        last = self.phases[-1]
        before = Mixture(self.sources, tuple(self.phases)).counts(last.first)
        table = schedule(last.units)
        ends = [
            last.first + table.place(number, int(each.most - before[number]) - 1) + 1
            for number, each in enumerate(self.sources)
            if last.units[number] and not math.isinf(each.most)
        ]
        return min(ends, default=math.inf)


def split_samples(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of sources, and of samples in these, of a mixture's sample numbers (int64, any shape)."""
    return samples >> SHIFT, samples & ((1 << SHIFT) - 1)
