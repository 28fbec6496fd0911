"""Finds tiles for the cases of attention that spill with those of `configurations` under the installed Triton.

Each Triton allocates registers in its own way. All shipped kernels are compiled; where one has a fault, tiles of smaller
blocks, fewer stages or a higher bound of registers are tried, best guess of the cost model first, until no kernel of the
case has one. The result replaces this Triton's part of `tile_corrections.json`. No GPU is needed.

    python -m benchmarks.kernel_tools.tile_search --kept build/compiled
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing import get_context
from pathlib import Path

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported: interpreted kernels cannot be compiled

from benchmarks.kernel_tools.architectures import ARCHITECTURES
from benchmarks.kernel_tools.compilation import compile_launch, record_launches, record_specimens
from benchmarks.kernel_tools.compile_report import find_faults
from benchmarks.kernel_tools.tile_candidates import list_corrections
from raystride.triton_kernels import configurations
from raystride.triton_kernels.configurations import Tile, TileCase
from raystride.triton_kernels.processes import end_with_parent

_ATTEMPTS = 60
"""Tiles tried for a case: a second or two each."""


def find_correction(architecture: str, case: TileCase, labels: frozenset[str], kept: Path | None) -> Tile | None:
    """Returns a tile with which no kernel of a case, launched by the specimens with these labels, has a fault.

    None if the shipped tile has none. Raises RuntimeError if no tile is found.
    """
    for tried in [None, *list_corrections(case)[:_ATTEMPTS]]:
        with corrected_tile(case, tried or configurations.shipped_tile(case)):
            launches = record_specimens(
                architecture, lambda one: one.shipped and one.operation == "attention" and one.label in labels
            )
        if not any(find_faults(compile_launch(one, kept)) for one in launches if one.case == case):
            return tried
    raise RuntimeError(f"{architecture}: no tile without a fault for {case}")


def list_cases(architecture: str) -> dict[TileCase, frozenset[str]]:
    """Returns the cases of the shipped attention kernels, with the labels of the specimens that launch them."""
    labels: dict[TileCase, set[str]] = defaultdict(set)
    for launch in record_launches(architecture, "attention", only_shipped=True):
        if launch.case:
            labels[launch.case].add(launch.label)
    return {case: frozenset(found) for case, found in labels.items()}


def corrected_tile(case: TileCase, chosen: Tile) -> AbstractContextManager[None]:
    """Corrects the tile of a case inside the block."""
    return configurations.choosing_tiles(lambda one: chosen if one == case else None)


def write_corrections(corrections: dict[str, dict[TileCase, Tile]]) -> None:
    """Writes the corrections, one a line."""
    versions = []
    for version in sorted(corrections, key=configurations.version_key):
        rows = [json.dumps([case, chosen]) for case, chosen in sorted(corrections[version].items())]
        versions.append(f"{json.dumps(version)}: [" + ",".join(f"\n  {row}" for row in rows) + "\n]")
    configurations.CORRECTIONS.write_text("{\n" + ",\n".join(versions) + "\n}\n")


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes the corrections; 1 if a case has no tile without a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel_tools.tile_search", description=__doc__.split("\n")[0]
    )  # type: ignore[union-attr]
    parser.add_argument(
        "--kept", type=Path, help="folder of earlier results: kernels that have not changed are not compiled"
    )
    parser.add_argument("--processes", type=int, help="compilers side by side; default: as many as processors")
    options = parser.parse_args(arguments)
    version, corrections, failed = configurations.triton_version(), configurations.read_corrections(), 0
    before = corrections.get(version, {})
    cases = [
        (name, case, labels)
        for name, architecture in ARCHITECTURES.items()
        if architecture.backend == "cuda"
        for case, labels in list_cases(name).items()
    ]
    found: dict[TileCase, Tile] = {}
    with ProcessPoolExecutor(options.processes or os.cpu_count(), get_context("spawn"), initializer=end_with_parent) as pool:
        running = [(one[1], pool.submit(find_correction, *one, options.kept)) for one in cases]
        for number, (case, future) in enumerate(running, 1):
            try:
                chosen = future.result()
            except RuntimeError as error:
                failed += 1
                print(error, file=sys.stderr)
                continue
            if chosen:
                found[case] = chosen
                print(f"{number}/{len(running)}  {case}: {configurations.shipped_tile(case)} -> {chosen}", flush=True)
    write_corrections(corrections | {version: found})
    changed = sum(before.get(case) != found.get(case) for case in before | found)
    print(f"Triton {version}: {len(found)} corrections, {changed} changed, {failed} cases without a tile")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
