"""Passes over all parts before they are prepared: each leaves a file a part, so it has progress, and a kill loses one part.

seconds = run_pass("surveying", survey_part, job, parts, folder, survey_name, is_whole, run_each, log)
put_pass_seconds(job.folder, {"survey": seconds})         # of all processes together, also those before an interruption
add_passes(stages, job.folder)                            # {"seconds": {"survey": 12.5, ...}, ...}
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from raystride.pipelines.data.prepare.progress import ProgressMeter, show_progress
from raystride.pipelines.data.sources.pieces import Part
from raystride.pipelines.system.storage.folder import Folder

PASSES_FILE = "passes.json"
"""In a folder that is being prepared: the seconds of the passes that have finished."""
_SECONDS = ".seconds"

RunEach = Callable[..., list[Any]]
"""Runs a function of a job and a part for all parts, in this process or on a cluster."""


def run_pass(
    label: str,
    function: Callable[[Any, Part], float],
    job: Any,
    parts: Sequence[Part],
    folder: Folder,
    name_of: Callable[[int], str],
    is_whole: Callable[[Folder, int], bool],
    run_each: RunEach,
    log: Callable[[str], None],
) -> float:
    """Runs a function for each part without a whole file, with progress, and returns the seconds of all parts.

    The function writes the file of the part, `name_of` its number, into the folder, and returns its seconds.
    """
    existing = set(folder.names())
    left = [part for part in parts if name_of(part.number) not in existing or not is_whole(folder, part.number)]
    if 0 < len(left) < len(parts):
        log(f"data: going on with {label} that was interrupted, {len(parts) - len(left)} of {len(parts)} parts are done")
    with show_progress(label, ProgressMeter((job.folder, folder, name_of, left)), log):
        run_each(function, job, left)
    seconds = 0.0
    for part in parts:
        with suppress(FileNotFoundError, ValueError):  # a part of 0.4 or before has none
            seconds += float(folder.read(name_of(part.number) + _SECONDS))
    return seconds


def put_part_seconds(folder: Folder, name: str, seconds: float) -> None:
    """Writes the seconds that a part's file has taken, ahead of the file."""
    folder.put(name + _SECONDS, f"{seconds:.6f}")


def put_pass_seconds(folder: Folder, seconds: Mapping[str, float]) -> None:
    """Writes the seconds of further passes."""
    folder.put_json(PASSES_FILE, _load_seconds(folder) | {name: round(spent, 3) for name, spent in seconds.items()})


def add_passes(stages: dict[str, Any], folder: Folder) -> dict[str, Any]:
    """Returns the stage figures with the passes that have finished in a folder."""
    return stages | {"seconds": _load_seconds(folder) | stages["seconds"]} if stages else {}


def _load_seconds(folder: Folder) -> dict[str, float]:
    try:
        return dict(folder.read_json(PASSES_FILE))
    except (FileNotFoundError, ValueError):
        return {}
