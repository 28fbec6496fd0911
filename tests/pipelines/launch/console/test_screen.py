"""Output of a training: on the terminal, or for programs only to a logger."""

import logging

import pytest

from raystride.pipelines.launch.console.progress import Progress
from raystride.pipelines.launch.console.screen import Screen, SilentScreen


def test_lines_go_to_standard_output_and_warnings_and_failures_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.log("a line")
    screen.warn("a warning")
    screen.show_failure("a failure")
    assert capsys.readouterr() == ("a line\n", "warning: a warning\na failure\n")
    assert screen.is_visible
    assert isinstance(screen.start_progress(), Progress)


def test_programs_see_warnings_alone_in_their_logger(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    screen = SilentScreen()
    assert not screen.is_visible
    with caplog.at_level(logging.WARNING, "raystride"), screen.start_progress() as live:
        screen.log("a line")
        screen.warn("a warning")
        screen.show_failure("a failure")
        live.update({"step": 1})
        live.log("a note")
        live.close()
    assert capsys.readouterr() == ("", "")
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("raystride", "a warning")]


def test_secrets_are_hidden(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    address, shown = "http://user:word@host", "http://host"
    for screen in (Screen(), SilentScreen()):
        screen.log(address)
        screen.warn(address)
        screen.show_failure(address)
    told = "".join(capsys.readouterr()) + caplog.text
    assert "word" not in told
    assert shown.removeprefix("http://") in told
