"""A trial's windows, their means and spread, and results that are read back from their files."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.coverage import coverage_of_windows
from raystride.pipelines.observability.phases import EXCLUSIVE_PHASES
from raystride.pipelines.sweep.result import (
    MeasuredWindow,
    extract_windows,
    list_keys,
    load_results,
    mean_shares,
    relative_half_width,
    remove_result,
    save_result,
    seconds_to_loss,
)
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, put_sealed, read_sealed
from tests.flips import flip
from tests.pipelines.sweep.test_report_page import trial
from tests.some import some

parts_of_windows = st.lists(
    st.lists(st.floats(0, 1 / len(EXCLUSIVE_PHASES)), min_size=len(EXCLUSIVE_PHASES), max_size=len(EXCLUSIVE_PHASES)),
    min_size=1,
    max_size=5,
)


def journal_line(attempt: str, step: int, speed: float, loss: object = 2.0) -> dict[str, Any]:
    """Returns a line of the journal."""
    values = {"tokens_per_second": speed, "step_seconds_mean": 1000 / speed, "train_loss": loss, "phase_data_share": 0.25}
    return {"attempt": attempt, "kind": "metrics", "step": step, "values": values}


def window(end: int, seconds: float, loss: float | None, steps: int = 10) -> MeasuredWindow:
    """Returns a window of `steps` steps, with `seconds` each."""
    return MeasuredWindow(end - steps, end, 1 / seconds, seconds, dict.fromkeys(EXCLUSIVE_PHASES, 0.1), loss)


def test_windows_are_those_of_the_newest_attempt_from_its_first_step() -> None:
    killed = [journal_line("a1", 4, 100.0), journal_line("a1", 8, 100.0)]
    beside = [
        {"attempt": "a2", "kind": "system", "step": 2, "values": {"tokens_per_second": 1.0}},
        {"attempt": "a2", "kind": "metrics", "step": 2, "values": {"val_loss": 3.0}},
    ]
    found = extract_windows([*killed, *beside, journal_line("a2", 4, 200.0), journal_line("a2", 10, 400.0)])
    assert [(window.begin, window.end, window.tokens_per_second, window.step_seconds) for window in found] == [
        (0, 4, 200.0, 5.0),
        (4, 10, 400.0, 2.5),
    ]
    assert found[0].shares["data"] == 0.25
    assert found[0].shares["reduce"] == 0.0


@pytest.mark.parametrize("word", ["NaN", "Infinity", None])
def test_a_loss_that_is_no_number_reaches_no_target(word: str | None) -> None:
    """As the journal writes it, which is strict JSON."""
    found = extract_windows([journal_line("a1", 10, 1000.0, word), journal_line("a1", 20, 1000.0, 1.5)])
    assert [window.loss for window in found] == [None, 1.5]
    assert seconds_to_loss(found, 2.0) == 20.0


@given(parts=parts_of_windows)
def test_shares_of_a_step_and_the_rest_make_one(parts: list[list[float]]) -> None:
    shares = mean_shares(
        [replace(window(10, 1.0, None), shares=dict(zip(EXCLUSIVE_PHASES, shares, strict=True))) for shares in parts]
    )
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) >= 0


def test_the_target_is_reached_at_the_end_of_a_window() -> None:
    windows = [window(10, 0.5, 4.0), window(20, 1.0, 3.0), window(30, 1.0, 2.0)]
    assert seconds_to_loss(windows, 3.0) == pytest.approx(15.0)
    assert seconds_to_loss(windows, 1.0) is None


@given(values=st.lists(st.floats(1, 1e6), min_size=2, max_size=20))
def test_the_spread_of_independent_windows_is_students_interval(values: list[float]) -> None:
    from scipy import stats

    error = statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    _, high = stats.t.interval(0.95, len(values) - 1, loc=0.0, scale=error) if error else (0.0, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raystride.pipelines.sweep.result.CORRELATIONS", (0.0,))
        assert relative_half_width(values) == pytest.approx(high / mean, rel=1e-6)


def test_the_spread_holds_the_mean_of_windows_that_resemble_their_neighbours() -> None:
    """As if windows were independent, it held 70 % at a correlation of 0.6."""
    alike, independent = (coverage_of_windows(8, correlation, data_sets=400) for correlation in (0.6, 0.0))
    assert alike["now"] >= 0.9
    assert alike["independent"] < 0.8
    assert independent["now"] >= 0.93


def test_one_window_tells_no_spread() -> None:
    assert relative_half_width([5.0]) == math.inf


def test_results_come_back_as_they_were_and_what_is_unknown_is_left_out(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    one, other = trial(100, 1), replace(trial(200, 2), status="stopped_early", loss=1.5, seconds_to_loss=7.0)
    for result in (one, other):
        save_result(folder, result)
    trials, name = folder / "trials", f"{one.key}.json"
    put_sealed(trials, name, read_sealed(trials, name) | {"of_a_later_version": [1]})
    assert load_results(folder) == {one.key: one, other.key: other}
    remove_result(folder, one.key)
    remove_result(folder, one.key)
    assert load_results(folder) == {other.key: other}


def test_a_result_with_any_bit_turned_is_named_with_the_remedy(tmp_path: Path) -> None:
    folder, result = Folder(str(tmp_path)), trial(100, 1)
    save_result(folder, result)
    file = tmp_path / "trials" / f"{result.key}.json"
    whole = file.read_bytes()
    for bit in some(range(0, 8 * len(whole), 37)):  # each bit of a byte, along the file
        file.write_bytes(flip(whole, bit))
        with pytest.raises(SealBroken, match=rf"{file.name} .*: remove it, and the sweep measures this trial again"):
            load_results(folder)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_finite_number_is_worse_than_any_also_when_read_again(tmp_path: Path, loss: float) -> None:
    folder = Folder(str(tmp_path))
    bad = replace(trial(100, 1), loss=1.0, val_loss=loss)
    assert bad.final_loss == math.inf
    save_result(folder, bad)
    found = load_results(folder)[bad.key]
    assert found.final_loss == math.inf, "the loss of training does not stand for it"


def test_without_trials_there_are_no_results(tmp_path: Path) -> None:
    assert load_results(Folder(str(tmp_path))) == {}


def test_a_result_of_which_little_is_known_has_no_figures_and_room_for_one_worker(tmp_path: Path) -> None:
    """As it is written for settings that contradict each other, and as an earlier version wrote one."""
    least = {"key": "k", "run": "s-k", "settings": {}, "label": "", "round": 0, "status": "refused"}
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "k.json").write_text(json.dumps(least))
    (tmp_path / "trials" / "k.txt").write_text("no result")
    assert list_keys(Folder(str(tmp_path))) == ["k"]
    (found,) = load_results(Folder(str(tmp_path))).values()
    assert (found.places_per_node, found.workers, found.threads, found.tokens_per_step) == (1, 0, 0, 0)
    assert (found.speed, found.spread, found.final_loss, found.is_measured) == (0, math.inf, math.inf, False)
    assert (found.cause, found.device, found.seconds, found.overhead_s) == ("", "", 0, 0)


@pytest.mark.parametrize(
    ("changes", "measured"),
    [({}, True), ({"status": "stopped_early"}, True), ({"status": "hung"}, False), ({"speeds": ()}, False)],
)
def test_a_measured_trial_has_a_window_and_ended_well(changes: dict[str, Any], measured: bool) -> None:
    assert replace(trial(100), **changes).is_measured is measured


@pytest.mark.parametrize(
    ("training", "validation", "final"),
    [(2.0, 1.5, 1.5), (2.0, None, 2.0), (None, 0.0, 0.0), (None, None, math.inf), (2.0, math.nan, math.inf)],
)
def test_the_final_loss_is_that_of_validation_if_it_is_known(
    training: float | None, validation: float | None, final: float
) -> None:
    assert replace(trial(100), loss=training, val_loss=validation).final_loss == final


def test_a_line_of_the_log_without_steps_is_no_window() -> None:
    empty = journal_line("a1", 5, 100.0)
    empty["values"]["step_seconds_mean"] = 0.0
    assert [(one.begin, one.end) for one in extract_windows([empty, journal_line("a1", 10, 100.0)])] == [(0, 10)]
