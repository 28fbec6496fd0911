"""Lists, shows, compares, prunes and audits runs, and brings MLflow up to date with a run's journal.

    raystride runs list --storage runs
    raystride runs compare one two three            # side by side here, and the link to MLflow's comparison
    raystride runs prune my-run --keep 1            # shows what it frees; --all removes the whole run
    raystride runs replay my-run                    # after MLflow was away
    raystride runs audit my-run                     # every sample once an epoch: is it true?

Exit codes: 0 done, 1 MLflow still cannot be reached or the audit fails, 2 no such run or one that may not be touched.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from raystride.pipelines.commands import pasted
from raystride.pipelines.config.run import Record
from raystride.pipelines.config.section import SettingError
from raystride.pipelines.credentials import MissingSecret, hidden
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.owner import Owner, read_owner
from raystride.pipelines.launch.resume import read_earlier
from raystride.pipelines.record.journal import join, stream_entries
from raystride.pipelines.record.links import UI_PORT, comparison_link, on_a_server, runs_link
from raystride.pipelines.record.mlflow_follower import Follower
from raystride.pipelines.record.mlflow_log import MLFLOW_REFERENCE, MlflowLog, stored_uri
from raystride.pipelines.record.summary import RunSummary
from raystride.pipelines.report import closing_screen, gather_figures, text_curve
from raystride.pipelines.report.closing import figures
from raystride.pipelines.train.names import checkpoint_names


class Refused(Exception):
    """What was asked for cannot be done; the message says why and what to do."""


@dataclass(frozen=True)
class StoredRun:
    """A run as its folder tells it; figures are None where the run did not get that far."""

    name: str
    folder: Folder
    summary: RunSummary
    owner: Owner | None
    """The living process that trains it."""

    @property
    def status(self) -> str:
        """`running`, how it ended, or `interrupted` where it ended without saying so."""
        return "running" if self.owner else str(self.summary.get("status") or "interrupted")

    @property
    def reference(self) -> dict[str, Any]:
        """Which MLflow run it is, and on which server; empty where MLflow has not heard of it."""
        return dict(self.folder.read_json(MLFLOW_REFERENCE)) if self.folder.exists(MLFLOW_REFERENCE) else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code."""
    given = _parser().parse_args(arguments)
    storage = Folder.at(given.storage)
    try:
        return int(given.action(storage, given) or 0)
    except (Refused, SettingError, MissingSecret) as refusal:
        print(hidden(str(refusal)), file=sys.stderr)
        return 2


def list_runs(storage: Folder, given: argparse.Namespace) -> None:
    """Prints a table of all runs, the newest last."""
    from rich.table import Table

    runs = sorted((find_run(storage, name) for name in run_names(storage)), key=lambda run: _when(run.folder) or "")
    if not runs:
        print(f"no runs in {storage}")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("run", "status", "steps", "loss", "val loss", "tokens/s", "when"):
        table.add_column(title, justify="left" if title in ("run", "status", "when") else "right", no_wrap=True)
    for run in runs:
        figures = (("steps", ",d"), ("train_loss", ".4f"), ("val_loss", ".4f"), ("tokens_per_second", ",.0f"))
        cells = [_figure(run.summary.get(key), form) for key, form in figures]
        table.add_row(run.name, run.status, *cells, _when(run.folder) or "-")
    _print(table)


def compare_runs(storage: Folder, given: argparse.Namespace) -> None:
    """Prints the figures of several runs, and the settings in which they differ, side by side; links MLflow's comparison.

    Raises Refused where fewer than two are named, or one of them is not there.
    """
    from rich.table import Table

    runs = [find_run(storage, name) for name in dict.fromkeys(given.runs)]
    if len(runs) < 2:
        raise Refused(f"compare is given one run, {runs[0].name}: name at least two")
    settings = [_settings(run) for run in runs]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", *(run.name for run in runs)):
        table.add_column(title, overflow="fold")
    for label, *cells in _rows([figures(run.summary | {"status": run.status}) for run in runs]):
        table.add_row(label, *cells)
    for label, *cells in _rows(settings):
        if len(set(cells)) > 1:
            table.add_row(label, *cells)
    _print(table)
    references = [run.reference for run in runs]
    link = comparison_link(references, given.port)
    if link is None:
        print("mlflow   has no page that compares them: it lacks one of them, or they are on different servers")
        return
    print(f"mlflow   {link}")
    print(f"         {runs_link(references[0], given.port)}   (all runs)")
    if not on_a_server(references[0]):
        port = "" if given.port == UI_PORT else f" --port {given.port}"
        print(f"         while this runs: {pasted('ui', storage=str(storage))}{port}")


