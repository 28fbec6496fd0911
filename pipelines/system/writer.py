"""The version that wrote a stored file: a file of a newer one is read as far as this version knows all that it says.

    refuse_unknown("runs/one/config.yaml", "0.5.0", {"optimizer.peak_rate": 0.003})    # raises WrittenByNewer
    refuse_unknown("manifest.json", "0.5.0", {})    # passes

A reader cannot know the default of a key that it does not know, so the writer says it. In JSON a key is at its default where
its value is empty (null, false, 0, "", [] or {}): a version that adds one chooses it so, or leaves it out. A `config.yaml`
lists the settings that are not at their defaults, in a comment that all versions read past (`config.parse.to_stored_yaml`).
Keys of older versions that this one does not know are passed over: `docs/upgrading.md` says what became of them.
"""

import re
from collections.abc import Mapping
from typing import Any

from raystride.locations import __version__
from raystride.pipelines.system.errors import SettingError

WRITER = "writer"
"""The key of the version that wrote a JSON file."""


class WrittenByNewer(SettingError):
    """A stored file is of a newer version, and has something that this one does not know."""


def release_order(version: str) -> tuple[float, ...]:
    """Returns a key by which versions sort: `0.4.0.dev1` comes after `0.3.0` and before `0.4.0`; others come last."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.dev(\d+))?", version)
    if found is None:
        return (float("inf"),)
    return tuple(float(part) if part is not None else float("inf") for part in found.groups())


def is_newer(version: str) -> bool:
    """Returns whether a version is newer than this one."""
    return release_order(version) > release_order(__version__)


def refuse_unknown(file: str, writer: object, unknown: Mapping[str, Any]) -> None:
    """Raises WrittenByNewer if a newer version wrote the file, and has keys in it that this one does not know.

    `unknown` are these with their values, without those at their defaults.
    """
    if not unknown or not isinstance(writer, str) or not is_newer(writer):
        return
    listed = ", ".join(f"{key} ({value!r})" if len(repr(value)) <= 40 else key for key, value in unknown.items())
    raise WrittenByNewer(
        f"{file} was written by Raystride {writer}, and this is {__version__}, which does not know {listed}: use that "
        "version, or a newer one",
        setting=next(iter(unknown)),
        value=next(iter(unknown.values())),
    )
