"""Which test files run which source files: made by one run of the usual tests, and kept in `tests/source_map.json`.

    python -m tests.source_map run -n 3      # `make test-map`: runs the usual tests, traced, and writes the map
    python -m tests.source_map run -n 3 tests/model      # those of a folder, whose entries are renewed
    python -m tests.source_map changed       # `make test-changed`: the tests that a change needs, within about a minute

Import graphs do not fit, as modules are imported inside functions and most code runs in forked workers, jobs and Ray's
processes; see tests/source_trace.py, which every interpreter of the environment imports while the map is made.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from tests import source_trace
from tests.architecture_map import list_wings
from tests.schedule import UNKNOWN_FILE_S, file_of, load_seconds

ROOT = Path(__file__).resolve().parents[1]
MAP_FILE = Path(__file__).with_name("source_map.json")
TRACED = ROOT / "build" / "source-map"
USUAL_TESTS = [sys.executable, "-m", "pytest", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not long"]
BUDGET_S = 120.0
"""Seconds of test processes that a change may take: about a minute on two cores."""
EVERYWHERE = 0.5
"""A source that more than this share of test files runs says little about which of them a change needs."""
LAYERS: tuple[tuple[str, ...], ...] = (
    ("triton_kernels/",),
    ("model/",),
    ("pipelines/__init__.py",),
    *((f"pipelines/{wing}/",) for wing in list_wings()),
    ("raystride/", "ray_jobs/", "configs/", "deploy/", "benchmarks/"),
)
"""From the ground up: a layer's code runs only that of its own and those before it."""


