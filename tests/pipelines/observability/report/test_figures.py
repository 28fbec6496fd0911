"""A journal's figures: short lines complete, long ones downsampled, in one pass."""

import math
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.observability.record.entry import Entry, new_entry
from raystride.pipelines.observability.report.figures import MAX_POINTS, Downsampled, gather_figures


def metrics(*measured: tuple[int, dict[str, Any]]) -> list[Entry]:
    """Entries of a loop."""
    return [new_entry("metrics", values, step, time=float(step)) for step, values in measured]


def test_a_repeated_step_counts_with_its_newest_value() -> None:
    found = gather_figures(
        metrics((10, {"train_loss": 3.0}), (20, {"train_loss": 9.0}), (20, {"train_loss": 2.0}), (20, {"val_loss": 2.2}))
        + metrics((30, {"train_loss": "Infinity"}))
    )
    assert found.losses == ([(10, 3.0), (20, 2.0), (30, math.inf)], [(20, 2.2)])


@given(st.lists(st.tuples(st.integers(0, 400), st.integers())), st.integers(2, 50))
def test_thinned_values_are_some_of_them_with_the_newest(put: list[tuple[int, int]], most: int) -> None:
    thinned: Downsampled[int] = Downsampled(most)
    for where, value in put:
        thinned.put(where, value)
    kept = thinned.items()
    newest = dict(put)
    assert kept == sorted(kept)
    assert all(newest[int(where)] == value for where, value in kept)
    assert len(kept) <= most + 1
    if len(newest) <= most:
        assert kept == sorted(newest.items())
    if put:
        assert (put[-1][0], put[-1][1]) in kept


def test_a_million_steps_make_a_line_of_some_thousand_points() -> None:
    def entries() -> Iterator[Entry]:
        for step in range(100_000):
            yield new_entry("metrics", {"train_loss": 1 / (1 + step), "phase_data_share": 0.25}, step, time=0.0)

    found = gather_figures(entries())
    training, _ = found.losses
    assert MAX_POINTS / 2 <= len(training) <= MAX_POINTS + 1
    assert training[0] == (0, 1.0)
    assert training[-1][0] == 99_999
    assert found.part_shares == {"data": 0.25, "rest": 0.75}


def test_workers_of_old_and_of_new_journals_are_rows() -> None:
    alone = {"world": 2, "node": "a", "steps": 10, "seconds": 1.0, "data_s": 0.0}
    old = [new_entry("rank", {"rank": rank, "own_s": 0.5 + rank, **alone}, 10) for rank in (0, 1)]
    new = [new_entry("ranks", {"ranks": [0, 1], "steps": 10, "own_s": [0.5, 1.5]}, 10)]
    assert gather_figures(old).workers.items() == gather_figures(new).workers.items() == [(10, {0: 0.05, 1: 0.15})]


def test_readings_of_all_nodes_are_lines_of_their_own() -> None:
    readings = {f"system/gpu_power_usage_watts_{of}": watts for of, watts in (("least", 1.0), ("mean", 2.0), ("most", 4.0))}
    found = gather_figures([new_entry("system", readings | {"system/gpu_0_power_usage_watts": 3.0}, 1, time=5.0)])
    lines = {device: line.items() for device, line in found.devices["power_usage_watts"].items()}
    assert lines == {"gpu least": [(0, 1.0)], "gpu mean": [(0, 2.0)], "gpu most": [(0, 4.0)], "gpu_0": [(0, 3.0)]}
