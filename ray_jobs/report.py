"""Builds a run's page anew from its journal: curves, where the time went, what to try next.

    python ray_jobs/report.py --run my-run --storage runs

Exit codes: 0 done, 2 no such run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["report", *sys.argv[1:]]))

from raystride.pipelines.commands import of_storage, pasted, program
from raystride.pipelines.files import Folder
from raystride.pipelines.record.journal import stream_entries
from raystride.pipelines.report import gather_figures, write_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, writes the page and says where it is; the exit code."""
    parser = argparse.ArgumentParser(prog="raystride report", description="Builds a run's page anew from its journal.")
    parser.add_argument("--run", required=True, help="the run's name")
    parser.add_argument("--storage", default="runs", help="folder or URI that the run lies in (default: runs)")
    given = parser.parse_args(arguments)
    folder = Folder.at(given.storage) / given.run
    figures = gather_figures(stream_entries(folder) if folder.exists() else ())
    if figures.began is None:
        print(f"error: there is no journal of a run in {folder}. Is --storage right?", file=sys.stderr)
        return 2
    try:
        summary = dict(folder.read_json("summary.json"))
    except (FileNotFoundError, ValueError):
        summary = {"run": given.run, "status": "not ended"}
    write_page(folder, figures, summary)
    storage = str(Folder.at(given.storage))
    print(f"results  {folder / 'report.html'}")
    print(f"mlflow   {pasted('ui', storage=storage)}")
    print(f"next     open the page in a browser, or {program()} runs show {quote(given.run)} {of_storage(storage)}".rstrip())
    return 0
