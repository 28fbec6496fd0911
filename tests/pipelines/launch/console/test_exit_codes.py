"""Errors that a user can cause become a line and their exit code; all others are raised, and handlers are put back."""

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from raystride.command import run as run_command
from raystride.pipelines.config import SettingError
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.console.exit_codes import (
    CANNOT_RUN,
    DONE,
    FAILED,
    UNUSABLE_ERRNOS,
    WRONG_SETTINGS,
    run_with_exit_code,
)
from raystride.pipelines.launch.console.failure import TrainingFailed
from raystride.pipelines.system.credentials import MissingSecret, remember_secrets
from raystride.pipelines.system.errors import Unreadable
from raystride.pipelines.system.signals import HUNG_UP, INTERRUPTED, TERMINATED, HungUp, Terminated, signal_exception
from raystride.pipelines.system.storage.sealed import SealBroken


def raising(error: BaseException) -> Callable[[], int]:
    """A job that raises."""

    def job() -> int:
        raise error

    return job


def failed_by(cause: BaseException) -> TrainingFailed:
    """A failed training, after its screen was shown."""
    error = TrainingFailed.__new__(TrainingFailed)
    error.cause = cause
    return error


def test_codes_are_those_that_shells_know() -> None:
    assert (DONE, FAILED, WRONG_SETTINGS, CANNOT_RUN, HUNG_UP, INTERRUPTED, TERMINATED) == (0, 1, 2, 3, 129, 130, 143)
    assert run_with_exit_code(lambda: 7) == 7


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (SettingError("a setting"), WRONG_SETTINGS, "error: a setting\n"),
        (DataError("some data"), WRONG_SETTINGS, "error: some data\n"),
        (MissingSecret("a secret"), WRONG_SETTINGS, "error: a secret\n"),
        (CannotRun("no GPU"), CANNOT_RUN, "error: no GPU\n"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted by Ctrl-C; the same command goes on from what is done\n"),
        (HungUp(), HUNG_UP, "interrupted by SIGHUP; the same command goes on from what is done\n"),
        (Terminated(), TERMINATED, "interrupted by SIGTERM; the same command goes on from what is done\n"),
        (Unreadable("a checkpoint"), CANNOT_RUN, "error: a checkpoint\n"),
        (failed_by(ValueError()), FAILED, ""),
        (failed_by(SettingError()), WRONG_SETTINGS, ""),
        (failed_by(DataError()), WRONG_SETTINGS, ""),
        (failed_by(SealBroken()), CANNOT_RUN, ""),
        (failed_by(IsADirectoryError(errno.EISDIR, "a folder", "/runs/x/sample.txt")), CANNOT_RUN, ""),
        (failed_by(OSError(errno.ENOSPC, "No space left on device")), CANNOT_RUN, ""),
        (failed_by(KeyboardInterrupt()), INTERRUPTED, ""),
        (failed_by(Terminated()), TERMINATED, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_the_user_is_a_line_and_a_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    assert run_with_exit_code(raising(error)) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("number", UNUSABLE_ERRNOS)
def test_a_disk_that_takes_no_files_or_fails_cannot_run_it(capsys: pytest.CaptureFixture[str], number: int) -> None:
    assert run_with_exit_code(raising(OSError(number, os.strerror(number), "/runs/x"))) == CANNOT_RUN
    assert capsys.readouterr().err.startswith(f"error: [Errno {number}]")


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "lost"), KeyError("a defect")], ids=["another", "defect"])
def test_what_nobody_has_caused_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_with_exit_code(raising(error))


def test_sigterm_passes_through_the_job_and_its_handler_is_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def job() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 60)
        return DONE

    assert run_with_exit_code(job) == TERMINATED
    assert "SIGTERM" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_job_in_a_thread_sets_no_handlers() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run_with_exit_code(lambda: 5)))
    thread.start()
    thread.join()
    assert codes == [5]


@pytest.mark.parametrize(("own", "said"), [(False, True), (True, False)])
def test_who_ignores_ctrl_c_says_so_unless_handlers_come_later(
    capsys: pytest.CaptureFixture[str], own: bool, said: bool
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run_with_exit_code(lambda: DONE, own_handlers=own) == DONE
    finally:
        signal.signal(signal.SIGINT, before)
    assert ("Ctrl-C is ignored" in capsys.readouterr().err) is said
    run_with_exit_code(lambda: DONE)
    assert capsys.readouterr().err == ""


def test_a_signal_raises_what_its_number_means() -> None:
    assert type(signal_exception(signal.SIGTERM)) is Terminated
    assert type(signal_exception(signal.SIGINT, "why")) is KeyboardInterrupt
    assert str(signal_exception(signal.SIGTERM, "why")) == "why"


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "lost"), AttributeError("no attribute '__name__'")])
def test_a_defect_of_named_work_is_some_lines_with_its_place(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with_exit_code(raising(error), what="preparation") == FAILED
    first, place, *more = capsys.readouterr().err.splitlines()
    assert first == f"preparation failed: {type(error).__name__}: {error}"
    assert "exit_codes.py" in place
    assert len(more) <= 3


def test_a_file_in_the_place_of_a_folder_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tls").write_text("")
    assert run_command(["certificates", "10.0.0.1", "--output", str(tmp_path / "tls")]) == CANNOT_RUN
    assert capsys.readouterr().err.startswith("error: ")


def test_no_error_tells_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    remember_secrets("s3://key:hush-hush@host/runs")
    for error in (SettingError("it says hush-hush"), SealBroken("it says hush-hush"), CannotRun("it says hush-hush")):
        run_with_exit_code(raising(error))
    assert "hush-hush" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("certificates 10.0.0.1 --days 0 --output tls", "--days is 0"),
        ("deploy moon --config lm_python", "moon"),
        ("evaluate --run none --storage runs", "there is no"),
        ("export --run none --storage runs", "there is no"),
        ("generate --run none --storage runs", "there is no"),
        ("predict --run none --storage runs --text a", "there is no"),
        ("prepare --data.source nowhere.txt", "nowhere.txt"),
        ("presets none", "unknown preset 'none'"),
        ("report --run none --storage runs", "there is no"),
        ("runs show none --storage runs", "there is no"),
        ("serve --run none --storage runs", "there is no"),
        ("storage --storage runs", "there is no"),
        ("sweep --data.source nowhere.txt --sweep.space {}", "sweep.space"),
        ("train --run none --storage runs", "there is no"),
        ("train --config none", "none"),
        ("trian", "did you mean train?"),
    ],
)
def test_each_command_ends_a_users_error_in_a_line_with_2(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(line.split()) == WRONG_SETTINGS
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert words in said
    assert "Traceback" not in said
