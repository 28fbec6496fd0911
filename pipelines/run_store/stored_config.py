"""Uses a run's stored settings for a command that names only the run: `raystride train --run NAME`.

with stored_settings(["--run", "my-run", "--train.steps", "2000"]) as arguments:
    parse(Config, arguments, ...)                         # --config /tmp/.../settings.yaml --storage ...
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from yaml import YAMLError

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import from_yaml, to_yaml
from raystride.pipelines.config.words import last_value
from raystride.pipelines.run_store.location import storage_base
from raystride.pipelines.storage.folder import Folder

EXPLICIT_FLAGS = ("config", "print_config", "help")


@contextmanager
def stored_settings(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yields the arguments, preceded by the run's stored settings if they name an existing run and no configuration."""
    run, given = (
        last_value(arguments, "run"),
        {argument[2:].partition("=")[0] for argument in arguments if argument[:2] == "--"},
    )
    if not run or given & set(EXPLICIT_FLAGS) or "/" in run or run.startswith(".") or not run.strip():
        yield list(arguments)
        return
    storage = Folder.from_uri(last_value(arguments, "storage") or "runs", storage_base())
    folder = storage / run
    try:
        # Settings unknown to this version are dropped; a damaged file is reported when the run is resumed.
        text = to_yaml(from_yaml(Config, folder.read("config.yaml").decode()))
    except (OSError, ValueError, TypeError, AttributeError, YAMLError):
        yield list(arguments)
        return
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "settings.yaml"
        file.write_text(text)
        # The stored path is ignored, as the storage may have been moved.
        yield ["--config", str(file), "--storage", storage.uri, *arguments]
