"""Totals of several nodes become the run's figures, in the summary and in the journal, whatever dies in between."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.observability.record import Sender
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.state import StateTracker, run_figures
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.observability.record.conftest import MakeRecorder, sent


def totals(node: str, **changes: Any) -> dict[str, Any]:
    """The totals of one of two nodes; rank 0 is on the left one."""
    given: dict[str, Any] = {
        "source": f"rank0.{node}",
        "node": node,
        "nodes": 2,
        "covers": "GPUs",
        "joules": 3000.0,
        "unmetered": 0,
        "throttled_seconds": 4.0,
        "throttled_by_reason": {"sw_power_cap": 3.0, "hw_thermal": 1.0},
        "readings": 30,
        "idle": 3,
    }
    return given | ({"tokens": 1000, "seconds": 10.0} if node == "left" else {}) | changes


EXPECTED = {
    "energy_joules": 8000.0,
    "energy_covers": "GPUs",
    "joules_per_token": 8.0,
    "average_power_watts": 800.0,
    "throttled_seconds": 6.0,
    "throttled_seconds_by_reason": {"sw_power_cap": 5.0, "hw_thermal": 1.0},
    "gpu_idle_share": 0.125,
}
RIGHT = totals("right", joules=5000.0, throttled_seconds=2.0, throttled_by_reason={"sw_power_cap": 2.0}, readings=50, idle=7)


def test_nodes_add_up() -> None:
    assert run_figures([totals("left"), RIGHT]) == EXPECTED


def test_nothing_counted_is_nothing_told() -> None:
    assert run_figures([]) == {}


@pytest.mark.parametrize("parts", [[totals("left")], [totals("left"), totals("right", unmetered=1)]])
def test_energy_of_a_part_of_the_devices_is_not_told(parts: list[dict[str, Any]]) -> None:
    figures = run_figures(parts)
    assert not {"energy_joules", "joules_per_token", "average_power_watts"} & set(figures)
    assert figures["gpu_idle_share"] == 0.1


def test_a_run_that_was_started_again_counts_all_its_starts() -> None:
    figures = run_figures([totals("left", nodes=1), totals("left", nodes=1, joules=1000.0, seconds=6.0)])
    assert figures["joules_per_token"] == 2.0
    assert figures["average_power_watts"] == 250.0


@given(st.lists(st.tuples(st.sampled_from(["left", "right"]), st.integers(0, 1), st.integers(1, 99)), max_size=12))
def test_of_each_sampler_of_each_node_the_newest_totals_count(told: list[tuple[str, int, int]]) -> None:
    """A group that was started again has other samplers on the same nodes."""
    tracker, newest = StateTracker(None), dict[tuple[str, int], int]()
    for node, start, joules in told:
        newest[node, start] = joules
        tracker.ingest(_entry(totals(node, source=f"rank0.{node}.{start}", joules=float(joules))))
    wanted = sum(newest.values()) if len({node for node, _ in newest}) == 2 else None
    assert run_figures(tracker.totals.values()).get("energy_joules") == wanted


def _entry(values: dict[str, Any]) -> Any:
    return new_entry("totals", values)  # type: ignore[arg-type]


def test_cards_that_tell_neither_limits_nor_use_tell_energy_alone() -> None:
    figures = run_figures([totals("left", nodes=1, throttled_seconds=None, throttled_by_reason={}, readings=0, idle=0)])
    assert set(figures) == {"energy_joules", "energy_covers", "joules_per_token", "average_power_watts"}


def test_the_newest_totals_of_each_node_reach_the_summary_and_mlflow_even_past_a_dead_recorder(
    record: MakeRecorder, folder: Folder
) -> None:
    recorder = record()
    sender = Sender(recorder.receive, "rank0", interval_s=0.02)
    sender.put(new_entry("metrics", {"train_loss": 2.0}, step=7))
    sender.put(new_entry("totals", totals("left", joules=1.0)))
    sender.put(new_entry("totals", totals("left")))
    sender.put(new_entry("totals", RIGHT))
    assert sender.close(60.0)
    successor = record()  # reads the journal, as after the first one's death
    summary = successor.finish("failed")
    assert {name: summary[name] for name in EXPECTED} == EXPECTED
    assert successor.finish("failed") == summary
    (told,) = [entry for entry in sent(folder, everyone=True) if "joules_per_token" in entry["values"]]
    assert told["step"] == 7
    assert told["values"] == {name: value for name, value in EXPECTED.items() if isinstance(value, float)}
    assert b"unmetered" not in folder.read("log.txt")
