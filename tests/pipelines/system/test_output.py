"""Failing output does not end a job: readers that go away, full devices, encodings without our characters, no stream."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.system.output import MAX_UNSHOWN_LINES, ProtectedStream, protected_output, take_unshown

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def nothing_unshown() -> Iterator[None]:
    """Leaves nothing that another test could take."""
    take_unshown()
    yield
    take_unshown()


class Failing(io.StringIO):
    """A stream that fails after some writes, in `write` or in `flush`."""

    def __init__(self, error: Exception, writes: int, *, in_flush: bool = False) -> None:
        super().__init__()
        self.left, self.failure, self.in_flush = writes, error, in_flush

    def write(self, text: str) -> int:
        """Writes, or raises."""
        self.left -= 1
        if self.left < 0 and not self.in_flush:
            raise self.failure
        return super().write(text)

    def flush(self) -> None:
        """Raises if writes do not."""
        if self.in_flush and self.left < 0:
            raise self.failure


@pytest.mark.parametrize(
    "failure",
    [
        BrokenPipeError(errno.EPIPE, "gone"),
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EIO, "no tty"),
        ValueError("closed"),
    ],
    ids=["pipe", "full", "terminal", "closed"],
)
@pytest.mark.parametrize("in_flush", [False, True])
def test_after_the_first_error_a_stream_is_quiet_and_keeps_the_rest(failure: Exception, in_flush: bool) -> None:
    below = Failing(failure, 1, in_flush=in_flush)
    stream = ProtectedStream(below)
    for number in range(4):
        stream.write(f"line {number}\n")
        stream.flush()
    assert stream.error is failure
    assert below.getvalue() == "line 0\n" + "line 1\n" * in_flush
    assert take_unshown() == [f"line {number}" for number in range(1, 4)]
    assert take_unshown() == []


@pytest.mark.parametrize(("failure", "warned"), [(OSError(errno.ENOSPC, "full"), True), (ValueError("closed"), False)])
def test_a_warning_says_that_a_stream_fails_but_not_that_it_was_closed(
    failure: Exception, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ProtectedStream(Failing(failure, 0)).write("text")
    assert ("cannot be written" in capsys.readouterr().err) == warned


def test_without_a_stream_everything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with protected_output():
        print("somebody may read this later")
        assert not sys.stdout.isatty()
        with pytest.raises(io.UnsupportedOperation):
            sys.stdout.fileno()
    assert sys.stdout is None
    assert take_unshown() == ["somebody may read this later"]


def test_the_newest_lines_are_kept() -> None:
    stream = ProtectedStream(None)
    for number in range(MAX_UNSHOWN_LINES + 10):
        print(number, file=stream)
    assert take_unshown() == [str(number) for number in range(10, MAX_UNSHOWN_LINES + 10)]


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "== 3 -> ?"), ("latin-1", "== 3 -> ü"), ("utf-8", "━━ 3 → ü"), ("cp1252", "== 3 -> ü")]
)
def test_what_an_encoding_lacks_is_written_in_plain_characters(encoding: str, shown: str) -> None:
    raw = io.BytesIO()
    stream = ProtectedStream(io.TextIOWrapper(raw, encoding=encoding))
    stream.write("━━ 3 → ü")
    stream.flush()
    assert stream.error is None
    assert raw.getvalue().decode(encoding) == shown


@given(st.text(), st.sampled_from(["ascii", "latin-1", "cp1252", "utf-8", "utf-16", "shift-jis"]))
def test_no_text_and_no_encoding_raises(text: str, encoding: str) -> None:
    stream = ProtectedStream(io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline=""))
    assert stream.write(text) == len(text)
    stream.flush()
    assert stream.error is None


def test_streams_are_put_back_and_protected_once() -> None:
    before = sys.stdout, sys.stderr
    with protected_output():
        first = sys.stdout
        with protected_output():
            assert sys.stdout is first
        assert sys.stdout is first
    assert (sys.stdout, sys.stderr) == before


PROGRAM = """
import sys
from raystride.pipelines.system.output import protected_output
with protected_output():
    for number in range(20000):
        print(f"line {number} ━", flush=number % 7 == 0)
sys.exit(7)
"""


def _to_a_reader_that_goes_away(command: list[str]) -> tuple[int, str]:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    assert process.stdout.readline()
    process.stdout.close()
    shown_text = process.stderr.read()
    process.stderr.close()
    return process.wait(), shown_text


def _to_a_full_device(command: list[str]) -> tuple[int, str]:
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


def _run_without_stdout(command: list[str]) -> tuple[int, str]:
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(shell, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


def _in_ascii(command: list[str]) -> tuple[int, str]:
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "line 3 =" in done.stdout
    return done.returncode, done.stderr


def test_closed_descriptors_are_no_file_s() -> None:
    """A file that is opened later must not get the number of standard output, to which libraries and children write."""
    program = """
import os, sys
from raystride.pipelines.system.output import protected_output
with protected_output(), open(sys.argv[1], "w") as file:
    assert file.fileno() > 2, file.fileno()
    os.write(1, b"by a library")
    os.system("echo by a child")
"""
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program, os.devnull]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("run", "says"),
    [(_to_a_reader_that_goes_away, ""), (_to_a_full_device, "No space left"), (_run_without_stdout, ""), (_in_ascii, "")],
)
def test_a_program_ends_with_its_own_exit_code(run: Callable[[list[str]], tuple[int, str]], says: str) -> None:
    code, shown_text = run([sys.executable, "-c", PROGRAM])
    assert code == 7
    assert "Traceback" not in shown_text
    assert "Exception ignored" not in shown_text
    assert says in shown_text if says else not shown_text
