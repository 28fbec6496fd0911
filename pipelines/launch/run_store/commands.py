"""Verbs of the command `raystride runs`: list, show, compare, replay and audit the runs of a storage.

storage = Folder.from_uri("runs")
list_runs(storage)
compare_runs(storage, ["one", "two"])           # side by side here, and the link to MLflow's comparison
replay_run(storage, "my-run")                   # after MLflow was unreachable
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from raystride.pipelines.config.attempts import read_environment
from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.config.stored_run import missing_run
from raystride.pipelines.launch.run_store.lease import Owner, RunLease, RunLocked, new_attempt, read_owner, watch_owners
from raystride.pipelines.launch.run_store.resume import read_previous_attempt
from raystride.pipelines.observability.record.journal import refuse_newer_entries, stream_entries
from raystride.pipelines.observability.record.mlflow.database import end_killed_runs, stored_uri
from raystride.pipelines.observability.record.mlflow.follower import replay
from raystride.pipelines.observability.record.mlflow.links import UI_PORT, comparison_link, is_on_server, runs_link
from raystride.pipelines.observability.record.mlflow.log import MlflowLog, read_reference
from raystride.pipelines.observability.record.state import summarize_journal
from raystride.pipelines.observability.record.summary import RunSummary, read_summary
from raystride.pipelines.observability.record.usage import charged_seconds, with_earlier_attempts
from raystride.pipelines.observability.report import closing_screen, gather_figures, text_curve
from raystride.pipelines.observability.report.closing import format_figures
from raystride.pipelines.observability.report.run_figures import list_metrics, list_run_figures
from raystride.pipelines.system.commands import shell_command
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken

FILES_OF_A_RUN = ("config.yaml", "journal", "summary.json", "checkpoints", "owner.json")
"""Files and folders of which one at least is in the folder of a run or sweep."""


class CommandRefused(SettingError):
    """The command cannot be executed; the message gives the reason and the remedy."""


@dataclass(frozen=True)
class StoredRun:
    """A run as stored in its folder; figures are None if the run did not get that far."""

    name: str
    folder: Folder
    summary: RunSummary
    owner: Owner | None
    """The process that its lease names, unless that is known to be dead."""

    @property
    def status(self) -> str:
        """That of its owner, else of its summary (`damaged` if that is), or `interrupted` if it ended without one."""
        return self.owner.status if self.owner else str(self.summary.get("status") or "interrupted")

    @property
    def owner_name(self) -> str:
        """Whom it is charged to, "" if that is not known, as of runs of 0.3."""
        try:
            return str(self.summary.get("owner") or read_environment(self.folder).get("owner") or "")
        except (OSError, ValueError):
            return ""

    @property
    def charged(self) -> tuple[float, float] | None:
        """Seconds of workers and of GPUs of all attempts; None if the journal does not say how many workers there were."""
        usage = self.summary.get("usage") or {}
        if self.owner or self.status == "interrupted" or not usage:
            try:
                usage = with_earlier_attempts(self.folder, usage)
            except OSError:
                return None
        seconds = charged_seconds(usage)
        return (seconds["worker_seconds"], seconds["gpu_seconds"]) if seconds else None

    @property
    def mlflow_reference(self) -> dict[str, Any]:
        """Id and server of its MLflow run; empty if MLflow does not know it. Raises SealBroken with the remedy."""
        return read_reference(self.folder)


def list_runs(storage: Folder, *, by: str | None = None, since_s: float | None = None) -> None:
    """Prints a table of all runs, newest last; or one row for each owner, with the time of all of its runs.

    `since_s`: only runs that were written in so many seconds, by the storage's times. Raises CommandRefused if there is no
    storage.
    """
    runs = [_read_run(storage / name, name) for name in run_names(storage)]
    end_killed_runs_in_mlflow(storage)
    if not runs and not storage.exists():
        raise CommandRefused(f"there is no storage {storage}: --storage names the folder that holds the runs")
    written = {run.name: _last_written(run.folder) for run in runs}
    if since_s is not None:
        earliest = storage.clock() - since_s
        runs = [run for run in runs if (written[run.name] or 0.0) >= earliest]
    if not runs:
        print(f"no runs in {storage}{'' if since_s is None else ' that were written since'}")
        return
    runs.sort(key=lambda run: written[run.name] or 0.0)
    print_table(_table_of_owners(runs) if by == "owner" else _table_of_runs(runs, written))


def _table_of_runs(runs: Sequence["StoredRun"], written: Mapping[str, float | None]) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("run", "status", "steps", "metric", "val loss", "train loss", "tokens/s", "owner", "when"):
        justify = "left" if title in ("run", "status", "metric", "owner", "when") else "right"
        table.add_column(title, justify=cast(Any, justify), no_wrap=True)
    for run in runs:
        texts = {figure.key: figure.text for figure in list_run_figures(run.summary)}
        own = [f"{figure.label} {figure.text}" for figure in list_metrics(run.summary)]
        cells = [texts.get(key, "-") for key in ("val_loss", "train_loss", "tokens_per_second")]
        time = written[run.name]
        when = "-" if time is None else datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M")
        table.add_row(
            run.name, run.status, texts.get("steps", "-"), next(iter(own), "-"), *cells, run.owner_name or "-", when
        )
    return table


def _table_of_owners(runs: Sequence["StoredRun"]) -> Any:
    """Returns a table of whom runs are charged to; a sweep's trials are runs. Of 0.3 no time is known."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("owner", "runs", "worker hours", "GPU hours", "unknown"):
        table.add_column(title, justify="left" if title == "owner" else "right", no_wrap=True)
    by_owner = defaultdict[str, list[StoredRun]](list)
    for run in runs:
        by_owner[run.owner_name].append(run)
    charged = {owner: [run.charged for run in owned_runs] for owner, owned_runs in by_owner.items()}
    for owner, found in sorted(charged.items(), key=lambda item: -sum(seconds[0] for seconds in item[1] if seconds)):
        known = [seconds for seconds in found if seconds]
        hours = [f"{sum(column) / 3600:,.2f}" for column in zip(*known, strict=True)] or ["-", "-"]
        table.add_row(owner or "-", str(len(found)), *hours, str(len(found) - len(known)) if len(known) < len(found) else "")
    return table


