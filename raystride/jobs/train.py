"""The main job: trains a configuration on Ray, or resumes a run.

A command that names only a run has the run's stored settings.

    raystride train --config configs/lm_python.yaml --train.steps 500 --scaling.workers 2 --run NAME
    raystride train --run NAME --train.steps 2000             # trains it further
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import Parsed, command, to_yaml
from raystride.pipelines.config.presets import presets
from raystride.pipelines.config.stored_run import parse_settings, read_settings
from raystride.pipelines.config.words import last_value, words_to_flags
from raystride.pipelines.launch.run_store.location import storage_base
from raystride.pipelines.system.storage.folder import Folder

EXPLICIT_FLAGS = ("config", "print_config", "help")


@contextmanager
def stored_settings(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yields the arguments, preceded by the run's stored settings if they name an existing run and no configuration.

    Raises SettingError if these are not as the run wrote them, unless `resume.edited` takes them, and WrittenByNewer.
    """
    if (folder := _named_run(arguments)) is None:
        yield list(arguments)
        return
    read = parse_settings if last_value(arguments, "resume.edited").lower() == "true" else read_settings
    try:
        text = to_yaml(read(folder))
    except OSError:
        yield list(arguments)
        return
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "settings.yaml"
        file.write_text(text)
        # The stored path is ignored, as the storage may have been moved.
        yield ["--config", str(file), "--storage", folder.parent.uri, *arguments]


def _named_run(arguments: Sequence[str]) -> Folder | None:
    """Returns the folder of the run that the arguments name, None if they name none, or a configuration."""
    run, given = (
        last_value(arguments, "run"),
        {argument[2:].partition("=")[0] for argument in arguments if argument[:2] == "--"},
    )
    if not run or given & set(EXPLICIT_FLAGS) or "/" in run or run.startswith(".") or not run.strip():
        return None
    return Folder.from_uri(last_value(arguments, "storage") or "runs", storage_base()) / run


COMMON = (
    "data.source", "task", "model.init_from", "run", "storage", "model.layers", "model.hidden_size", "model.context",
    "train.steps", "train.epochs", "train.batch", "optimizer.learning_rate", "train.precision",
    "validation.every", "scaling.workers", "launch.mode",
)  # fmt: skip
"""Settings that presets change and people try first."""
EXAMPLES = (
    "raystride train --config lm_python --train.steps 500",
    "raystride train --config finetune --model.init_from FOLDER --data.source chats.jsonl",
    "raystride train --run NAME                           # resumes it",
    "raystride train --run NAME --train.steps 5000        # trains it further",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    words = words_to_flags(Config, sys.argv[1:] if arguments is None else arguments, presets())
    folder = _named_run(words)
    with ExitStack() as stack:
        given = stack.enter_context(stored_settings(words))
        return command(
            Config,
            _run_job,
            given,
            program="raystride train",
            description="Train or resume a run.",
            common=COMMON,
            examples=EXAMPLES,
            stored_in=folder.uri if folder else "",
        )


def _run_job(parsed: Parsed[Config]) -> int:
    from raystride.pipelines.launch.train_job import run_training  # after the settings are parsed: it takes most of a second

    return run_training(parsed)
