"""Digests and a compiled sample of the current kernels, for comparison with the page `docs/kernels.md`.

It runs as a process of its own, since a test's own process has kernels that belong to the interpreter:

    python -m tests.triton_kernels.compiled     # {"digest": "e5...", "others": {"3.6": ["8b...", 1482], ...}, "rows": [...]}
"""

import hashlib
import json
import math
import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from raystride.triton_kernels.processes import end_with_parent

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
KERNELS = PAGE.parents[1] / "triton_kernels"


def state() -> str:
    """Returns a hash of the result's causes: the kernels, this file, Triton with its compilers, and Python."""
    import triton

    causes = hashlib.sha256(f"{triton.__version__} {sys.version} {platform.machine()}".encode())
    for path in (Path(__file__), *sorted(KERNELS.rglob("*.py")), *sorted(KERNELS.rglob("*.json"))):
        causes.update(path.name.encode() + path.read_bytes())
    return causes.hexdigest()[:16]


@cache
def _launches() -> list[Any]:
    """Returns the launches of all specimens that are shipped."""
    from benchmarks.kernel_tools.architectures import ARCHITECTURES
    from benchmarks.kernel_tools.compilation import record_launches

    return [recorded for architecture in ARCHITECTURES for recorded in record_launches(architecture, only_shipped=True)]


def _describe_launches_of(version: str) -> tuple[str, int]:
    """Returns the digest of the launches that another Triton would get, with its tiles, and their number for NVIDIA."""
    from benchmarks.kernel_tools.architectures import ARCHITECTURES
    from benchmarks.kernel_tools.compilation import digest_launches, record_launches

    with mock.patch("raystride.triton_kernels.configurations.triton_version", return_value=version):
        launches = [one for architecture in ARCHITECTURES for one in record_launches(architecture, only_shipped=True)]
    return digest_launches(launches), sum(ARCHITECTURES[one.architecture].backend == "cuda" for one in launches)


def sample(launches: list[Any]) -> list[int]:
    """Returns of every kernel the launch with the smallest tile, for sm_90 and for one of the other architectures."""
    others = [
        architecture for architecture in dict.fromkeys(one.architecture for one in launches) if architecture != "sm_90"
    ]
    numbers = []
    for turn, kernel in enumerate(dict.fromkeys(one.kernel.fn.__name__ for one in launches)):
        for architecture in ("sm_90", others[turn % len(others)]):
            chosen = [
                number
                for number, one in enumerate(launches)
                if (one.architecture, one.kernel.fn.__name__) == (architecture, kernel)
            ]
            numbers.append(min(chosen, key=lambda number: _tile_size(launches[number])))
    return numbers


def _tile_size(recorded: Any) -> int:
    return math.prod(int(block.split()[1]) for block in recorded.blocks)


def _compile(number: int) -> dict[str, Any]:
    from benchmarks.kernel_tools.compilation import compile_launch

    return asdict(compile_launch(_launches()[number]))


def main() -> None:
    """Prints digests of all launches, and the sample as compiled now."""
    from benchmarks.kernel_tools.compilation import digest_launches
    from raystride.triton_kernels.configurations import read_corrections, triton_version

    others = {name: _describe_launches_of(name) for name in read_corrections() if name != triton_version()}
    digests = {"digest": digest_launches(_launches()), "others": others}
    # Forked, they have the launches already.
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork"), initializer=end_with_parent) as pool:
        rows = list(pool.map(_compile, sample(_launches())))
    print(json.dumps({**digests, "rows": rows}))


if __name__ == "__main__":
    main()
