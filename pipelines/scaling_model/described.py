"""A cluster described in YAML: what no trial on a few workers can measure, and what it costs.

device: H100                     # as the trials name it, or a part of that
gpus_per_node: 8                 # workers of a node
intra: {gb_per_s: 450, latency_us: 3}        # inside a node: bytes a second of each worker, one way
inter: {gb_per_s: 400, latency_us: 8}        # between nodes: of a whole node, one way
price_per_gpu_hour: 2.5          # optional, in any currency
peak_tflops: 989                 # optional, dense, of the precision that is used

cluster = ClusterDescription.load("cluster.yaml")
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml


class ClusterError(ValueError):
    """A description cannot be used. The message names the place, the key, the value and what is allowed.

    So do the fields: `file`, `key` by its full name ("" where it is the file itself), `value`, and `allowed` keys or limits.
    """

    def __init__(self, message: str = "", *, file: str = "", key: str = "", value: Any = None, allowed: Any = None) -> None:
        super().__init__(message)
        self.file, self.key, self.value, self.allowed = file, key, value, allowed


@dataclass(frozen=True)
class NetworkLink:
    """A link as its data sheet states it."""

    gb_per_s: float
    """1e9 bytes a second, one way."""
    latency_us: float
    """Microseconds of one hop, software included if known."""


@dataclass(frozen=True)
class ClusterDescription:
    """Nodes of equal workers, and the links inside and between them."""

    device: str
    """The name under which trials ran on such workers."""
    gpus_per_node: int
    """Workers of a node."""
    intra: NetworkLink
    """Between the workers of a node; `gb_per_s` is that of one worker."""
    inter: NetworkLink
    """Between nodes; `gb_per_s` is that of a node, which its workers share."""
    price_per_gpu_hour: float | None = None
    """In any currency; none: costs are not told."""
    peak_tflops: float | None = None
    """Of one worker, for the utilisation; none: that is not told."""

    @classmethod
    def load(cls, path: str | Path) -> "ClusterDescription":
        """Reads YAML; raises ClusterError where it is absent, or a key is unknown, missing or of a wrong value."""
        where = str(path)
        try:
            loaded = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            message = f"sweep.cluster is {where}: it cannot be read ({error}); name a YAML file"
            raise ClusterError(message, file=where) from error
        values = _entries(cls, loaded, where, "")
        for name in ("intra", "inter"):
            entries = _entries(NetworkLink, values[name], where, f"{name}.")
            values[name] = NetworkLink(**{key: _number(entries[key], where, f"{name}.{key}") for key in entries})
        if not isinstance(values["device"], str) or not values["device"]:
            message = f"{where}: device is {values['device']!r}: it must be the name that trials give their device"
            raise ClusterError(message, file=where, key="device", value=values["device"])
        for name in ("price_per_gpu_hour", "peak_tflops"):
            if values.get(name) is not None:
                values[name] = _number(values[name], where, name)
        count = values["gpus_per_node"]
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            message = f"{where}: gpus_per_node is {count!r}: it must be a whole number, at least 1"
            raise ClusterError(message, file=where, key="gpus_per_node", value=count, allowed={"at_least": 1})
        return cls(**values)


def _entries(kind: type, loaded: Any, where: str, prefix: str) -> dict[str, Any]:
    """The keys of a section, which must be those of `kind`."""
    known = {item.name: item.default is MISSING for item in fields(kind)}
    if not isinstance(loaded, Mapping):
        place = prefix.rstrip(".") or "the file"
        message = f"{where}: {place} is {loaded!r}: it must have the keys {', '.join(known)}"
        raise ClusterError(message, file=where, key=prefix.rstrip("."), value=loaded, allowed=tuple(known))
    for key in loaded:
        if key not in known:
            message = f"{where}: {prefix}{key} is not known: the keys are {', '.join(known)}"
            raise ClusterError(message, file=where, key=f"{prefix}{key}", value=loaded[key], allowed=tuple(known))
    for key, required in known.items():
        if required and key not in loaded:
            message = f"{where}: {prefix}{key} is missing: add it, see docs/scaling.md"
            raise ClusterError(message, file=where, key=f"{prefix}{key}")
    return dict(loaded)


def _number(value: Any, where: str, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        message = f"{where}: {key} is {value!r}: it must be a number above 0"
        raise ClusterError(message, file=where, key=key, value=value, allowed={"above": 0})
    return float(value)
