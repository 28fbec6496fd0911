"""Lists the configurations that come along, or prints one to copy.

    raystride presets                                     # a table
    raystride presets lm_python > mine.yaml               # --full: with all settings

Exit codes: 0 done, 2 no such preset.
"""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import yaml

from raystride.pipelines.config.config import Config
from raystride.pipelines.config.parse import load_settings, to_yaml
from raystride.pipelines.config.presets import COLUMNS, describe_preset, presets
from raystride.pipelines.config.sweep import SweepJobConfig


def main(arguments: Sequence[str]) -> int:
    """Prints a table of the presets, or one of them as YAML; returns the exit code."""
    parser = argparse.ArgumentParser(prog="raystride presets", description="List the presets, or print one as YAML to copy.")
    parser.add_argument("name", nargs="?", help="preset to print")
    parser.add_argument("--full", action="store_true", help="print all settings with their values, not the preset's alone")
    args = parser.parse_args(arguments)
    if args.name is None:
        _print_table()
        return 0
    if args.name not in presets():
        similar = get_close_matches(args.name, presets(), 1)
        meant = f"did you mean {similar[0]}?" if similar else f"presets are {', '.join(presets())}"
        print(f"error: unknown preset {args.name!r}; {meant}", file=sys.stderr)
        return 2
    file = presets()[args.name]
    print(_with_all_settings(file) if args.full else file.read_text(), end="")
    return 0


def _print_table() -> None:
    rows = [describe_preset(file) for file in presets().values()]
    cells = [("preset", *COLUMNS), *((row.name, row.task, row.size, row.data, row.hardware) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print("\nraystride presets NAME                 prints its file, to copy")
    print("raystride train --config NAME          trains it; data of your own: --data.source FILE_OR_FOLDER")


def _with_all_settings(file: Path) -> str:
    is_sweep = "sweep" in yaml.safe_load(file.read_text())
    return to_yaml(load_settings(SweepJobConfig if is_sweep else Config, file.stem).settings)
