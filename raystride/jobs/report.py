"""Rebuilds a run's HTML report from its journal: curves, time per phase, suggestions.

    python ray_jobs/report.py --run my-run --storage runs

Exit codes: 0 done, 2 no such run, 3 its summary is not as it was written.
"""

import argparse
import sys
from collections.abc import Sequence
from shlex import quote

from raystride.pipelines.config.stored_run import missing_run
from raystride.pipelines.launch.console.exit_codes import DONE, WRONG_SETTINGS
from raystride.pipelines.launch.run_store.commands import run_names
from raystride.pipelines.observability.record.journal import stream_entries
from raystride.pipelines.observability.record.summary import read_summary
from raystride.pipelines.observability.report import gather_figures, write_page
from raystride.pipelines.system.commands import launch_command, shell_command, storage_flag
from raystride.pipelines.system.storage.folder import Folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, writes the report and prints its path; returns the exit code."""
    parser = argparse.ArgumentParser(prog="raystride report", description="Builds a run's page anew from its journal.")
    parser.add_argument("--run", required=True, help="the run's name")
    parser.add_argument("--storage", default="runs", help="folder or URI that the run lies in (default: runs)")
    given = parser.parse_args(arguments)
    return _report(given.run, given.storage)


def _report(run: str, uri: str) -> int:
    folder = Folder.from_uri(uri) / run
    if not folder.exists():
        raise missing_run(folder.parent, run, run_names(folder.parent))
    figures = gather_figures(stream_entries(folder))
    if figures.began is None:
        print(f"error: run {run} has no journal in {folder}, so there is nothing to report", file=sys.stderr)
        return WRONG_SETTINGS
    summary = read_summary(folder) or {"run": run, "status": "not ended"}
    write_page(folder, figures, summary)
    storage = str(Folder.from_uri(uri))
    print(f"results  {folder / 'report.html'}")
    print(f"mlflow   {shell_command('ui', storage=storage)}")
    show = f"{launch_command()} runs show {quote(run)} {storage_flag(storage)}"
    print(f"next     open the page in a browser, or {show}".rstrip())
    return DONE
