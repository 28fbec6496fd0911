"""Energy, throttling time and idle share of a device, accumulated from successive readings.

A device (a GPU, a CPU package) is read as a dict of figures. Energy in joules is the difference of its energy counter if it
has one, else the trapezoidal integral of its power in watts. Throttling time of a reason in seconds is the difference of the
card's own counter if it has one, else the whole time between two readings if the reason is active at the second.

A CPU package has RAPL's counter, often readable by root only. It counts cores, caches and memory controller, not the rest of
the machine, and includes other processes. It is in microjoules and wraps around after minutes or hours.

    meter = EnergyMeter()
    meter.add_reading({"power_usage_watts": 300.0, "utilization_percentage": 97.0}, now=0.0)
    meter.add_reading({"power_usage_watts": 500.0, "utilization_percentage": 98.0}, now=5.0); meter.joules      # 2000.0
    for package in rapl_packages(): print(package.name, package.read())    # cpu_package_0 {"energy_counter_joules": 0.0}
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

IDLE_BELOW_PERCENT = 5.0
"""Percent of SM utilisation below which a GPU counts as idle."""
ENERGY_COUNTER = "energy_counter_joules"
CLOCK_REASONS = "clocks_event_reasons"
THROTTLE_BITS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "board_limit": 0x200,
    "reliability": 0x400,
}
"""Bits of NVML's clocks event reasons that throttle a busy card, without idling and clocks set by a user."""

Figures = dict[str, float]
ErrorKind = Literal["lost", "lacking", "later"]


class DeviceLostError(Exception):
    """The device is permanently lost; the text says why."""


class Device(Protocol):
    """A device that is read periodically, with figures as `EnergyMeter` expects them."""

    name: str
    """Prefix of its figures' names: `gpu_0`, `cpu_package_0`."""

    def read(self) -> Figures:
        """Returns the device's current figures, without those that fail this time.

        Raises DeviceLostError if the device is permanently lost.
        """
        ...


class Card:
    """A GPU with independent readings: an unsupported one is dropped for good, a failing one is skipped this time.

    `classify_error` maps an error to its kind. The first call of `read` probes all readings.
    """

    def __init__(
        self, name: str, readings: Mapping[str, Callable[[], Figures]], classify_error: Callable[[Exception], ErrorKind]
    ) -> None:
        self.name = name
        self._readings = dict(readings)
        self._classify_error = classify_error

    def read(self) -> Figures:
        """Returns the figures of all readings that succeed. Raises DeviceLostError."""
        figures: Figures = {}
        for name, reading in list(self._readings.items()):
            try:
                figures |= reading()
            except Exception as error:  # each vendor's library has its own errors, and none may end the sampling
                kind = self._classify_error(error)
                if kind == "lost":
                    raise DeviceLostError(str(error)) from error
                if kind == "lacking":
                    del self._readings[name]
        return figures


class EnergyMeter:
    """Accumulated energy, throttling and idling of one device. Missing figures only make the result coarser."""

    def __init__(self) -> None:
        self.joules: float | None = None
        """Since the first reading; None if the device reports neither energy nor power."""
        self.throttled: dict[str, float] = {}
        """Seconds by reason, for the reasons that were ever active."""
        self.throttled_seconds: float | None = None
        """Seconds in which any reason was active; None if the device does not report it."""
        self.readings = self.idle = 0
        """Number of utilisation readings after the first, and of those below `IDLE_BELOW_PERCENT`."""
        self._time: float | None = None
        self._energy: tuple[float, float] | None = None  # the newest reading's time and value
        self._power: tuple[float, float] | None = None
        self._counters: dict[str, float] = {}

    def add_reading(self, figures: Figures, now: float, last: bool = False) -> Figures:
        """Accumulates a reading at `now` seconds and returns the figures to record. The `last` one is ignored for idling."""
        elapsed = 0.0 if self._time is None else now - self._time
        shown = {name: value for name, value in figures.items() if "counter" not in name}
        power = self._add_energy(figures, now)
        self._add_throttling(figures, elapsed)
        if elapsed and not last and "utilization_percentage" in figures:
            self.readings += 1
            self.idle += figures["utilization_percentage"] < IDLE_BELOW_PERCENT
        if self.joules is not None:
            shown["energy_joules"] = self.joules
            if power is not None:
                shown.setdefault("power_usage_watts", power)
        if self.throttled_seconds is not None:
            shown["throttled_seconds"] = self.throttled_seconds
            shown |= {f"throttled_{reason}_seconds": seconds for reason, seconds in self.throttled.items()}
        self._time = now
        return shown

    def _add_energy(self, figures: Figures, now: float) -> float | None:
        """Accumulates the energy; returns the mean power in watts since the last counter reading, if there is one."""
        energy, power = figures.get(ENERGY_COUNTER), figures.get("power_usage_watts")
        joules, mean = self.joules or 0.0, None
        if energy is not None and self._power is None:
            if self._energy is not None:
                last_time, last_value = self._energy
                gained = max(0.0, energy - last_value)  # a reloaded driver resets the counter
                joules += gained
                mean = gained / (now - last_time) if now > last_time else None
            self._energy, self.joules = (now, energy), joules
        elif power is not None and self._energy is None:
            if self._power is not None:
                last_time, last_value = self._power
                joules += (now - last_time) * (last_value + power) / 2
            self._power, self.joules = (now, power), joules
        return mean

    def _add_throttling(self, figures: Figures, elapsed: float) -> None:
        bits = int(figures.get(CLOCK_REASONS, 0))
        gained: Figures = {}
        known = CLOCK_REASONS in figures
        for reason, bit in THROTTLE_BITS.items():
            counter = figures.get(f"throttled_counter_{reason}")
            if counter is not None:
                known = True
                gained[reason] = max(0.0, counter - self._counters.get(reason, counter))
                self._counters[reason] = counter
            elif bits & bit and reason not in self._counters:
                gained[reason] = elapsed
        if not known:
            return
        for reason, seconds in gained.items():
            if seconds:
                self.throttled[reason] = self.throttled.get(reason, 0.0) + seconds
        # Reasons overlap (a hot card may also be at its power limit), so their sum is bounded by the elapsed time.
        self.throttled_seconds = (self.throttled_seconds or 0.0) + min(sum(gained.values()), elapsed)


POWERCAP = Path("/sys/class/powercap")


class RaplPackage:
    """The energy counter of one CPU, with wrap-around handled."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._range = _read_microjoules(folder / "max_energy_range_uj")
        self._last = _read_microjoules(folder / "energy_uj")
        self._counted = 0

    def read(self) -> Figures:
        """Returns joules since this object was made; empty if the file cannot be read this time."""
        try:
            now = _read_microjoules(self._folder / "energy_uj")
        except (OSError, ValueError):
            return {}
        gained = now - self._last
        self._counted += gained if gained >= 0 else gained + self._range + 1
        self._last = now
        return {ENERGY_COUNTER: self._counted / 1e6}


def rapl_packages(root: Path = POWERCAP) -> list[RaplPackage]:
    """Returns the readable packages. Their subdomains (cores, memory) and `psys` are left out."""
    found = []
    for folder in sorted(root.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
            if folder.name.count(":") == 1 and name.startswith("package"):
                found.append(RaplPackage(f"cpu_{name.replace('-', '_')}", folder))
        except (OSError, ValueError):
            continue
    return found


def _read_microjoules(path: Path) -> int:
    return int(path.read_text())