def show_run(storage: Folder, given: argparse.Namespace) -> None:
    """Prints a run's curve, sample, figures and where it lies. Raises Refused where there is no such run."""
    run = find_run(storage, given.run)
    curve = text_curve(*gather_figures(stream_entries(run.folder)).losses)
    sample = run.folder.read("sample.txt").decode(errors="replace") if run.folder.exists("sample.txt") else ""
    summary = run.summary | {"status": run.status, "mlflow_run_id": run.reference.get("run_id")}
    print(closing_screen(summary, run.folder, curve, sample))


def prune_run(storage: Folder, given: argparse.Namespace) -> None:
    """Removes old checkpoints' data, never their manifests; with `--all` the run's whole folder.

    Raises Refused where there is no such run, or a driver still owns it.
    """
    run = find_run(storage, given.run)
    if run.owner:
        raise Refused(f"{run.name} is owned by process {run.owner.pid} on {run.owner.host}: stop it first")
    if given.all:
        freed = folder_size(run.folder)
        run.folder.remove()
        print(f"removed {run.folder}: {_bytes(freed)} freed")
        return
    checkpoints = run.folder / "checkpoints"
    with_data = [step for step in checkpoint_names(checkpoints.names()) if _data_folders(checkpoints / step)]
    hinted = {_hint(checkpoints, name) for name in ("best", "last")}
    kept = set(with_data[-given.keep :]) | hinted
    freed = 0
    for step in with_data:
        if step in kept:
            continue
        for attempt in _data_folders(checkpoints / step):
            freed += folder_size(checkpoints / step / attempt)
            (checkpoints / step).remove(attempt)
        print(f"removed the data of {step}")
    print(f"{_bytes(freed)} freed; {len([step for step in with_data if step in kept])} checkpoints left in {run.folder}")


def replay_run(storage: Folder, given: argparse.Namespace) -> int:
    """Logs to MLflow what it lacks of a run's journal, and how the run ended; the exit code.

    Raises Refused where there is no such run, it is running, it has no journal, or no MLflow is named.
    """
    run = find_run(storage, given.run)
    if run.owner:
        raise Refused(f"{run.name} is running, and replays by itself as soon as MLflow answers")
    earlier = read_earlier(run.folder)
    asked = earlier.config.record if earlier else Record()  # where a server has never answered, there is no reference to it
    uri = given.mlflow_uri or stored_uri(run.reference) or asked.mlflow_uri
    settings = Record(mlflow_uri=uri, experiment=given.experiment or asked.experiment)
    log = MlflowLog.at(run.folder, run.name, settings, storage)
    if log is None:
        raise Refused(f"--mlflow-uri is not given, and {storage} holds no database: name the tracking server")
    last = join(run.folder)
    if last is None:
        raise Refused(f"{run.folder} has no journal: there is nothing to replay")
    try:
        Follower(run.folder, log, warn=print).catch_up()
        # The time of its last entry, since the run has not ended just now.
        log.finish(run.summary.get("status") or "stopped", float(last["time"]))
    except Exception as error:
        cause = hidden(f"{type(error).__name__}: {error}")
        print(f"MLflow at {log.public_uri} cannot be reached ({cause})", file=sys.stderr)
        return 1
    print(f"MLflow has all of {run.name}, run {log.run_id}")
    return 0


def audit_run(storage: Folder, given: argparse.Namespace) -> int:
    """Proves from the checkpoints alone that every sample was used exactly once an epoch; the exit code.

    Raises Refused where there is no such run.
    """
    from raystride.pipelines.record.audit import main as audit

    find_run(storage, given.run)
    return audit([given.run, "--storage", storage.uri])


