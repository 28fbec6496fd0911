"""The committed table of compiled kernels (docs/kernels.md) beside what the code would launch and compile to now.

Run as a process of its own, since a test's own process has kernels that belong to the interpreter:

    python -m tests.triton_kernels.compiled                   # {"launches": [...], "launches_3_6": [...], "rows": [...]}
"""

import hashlib
import json
import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from raystride.triton_kernels.processes import end_with_parent

TABLE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
BY_TRITON_3_6 = TABLE.with_name("kernels-3.6.md")
"""What is shipped alone, by `make report-3.6`."""
KERNELS = TABLE.parents[1] / "triton_kernels"
Cells = list[str]
"""A row: the architecture, then what the table holds."""


def state() -> str:
    """What the result depends on, as digits: the kernels, the table, this file, Triton with its compilers, and Python."""
    import triton

    said = hashlib.sha256(f"{triton.__version__} {sys.version} {platform.machine()}".encode())
    for path in (TABLE, Path(__file__), *sorted(KERNELS.rglob("*.py"))):
        said.update(path.name.encode() + path.read_bytes())
    return said.hexdigest()[:16]


def table(page: Path = TABLE) -> list[Cells]:
    """The rows of a committed table."""
    rows, architecture = [], ""
    for line in page.read_text().splitlines():
        if line.startswith("## "):
            architecture = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| kernel |", "| --- |")):
            rows.append([architecture, *(cell.strip() for cell in line.strip("|").split("|"))])
    return rows


def sample(rows: list[Cells]) -> list[int]:
    """Of every kernel the row that takes the least time to compile, for sm_90 and one of the other architectures."""
    others = [architecture for architecture in dict.fromkeys(row[0] for row in rows) if architecture != "sm_90"]
    numbers = []
    for turn, kernel in enumerate(dict.fromkeys(row[1] for row in rows)):
        for architecture in ("sm_90", others[turn % len(others)]):
            of_it = [number for number, row in enumerate(rows) if row[:2] == [architecture, kernel]]
            numbers.append(min(of_it, key=lambda number: float(rows[number][-1])))
    return numbers


@cache
def _launches() -> list[Any]:
    """What the specimens launch, in the table's order."""
    from raystride.triton_kernels.architectures import ARCHITECTURES
    from raystride.triton_kernels.compile_report import record

    return [recorded for architecture in ARCHITECTURES for recorded in record(architecture)]


def _launches_before_3_7() -> list[Cells]:
    """What those that are shipped would launch with a Triton older than 3.7: its tiles, warps and stages."""
    from raystride.triton_kernels.architectures import ARCHITECTURES
    from raystride.triton_kernels.compile_report import record

    names = {"num_warps": "{} warps", "num_stages": "{} stages", "maxnreg": "{} registers at most"}
    with mock.patch("raystride.triton_kernels.configurations._before_3_7", return_value=True):
        found = [recorded for architecture in ARCHITECTURES for recorded in record(architecture, only_shipped=True)]
    return [[*_describe(one), *(names[key].format(n) for key, n in one.options if key in names)] for one in found]


def _describe(recorded: Any) -> Cells:
    """Architecture, kernel, label, and the constants that are block sizes."""
    blocks = [f"{name.removeprefix('BLOCK_').lower()} {value}" for name, value in recorded.constants if "BLOCK" in name]
    return [recorded.architecture, recorded.kernel.fn.__name__.strip("_").removesuffix("_kernel"), recorded.label, *blocks]


def _compile(number: int) -> Cells:
    from raystride.triton_kernels.compile_report import _cells, compile_recorded

    row = compile_recorded(_launches()[number])
    return [row.architecture, *_cells(row)]


def main() -> None:
    """Prints what would be launched, and the sample as compiled now."""
    launches, before_3_7 = [_describe(recorded) for recorded in _launches()], _launches_before_3_7()
    numbers = [number for number in sample(table()) if number < len(launches)]
    # Forked, they have the launches already.
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork"), initializer=end_with_parent) as pool:
        rows = list(pool.map(_compile, numbers))
    print(json.dumps({"launches": launches, "launches_3_6": before_3_7, "rows": rows}))


if __name__ == "__main__":
    main()
