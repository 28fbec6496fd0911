"""What a run was made of, for its page: data, date, commit, the settings that are not the defaults, and its sample.

origin_of(run_folder).changed                             # [["train.steps", "200", "1000"], ...]
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from yaml import YAMLError

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.files import Folder

SAMPLE = 2000
"""Characters of the sample that are shown."""
PLACES = ("run", "storage")
"""Settings that say where the run lies, which its page shows anyway."""


@dataclass(frozen=True)
class Origin:
    """What was known of a run when it began."""

    config: Config | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    sample: str = ""

    @property
    def changed(self) -> list[list[str]]:
        """Settings that differ from the defaults: name, value, default."""
        if self.config is None:
            return []
        default = Config().flat()
        return [
            [key, str(value), str(default.get(key))]
            for key, value in self.config.flat().items()
            if key not in PLACES and value != default.get(key)
        ]

    def _data(self, flat: Mapping[str, Any]) -> str | None:
        """The source, or those of a mixture by name."""
        mixed = self.config.data.sources if self.config else {}
        return ", ".join(f"{name}: {flat[f'data.sources.{name}.source']}" for name in mixed) or flat.get("data.source")

    def facts(self, began: float | None) -> list[list[str]]:
        """What the data was, when the run began (seconds since 1970), and what it ran on, as far as it is known."""
        flat = self.config.flat() if self.config else {}
        commit, versions = self.environment.get("commit"), self.environment.get("versions") or {}
        cards = self.environment.get("gpus") or []
        found = {
            "data": self._data(flat),
            "validated on": flat["data.validation_source"] if flat.get("data.validation") == "source" else None,
            "data's fingerprint": self.environment.get("data"),
            "prepared at": self.environment.get("prepared_at"),
            "began": datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%d %H:%M UTC") if began else None,
            "commit": f"{commit}{', with changes' if self.environment.get('dirty') else ''}" if commit else None,
            "machine": cards[0]["name"] if cards else self.environment.get("cpu"),
            "PyTorch": versions.get("torch"),
        }
        return [[name, str(value)] for name, value in found.items() if value]


def origin_of(folder: Folder) -> Origin:
    """What a run's folder says of it; what is missing or damaged there is left out."""
    config, environment, sample = None, {}, ""
    with suppress(OSError, ValueError, TypeError, AttributeError, YAMLError):
        config = from_yaml(Config, folder.read("config.yaml").decode())
    with suppress(OSError, ValueError):
        environment = dict(folder.read_json("environment.json"))
    with suppress(OSError):
        sample = folder.read("sample.txt").decode(errors="replace")[:SAMPLE]
    return Origin(config, environment, sample)
