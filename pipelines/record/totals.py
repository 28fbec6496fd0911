"""A run's energy, power, throttling and idling from what its nodes counted, each since its start.

Every node's sampler sends its totals again and again, and the newest of each counts: a node that dies leaves what it had.
A run that was started again within its job counts all its starts: the work that was lost has cost energy, too.

    run_figures([{"node": "left", "nodes": 1, "joules": 5000.0, "tokens": 1000, "seconds": 10.0, ...}])["joules_per_token"]
"""

from collections.abc import Iterable, Mapping
from typing import Any


def run_figures(totals: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures that the totals allow.

    Energy is told only where every device of every node was metered to the end: a sum of some of them would be taken for
    that of all. Tokens and seconds are those of the node of rank 0; the others send none.
    """
    parts = list(totals)
    figures: dict[str, Any] = {}
    if not parts:
        return figures
    complete = len({part["node"] for part in parts}) >= max(part["nodes"] for part in parts)
    if complete and not any(part["unmetered"] for part in parts):
        joules, tokens, seconds = (_sum(parts, name) for name in ("joules", "tokens", "seconds"))
        figures |= {"energy_joules": joules, "energy_covers": " and ".join(sorted({part["covers"] for part in parts}))}
        if tokens:
            figures["joules_per_token"] = joules / tokens
        if seconds:
            figures["average_power_watts"] = joules / seconds
    if any(part.get("throttled_seconds") is not None for part in parts):
        by_reason: dict[str, float] = {}
        for reason, held in (item for part in parts for item in part["throttled_by_reason"].items()):
            by_reason[reason] = by_reason.get(reason, 0.0) + held
        figures |= {"throttled_seconds": _sum(parts, "throttled_seconds"), "throttled_seconds_by_reason": by_reason}
    if readings := _sum(parts, "readings"):
        figures["gpu_idle_share"] = _sum(parts, "idle") / readings
    return figures


def _sum(parts: list[Mapping[str, Any]], name: str) -> float:
    return float(sum(part.get(name) or 0 for part in parts))