def compare_runs(storage: Folder, names: Sequence[str], port: int = UI_PORT) -> None:
    """Prints figures and differing settings of several runs side by side, with a link to MLflow's comparison.

    Raises CommandRefused if fewer than two are named, or one does not exist.
    """
    from rich.table import Table

    runs = [find_run(storage, name) for name in dict.fromkeys(names)]
    if len(runs) < 2:
        raise CommandRefused(f"compare is given one run, {runs[0].name}: name at least two")
    settings = [_flat_settings(run) for run in runs]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", *(run.name for run in runs)):
        table.add_column(title, overflow="fold")
    for label, *cells in _to_rows([format_figures(run.summary | {"status": run.status}) for run in runs]):
        table.add_row(label, *cells)
    for label, *cells in _to_rows(settings):
        if len(set(cells)) > 1:
            table.add_row(label, *cells)
    print_table(table)
    references = [run.mlflow_reference for run in runs]
    link = comparison_link(references, port)
    if link is None:
        print("mlflow   has no page that compares them: it lacks one of them, or they are on different servers")
        return
    print(f"mlflow   {link}")
    print(f"         {runs_link(references[0], port)}   (all runs)")
    if not is_on_server(references[0]):
        port_flag = "" if port == UI_PORT else f" --port {port}"
        print(f"         while this runs: {shell_command('ui', storage=str(storage))}{port_flag}")


def show_run(storage: Folder, name: str) -> None:
    """Prints a run's curve, sample, figures and path. Raises CommandRefused if there is no such run."""
    run = find_run(storage, name)
    figures = gather_figures(stream_entries(run.folder))
    for damage in figures.damages:
        print(f"warning: the journal is damaged: {damage}", file=sys.stderr)
    sample = run.folder.read("sample.txt").decode(errors="replace") if run.folder.exists("sample.txt") else ""
    summary = run.summary | {"status": run.status, "mlflow_run_id": run.mlflow_reference.get("run_id")}
    print(closing_screen(summary, run.folder, text_curve(*figures.losses), sample))


@contextmanager
def owned(folders: Sequence[Folder], log: Callable[[str], None] | None = None) -> Iterator[list[RunLease]]:
    """Owns runs for the block; their owners on other machines are watched at once, for one lease in all.

    With `log`, runs that another process owns are left out, with a line. Raises CommandRefused for one without it.
    """
    left, silent = list(folders), dict[str, Owner]()
    with ExitStack() as held:
        while True:
            try:
                silent = watch_owners(left, log_to_stderr)
                break
            except RunLocked as locked:
                left = [folder for folder in left if folder.name != locked.value]
                _refuse_or_log(locked, log)
        leases = []
        for folder in left:
            try:
                lease = RunLease.acquire(folder, new_attempt(), log_to_stderr, silent=silent.get(folder.uri))
                leases.append(held.enter_context(lease))
            except RunLocked as locked:
                _refuse_or_log(locked, log)
        yield leases


def _refuse_or_log(locked: RunLocked, log: Callable[[str], None] | None) -> None:
    owner = locked.owner
    who = f"{locked.value} is owned by process {owner.pid} on {owner.host}" if owner else str(locked)
    if log is None:
        raise CommandRefused(f"{who}: stop it first") from None
    log(who)


def log_to_stderr(text: str) -> None:
    """Prints a line to standard error at once."""
    print(text, file=sys.stderr, flush=True)


