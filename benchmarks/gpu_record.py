"""Measurements under a budget of time, in order, each written down when it is known, whatever the next one does.

A kernel that reads where it must not leaves its process without a GPU, one that waits for ever leaves it without an end. So
the rows run in a process of their own, which writes every result at once; the process that looks after it ends what takes
far too long, writes down how, and starts the next one behind it. What the budget leaves out is named, and so is what would
not have measured what it says: it is not run.

    record = Record(Path("figures.json"))
    run_rows([Row("copy", 3.0, measure_copy)], record, deadline=time.time() + 60)     # in the process that measures
    watch(["python", "-m", "benchmarks.gpu", "--measure", ...], record, deadline)     # in the one that looks after it
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from raystride.triton_kernels.dispatch import NoCompiler, NotRun
from raystride.triton_kernels.processes import LOST_DEVICE, map_in_children

ANEW = 75
"""Exit code of a process whose GPU is lost to it: another one goes on."""
PATIENCE = 5.0
"""A row may take so many times what was predicted."""
LOOK_S = 0.1
NOT_RUN = 3
"""Exit code of a process in which nothing can be compiled."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    seconds: float
    """What it is predicted to take, compilation included."""
    measure: Callable[[], Any]
    """Gives what JSON can hold; whatever it raises is its result."""
    least_s: float = 60.0
    """It may take so many seconds in any case."""
    place: Literal["here", "child", "children"] = "here"
    """Where its work runs. `child`: in a process of its own, as it leaves state behind; `children`: in those it starts."""

    def run(self) -> Any:
        """Measures. Raises NotRun if it would not measure what it says, RuntimeError for all problems of a child."""
        if self.place != "child":
            return self.measure()
        (outcome,) = map_in_children(_call, [self.measure], processes=1, timeout_s=float("inf"))
        if outcome.problem:
            if outcome.problem.startswith("NotRun: "):
                raise NotRun(outcome.problem.removeprefix("NotRun: "))
            raise RuntimeError(outcome.problem)
        return outcome.value


def _call(measure: Callable[[], Any]) -> Any:
    return measure()


class Record:
    """The file of figures: results by row, what is under way, what was left out. Two processes write it, never at once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.content: dict[str, Any] = {}
        self.read()

    def read(self) -> None:
        """Takes in what is in the file, if there is one."""
        if self.file.exists():
            self.content = json.loads(self.file.read_text())

    def note(self, **what: Any) -> None:
        """Writes something down beside the rows; None takes it back."""
        self.content = {key: value for key, value in (self.content | what).items() if value is not None}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        written = self.file.with_suffix(".new")
        written.write_text(json.dumps(self.content, indent=1) + "\n")
        written.replace(self.file)

    @property
    def rows(self) -> dict[str, Any]:
        """Result or error, and seconds, of every row that has ended."""
        return dict(self.content.get("rows", {}))

    def end(self, name: str, seconds: float, **how: Any) -> None:
        """Writes down how a row ended, by `result` or `error`."""
        self.note(rows=self.rows | {name: {"seconds": round(seconds, 1), **how}}, under_way=None)
        told = how.get("error") or how.get("not_run") or json.dumps(how.get("result"))
        print(f"{seconds:7.1f} s  {name}: {told if len(told) < 300 else told[:300] + ' ...'}", flush=True)


def run_rows(rows: Sequence[Row], record: Record, deadline: float, clock: Callable[[], float] = time.time) -> int:
    """Measures what has no result yet and fits before `deadline` (seconds since 1970); the exit code, 0, ANEW or NOT_RUN."""
    for row in rows:
        began = clock()
        left_s = deadline - began
        if row.name in record.rows or row.seconds > left_s:
            continue
        limit_s = min(left_s, max(row.least_s, PATIENCE * row.seconds))
        record.note(under_way={"row": row.name, "since": began, "until": began + limit_s})
        try:
            result = row.run()
        except NotRun as reason:
            record.end(row.name, clock() - began, not_run=f"not run: {reason}")
            if isinstance(reason, NoCompiler):
                return NOT_RUN
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip()[:2000]}"
            record.end(row.name, clock() - began, error=text)
            if row.place == "here" and any(sign in text for sign in LOST_DEVICE):
                return ANEW
        else:
            record.end(row.name, clock() - began, result=result)
    return 0


def watch(command: Sequence[str], record: Record, deadline: float) -> None:
    """Has a process run the rows, and another one after it where it died or hung, until all are known or time is over."""
    while time.time() < deadline:
        child = subprocess.Popen(command, start_new_session=True)
        try:
            late = not _ended(child, record, deadline)
        finally:
            with suppress(ProcessLookupError):  # also what a row has started
                os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
        record.read()
        if row := record.content.get("under_way"):
            seconds = time.time() - row["since"]
            cause = f"it was ended after {seconds:.0f} s" if late else f"its process ended with {code}"
            record.end(row["row"], seconds, error=cause)
        elif code != ANEW:
            if code not in (0, NOT_RUN):
                record.note(failed=f"the process that measures ended with {code} between two rows")
            break
    left_out = [name for name in record.content.get("planned", []) if name not in record.rows]
    record.note(left_out=left_out)
    for name in left_out:
        print(f"  left out  {name}", flush=True)


def _ended(child: "subprocess.Popen[bytes]", record: Record, deadline: float) -> bool:
    """Waits for the process, as long as its row may take; whether it ended by itself."""
    while child.poll() is None:
        time.sleep(LOOK_S)
        record.read()
        if time.time() > record.content.get("under_way", {}).get("until", deadline):
            return False
    return True
