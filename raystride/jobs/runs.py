"""Lists, shows, compares, prunes, deletes and audits runs, and replays a run's journal to MLflow.

    raystride runs list --storage runs
    raystride runs list --by owner --since 30       # worker and GPU hours of the runs of a month
    raystride runs compare one two three            # side by side here, and the link to MLflow's comparison
    raystride runs prune one two --keep 1           # shows what it frees
    raystride runs delete one two                   # whole runs, as `prune --all` does: trials, exports, MLflow's rows
    raystride runs prune --older 30 --status failed --all --dry-run
    raystride runs prune --unused                   # prepared data, artifacts and caches that no run uses
    raystride runs replay my-run                    # after MLflow was unreachable
    raystride runs audit my-run                     # verifies that every sample was used once an epoch

Exit codes: 0 done, 1 MLflow still cannot be reached or the audit fails, 2 no such run or it must not be changed, 3 the
storage cannot be written.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

from raystride.pipelines.launch.console.exit_codes import DONE
from raystride.pipelines.launch.run_store.commands import (
    CommandRefused,
    audit_run,
    compare_runs,
    list_runs,
    replay_run,
    show_run,
)
from raystride.pipelines.launch.run_store.prune import DAY_S, Selection, prune, prune_unused
from raystride.pipelines.observability.record.mlflow.links import UI_PORT
from raystride.pipelines.system.storage.folder import Folder

STATUSES_TO_PRUNE = ("finished", "stopped", "failed", "interrupted", "damaged")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    given = vars(_build_parser().parse_args(arguments))
    verb, storage = given.pop("verb"), Folder.from_uri(given.pop("storage"))
    return int(verb(storage, **given) or DONE)


def _prune(storage: Folder, *, unused: bool, dry_run: bool, yes: bool, **given: Any) -> None:
    """Removes what the flags select. Raises CommandRefused for flags that contradict each other or select nothing."""
    names, older_s = given.pop("names"), given.pop("older")
    keep, whole = given.pop("keep"), given.pop("whole")
    selection = Selection(tuple(names), older_s, given.pop("sweep"), given.pop("status"))
    if unused:
        if names or selection.sweep or selection.status or whole or keep:
            raise CommandRefused(
                "--unused is about what no run uses: give it alone, or with --older, and prune runs in another call"
            )
        prune_unused(storage, older_s=older_s or DAY_S, dry_run=dry_run, yes=yes)
        return
    if selection == Selection():
        raise CommandRefused("no run is named: name runs, or give --older, --status, --sweep or --unused")
    prune(storage, selection, keep=keep or 1, whole=whole, dry_run=dry_run, yes=yes)


def _delete(storage: Folder, *, names: Sequence[str], dry_run: bool, yes: bool) -> None:
    """Removes whole runs. Raises CommandRefused as `prune` does."""
    prune(storage, Selection(tuple(names)), whole=True, dry_run=dry_run, yes=yes)


def _parse_duration(text: str) -> float:
    """Returns the seconds of `30` (days), `30d`, `12h` or `90min`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(d|h|min|w)?", text)
    if not found:
        raise ValueError(text)
    return float(found[1]) * {"w": 7 * DAY_S, "h": 3600.0, "min": 60.0}.get(found[2], DAY_S)


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _build_parser() -> argparse.ArgumentParser:
    """Returns a parser whose arguments are those of the verb, `storage` and `verb` itself."""
    parser = argparse.ArgumentParser(prog="raystride runs", description="Lists, shows, compares and removes runs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add_command(command: str, verb: Callable[..., int | None], text: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(command, help=text, description=text)
        if command in ("compare", "delete", "prune"):
            subparser.add_argument("names", metavar="RUN", nargs="*" if command == "prune" else "+", help="the runs' names")
        elif command != "list":
            subparser.add_argument("name", metavar="RUN", help="the run's name")
        subparser.add_argument("--storage", default="runs", help="folder or URI that the runs lie in")
        subparser.set_defaults(verb=verb)
        return subparser

    listing = add_command("list", list_runs, "a table of all runs, or of their owners with the time that they have held")
    listing.add_argument("--by", choices=("owner",), help="one row for each owner: worker and GPU hours of all attempts")
    listing.add_argument(
        "--since", dest="since_s", type=_parse_duration, metavar="DAYS", help="only runs written in so many days, or 12h, 4w"
    )
    add_command("show", show_run, "a run's curve, figures and place")
    compare = add_command("compare", compare_runs, "several runs side by side, and the link to MLflow's comparison of them")
    compare.add_argument("--port", type=int, default=UI_PORT, help="port of MLflow's UI on this machine")
    add_command("audit", audit_run, "prove that a run used every sample exactly once an epoch")
    _add_flags_of_prune(add_command("prune", _prune, "remove old checkpoints' data, whole runs, or what no run uses"))
    _add_flags_of_removal(add_command("delete", _delete, "remove runs with all that they hold, MLflow's rows too"))
    replay = add_command("replay", replay_run, "log to MLflow what it lacks of a run's journal")
    replay.add_argument("--mlflow-uri", help="tracking server; when not given, the one that the run was logged to")
    replay.add_argument("--experiment", help="experiment, where the run is not in MLflow yet; when not given, the run's own")
    return parser


def _add_flags_of_prune(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--keep", type=_at_least_one, help="newest checkpoints whose data to keep, besides `best` and `last`; default 1"
    )
    choice.add_argument(
        "--all",
        dest="whole",
        action="store_true",
        help="remove runs with all that they hold: trials, exports, MLflow's rows",
    )
    parser.add_argument(
        "--older", type=_parse_duration, metavar="DAYS", help="those unchanged for so many days, or as 12h, 90min, 4w"
    )
    parser.add_argument("--sweep", metavar="NAME", help="a sweep with its trials")
    parser.add_argument("--status", choices=STATUSES_TO_PRUNE, help="runs that ended so")
    parser.add_argument(
        "--unused", action="store_true", help="prepared data, MLflow's artifacts and this machine's caches that no run uses"
    )
    _add_flags_of_removal(parser)


def _add_flags_of_removal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="list what would be removed, and remove nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
