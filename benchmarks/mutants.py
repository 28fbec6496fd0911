"""Draws small faults over the product's own code, and says which tests see them.

Lines are drawn by seed, from each package in proportion to its lines, one fault of each. It is made in a copy of the tree,
and tried with the module's mirrored test file, then with the package's other usual tests; the first failure ends it, and so
does a hang. Each result is a line of a file at once, so `--resume` goes on after a kill. Faults that no test could see are
listed with their reason in benchmarks/mutants_equivalent.json. `--again` tries survivors once more, wherever they are now.
`--by-hand` tries those of benchmarks/mutants_by_hand.json instead, which a person wrote from the sources; `--only TEXT`
some of them.

    python -m benchmarks.mutants --packages feed train --count 60 --seed 1       # a minute or less each
    python -m benchmarks.mutants --by-hand --packages train --quick
    python -m benchmarks.mutants --again; python -m benchmarks.mutants --table
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.mutation_operators import Fault, find_faults
from benchmarks.pytest_server import PytestServer

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    **{package: f"pipelines/data/{package}" for package in ("feed", "prepare", "tasks")},
    **{package: f"pipelines/train/{package}" for package in ("strategies", "checkpoint", "lora")},
    **{package: f"pipelines/launch/{package}" for package in ("preflight", "run_store", "console")},
    **{package: f"pipelines/{package}" for package in ("train", "evaluate", "launch", "sweep", "config")},
    "record": "pipelines/observability/record",
    "credentials": "pipelines/system/credentials.py",
    "resources": "pipelines/launch/cluster/resources.py",
}
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
BY_HAND = Path(__file__).with_name("mutants_by_hand.json")
OUTCOMES = ("mirrored file", "package", "equivalent", "survived")
LIMIT, MIN_LIMIT_S, QUICK_S = 4, 60.0, 120.0
"""A run that takes so many times its usual seconds, and these at least, hangs; of a file that was not measured the last."""
PYTEST = ["-q", "-m", "not long", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--no-header"]


def sources_of(package: str) -> list[Path]:
    """The modules of a package, relative to the root."""
    place = ROOT / PACKAGES[package]
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return [file.relative_to(ROOT) for file in files]


def draw_faults(sources: dict[str, str], count: int, seed: str) -> list[Fault]:
    """Faults on different lines of these sources, by path; the same for the same seed, and more of them begin with fewer."""
    by_line: dict[tuple[str, int], list[Fault]] = {}
    for path, source in sorted(sources.items()):
        for fault in find_faults(path, source):
            by_line.setdefault((path, fault.number), []).append(fault)
    draw = random.Random(seed)
    lines = list(by_line)
    draw.shuffle(lines)
    return [draw.choice(by_line[line]) for line in lines[:count]]


def share_out(lines: dict[str, int], count: int) -> dict[str, int]:
    """How many of `count` draws each package has, in proportion to its lines (Hamilton's largest remainders), 1 at least."""
    total = sum(lines.values())
    exact = {package: count * own / total for package, own in lines.items()}
    shares = {package: max(1, int(wanted)) for package, wanted in exact.items()}
    for package in sorted(exact, key=lambda package: int(exact[package]) - exact[package])[
        : max(0, count - sum(shares.values()))
    ]:
        shares[package] += 1
    return shares


def draw_packages(packages: Sequence[str], count: int, seed: int) -> list[tuple[str, Fault]]:
    """Returns faults of all packages, each with its package, shuffled: a run that is stopped has tried some of each."""
    texts = {package: {str(path): (ROOT / path).read_text() for path in sources_of(package)} for package in packages}
    lines = {package: sum(text.count("\n") for text in sources.values()) for package, sources in texts.items()}
    shares = share_out(lines, count)
    drawn = [
        (package, fault)
        for package in packages
        for fault in draw_faults(texts[package], shares[package], f"{seed} {package}")
    ]
    random.Random(seed).shuffle(drawn)
    return drawn


def read_by_hand(packages: Sequence[str]) -> list[tuple[str, Fault]]:
    """Returns the faults by hand in these packages, with these. Raises ValueError if a source has no such text any more."""
    found = []
    for row in json.loads(BY_HAND.read_text()):
        inside = [name for name in PACKAGES if row["path"].startswith(PACKAGES[name])]
        package = max(inside, key=lambda name: len(PACKAGES[name]), default="others")
        if package in packages or not inside:
            found.append((package, _fault_by_hand(**row)))
    return found


def _fault_by_hand(path: str, old: str, new: str, operator: str) -> Fault:
    content = (ROOT / path).read_bytes()
    start = content.find(old.encode())
    if (count := content.count(old.encode())) != 1:
        raise ValueError(f"{path} has {old!r} {count} times and not once: mend or remove it in {BY_HAND.name}")
    number = content.count(b"\n", 0, start) + 1
    line = content.splitlines()[number - 1].decode().strip()
    return Fault(path, line, operator, 0, number, start, start + len(old.encode()), new)


def find_again(name: Sequence[Any]) -> Fault | None:
    """The fault of this name in the present source; None where its line is gone."""
    if by_hand := [fault for _, fault in read_by_hand(list(PACKAGES)) if fault.name == tuple(name)]:
        return by_hand[0]
    path = ROOT / str(name[0])
    faults = find_faults(str(name[0]), path.read_text()) if path.exists() else []
    return next((fault for fault in faults if fault.name == tuple(name)), None)


class Copy:
    """A copy of the tree in which faults are made and tests run."""

    def __init__(self, folder: Path, server: PytestServer, root: Path = ROOT) -> None:
        """Copies to `folder` what git has of `root`, changed or not, and new files."""
        self.folder, self._server = folder, server
        self.seconds: dict[str, float] = {}
        """Of each test file without a fault, by name; infinite where it fails."""
        self._written = 1_000_000_000
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
        for name in names:
            if os.path.lexists(root / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name, follow_symlinks=False)

    def write(self, path: str, text: str) -> None:
        """Writes a source under a time of its own, so that nobody takes what was compiled of another for it."""
        (self.folder / path).write_text(text)
        self._written += 10
        os.utime(self.folder / path, (self._written, self._written))

    def find_failure(self, tests: Sequence[str], limit_s: float) -> str | None:
        """The first test that fails, or `a hang`; None where all pass."""
        code, lines = self._server.run(self.folder, [*PYTEST, "-x", *tests], limit_s)
        if code in (0, 5):  # 5: all tests of these files are long ones
            return None
        told = [line for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
        failed = [line.split(" - ")[0].split(" ", 1)[1] for line in told]
        return "a hang" if code is None else failed[0] if failed else "pytest itself"

    def measure(self, tests: Sequence[str]) -> None:
        """Measures test files without a fault, once, all in one go; those that fail are said, and left out from then on."""
        tests = [test for test in tests if test not in self.seconds]
        if not tests:
            return
        report = self.folder / "seconds.xml"
        began = time.monotonic()
        self._server.run(self.folder, [*PYTEST, "-o", "junit_family=xunit1", f"--junitxml={report}", *tests], 1800.0)
        cases = [case for case in ElementTree.parse(report).iter("testcase") if case.get("file")]
        # Whatever no test took is for the start: of each run of tests, so of each file once.
        start = time.monotonic() - began - sum(float(case.get("time", 0)) for case in cases)
        for test in tests:
            own = [case for case in cases if case.get("file") == test]
            failed = [case.get("name") for case in own if case.find("failure") is not None or case.find("error") is not None]
            self.seconds[test] = math.inf if failed else start + sum(float(case.get("time", 0)) for case in own)
            if failed:
                print(f"{test} fails without a fault ({failed[0]}) and is left out", flush=True)

    def order_tests(self, tests: Iterable[str], module: str, quick: bool) -> list[str]:
        """Those that name a module come first, or are all where `quick` and there is one; then the fastest, if known."""
        named = {test: module in (self.folder / test).read_text() for test in tests}
        chosen = [test for test in named if named[test]] if quick and any(named.values()) else list(named)
        return sorted(chosen, key=lambda test: (not named[test], self.seconds.get(test, 0.0)))


def find_tests(path: str, folder: Path) -> tuple[list[str], list[str]]:
    """A module's mirrored test file, if it has one, and the other test files of its package.

    Where it has none, and nothing in its package names it, with those elsewhere that name it or are called as it is.
    """
    source = Path(path)
    package = folder / "tests" / source.parent
    mirrored = package / f"test_{source.name}"
    one_file = path == PACKAGES["credentials"]
    others = [] if one_file else [file for file in sorted(package.rglob("test_*.py")) if file != mirrored]
    module = path.removesuffix(".py").replace("/", ".")
    if not mirrored.exists() and not any(module in file.read_text() for file in others):
        elsewhere = sorted({*(folder / "tests").rglob("test_*.py")} - {*others})
        others += [file for file in elsewhere if file.name == mirrored.name or module in file.read_text()]
    names = [[str(file.relative_to(folder)) for file in files if file.exists()] for files in ([mirrored], others)]
    return names[0], names[1]


def try_fault(copy: Copy, fault: Fault, quick: bool = False) -> tuple[str, str]:
    """Makes a fault and runs its tests until one fails; the outcome, and the test. The copy is as before afterwards.

    With `quick`, only those of the package's other test files that name the module, if any does; none is measured before.
    """
    source = (copy.folder / fault.path).read_text()
    mirrored, others = find_tests(fault.path, copy.folder)
    others = copy.order_tests(others, fault.path.removesuffix(".py").replace("/", "."), quick)
    for outcome, tests in zip(OUTCOMES, (mirrored, others), strict=False):
        if not quick:
            copy.measure(tests)
        passing = [test for test in tests if copy.seconds.get(test, 0.0) < math.inf]
        limit_s = max(MIN_LIMIT_S, LIMIT * sum(copy.seconds.get(test, QUICK_S) for test in passing))
        copy.write(fault.path, fault.apply(source))
        try:
            if passing and (failed := copy.find_failure(passing, limit_s)):
                return outcome, failed
        finally:
            copy.write(fault.path, source)
    return "survived", ""


class Results:
    """What is known of faults: a file of JSON lines, the newest of a fault counting."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = {tuple(row["name"]): row for row in map(json.loads, lines)}

    def add(self, package: str, fault: Fault, outcome: str, test: str, seconds: float) -> None:
        """Appends a result."""
        row = {"package": package, "name": list(fault.name), "number": fault.number, "new": fault.new[:80]}
        row |= {"outcome": outcome, "test": test, "seconds": round(seconds, 1)}
        self.rows[fault.name] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_equivalent() -> dict[tuple[Any, ...], str]:
    """The reasons why faults change nothing that a test could see, by the faults' names."""
    return {tuple(row["name"]): row["reason"] for row in json.loads(EQUIVALENT.read_text())} if EQUIVALENT.exists() else {}


def make_table(rows: Iterable[dict[str, Any]], equivalent: dict[tuple[Any, ...], str]) -> str:
    """The outcomes by package, and the survivors, in Markdown."""
    counts: dict[str, Counter[str]] = {}
    survivors = []
    for row in rows:
        same = row["outcome"] == "survived" and tuple(row["name"]) in equivalent
        outcome = "equivalent" if same else row["outcome"]
        counts.setdefault(row.get("package") or row["room"], Counter())[outcome] += 1
        if outcome == "survived":
            path, line, operator, _ = row["name"]
            survivors.append(f"- {path.removeprefix('pipelines/')}, {operator}: `{line}`")
    counts = {package: counts[package] for package in (*PACKAGES, "others") if package in counts}
    counts["all"] = sum(counts.values(), Counter())
    lines = [
        "| package | drawn | killed by mirrored file | killed by package | equivalent | survived | killed of the rest |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for package, own in counts.items():
        killed, rest = own["mirrored file"] + own["package"], own.total() - own["equivalent"]
        figures = [own.total(), *(own[outcome] for outcome in OUTCOMES), f"{100 * killed / max(1, rest):.0f} %"]
        lines.append(f"| {package} | " + " | ".join(map(str, figures)) + " |")
    return "\n".join([*lines, *(["", "Survivors:", "", *sorted(survivors)] if survivors else [])])


def main() -> None:
    """Draws, tries, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", "--rooms", nargs="*", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.jsonl")
    parser.add_argument("--quick", action="store_true", help="try only other files that name the module, if any does")
    parser.add_argument("--resume", action="store_true", help="leave out what the results have already")
    parser.add_argument("--by-hand", action="store_true", help=f"try the faults of {BY_HAND.name} instead of drawing")
    parser.add_argument("--only", default="", help="try those alone whose path or operator has this text")
    parser.add_argument("--again", action="store_true", help="try the survivors of the results once more")
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    given = parser.parse_args()
    results, equivalent = Results(given.results), read_equivalent()
    if given.again:
        lost = [
            row for row in results.rows.values() if row["outcome"] == "survived" and tuple(row["name"]) not in equivalent
        ]
        found = [(row.get("package") or row["room"], find_again(row["name"])) for row in lost]
        chosen = [(package, fault) for package, fault in found if fault is not None]
    elif not given.table:
        drawn = (given.packages, given.count, given.seed)
        chosen = read_by_hand(given.packages) if given.by_hand else draw_packages(*drawn)
        chosen = [(package, fault) for package, fault in chosen if given.only in f"{fault.path} {fault.operator}"]
        chosen = [(package, fault) for package, fault in chosen if not (given.resume and fault.name in results.rows)]
    else:
        chosen = []
    with tempfile.TemporaryDirectory() as scratch, PytestServer() as server:
        copy = Copy(Path(scratch), server)
        known = given.results.with_suffix(".seconds.json")
        if known.exists() and (given.resume or given.again):
            copy.seconds = json.loads(known.read_text())
        for number, (package, fault) in enumerate(chosen, 1):
            began = time.monotonic()
            outcome, test = try_fault(copy, fault, given.quick)
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(json.dumps(copy.seconds))
            results.add(package, fault, outcome, test, time.monotonic() - began)
            print(
                f"{number}/{len(chosen)} {outcome:<13} {fault.path}:{fault.number} {fault.operator}: {fault.line} [{test}]",
                flush=True,
            )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    print(f"\nCommit {commit}, {time.strftime('%d %B %Y')}:\n")
    print(make_table(results.rows.values(), equivalent))


if __name__ == "__main__":
    main()
