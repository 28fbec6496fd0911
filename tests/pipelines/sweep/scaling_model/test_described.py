"""A cluster description is read completely, and errors name the file and key."""

import math
from dataclasses import fields
from pathlib import Path
from unittest.mock import ANY

import pytest
import yaml

from raystride.pipelines.sweep.scaling_model import ClusterDescription, ClusterError, NetworkLink

GOOD = {
    "device": "H100",
    "gpus_per_node": 8,
    "intra": {"gb_per_s": 450, "latency_us": 3},
    "inter": {"gb_per_s": 400, "latency_us": 8},
    "price_per_gpu_hour": 2.5,
}

KEYS = tuple(item.name for item in fields(ClusterDescription))


def write_yaml(folder: Path, content: object) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_description_is_read(tmp_path: Path) -> None:
    found = ClusterDescription.load(write_yaml(tmp_path, GOOD))
    assert found == ClusterDescription("H100", 8, NetworkLink(450, 3), NetworkLink(400, 8), price_per_gpu_hour=2.5)


@pytest.mark.parametrize(
    ("change", "key", "value", "allowed"),
    [
        ({"gpus": 8}, "gpus", 8, KEYS),
        ({"device": None}, "device", None, None),
        ({"gpus_per_node": 0}, "gpus_per_node", 0, {"at_least": 1}),
        ({"intra": 450}, "intra", 450, ("gb_per_s", "latency_us")),
        ({"inter": {"gb_per_s": 400}}, "inter.latency_us", None, None),
        ({"inter": {"gb_per_s": -1, "latency_us": 8}}, "inter.gb_per_s", -1, {"above": 0}),
        ({"price_per_gpu_hour": "cheap"}, "price_per_gpu_hour", "cheap", {"above": 0}),
        ({"peak_tflops": math.nan}, "peak_tflops", ANY, {"above": 0}),
    ],
)
def test_invalid_keys_are_named(tmp_path: Path, change: dict[str, object], key: str, value: object, allowed: object) -> None:
    path = write_yaml(tmp_path, GOOD | change)
    with pytest.raises(ClusterError, match=f": {key} is ") as raised:
        ClusterDescription.load(path)
    error = raised.value
    assert (error.file, error.key, error.value, error.allowed) == (str(path), key, value, allowed)
    assert str(path) in str(error)
    assert not isinstance(allowed, tuple) or ", ".join(allowed) in str(error)


def test_the_sentence_says_file_key_value_and_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cluster\.yaml: gpus_per_node is 0: it must be a whole number, at least 1$"):
        ClusterDescription.load(write_yaml(tmp_path, GOOD | {"gpus_per_node": 0}))


def test_a_file_that_is_absent_or_no_description_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"sweep\.cluster .*nowhere\.yaml") as absent:
        ClusterDescription.load(tmp_path / "nowhere.yaml")
    assert absent.value.file == str(tmp_path / "nowhere.yaml")
    with pytest.raises(ClusterError, match=" 7: ") as other:
        ClusterDescription.load(write_yaml(tmp_path, 7))
    assert (other.value.key, other.value.value, other.value.allowed) == ("", 7, KEYS)
