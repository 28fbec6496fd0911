"""The energy of a node's processors by RAPL, which Linux shows under /sys/class/powercap, often to root alone.

A package is a processor with its cores, caches and memory controller: not the machine, and other processes are included. The
counter is in microjoules and begins again at a range that the kernel states, after minutes or hours.

    for package in rapl_packages(): print(package.name, package.read())        # cpu_package_0 {"energy_counter_joules": 0.0}
"""

from pathlib import Path

from raystride.pipelines.hardware.energy import COUNTER, Figures

POWERCAP = Path("/sys/class/powercap")


class Package:
    """One processor's counter, counted on where it begins again."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._range = _microjoules(folder / "max_energy_range_uj")
        self._last = _microjoules(folder / "energy_uj")
        self._counted = 0

    def read(self) -> Figures:
        """Joules since it was made; nothing where the file cannot be read this time."""
        try:
            now = _microjoules(self._folder / "energy_uj")
        except (OSError, ValueError):
            return {}
        gained = now - self._last
        self._counted += gained if gained >= 0 else gained + self._range + 1
        self._last = now
        return {COUNTER: self._counted / 1e6}


def rapl_packages(root: Path = POWERCAP) -> list[Package]:
    """The packages that may be read here. Their parts (cores, memory) lie beside them and are left out, like `psys`."""
    found = []
    for folder in sorted(root.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
            if folder.name.count(":") == 1 and name.startswith("package"):
                found.append(Package(f"cpu_{name.replace('-', '_')}", folder))
        except (OSError, ValueError):
            continue
    return found


def _microjoules(path: Path) -> int:
    return int(path.read_text())