class CurrentTestFile:
    """Tells the traced processes which test file runs; a plugin of each pytest process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = ""
        (folder / "current").write_text("")
        self._trace = source_trace.start()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes a test file, which may have none but long tests; one that is skipped here stays unknown to the map."""
        if report.passed and report.nodeid.endswith(".py"):
            with (self._folder / "collected.tsv").open("a") as collected:
                collected.write(f"{report.nodeid}\t\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Writes the file of the test that begins."""
        if (file := file_of(item.nodeid)) != self._file:
            self._file = file
            (self._folder / "next").write_text(file)
            (self._folder / "next").replace(self._folder / "current")
            if self._trace:
                self._trace.restart()


def pytest_configure(config: pytest.Config) -> None:
    """Gives each pytest process a folder of its own below $RAYSTRIDE_MAP, which its children inherit."""
    if "RAYSTRIDE_MAP" in os.environ and os.environ.get("PYTEST_XDIST_WORKER", "master") != "master":
        folder = Path(os.environ["RAYSTRIDE_MAP"]) / os.environ["PYTEST_XDIST_WORKER"]
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["RAYSTRIDE_MAP"] = str(folder)
        config.pluginmanager.register(CurrentTestFile(folder), "current-test-file")


def read_traces(folder: Path) -> dict[str, set[str]]:
    """Returns the source files that ran with each test file; none for one without usual tests."""
    found: dict[str, set[str]] = defaultdict(set)
    for trace in folder.rglob("*.tsv"):
        for line in trace.read_text().splitlines():
            test, _, source = line.partition("\t")
            if (ROOT / test).exists():
                found[test].update([source] if source and (ROOT / source).exists() else [])
    return found


def write_map(found: Mapping[str, Iterable[str]]) -> None:
    """Writes the map: sources by number, test files with the numbers of what they run."""
    sources = sorted({source for each in found.values() for source in each})
    numbers = {source: number for number, source in enumerate(sources)}
    rows = [f"{json.dumps(test)}: {json.dumps(sorted(numbers[each] for each in found[test]))}" for test in sorted(found)]
    tests = ",\n".join(rows)
    MAP_FILE.write_text(f'{{"sources": {json.dumps(sources, indent=0)},\n"tests": {{\n{tests}\n}}}}\n'.replace(", ", ","))


def load_map() -> dict[str, set[str]]:
    """Returns the source files that each test file runs."""
    if not MAP_FILE.exists():
        return {}
    stored = json.loads(MAP_FILE.read_text())
    return {test: {stored["sources"][number] for number in numbers} for test, numbers in stored["tests"].items()}


def trace_usual_tests(arguments: list[str]) -> int:
    """Runs the usual tests with every interpreter of this environment traced, and renews their entries in the map."""
    shutil.rmtree(TRACED, ignore_errors=True)
    TRACED.mkdir(parents=True)
    hook = Path(sysconfig.get_path("purelib")) / "raystride-source-map.pth"
    condition = "import os; 'RAYSTRIDE_MAP' in os.environ"
    hook.write_text(
        f"{condition} and __import__('sys').path.append({str(ROOT)!r})\n"
        f"{condition} and __import__('tests.source_trace', fromlist=['start']).start()\n"
    )
    try:
        variables = os.environ | {"RAYSTRIDE_MAP": str(TRACED)}
        done = subprocess.run([*USUAL_TESTS, *arguments], cwd=ROOT, env=variables, check=False)
    finally:
        hook.unlink()
    if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # a run that was cut knows no file's sources
        write_map({test: sources for test, sources in load_map().items() if (ROOT / test).exists()} | read_traces(TRACED))
    return done.returncode


def changed_files(base: str) -> list[str]:
    """Returns the files that differ from where this branch left `base`, uncommitted ones too; else the last commit's."""

    def lines(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    since = lines("merge-base", "HEAD", base)[0]
    new = lines("ls-files", "--others", "--exclude-standard")
    return lines("diff", "--name-only", since) + new or lines("diff", "--name-only", "HEAD~1")


def mirrored_tests(source: str) -> list[str]:
    """Returns the test file of a module, or the test files of the nearest folder that mirrors its package."""
    path = Path(source)
    inside = path.relative_to("tests") if path.parts[0] == "tests" else path
    own = ROOT / "tests" / inside.parent / f"test_{inside.name}"
    if path.suffix == ".py" and own.exists():
        return [str(own.relative_to(ROOT))]
    folder = ROOT / "tests" / inside.parent
    while not folder.is_dir():
        folder = folder.parent
    at_top = folder == ROOT / "tests"
    return [] if at_top else [str(file.relative_to(ROOT)) for file in sorted(folder.rglob("test_*.py"))]


def unmapped_tests(known: Mapping[str, set[str]]) -> list[str]:
    """Returns the test files that the map does not know."""
    files = (str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return [file for file in files if file not in known]


def _layer(path: str, other: int) -> int:
    return next((number for number, folders in enumerate(LAYERS) if path.startswith(folders)), other)


def rank_unmapped(test: str, source: str) -> int | None:
    """Returns how much a test file that the map does not know needs a changed file; None: it cannot run it.

    It needs its own package first, then what its layer may import. A helper of tests is needed by those of its folder.
    """
    home = test.removeprefix("tests/").rpartition("/")[0] + "/"
    if source.startswith("tests/"):
        return 4 if test.startswith(source.rpartition("/")[0] + "/") else None
    if source.startswith(home):
        return 4
    return 5 if _layer(source, len(LAYERS)) <= _layer(home, len(LAYERS) - 1) else None


def select_tests(changed: Iterable[str], known: Mapping[str, set[str]], unmapped: Sequence[str] = ()) -> list[str]:
    """Returns the test files that changed files need, the most telling ones first.

    These are changed test files, each module's own, then those that run a changed file: first those that run few others.
    A source that the map does not know has the tests of its package. Last come `unmapped` test files, which the map does
    not know, if they could run a changed file.
    """
    found: dict[str, tuple[int, int]] = {}
    by_source: dict[str, set[str]] = defaultdict(set)
    for test, sources in known.items():
        for source in sources:
            by_source[source].add(test)

    def need(test: str, rank: int) -> None:
        if (ROOT / test).exists():
            found[test] = min(found.get(test, (9, 0)), (rank, len(known.get(test, ()))))

    for file in changed:
        if Path(file).name.startswith("test_") and file.endswith(".py"):
            need(file, 0)
        elif file in by_source:
            for test in mirrored_tests(file) if len(mirrored_tests(file)) == 1 else []:
                need(test, 1)
            often = len(by_source[file]) > EVERYWHERE * len(known)
            for test in by_source[file]:
                need(test, 3 if often else 2)
        else:
            for test in mirrored_tests(file):
                need(test, 2)
        for test in unmapped:
            if (rank := rank_unmapped(test, file)) is not None:
                need(test, rank)
    return sorted(found, key=lambda test: (*found[test], test))


def within_budget(tests: Iterable[str], seconds: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[str]]:
    """Returns which of these test files fit into the budget, in their order, and which do not. The first always fits."""
    taken, left_out, total = [], [], 0.0
    for test in tests:
        takes = seconds.get(test, {"usual": UNKNOWN_FILE_S})["usual"]
        if taken and total + takes > BUDGET_S:
            left_out.append(test)
        else:
            taken.append(test)
            total += takes
    return taken, left_out


def run_changed(base: str, arguments: list[str]) -> int:
    """Runs the usual tests that a change needs, and names those that it leaves out."""
    changed, known, seconds = changed_files(base), load_map(), load_seconds()
    unmapped = unmapped_tests(known)
    taken, left_out = within_budget(select_tests(changed, known, unmapped), seconds)
    print(f"{len(changed)} changed files need {len(taken) + len(left_out)} test files; these run now:")
    print("".join(f"  {test}\n" for test in taken) or "  none")
    if unmapped:
        print(f"the map lacks {len(unmapped)} test files, which are chosen by their packages: make test-map makes it anew")
    if left_out:
        print("left out, beyond about a minute (make test runs them):", *left_out, sep="\n  ")
    if not taken:
        return 0
    return subprocess.run([*USUAL_TESTS, *arguments, *taken], cwd=ROOT, check=False).returncode


def main() -> None:
    """Makes the map, or runs the tests of a change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "changed"])
    parser.add_argument("--base", default="main", help="branch that the change is compared with")
    known, rest = parser.parse_known_args()
    sys.exit(trace_usual_tests(rest) if known.action == "run" else run_changed(known.base, rest))


if __name__ == "__main__":
    main()
