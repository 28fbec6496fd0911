"""A described cluster is read whole, and what is wrong in it is named with its place."""

from pathlib import Path

import pytest
import yaml

from raystride.pipelines.scaling_model import ClusterDescription, ClusterError, NetworkLink

GOOD = {
    "device": "H100",
    "gpus_per_node": 8,
    "intra": {"gb_per_s": 450, "latency_us": 3},
    "inter": {"gb_per_s": 400, "latency_us": 8},
    "price_per_gpu_hour": 2.5,
}


def write(folder: Path, content: object) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_description_is_read(tmp_path: Path) -> None:
    found = ClusterDescription.load(write(tmp_path, GOOD))
    assert found == ClusterDescription("H100", 8, NetworkLink(450, 3), NetworkLink(400, 8), price_per_gpu_hour=2.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 8}, "gpus is not known: the keys are device, gpus_per_node"),
        ({"device": None}, "device is None: it must be the name"),
        ({"gpus_per_node": 0}, "gpus_per_node is 0: it must be a whole number, at least 1"),
        ({"intra": 450}, "intra is 450: it must have the keys gb_per_s, latency_us"),
        ({"inter": {"gb_per_s": 400}}, "inter.latency_us is missing"),
        ({"inter": {"gb_per_s": -1, "latency_us": 8}}, "inter.gb_per_s is -1: it must be a number above 0"),
        ({"price_per_gpu_hour": "cheap"}, "price_per_gpu_hour is 'cheap': it must be a number above 0"),
        ({"peak_tflops": float("nan")}, "peak_tflops is nan: it must be a number above 0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write(tmp_path, GOOD | change)
    with pytest.raises(ClusterError, match=message) as raised:
        ClusterDescription.load(path)
    assert str(path) in str(raised.value)


def test_a_file_that_is_absent_or_no_description_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"sweep.cluster is .*nowhere.yaml: it cannot be read"):
        ClusterDescription.load(tmp_path / "nowhere.yaml")
    with pytest.raises(ClusterError, match="the file is 7: it must have the keys"):
        ClusterDescription.load(write(tmp_path, 7))
