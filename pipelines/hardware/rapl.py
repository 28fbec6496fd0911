"""CPU energy by RAPL from /sys/class/powercap, which is often readable by root only.

A package is a CPU with its cores, caches and memory controller: not the machine, and other processes are included. The
counter is in microjoules and wraps around at a range stated by the kernel, after minutes or hours.

    for package in rapl_packages(): print(package.name, package.read())        # cpu_package_0 {"energy_counter_joules": 0.0}
"""

from pathlib import Path

from raystride.pipelines.hardware.energy import ENERGY_COUNTER, Figures

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
