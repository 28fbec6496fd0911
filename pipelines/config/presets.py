"""The presets by name, with the descriptions in the heads of their files.

presets()["lm_python"]                                    # the YAML file
describe_preset(presets()["lm_python"]).hardware          # "2 CPU cores, 4 minutes"
"""

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import yaml

from raystride.locations import PACKAGE

PRESETS = PACKAGE / "configs"
COLUMNS = ("task", "size", "data", "hardware")


@dataclass(frozen=True)
class Preset:
    """A configuration that comes along, as its file's head describes it."""

    name: str
    """The file's name without its ending, as `--config` takes it."""
    about: str
    """The first line of its comment."""
    task: str
    """The task that it trains."""
    size: str
    """Parameters of its network."""
    data: str
    """`built in`, or the kind of data that a user has to give."""
    hardware: str
    """The machine that it was made for, and how long it takes there, if measured."""


def presets() -> dict[str, Path]:
    """Returns the files of the configurations that come along, by name."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def find_config(name: str) -> str:
    """Returns the file that `--config` names: an existing one, or a preset's, configs/NAME.yaml in the docs."""
    if Path(name).exists():
        return name
    preset = name.removeprefix("configs/").removesuffix(".yaml") if name.startswith("configs/") else name
    return str(presets().get(preset, name))


def describe_preset(file: Path) -> Preset:
    """Reads the comment at the head of a preset's file; `# size:`, `# data:` and `# hardware:` have lines of their own."""
    text = file.read_text()
    comment = [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), text.splitlines())]
    facts = {key: value.strip() for key, _, value in (line.partition(":") for line in comment) if key in COLUMNS}
    task = yaml.safe_load(text).get("task", "language_model")
    return Preset(file.stem, comment[0], task, *(facts.get(key, "") for key in COLUMNS[1:]))
