"""Figures of ours beside a peer's: runs that take turns, medians with their spread, and what they ran on.

The machine's speed drifts, so a ratio is taken run by run, each of ours with the peer's of the same round, and only then its
median. Every second round runs in the opposite order.

    samples = take_turns({"peer": run_peer, "ours": run_ours}, rounds=5)   # {"peer": [0.9, ...], "ours": [0.7, ...]}
    comparison = Comparison("seconds", samples, peer="peer", aims={"ours": "at most 0.8"})
    print(machine_line(machine())); print(comparison)
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
MANY = 8
"""From so many values on, the spread is their middle half, which one disturbed run does not change."""


@dataclass(frozen=True)
class Spread:
    """The median of some values and how far they lie apart."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Median with the lowest and highest value, or with the bounds of the middle half where there are many."""
        if len(values) < MANY:
            return cls(statistics.median(values), min(values), max(values), len(values))
        low, median, high = statistics.quantiles(values, n=4)
        return cls(median, low, high, len(values))

    @property
    def meaning(self) -> str:
        """What the two bounds are, in words."""
        return f"middle half of {self.count}" if self.count >= MANY else f"lowest, highest of {self.count}"

    def text(self, form: str = ".2f") -> str:
        """`median [low, high]`."""
        return f"{self.median:{form}} [{self.low:{form}}, {self.high:{form}}]"


def ratio(ours: Sequence[float], peer: Sequence[float]) -> Spread:
    """The spread of ours / peer, each taken within its round."""
    return Spread.of([mine / other for mine, other in zip(ours, peer, strict=True)])


@dataclass(frozen=True)
class Comparison:
    """One figure of several ways, each as a ratio to the peer."""

    what: str
    """What is compared, with its unit."""
    samples: Mapping[str, Sequence[float]]
    """Values by way, in the order of the rounds."""
    peer: str
    """The way that the others are divided by."""
    aims: Mapping[str, str] = field(default_factory=dict)
    """What each ratio should be, in words."""
    form: str = ".1f"
    """Format of a value."""

    def __str__(self) -> str:
        width = max(map(len, self.samples))
        lines = [f"{self.what}: median [{Spread.of(self.samples[self.peer]).meaning}], and the ratio to {self.peer}"]
        for way, values in self.samples.items():
            line = f"  {way:<{width}}  {Spread.of(values).text(self.form):<28}"
            if way != self.peer:
                line += f"  {ratio(values, self.samples[self.peer]).text('.3f')}"
                line += f"   (aim: {self.aims[way]})" if way in self.aims else ""
            lines.append(line.rstrip())
        return "\n".join(lines)

    def figures(self) -> dict[str, Any]:
        """The same for programs."""
        ways = {
            way: {"values": list(values), **asdict(Spread.of(values))}
            | ({} if way == self.peer else {"ratio": asdict(ratio(values, self.samples[self.peer]))})
            | ({"aim": self.aims[way]} if way in self.aims else {})
            for way, values in self.samples.items()
        }
        return {"what": self.what, "peer": self.peer, "ways": ways}


def take_turns(
    ways: Mapping[str, Callable[[], T]], rounds: int, say: Callable[[str, T], str] | None = None
) -> dict[str, list[T]]:
    """Runs every way once a round; the results by way. `say` makes a line of each, which is printed at once."""
    results: dict[str, list[T]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in list(ways)[:: -1 if number % 2 else 1]:
            result = ways[way]()
            results[way].append(result)
            if say:
                print(f"  round {number + 1}  {way}: {say(way, result)}", flush=True)
    return results


def machine(threads: str = "") -> dict[str, Any]:
    """Processor, cores, load, versions, commit and date; `threads` says in words how many a run uses."""
    # A benchmark's own children import this module, and what they import is measured.
    from raystride.pipelines.observability.record.environment import describe_environment

    found = describe_environment()
    return {
        "cpu": found["cpu"],
        "cores": found["cores"],
        "threads": threads,
        "gpus": [gpu["name"] for gpu in found["gpus"]],
        "load_before": round(os.getloadavg()[0], 1),
        "python": found["python"],
        "versions": found["versions"],
        "commit": found["commit"],
        "dirty": found["dirty"],
        "date": time.strftime("%Y-%m-%d"),
    }


def machine_line(found: Mapping[str, Any], packages: Sequence[str] = ("torch", "ray")) -> str:
    """What `machine` found, on two lines."""
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in packages if name in found["versions"])
    commit = f"{str(found['commit'])[:8]}{' with changes' if found['dirty'] else ''}"
    threads = f", {found['threads']}" if found["threads"] else ""
    return (
        f"{found['cpu']}, {found['cores']} cores{threads}, load {found['load_before']} before\n"
        f"Python {found['python']}, {versions}, commit {commit}, {found['date']}"
    )


def command_line(name: str, description: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """The parser of a benchmark with what all take: `--json`, and `--rounds` where a default is given."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"times that every way runs (default {rounds})")
    return parser


def report(given: argparse.Namespace, found: Mapping[str, Any], comparisons: Sequence[Comparison], **more: Any) -> None:
    """Prints the comparisons and, with `--json`, writes them with the machine, the options and what else there is."""
    for comparison in comparisons:
        print(f"\n{comparison}")
    if given.json:
        # Paths would say more of the machine than of the figure.
        options = {name: value for name, value in vars(given).items() if isinstance(value, bool | int | float)}
        content = {"machine": dict(found), "options": options, "figures": [each.figures() for each in comparisons], **more}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(content, indent=1) + "\n")
