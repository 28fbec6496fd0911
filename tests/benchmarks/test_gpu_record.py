"""Measurements under a budget: in order, none lost, whatever they do; without a GPU, by rows that pass their time."""

import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_record import ANEW, NOT_RUN, Record, Row, run_rows, watch
from raystride.triton_kernels.dispatch import NoCompiler, NotRun

seconds = st.floats(1, 300)


class Time:
    """A clock that moves when somebody works."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now

    def row(self, number: int, lasts: float) -> Row:
        """A measurement that takes as long as predicted."""

        def work() -> int:
            self.now += lasts
            return number

        return Row(str(number), lasts, work)


@given(lasting=st.lists(seconds, max_size=12), budgets=st.lists(st.floats(60, 500), min_size=1, max_size=4))
def test_every_call_does_what_fits_and_the_next_goes_on(lasting: list[float], budgets: list[float]) -> None:
    clock = Time()
    rows = [clock.row(number, lasts) for number, lasts in enumerate(lasting)]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "figures.json"
        done: list[str] = []
        for budget in budgets:
            deadline = clock() + budget
            assert run_rows(rows, Record(file), deadline, clock) == 0
            assert clock() <= deadline + 1e-6
            found = Record(file)
            assert list(found.rows)[: len(done)] == done, "what was known stays as it is"
            fresh = list(found.rows)[len(done) :]
            assert fresh == sorted(fresh, key=int)
            assert all(found.rows[name]["result"] == int(name) for name in fresh)
            left = deadline - clock()
            assert all(row.seconds > left for row in rows if row.name not in found.rows), "what is left out does not fit"
            done = list(found.rows)


def test_an_error_is_a_result_and_a_lost_gpu_ends_the_process(tmp_path: Path) -> None:
    def fails(text: str) -> None:
        raise RuntimeError(text)

    record, clock = Record(tmp_path / "figures.json"), Time()
    rows = [
        Row("full", 1, lambda: fails("CUDA out of memory")),
        clock.row(1, 1),
        Row("lost", 1, lambda: fails("CUDA error: an illegal memory access was encountered")),
        clock.row(2, 1),
    ]
    assert run_rows(rows, record, clock() + 100, clock) == ANEW
    assert record.rows["full"]["error"] == "RuntimeError: CUDA out of memory"
    assert list(record.rows) == ["full", "1", "lost"]
    assert run_rows(rows, record, clock() + 100, clock) == 0
    assert list(record.rows) == ["full", "1", "lost", "2"]


def end_of(fate: str) -> str:
    """A row's work in a child."""
    if fate == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fate == "falls back":
        raise NotRun("gelu runs in PyTorch: dtype")
    if fate == "loses":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return fate


def test_a_child_loses_its_own_row_alone_and_not_this_process(tmp_path: Path) -> None:
    record, clock = Record(tmp_path / "figures.json"), Time()
    fates = ("crashes", "falls back", "loses", "right")
    rows = [Row(fate, 1, partial(end_of, fate), place="child") for fate in fates]
    assert run_rows(rows, record, clock() + 100, clock) == 0
    assert "its process ended with -11" in record.rows["crashes"]["error"]
    assert record.rows["falls back"]["not_run"] == "not run: gelu runs in PyTorch: dtype"
    assert "illegal memory access" in record.rows["loses"]["error"]
    assert record.rows["right"]["result"] == "right"


def test_without_a_compiler_the_call_ends_at_its_first_row(tmp_path: Path) -> None:
    record, clock = Record(tmp_path / "figures.json"), Time()
    broken = partial(NoCompiler.raise_for, "RuntimeError: Failed to find C compiler. Please specify via CC")
    assert run_rows([Row("one launch", 1, broken), clock.row(1, 1)], record, clock() + 100, clock) == NOT_RUN
    assert list(record.rows) == ["one launch"]
    assert "install a C compiler" in record.rows["one launch"]["not_run"]


PROGRAM = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu_record import Record, Row, run_rows
rows = [Row("one", 0.1, lambda: 1), Row("dies", 0.1, lambda: os._exit(139)), Row("two", 0.1, lambda: 2),
        Row("hangs", 0.1, lambda: time.sleep(3600), least_s=1.0), Row("three", 0.1, lambda: 3), Row("long", 1e6, lambda: 4)]
sys.exit(run_rows(rows, Record(Path(sys.argv[1])), float(sys.argv[2])))
"""


def test_what_dies_or_hangs_costs_itself_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import time

    record, deadline = Record(tmp_path / "figures.json"), time.time() + 240
    record.note(planned=["one", "dies", "two", "hangs", "three", "long"])
    watch([sys.executable, "-c", PROGRAM, str(record.file), str(deadline)], record, deadline)
    found = {name: how.get("result", how.get("error")) for name, how in Record(record.file).rows.items()}
    assert found["dies"] == "its process ended with 139"
    assert found["hangs"].startswith("it was ended after ")
    assert [found[name] for name in ("one", "two", "three")] == [1, 2, 3]
    assert Record(record.file).content["left_out"] == ["long"]
    assert "left out  long" in capsys.readouterr().out


def test_a_program_that_cannot_start_is_told_of_and_not_started_for_ever(tmp_path: Path) -> None:
    import time

    record = Record(tmp_path / "figures.json")
    watch([sys.executable, "-c", "raise SystemExit(5)"], record, time.time() + 240)
    assert record.content["failed"] == "the process that measures ended with 5 between two rows"
