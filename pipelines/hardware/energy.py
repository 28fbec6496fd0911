"""What a device has drawn, how long it was held back and how often it idled, reckoned from readings one after the other.

A device (a GPU, a processor's package) is read as a dict of figures. Energy is the difference of its counter where it has
one, else its power integrated by trapezoids. A reason to slow down counts by the card's own counter of seconds where there
is one, else for the whole time between two readings where it held at the second.

    meter = EnergyMeter()
    meter.add({"power_usage_watts": 300.0, "utilization_percentage": 97.0}, now=0.0)
    meter.add({"power_usage_watts": 500.0, "utilization_percentage": 98.0}, now=5.0); meter.joules      # 2000.0
"""

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

IDLE_BELOW = 5.0
"""Percent of SM utilisation below which a GPU counts as idle."""
COUNTER = "energy_counter_joules"
REASONS = "clocks_event_reasons"
THROTTLING = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "board_limit": 0x200,
    "reliability": 0x400,
}
"""Bits of NVML's clocks event reasons that hold a busy card back. Idling and clocks that someone chose are none of them."""

Figures = dict[str, float]
Verdict = Literal["lost", "lacking", "later"]


class LostError(Exception):
    """A device that is gone for good; the text says why."""


class Device(Protocol):
    """A device whose figures are read again and again, as `EnergyMeter` takes them."""

    name: str
    """As in the names of its figures: `gpu_0`, `cpu_package_0`."""

    def read(self) -> Figures:
        """The device's figures now, without those that fail this time. Raises LostError where it is gone for good."""
        ...


class Card:
    """A GPU whose figures are read each alone: one that it lacks is left out for good, one that fails for this time.

    `judge` says of an error what it means. The first call of `read` is the probe.
    """

    def __init__(
        self, name: str, readings: Mapping[str, Callable[[], Figures]], judge: Callable[[Exception], Verdict]
    ) -> None:
        self.name = name
        self._readings = dict(readings)
        self._judge = judge

    def read(self) -> Figures:
        """The figures of all readings that succeed. Raises LostError."""
        figures: Figures = {}
        for what, reading in list(self._readings.items()):
            try:
                figures |= reading()
            except Exception as error:  # each vendor's library has its own, and none may end the sampling
                verdict = self._judge(error)
                if verdict == "lost":
                    raise LostError(str(error)) from error
                if verdict == "lacking":
                    del self._readings[what]
        return figures


class EnergyMeter:
    """One device's account. Figures of readings that are missing now and then only make it coarser."""

    def __init__(self) -> None:
        self.joules: float | None = None
        """Since the first reading; None where the device tells neither energy nor power."""
        self.throttled: dict[str, float] = {}
        """Seconds by reason, of those that held at any time."""
        self.throttled_seconds: float | None = None
        """Seconds in which any reason held; None where the device does not tell."""
        self.readings = self.idle = 0
        """Readings of utilisation after the first, and those of them below `IDLE_BELOW`."""
        self._time: float | None = None
        self._energy: tuple[float, float] | None = None  # the newest reading's time and value
        self._power: tuple[float, float] | None = None
        self._counters: dict[str, float] = {}

    def add(self, figures: Figures, now: float, last: bool = False) -> Figures:
        """Takes a reading at `now` seconds; returns what is worth recording of it. The `last` says nothing on idling."""
        passed = 0.0 if self._time is None else now - self._time
        shown = {name: value for name, value in figures.items() if "counter" not in name}
        power = self._add_energy(figures, now)
        self._add_throttling(figures, passed)
        if passed and not last and "utilization_percentage" in figures:
            self.readings += 1
            self.idle += figures["utilization_percentage"] < IDLE_BELOW
        if self.joules is not None:
            shown["energy_joules"] = self.joules
            if power is not None:
                shown.setdefault("power_usage_watts", power)
        if self.throttled_seconds is not None:
            shown["throttled_seconds"] = self.throttled_seconds
            shown |= {f"throttled_{reason}_seconds": held for reason, held in self.throttled.items()}
        self._time = now
        return shown

    def _add_energy(self, figures: Figures, now: float) -> float | None:
        """Counts on; the mean power in watts since the counter's reading before, where there is one."""
        energy, power = figures.get(COUNTER), figures.get("power_usage_watts")
        joules, mean = self.joules or 0.0, None
        if energy is not None and self._power is None:
            if self._energy is not None:
                then, earlier = self._energy
                gained = max(0.0, energy - earlier)  # a counter that went back was reset by a driver that was loaded anew
                joules += gained
                mean = gained / (now - then) if now > then else None
            self._energy, self.joules = (now, energy), joules
        elif power is not None and self._energy is None:
            if self._power is not None:
                then, earlier = self._power
                joules += (now - then) * (earlier + power) / 2
            self._power, self.joules = (now, power), joules
        return mean

    def _add_throttling(self, figures: Figures, passed: float) -> None:
        bits = int(figures.get(REASONS, 0))
        gained: Figures = {}
        known = REASONS in figures
        for reason, bit in THROTTLING.items():
            counter = figures.get(f"throttled_counter_{reason}")
            if counter is not None:
                known = True
                gained[reason] = max(0.0, counter - self._counters.get(reason, counter))
                self._counters[reason] = counter
            elif bits & bit and reason not in self._counters:
                gained[reason] = passed
        if not known:
            return
        for reason, seconds in gained.items():
            if seconds:
                self.throttled[reason] = self.throttled.get(reason, 0.0) + seconds
        # Reasons overlap (a card that is too hot may also be at its power limit), but not beyond the time that passed.
        self.throttled_seconds = (self.throttled_seconds or 0.0) + min(sum(gained.values()), passed)