def run_names(storage: Folder) -> list[str]:
    """Names of the folders of a storage that hold a run."""
    names_of_a_run = ("config.yaml", "journal", "summary.json", "checkpoints", "owner.json")
    names = [name for name in storage.names() if not name.startswith(".")]
    return [name for name in names if set((storage / name).names()) & set(names_of_a_run)]


def find_run(storage: Folder, name: str) -> StoredRun:
    """The run of that name. Raises Refused where there is none."""
    if name not in run_names(storage):
        known = ", ".join(run_names(storage)[-10:]) or "none"
        raise Refused(f"there is no run {name!r} in {storage} (there is: {known})")
    folder = storage / name
    try:
        summary = folder.read_json("summary.json")
    except (FileNotFoundError, ValueError):
        summary = {}
    owner = read_owner(folder)
    return StoredRun(name, folder, summary, owner if owner and owner.alive else None)


def folder_size(folder: Folder) -> int:
    """Bytes of all files below a folder."""
    return sum(folder.sizes(temporary=True).values())


def _data_folders(step: Folder) -> list[str]:
    """A checkpoint's data, a folder for each attempt that saved it."""
    return [name for name in step.names() if not name.endswith(".json")]


def _hint(checkpoints: Folder, name: str) -> str | None:
    """The step that the file `best` or `last` names."""
    try:
        return checkpoints.read(name).decode().strip()
    except FileNotFoundError:
        return None


def _when(folder: Folder) -> str | None:
    """When the run's newest journal segment (or summary) was written, where the storage is local."""
    if folder.local is None:
        return None
    files = [*(folder.local / "journal").glob("*.jsonl"), *folder.local.glob("*.json"), *folder.local.glob("*.yaml")]
    return max((datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M") for path in files), default=None)


def _settings(run: StoredRun) -> dict[str, str]:
    """The run's settings under their full names, without those in which all runs differ."""
    earlier = read_earlier(run.folder)
    flat = earlier.config.flat() if earlier else {}
    return {key: str(value) for key, value in flat.items() if key not in ("run", "storage")}


def _rows(columns: list[dict[str, str]]) -> list[list[str]]:
    """Columns as rows, each after its label; what a column lacks is a dash."""
    labels = dict.fromkeys(label for column in columns for label in column)
    return [[label, *(column.get(label, "-") for column in columns)] for label in labels]


def _print(table: Any) -> None:
    from rich.console import Console

    # Where nobody looks at a terminal, names must not be cut to 80 columns.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _figure(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form) if isinstance(value, int | float) else str(value)


def _bytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="raystride runs", description="Lists, shows, compares, prunes and replays runs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, action: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        if name == "compare":
            made.add_argument("runs", metavar="RUN", nargs="+", help="the runs' names")
        elif name != "list":
            made.add_argument("run", metavar="RUN", help="the run's name")
        made.add_argument("--storage", default="runs", help="folder or URI that the runs lie in")
        made.set_defaults(action=action)
        return made

    command("list", list_runs, "a table of all runs")
    command("show", show_run, "a run's curve, figures and place")
    compare = command("compare", compare_runs, "several runs side by side, and the link to MLflow's comparison of them")
    compare.add_argument("--port", type=int, default=UI_PORT, help="port of MLflow's UI on this machine")
    command("audit", audit_run, "prove that a run used every sample exactly once an epoch")
    prune = command("prune", prune_run, "remove old checkpoints' data; their manifests stay")
    what = prune.add_mutually_exclusive_group()
    what.add_argument("--keep", type=_at_least_one, default=1, help="newest checkpoints to keep, besides `best` and `last`")
    what.add_argument("--all", action="store_true", help="remove the run with all that it holds")
    replay = command("replay", replay_run, "log to MLflow what it lacks of a run's journal")
    replay.add_argument("--mlflow-uri", help="tracking server; when not given, the one that the run was logged to")
    replay.add_argument("--experiment", help="experiment, where the run is not in MLflow yet; when not given, the run's own")
    return parser
