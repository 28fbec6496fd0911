"""Seconds of tests by file and group: recorded by pytest, printed, kept in `tests/seconds.json` and `tests/README.md`.

A test's seconds are those of one pytest process, from its set-up to its tear-down, whether it computes or waits.

    RAYSTRIDE_TEST_SECONDS=build/test-seconds.json pytest -n 3      # records and prints the table
    python -m tests.seconds build/test-seconds.json                 # `make test-table`: writes it into the project
"""

import argparse
import json
import os
import platform
import re
import subprocess
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.schedule import SECONDS_FILE, file_of

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- seconds of tests -->\n).*?(<!-- end -->)", re.DOTALL)
"""The part of `tests/README.md` that a command writes."""


class SecondsRecorder:
    """Sums the seconds of each file's tests, writes them as JSON, and prints the table at the end of the output."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started = time.monotonic()
        self._files: dict[str, dict[str, Any]] = defaultdict(lambda: {"usual": 0.0, "long": 0.0, "tests": 0})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds one phase of one test."""
        row = self._files[file_of(report.nodeid)]
        row["long" if "long" in report.keywords else "usual"] += report.duration
        row["tests"] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Writes the record and prints it by group."""
        record = describe_machine() | {
            "minutes": round((time.monotonic() - self._started) / 60, 1),
            "files": {name: self._files[name] for name in sorted(self._files)},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(record, indent=1))
        terminalreporter.section("seconds by group")
        terminalreporter.write(render_table(record))
        terminalreporter.section("seconds by file, the slowest forty")
        slowest = sorted(self._files.items(), key=lambda row: -row[1]["usual"] - row[1]["long"])[:40]
        for name, row in slowest:
            terminalreporter.write_line(f"{row['usual']:8.1f} usual {row['long']:8.1f} long  {name}")


def pytest_configure(config: pytest.Config) -> None:
    """Records in the process that hears of all tests, if $RAYSTRIDE_TEST_SECONDS names a file."""
    path = os.environ.get("RAYSTRIDE_TEST_SECONDS")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondsRecorder(Path(path)), "seconds-recorder")


def describe_machine() -> dict[str, str]:
    """Returns the date, commit, Python and processor of a record."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "processor": f"{os.cpu_count()} cores, {names[0] if names else platform.processor()}",
    }


def group_of(file: str) -> str:
    """Returns the package of a test file: `tests/model`, `tests/pipelines/data/feed`."""
    parts = file.split("/")
    return "/".join(parts[: min(len(parts) - 1, 4 if parts[1] == "pipelines" else 2)])


def render_table(record: dict[str, Any]) -> str:
    """Returns a record as Markdown: seconds by group, and their sum."""
    groups: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for file, row in record["files"].items():
        for group in (group_of(file), "all"):
            for place, key in enumerate(("tests", "usual", "long")):
                groups[group][place] += row[key]
    total = groups.pop("all", [0, 0.0, 0.0])
    ordered = sorted(groups.items(), key=lambda item: -item[1][1] - item[1][2])
    lines = ["| group | tests | usual, s | long, s |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| `{group}` | {tests:.0f} | {usual:.0f} | {long:.0f} |" for group, (tests, usual, long) in ordered]
    lines += ["| all | {:.0f} | {:.0f} | {:.0f} |".format(*total)]
    caption = (
        f"{record['minutes']} minutes on {record['date']}, commit {record['commit']}, Python {record['python']}, "
        f"{record['processor']}."
    )
    return "\n".join(lines) + f"\n\n{caption}\n"


def main() -> None:
    """Writes a record's seconds to `tests/seconds.json`, and its table to `tests/README.md`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("record", type=Path)
    record = json.loads(parser.parse_args().record.read_text())
    seconds = {file: {key: round(row[key], 1) for key in ("usual", "long")} for file, row in record["files"].items()}
    SECONDS_FILE.write_text(json.dumps(seconds, indent=0, sort_keys=True) + "\n")
    page = ROOT / "tests" / "README.md"
    page.write_text(MARKED.sub(lambda found: f"{found[1]}{render_table(record)}{found[2]}", page.read_text()))


if __name__ == "__main__":
    main()
