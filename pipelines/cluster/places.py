"""What a group of workers waits for that has not begun: places on a cluster that is in use.

    places = PlacesWatch(share, wait_s=600)
    places.look()                                             # "waiting for 2 workers with GPU 1 each: 0 of 8 GPUs free"

Ray Train asks for all places of a group at once, as a placement group, and goes on asking without a word for as long as
there are none.
"""

import time
from collections.abc import Callable

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.cluster.resources import Share


class PlacesWatch:
    """Looks whether places like those of `share` are asked for and not given; with `wait_s` above 0 for so many seconds."""

    def __init__(self, share: Share, wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._wait_s, self._clock = share, wait_s, clock
        self._since: float | None = None

    def look(self) -> str | None:
        """What the workers wait for; None where it is not for places. Raises CannotRun when they have waited too long."""
        if not self._pending():
            self._since = None
            return None
        self._since = self._since or self._clock()
        text = f"waiting for {self._wanted()}: {self._free()}"
        if self._wait_s and self._clock() - self._since > self._wait_s:
            raise CannotRun(
                f"no places for the workers in {self._wait_s:g} s (launch.wait_s), {text}. Ask for fewer with "
                "--scaling.workers, wait longer with --launch.wait_s, or see `ray status` for who has them",
                setting="launch.wait_s",
                value=self._wait_s,
            )
        return text

    def _pending(self) -> bool:
        """Whether a placement group of so many such places has none."""
        from ray.util import placement_group_table

        wanted = {name: float(count) for name, count in self._share.per_worker.items()}
        for group in placement_group_table().values():
            bundles = [bundle for bundle in group["bundles"].values() if wanted.items() <= bundle.items()]
            if group["state"] in ("PENDING", "INFEASIBLE") and len(bundles) >= max(1, self._share.least):
                return True
        return False

    def _wanted(self) -> str:
        each = " and ".join(f"{name} {count:g}" for name, count in self._share.per_worker.items())
        workers = self._share.least or self._share.workers
        return f"{workers} worker{'s' if workers > 1 else ''} with {each} each"

    def _free(self) -> str:
        import ray

        free, there = ray.available_resources(), ray.cluster_resources()
        return ", ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}s free" for name in self._share.per_worker)
