"""A run's own settings for a command that names the run and no configuration: `raystride train --run NAME`.

with stored_settings(["--run", "my-run", "--train.steps", "2000"]) as arguments:
    parse(Config, arguments, ...)                         # --config /tmp/.../settings.yaml --storage ...
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from yaml import YAMLError

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import from_yaml, to_yaml
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.place import storage_base

NAMED = ("config", "print_config", "help")


@contextmanager
def stored_settings(arguments: Sequence[str]) -> Iterator[list[str]]:
    """The arguments, below them what the run was started with, where they name one that is there and no configuration."""
    run, given = _value(arguments, "run"), {argument[2:].partition("=")[0] for argument in arguments if argument[:2] == "--"}
    if not run or given & set(NAMED) or "/" in run or run.startswith(".") or not run.strip():
        yield list(arguments)
        return
    storage = Folder.at(_value(arguments, "storage") or "runs", storage_base())
    folder = storage / run
    try:
        # What this version does not know is left out; a file that is damaged is told of where runs are started again.
        text = to_yaml(from_yaml(Config, folder.read("config.yaml").decode()))
    except (OSError, ValueError, TypeError, AttributeError, YAMLError):
        yield list(arguments)
        return
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "settings.yaml"
        file.write_text(text)
        # The storage may have been moved since.
        yield ["--config", str(file), "--storage", storage.uri, *arguments]


def _value(arguments: Sequence[str], flag: str) -> str:
    values = [value for name, value in pairwise(arguments) if name == f"--{flag}"]
    values += [argument.partition("=")[2] for argument in arguments if argument.startswith(f"--{flag}=")]
    return values[-1] if values else ""
