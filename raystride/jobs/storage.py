"""Lists what lies in a storage, with sizes, newest changes and the runs that use each; nothing is changed.

    raystride storage --storage runs           # runs, trials, exports, prepared data, MLflow's files; caches of this machine
    raystride storage --storage s3://bucket/runs --json

Exit codes: 0 done, 2 there is no such storage, 3 it cannot be read.
"""

import argparse
from collections.abc import Sequence

from raystride.pipelines.launch.console.exit_codes import DONE
from raystride.pipelines.launch.run_store.contents import show_storage
from raystride.pipelines.system.storage.folder import Folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    given = build_parser().parse_args(arguments)
    show_storage(Folder.from_uri(given.storage), as_json=given.json)
    return DONE


def build_parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    parser = argparse.ArgumentParser(
        prog="raystride storage",
        description="Lists what lies in a storage, the largest first: size, files, newest change, and the runs that use it. "
        "Trials of a sweep are one row. Nothing is changed.",
    )
    parser.add_argument("--storage", default="runs", help="folder or URI that the runs lie in")
    parser.add_argument("--json", action="store_true", help="one JSON object, with every trial and file of MLflow by itself")
    return parser
