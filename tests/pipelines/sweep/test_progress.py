"""A sweep's lines on the terminal: columns that fit their values, a trial's figures or its cause, and how many are left."""

from dataclasses import replace

import pytest

from raystride.pipelines.sweep import progress
from raystride.pipelines.sweep.progress import MAX_CAUSE_CHARACTERS, ProgressBoard, format_figures
from tests.pipelines.sweep.test_report_page import failed_trial, trial

SPACE = {"scaling.workers": [1, 2], "train.precision": ["fp32", "bf16_and_more"], "optimizer.eps": {"uniform": [0, 1]}}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is wide enough for whole lines."""
    monkeypatch.setenv("COLUMNS", "300")


def test_a_trials_figures_are_speed_spread_loss_and_seconds() -> None:
    one = trial(12345.0, windows=1)
    assert format_figures(one).split() == ["12,345", "-", "-", "12.5"]
    several = replace(trial(100.0, windows=2), loss=2.34567, seconds=1234.56)
    assert format_figures(several).split() == ["100", f"{several.spread:.1%}", "2.346", "1234.6"]
    assert format_figures(replace(several, status="stopped_early")) == format_figures(several) + "  stopped early"


def test_a_trial_without_figures_has_its_status_and_the_beginning_of_its_cause() -> None:
    found = format_figures(failed_trial("out_of_memory", "rank 1 " * 50, 1))
    assert found.startswith("out of memory: rank 1 rank 1")
    assert found.endswith(" ...")
    cause = found.removeprefix("out of memory: ")
    assert MAX_CAUSE_CHARACTERS - len("rank 1 ") < len(cause) <= MAX_CAUSE_CHARACTERS
    assert format_figures(failed_trial("hung", "x" * MAX_CAUSE_CHARACTERS, 1)) == "hung: " + "x" * MAX_CAUSE_CHARACTERS


def test_columns_are_as_wide_as_the_widest_of_name_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBoard(SPACE, total=2) as board:
        board.add_result(trial(100.0, 2, "fp32", optimizer__eps=0.123456))
        board.add_result(failed_trial("refused", "workers [bold]16[/bold]", 1, "bf16_and_more"))
        board.add_trials(3, "[red] three more seeds")
    head, first, second, add_trials = capsys.readouterr().out.splitlines()
    assert [head.index(name) for name in ("workers", "precision", "eps", "tokens/s")] == [0, 9, 24, 37]
    assert [first.index(value) for value in ("2", "fp32", "0.1235")] == [0, 9, 24]
    assert first[36:].split()[0] == "100"
    assert second[9:22] == "bf16_and_more"
    assert second[24:] == "None        refused: workers [bold]16[/bold]"
    assert add_trials == "[red] three more seeds"
    assert len(head) == len(first)


def test_a_line_is_not_broken_where_the_terminal_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with ProgressBoard(SPACE, total=1) as board:
        board.add_result(trial(100.0))
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_nothing_is_written_if_it_is_quiet_and_no_head_if_there_is_nothing_to_try(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ProgressBoard(SPACE, total=2, quiet=True) as board:
        board.add_result(trial(100.0))
    with ProgressBoard(SPACE, total=0):
        pass
    assert capsys.readouterr().out == ""


def test_time_that_is_left_is_that_of_a_trial_times_those_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    board = ProgressBoard(SPACE, total=3, quiet=True)
    described = []
    assert board._progress.tasks[0].total == 3
    for now[0] in (1120.0, 1240.0):
        board.add_result(trial(100.0))
        described.append(board._progress.tasks[0].description)
    board.add_trials(2, "more")
    assert board._progress.tasks[0].total == 5
    for now[0] in (1360.0, 1480.0, 1600.0):
        board.add_result(trial(100.0))
        described.append(board._progress.tasks[0].description)
    assert described == [f"about {minutes} min left" for minutes in (4, 2, 4, 2)] + [""]
    assert board._progress.tasks[0].completed == 5
