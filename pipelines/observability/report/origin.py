"""Provenance of a run, for its page: data, date, commit, non-default settings, and a sample of its output.

load_origin(run_folder).changed_settings                  # [["train.steps", "200", "1000"], ...]
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from yaml import YAMLError

from raystride.pipelines.config import Config
from raystride.pipelines.config.attempts import read_environment
from raystride.pipelines.config.stored_run import parse_settings
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import read_sealed

MAX_SAMPLE_CHARACTERS = 2000
"""Maximum length of the sample in characters."""
LOCATION_SETTINGS = ("run", "storage")
"""Settings of the run's location, which its page shows anyway."""


@dataclass(frozen=True)
class Origin:
    """Configuration, environment and sample of a run."""

    config: Config | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    sample: str = ""
    answers: Mapping[str, Any] = field(default_factory=dict)
    """A classifier's `answers.json`: labels, confusion matrix and some validation documents."""

    @property
    def changed_settings(self) -> list[list[str]]:
        """Settings that differ from the defaults: name, value, default."""
        if self.config is None:
            return []
        default = Config().flat()
        return [
            [key, str(value), str(default.get(key))]
            for key, value in self.config.flat().items()
            if key not in LOCATION_SETTINGS and value != default.get(key)
        ]

    @property
    def data_source(self) -> str | None:
        """The data source, or those of a mixture by name."""
        flat = self.config.flat() if self.config else {}
        mixed = self.config.data.sources if self.config else {}
        return ", ".join(f"{name}: {flat[f'data.sources.{name}.source']}" for name in mixed) or flat.get("data.source")

    @property
    def data_lines(self) -> list[str]:
        """Lines about the data that was read; empty if an older version prepared it."""
        return list(self.environment.get("data_lines", ()))

    def list_facts(self, began: float | None) -> list[list[str]]:
        """Returns rows on data, begin, commit and machine, as far as they are known. `began` is in seconds since 1970."""
        flat = self.config.flat() if self.config else {}
        commit, versions = self.environment.get("commit"), self.environment.get("versions") or {}
        cards = self.environment.get("gpus") or []
        values = {
            "data": self.data_source,
            "validated on": flat["data.validation_source"] if flat.get("data.validation") == "source" else None,
            "data fingerprint": self.environment.get("data"),
            "preparation speed": self.environment.get("prepared_at"),
            "began": datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%d %H:%M UTC") if began else None,
            "commit": f"{commit}{', with changes' if self.environment.get('dirty') else ''}" if commit else None,
            "machine": cards[0]["name"] if cards else self.environment.get("cpu"),
            "PyTorch": versions.get("torch"),
        }
        return [[name, str(value)] for name, value in values.items() if value]


def load_origin(folder: Folder) -> Origin:
    """Loads the origin from a run's folder; missing or damaged files are ignored."""
    config, environment, sample, answers = None, {}, "", {}
    with suppress(OSError, ValueError, TypeError, AttributeError, YAMLError):
        config = parse_settings(folder)
    with suppress(OSError, ValueError):
        environment = read_environment(folder)
    with suppress(OSError):
        sample = folder.read("sample.txt").decode(errors="replace")[:MAX_SAMPLE_CHARACTERS]
    with suppress(OSError, ValueError):
        found = read_sealed(folder, "answers.json")
        answers = found if found.keys() >= {"step", "labels", "confusion", "documents"} else {}
    return Origin(config, environment, sample, answers)
