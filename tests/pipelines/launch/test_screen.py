"""Where a training's lines go: to the terminal, or for programs to a logger alone."""

import logging

import pytest

from raystride.pipelines.launch.progress import Progress
from raystride.pipelines.launch.screen import Quiet, Screen


def test_lines_go_to_standard_output_and_warnings_and_failures_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.line("a line")
    screen.warning("a warning")
    screen.failure("a failure")
    assert capsys.readouterr() == ("a line\n", "warning: a warning\na failure\n")
    assert screen.seen
    assert isinstance(screen.progress(), Progress)


def test_programs_see_warnings_alone_in_their_logger(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    screen = Quiet()
    assert not screen.seen
    with caplog.at_level(logging.WARNING, "raystride"), screen.progress() as live:
        screen.line("a line")
        screen.warning("a warning")
        screen.failure("a failure")
        live.update({"step": 1})
        live.note("a note")
        live.close()
    assert capsys.readouterr() == ("", "")
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("raystride", "a warning")]


def test_secrets_are_hidden(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    address, shown = "http://user:word@host", "http://host"
    for screen in (Screen(), Quiet()):
        screen.line(address)
        screen.warning(address)
        screen.failure(address)
    told = "".join(capsys.readouterr()) + caplog.text
    assert "word" not in told
    assert shown.removeprefix("http://") in told
