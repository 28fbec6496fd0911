"""The progress line, on a terminal and in a file."""

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.launch.console.progress import Progress, format_duration, format_time_left, progress_line

STATE = {
    "step": 250,
    "steps": 1000,
    "loss": 2.34567,
    "val_loss": 2.5,
    "tokens_per_second": 12345.6,
    "eta": 187.0,
    "phase": None,
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def state(**changes: Any) -> dict[str, Any]:
    """The state of a running training, with changes."""
    return STATE | {"warnings": []} | changes


def test_the_line_shows_figures_or_else_the_phase() -> None:
    line = progress_line(state())
    assert "step 250/1,000  loss 2.3457  val_loss 2.5000  tokens/s 12,346  eta 3:07 min" in line
    assert line.count("━") * 3 == line.count("╌")
    assert progress_line({"phase": "starting workers ..."}) == "starting workers ..."
    assert progress_line(state(steps=None, eta=None, val_loss=None)) == "step 250  loss 2.3457  tokens/s 12,346"
    scores = {"accuracy": 0.87654, "accuracy/web": 0.5, "f1": 1}
    assert "val_loss 2.5000  accuracy 0.8765  f1 1  tokens/s" in progress_line(state(scores=scores))
    assert progress_line(state(scores={})) == line
    assert progress_line(state(step=1010)).count("╌") == 0
    assert "nan" in progress_line(state(loss=float("nan")))


def test_in_a_file_lines_are_plain_and_few() -> None:
    stream = io.StringIO()
    with Progress(stream, plain_every_s=3600) as progress:
        for phase in ("starting workers ...", "starting workers ...", "first step ..."):
            progress.update({"step": None, "phase": phase})
        for step in range(100, 200):
            progress.update(state(step=step, warnings=["MLflow is away"]))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[:2] == ["starting workers ...", "first step ..."]
    assert lines[2:4] == ["warning: MLflow is away", "about 3:07 min remaining"]
    assert "step 100/1,000" in lines[4]
    assert "\x1b" not in stream.getvalue()


@given(st.lists(st.lists(st.sampled_from(["one", "two", "three"])), max_size=8))
def test_each_warning_is_told_once_whatever_others_come_between(warnings: list[list[str]]) -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        for said in warnings:
            progress.update(state(warnings=said))
    told = [line.removeprefix("warning: ") for line in stream.getvalue().splitlines() if line.startswith("warning: ")]
    assert told == list(dict.fromkeys(text for said in warnings for text in said))


def test_on_a_terminal_one_line_is_redrawn() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        for step in (1, 2, 3):
            progress.update(state(step=step))
        progress.log("a line that stays")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert all(f"step {step}/1,000" in text for step in (1, 2, 3))
    assert "a line that stays" in text
    assert "\x1b[2K" in stream.getvalue()


def test_how_long_it_will_take_is_told_once_after_ten_steps() -> None:
    stream = io.StringIO()
    with Progress(stream, plain_every_s=3600) as progress:
        for step in (9, 10, 20):
            progress.update(state(step=step, eta=700.0))
    assert [line for line in stream.getvalue().splitlines() if "remaining" in line] == [
        "about 11:40 min remaining; --train.steps 850 would take ten minutes"
    ]


@pytest.mark.parametrize(
    ("seconds", "left", "steps", "flag"),
    [
        (600, 900, 1000, ""),
        (4000, 900, 1000, ""),
        (1200, 990, 1000, "--train.steps 500"),
        (3000, 9, 10, "--train.steps 2"),
        (1300, 99_990, 100_000, "--train.steps 46000"),
    ],
)
def test_a_training_of_some_length_says_how_to_shorten_it(seconds: float, left: int, steps: int, flag: str) -> None:
    told = format_time_left(seconds, left, steps)
    assert told.startswith(f"about {format_duration(seconds)} remaining")
    assert (flag in told) if flag else "--train" not in told


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0 s"), (42.4, "42 s"), (187, "3:07 min"), (18120, "5:02 h")])
def test_durations_read_as_a_person_says_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
