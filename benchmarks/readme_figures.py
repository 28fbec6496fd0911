"""The table of figures in README.md, from the files in `benchmarks/results` that the benchmarks wrote with `--json`.

A row is there only where its file is; it says processor, date, rounds and what is not equal on both sides.

    python -m benchmarks.readme_figures                        # writes the table into README.md
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures: python -m benchmarks.readme_figures -->", "<!-- end of figures -->"
Values = Callable[[str, str], list[float]]
"""(figure, way) -> the values of the rounds, from a file of results."""


@dataclass(frozen=True)
class Row:
    """A row: the figure of ours beside those of others."""

    what: str
    """What is measured, its unit, and what differs between the sides."""
    file: str
    """Name of the results, without its ending."""
    figure: str
    ours: Mapping[str, str]
    """Ways of ours by what is said of them."""
    others: Mapping[str, str]
    """Ways of others likewise."""
    form: str = ",.0f"
    command: str = ""
    """Command, if it is not the file's name."""


_SAME, _MEASURED, _AUTO = "fp32 with PyTorch's products", "fp32 as measured fastest", "`precision auto`"
_STEP_OURS = {"ours, PyTorch's products": _SAME, "ours, fp32": _MEASURED, "ours, auto": _AUTO}
_PLAIN_LOOP = {"plain loop": "plain loop in fp32", "plain loop, bf16 by autocast": "bf16 by autocast"}
_PLAIN_STEP = {"plain PyTorch": "PyTorch in fp32", "plain PyTorch, bf16 by autocast": "bf16 by autocast"}
ROWS = (
    Row(
        "nanoGPT's small network, tokens/s, inline, 2 threads; ours logs to MLflow meanwhile and keeps freed memory",
        "training",
        "tokens a second",
        {"inline, PyTorch's products": _SAME, "inline, fp32": _MEASURED, "inline": _AUTO},
        _PLAIN_LOOP,
    ),
    Row(
        "the same under Ray, one worker",
        "training",
        "tokens a second",
        {"Ray, 1 worker": _AUTO},
        _PLAIN_LOOP,
    ),
    Row(
        "the step alone, in one process, ms; memory is kept for both",
        "step",
        "nanogpt: milliseconds, step",
        _STEP_OURS,
        _PLAIN_STEP,
        ".1f",
    ),
    Row(
        "ten million parameters, the step alone, ms",
        "step",
        "10m: milliseconds, step",
        _STEP_OURS,
        _PLAIN_STEP,
        ",.0f",
    ),
    Row(
        "the small network beside other trainers, tokens/s, 2 threads; ours by `precision auto` (bf16 there), peers in fp32",
        "peers",
        "speed 1",
        {"inline": ""},
        {"torch": "PyTorch", "hf_trainer": "HF Trainer", "lightning": "Lightning", "nanogpt": "nanoGPT"},
    ),
    Row(
        "LoRA on SmolLM2-135M, tokens/s, fp32",
        "peers",
        "tuning",
        {"inline": ""},
        {"hf_trainer": "PEFT's Trainer", "torch": "plain PyTorch with PEFT", "trl": "TRL"},
    ),
    Row(
        "a new cluster, to the first step of two workers, seconds",
        "startup",
        "seconds from the start of the process to the first step, on a cluster of its own",
        {"lean": "", "inline": "inline"},
        {"stock TorchTrainer": "Ray's TorchTrainer"},
        ".1f",
    ),
    Row(
        "a job killed and started again, to its next step, seconds; checkpoints are exact",
        "peers",
        "resume",
        {"inline": "inline", "ray": "on Ray"},
        {
            "torch": "PyTorch, repeating data",
            "hf_trainer": "HF Trainer",
            "torch_trainer": "Ray's TorchTrainer, repeating data",
        },
        ".1f",
    ),
    Row(
        "a worker killed, to the end of the next step on Ray, seconds",
        "recovery",
        "recoveries",
        {"a worker killed": ""},
        {},
        ".1f",
        "python -m benchmarks.recovery --only worker",
    ),
    Row(
        "labels of 10,000 texts by a small BERT, texts/s, fp32",
        "scoring",
        "texts a second",
        {"ours, a list": ""},
        {"transformers": "`transformers` pipeline", "transformers, sorted": "with texts sorted by length"},
    ),
    Row(
        "our loop with every observer and MLflow, steps/s",
        "loop",
        "steps a second",
        {"ours, observed": ""},
        {"ours, no observers": "without them", "bare loop": "a bare loop"},
        ".1f",
    ),
)


def table() -> str:
    """Returns the table of the rows whose files are there."""
    lines = ["| figure | ours | beside | measured | command |", "| --- | --- | --- | --- | --- |"]
    for row in ROWS:
        if (ROOT / "benchmarks" / "results" / f"{row.file}.json").exists():
            ours = "; ".join(_cells(row, row.ours, with_spread=True))
            others = "; ".join(_cells(row, row.others, with_spread=False))
            command = row.command or f"python -m benchmarks.{row.file}"
            lines.append(f"| {row.what} | {ours} | {others} | {_measured(row)} | `{command}` |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Returns a page with the table as it is now, between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def _cells(row: Row, ways: Mapping[str, str], *, with_spread: bool) -> Iterator[str]:
    values = _reader(row.file)
    for way, name in ways.items():
        found = values(row.figure, way)
        number = format(statistics.median(found), row.form)
        if with_spread and len(found) > 1:
            number += f" [{min(found):{row.form}}, {max(found):{row.form}}]"
        yield f"{name}: {number}" if name else number


def _measured(row: Row) -> str:
    found = _load(row.file)["machine"]
    rounds = {len(_reader(row.file)(row.figure, way)) for way in (*row.ours, *row.others)}
    count = f"{min(rounds)}" if len(rounds) == 1 else f"{min(rounds)} to {max(rounds)}"
    cpu = found["cpu"].replace("(R)", "").replace(" Processor", "")
    return f"{cpu}, {found['date']}, rounds: {count}"


@cache
def _load(file: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text()))


def _reader(file: str) -> Values:
    return partial({"peers": _of_peers, "recovery": _of_recovery}.get(file, _of_comparison), _load(file))


def _of_comparison(content: Mapping[str, Any], figure: str, way: str) -> list[float]:
    (found,) = (each for each in content["figures"] if each["what"] == figure)
    return [float(value) for value in found["ways"][way]["values"]]


def _of_peers(content: Mapping[str, Any], figure: str, way: str) -> list[float]:
    return [each["figures"][figure] for each in content["results"] if each["way"] == way and figure in each["figures"]]


def _of_recovery(content: Mapping[str, Any], figure: str, way: str) -> list[float]:
    return [sum(each.values()) for each in content[figure][way]]


if __name__ == "__main__":
    README = ROOT / "README.md"
    README.write_text(with_table(README.read_text()))
