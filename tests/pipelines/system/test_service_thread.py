"""A service thread survives its work's errors, and logs them once an outage."""

import threading

import pytest

from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.system import service_thread
from raystride.pipelines.system.service_thread import ServiceThread, format_error
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses after errors are short."""
    monkeypatch.setattr(service_thread, "FIRST_PAUSE_S", 0.001)


def test_an_outage_is_said_once_and_the_work_goes_on() -> None:
    outcomes = [OSError("no\nroute"), OSError("no route"), None, OSError("again"), None]
    lines: list[str] = []
    errors: list[Exception] = []
    left = list(outcomes)

    def work() -> bool:
        if left and (outcome := left.pop(0)):
            raise outcome
        return not left

    with ServiceThread(
        "publishing", work, every_s=0.001, max_pause_s=0.002, log=lines.append, on_error=errors.append
    ) as thread:
        wait_until(lambda: not left and not _lives("publishing"), "the end of the work")
    assert lines == ["publishing: OSError: no route; tried again", "publishing: OSError: again; tried again"]
    assert errors == [outcome for outcome in outcomes if outcome]
    assert thread.error is None


def test_who_is_told_may_end_it_and_a_log_that_fails_does_not() -> None:
    def broken() -> None:
        raise KeyError("word")

    def no_screen(line: str) -> None:
        raise BrokenPipeError

    logged_errors: list[Exception] = []

    def tell(error: Exception) -> bool:
        logged_errors.append(error)
        return len(logged_errors) == 3

    thread = ServiceThread("failing", broken, every_s=0.0, max_pause_s=0.001, log=no_screen, on_error=tell).start()
    wait_until(lambda: not _lives("failing"), "its end")
    assert len(logged_errors) == 3
    assert isinstance(thread.error, KeyError)


def test_errors_are_said_on_standard_error_by_default_and_so_are_those_of_who_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[None] = []

    def work() -> bool:
        calls.append(None)
        if len(calls) == 1:
            raise KeyError("word")
        return True

    def tell(error: Exception) -> None:
        raise OSError("nobody hears it")

    ServiceThread("failing", work, every_s=0.0, on_error=tell).start().join()
    assert capsys.readouterr().err == (
        "warning: failing: KeyError: 'word'; tried again\nwarning: failing: OSError: nobody hears it; tried again\n"
    )


def test_a_pause_is_ended_by_waking_and_by_stopping() -> None:
    calls: list[None] = []
    thread = ServiceThread("waiting", lambda: calls.append(None), every_s=3600.0).start()
    for number in (1, 2):
        thread.wake()
        wait_until(lambda number=number: len(calls) == number, "the call")  # type: ignore[misc]
    assert not thread.join(0.0)
    thread.stop()
    assert thread.join()
    assert len(calls) == 2


def test_it_ends_with_its_block() -> None:
    with ServiceThread("waiting", lambda: None, every_s=600.0):
        assert _lives("waiting")
    assert not _lives("waiting")


def test_passwords_are_not_in_what_is_said() -> None:
    text = format_error(OSError("s3://user:secret@bucket/data is away"))
    assert text.startswith("OSError: s3://")
    assert "secret" not in text
    assert format_error(DataError("7.txt is not UTF-8")) == "7.txt is not UTF-8"


def _lives(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())