def replay_run(storage: Folder, name: str, *, mlflow_uri: str | None = None, experiment: str | None = None) -> int:
    """Logs the missing entries of a run's journal and its final status to MLflow; returns the exit code.

    Owns the run meanwhile. Raises CommandRefused if there is no such run, another process owns it, it has no journal, or no
    MLflow server is known, and WrittenByNewer for a journal of a newer version with entries that this one does not know.
    """
    run = find_run(storage, name)
    refuse_newer_entries(run.folder)
    previous = read_previous_attempt(run.folder)
    stored_record = (
        previous.config.record if previous else RecordConfig()
    )  # if a server has never answered, there is no reference to it
    uri = mlflow_uri or stored_uri(run.mlflow_reference) or stored_record.mlflow_uri
    settings = RecordConfig(mlflow_uri=uri, experiment=experiment or stored_record.experiment)
    with owned([run.folder]) as (lease,):
        log = MlflowLog.for_run(run.folder, run.name, settings, storage)
        if log is None:
            raise CommandRefused(f"--mlflow-uri is not given, and {storage} holds no database: name the tracking server")
        try:
            has_journal = replay(run.folder, log, read_summary(run.folder).get("status") or "stopped", print, lease.permit)
        except RunLocked:
            raise
        except Exception as error:
            cause = redact(f"{type(error).__name__}: {error}")
            print(f"MLflow at {log.public_uri} cannot be reached ({cause})", file=sys.stderr)
            return 1
    if not has_journal:
        raise CommandRefused(f"{run.folder} has no journal: there is nothing to replay")
    print(f"MLflow has all of {run.name}, run {log.run_id}")
    return 0


def audit_run(storage: Folder, name: str) -> int:
    """Verifies from the checkpoints alone that every sample was used exactly once an epoch; returns the exit code.

    Raises CommandRefused if there is no such run.
    """
    from raystride.pipelines.train.checkpoint.audit import main as audit

    find_run(storage, name)
    return audit([name, "--storage", storage.uri])


def end_killed_runs_in_mlflow(storage: Folder) -> None:
    """Ends runs in the storage's own database whose process is gone, as it could not; a resumed one runs there again."""

    def is_killed(name: str) -> bool:
        return _has_run(storage, name) and _read_run(storage / name, name).status == "interrupted"

    end_killed_runs(storage, is_killed)


def run_names(storage: Folder) -> list[str]:
    """Returns the names of a storage's folders that hold a run."""
    return [name for name in storage.names() if _has_run(storage, name)]


def _has_run(storage: Folder, name: str) -> bool:
    """Returns whether the storage has a run of this name; it lists only that folder."""
    if not name or "/" in name or name.startswith("."):
        return False
    return not set((storage / name).names()).isdisjoint(FILES_OF_A_RUN)


def find_run(storage: Folder, name: str) -> StoredRun:
    """Returns the run of that name. Raises CommandRefused if there is none."""
    if not _has_run(storage, name):
        raise CommandRefused(str(missing_run(storage, name, run_names(storage))))
    return _read_run(storage / name, name)


def _read_run(folder: Folder, name: str) -> StoredRun:
    try:
        summary = cast(RunSummary, read_summary(folder)) or _figures_of_journal(folder)
    except SealBroken:
        summary = {"status": "damaged"}
    owner = read_owner(folder)
    return StoredRun(name, folder, summary, None if owner and owner.is_dead else owner)


def _figures_of_journal(folder: Folder) -> RunSummary:
    """Returns the figures of a run without a summary: it has not ended yet, or was killed."""
    try:
        summary = summarize_journal(folder, "stopped")
    except OSError:
        return {}
    summary.pop("status", None)
    return summary


def folder_size_bytes(folder: Folder) -> int:
    """Returns the bytes of all files below a folder."""
    return sum(folder.sizes(temporary=True).values())


def _last_written(folder: Folder) -> float | None:
    """Returns the time of the run's newest journal segment or summary in seconds since 1970, by the storage's clock.

    On a store that of its summary, owner's file or settings.
    """
    if folder.local is None:
        found = [folder.changed_at(name) for name in ("summary.json", "owner.json", "config.yaml")]
        return max((time for time in found if time is not None), default=None)
    files = [*(folder.local / "journal").glob("*.jsonl"), *folder.local.glob("*.json"), *folder.local.glob("*.yaml")]
    return max((path.stat().st_mtime for path in files), default=None)


def _flat_settings(run: StoredRun) -> dict[str, str]:
    """Returns the run's settings by full name, without its name and storage."""
    previous = read_previous_attempt(run.folder)
    flat = previous.config.flat() if previous else {}
    return {key: str(value) for key, value in flat.items() if key not in ("run", "storage")}


def _to_rows(columns: list[dict[str, str]]) -> list[list[str]]:
    """Transposes columns to rows that begin with their label; missing cells are a dash."""
    labels = dict.fromkeys(label for column in columns for label in column)
    return [[label, *(column.get(label, "-") for column in columns)] for label in labels]


def print_table(table: Any) -> None:
    """Prints a table of rich's, 160 columns wide if the output is no terminal."""
    from rich.console import Console

    # Without a terminal, names must not be cut to 80 columns.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def format_bytes(count: int) -> str:
    """Returns bytes in words: `0 B`, `1.5 KiB`, `1,024.0 GiB`."""
    for unit, bytes_of_unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= bytes_of_unit:
            return f"{count / bytes_of_unit:,.1f} {unit}"
    return f"{count} B"
