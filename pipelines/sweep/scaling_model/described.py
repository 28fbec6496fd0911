"""A cluster described in YAML: figures that no trial on a few workers can measure, and prices.

device: H100                     # the device name of the trials, or a part of it
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
    """An invalid description. The message names the file, the key, the value and the allowed ones.

    So do the fields: `file`, `key` by its full name ("" for the file itself), `value`, and `allowed` keys or limits.
    """

    def __init__(self, message: str = "", *, file: str = "", key: str = "", value: Any = None, allowed: Any = None) -> None:
        super().__init__(message)
        self.file, self.key, self.value, self.allowed = file, key, value, allowed


@dataclass(frozen=True)
class NetworkLink:
    """A link according to its data sheet."""

    gb_per_s: float
    """1e9 bytes a second, one way."""
    latency_us: float
    """Microseconds of one hop, software included if known."""


@dataclass(frozen=True)
class ClusterDescription:
    """Nodes of equal workers, and the links inside and between them."""

    device: str
    """Device name of the trials."""
    gpus_per_node: int
    """Workers of a node."""
    intra: NetworkLink
    """Between the workers of a node; `gb_per_s` is that of one worker."""
    inter: NetworkLink
    """Between nodes; `gb_per_s` is that of a node, which its workers share."""
    price_per_gpu_hour: float | None = None
    """In any currency; none: no costs are predicted."""
    peak_tflops: float | None = None
    """Peak rate of one worker, for the utilisation; None: no utilisation is predicted."""

    @classmethod
    def load(cls, path: str | Path) -> "ClusterDescription":
        """Reads YAML; raises ClusterError if it is absent, or a key is unknown, missing or of a wrong value."""
        path_text = str(path)
        try:
            loaded = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            message = f"sweep.cluster is {path_text}: it cannot be read ({error}); name a YAML file"
            raise ClusterError(message, file=path_text) from error
        values = _check_keys(cls, loaded, path_text, "")
        for name in ("intra", "inter"):
            entries = _check_keys(NetworkLink, values[name], path_text, f"{name}.")
            values[name] = NetworkLink(**{key: _parse_number(entries[key], path_text, f"{name}.{key}") for key in entries})
        if not isinstance(values["device"], str) or not values["device"]:
            message = f"{path_text}: device is {values['device']!r}: it must be the name that trials give their device"
            raise ClusterError(message, file=path_text, key="device", value=values["device"])
        for name in ("price_per_gpu_hour", "peak_tflops"):
            if values.get(name) is not None:
                values[name] = _parse_number(values[name], path_text, name)
        gpus_per_node = values["gpus_per_node"]
        if isinstance(gpus_per_node, bool) or not isinstance(gpus_per_node, int) or gpus_per_node < 1:
            message = f"{path_text}: gpus_per_node is {gpus_per_node!r}: it must be a whole number, at least 1"
            raise ClusterError(message, file=path_text, key="gpus_per_node", value=gpus_per_node, allowed={"at_least": 1})
        return cls(**values)


def _check_keys(kind: type, loaded: Any, path_text: str, prefix: str) -> dict[str, Any]:
    """Returns the entries of a section; raises ClusterError unless its keys are the fields of `kind`."""
    known = {item.name: item.default is MISSING for item in fields(kind)}
    if not isinstance(loaded, Mapping):
        section = prefix.rstrip(".") or "the file"
        message = f"{path_text}: {section} is {loaded!r}: it must have the keys {', '.join(known)}"
        raise ClusterError(message, file=path_text, key=prefix.rstrip("."), value=loaded, allowed=tuple(known))
    for key in loaded:
        if key not in known:
            message = f"{path_text}: {prefix}{key} is not known: the keys are {', '.join(known)}"
            raise ClusterError(message, file=path_text, key=f"{prefix}{key}", value=loaded[key], allowed=tuple(known))
    for key, required in known.items():
        if required and key not in loaded:
            message = f"{path_text}: {prefix}{key} is missing: add it, see docs/scaling.md"
            raise ClusterError(message, file=path_text, key=f"{prefix}{key}")
    return dict(loaded)


def _parse_number(value: Any, path_text: str, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        message = f"{path_text}: {key} is {value!r}: it must be a number above 0"
        raise ClusterError(message, file=path_text, key=key, value=value, allowed={"above": 0})
    return float(value)
