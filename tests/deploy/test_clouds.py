"""Ray's launcher and SkyPilot accept the files that `raystride deploy launcher` and `sky` write, for all places."""

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from raystride.command import run as run_command
from tests.deploy.faults import find_faults
from tests.deploy.rendering import render_for
from tests.waiting import wait_until

SSH: dict[str, Any] = {"place": "machines_by_ssh", "cloud": {"hosts": ("10.0.0.1", "10.0.0.2", "10.0.0.3")}}
LAUNCHED: dict[str, dict[str, Any]] = {
    "aws": {"place": "aws", "gpus": 8},
    "aws spot": {"place": "aws", "cloud": {"spot": True, "role": "runs", "machine_image": "ami-1", "zone": "us-east-1a"}},
    "gcp": {"place": "gcp", "gpus": 8},
    "gcp spot": {"place": "gcp", "cloud": {"spot": True, "role": "a@b.iam.gserviceaccount.com"}},
    "ssh": SSH,
    "ssh with GPUs": {**SSH, "gpus": 8},
    "ssh, Raystride there": {**SSH, "cloud": {**SSH["cloud"], "python": "/shared/it's here/venv"}},
    "one machine by ssh": {**SSH, "nodes": 1},
}
SKY: dict[str, dict[str, Any]] = {
    "gpu": {"place": "aws", "gpus": 8},
    "cpu": {"place": "gcp", "cloud": {"worker_type": ""}},
    "spot": {"place": "aws", "gpus": 8, "cloud": {"spot": True, "zone": "us-east-1a", "machine_image": "ami-1"}},
}


@pytest.mark.parametrize("case", LAUNCHED)
def test_rays_launcher_accepts_the_cluster_file(case: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    files = render_for("launcher", **LAUNCHED[case])
    assert not find_faults("launcher", files)
    config = prepare_config(yaml.safe_load(files["cluster.yaml"]))
    validate_config(config)
    assert config["max_workers"] == LAUNCHED[case].get("nodes", 2) - ("ssh" in case)


def test_a_cloud_has_a_head_without_work_and_workers_that_may_be_spot() -> None:
    tree = yaml.safe_load(render_for("launcher", **LAUNCHED["aws spot"])["cluster.yaml"])
    head, worker = (tree["available_node_types"][name] for name in ("head", "worker"))
    assert head["resources"] == {"CPU": 0, "GPU": 0}
    assert (worker["min_workers"], worker["max_workers"], worker["resources"]) == (2, 2, {"CPU": 192})
    assert worker["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in head["node_config"]
    assert worker["node_config"]["IamInstanceProfile"] == {"Name": "runs"}
    gcp = yaml.safe_load(render_for("launcher", **LAUNCHED["gcp spot"])["cluster.yaml"])
    (scheduling,) = gcp["available_node_types"]["worker"]["node_config"]["scheduling"]
    assert scheduling["preemptible"]


@pytest.mark.parametrize("case", SKY)
def test_skypilot_accepts_the_task_file(case: str) -> None:
    files = render_for("sky", **SKY[case])
    assert not find_faults("sky", files)
    tree = yaml.safe_load(files["task.yaml"])
    assert tree["num_nodes"] == 2
    assert tree["resources"].get("accelerators") == ("H100:8" if SKY[case].get("gpus") else None)
    assert tree["resources"]["use_spot"] == (case == "spot")
    assert tree["secrets"] == {"RAY_AUTH_TOKEN": None}


@pytest.mark.parametrize(("kind", "case"), [("launcher", LAUNCHED["ssh"]), ("sky", SKY["gpu"])])
def test_a_run_waits_for_machines_that_join_one_by_one(kind: Any, case: dict[str, Any]) -> None:
    settings = yaml.safe_load(render_for(kind, **case)["settings.yaml"])
    assert settings["scaling"]["min_nodes"] == 2
    assert settings["launch"] == {"cluster_timeout_s": 1800.0}
    preset = {
        "data": {"source": "s3://bucket/texts"},
        "train": {"slots": 16},
        "scaling": {"min_nodes": 1},
        "launch": {"cluster_timeout_s": 3600.0},
    }
    settings = yaml.safe_load(render_for(kind, **{**case, "preset": preset})["settings.yaml"])
    assert (settings["scaling"]["min_nodes"], settings["launch"]) == (1, {"cluster_timeout_s": 3600.0})


def test_nodes_of_a_task_start_or_join_the_head(tmp_path: Path) -> None:
    """Runs the script with commands that print their arguments instead of Ray, Python and Raystride."""
    files = render_for("sky", **SKY["gpu"])
    (tmp_path / "node.sh").write_text(files["node.sh"])
    programs = tmp_path / "raystride-venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("ray", "python", "raystride"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*"\n[ "$1" != health-check ]\n')
        (programs / name).chmod(0o755)
    said = []
    for rank in (0, 1):
        variables = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "PATH": "/usr/bin:/bin"}
        variables |= {"HOME": str(tmp_path), "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
        done = subprocess.run(["bash", "node.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
        said.append(done.stdout)
    (port,) = re.findall(r"ray start --head --port=(\d+)", said[0])
    assert 20000 <= int(port) < 32768  # below what systems give away
    assert "--node-ip-address=10.0.0.1" in said[0]
    assert "raystride train --config settings.yaml" in said[0]
    assert f"ray start --address=10.0.0.1:{port} --node-ip-address=10.0.0.2" in said[1]
    assert "raystride train" not in said[1]
    folders = [re.findall(r"--temp-dir=(\S+)", text) for text in said]
    assert all(f"node end {folder}" in text for text, (folder,) in zip(said, folders, strict=True))
    assert folders[0] != folders[1]


def test_a_stop_request_reaches_the_job_of_a_task(tmp_path: Path) -> None:
    """Runs the script in the background of a shell, as SkyPilot does: there, bash's children ignore SIGINT."""
    (tmp_path / "node.sh").write_text(render_for("sky", **SKY["gpu"])["node.sh"])
    programs = tmp_path / "raystride-venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("ray", "python"):
        (programs / name).write_text("#!/bin/sh\n")
    (programs / "raystride").write_text(
        "#!/bin/bash\ntrap 'exit 143' TERM\necho begun > begun\nwhile :; do sleep 0.1; done\n"
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    variables = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    node = subprocess.Popen(["bash", "node.sh"], cwd=tmp_path, env=variables)
    wait_until((tmp_path / "begun").exists, "the job")
    node.send_signal(signal.SIGTERM)
    assert node.wait() == 143


def test_too_few_machines_by_ssh_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--config",
        "lm_124m",
        "--data.source",
        "python",
        "--nodes",
        "4",
        "--gpus-per-node",
        "8",
        "--output",
        str(tmp_path / "out"),
    ]
    assert run_command(["deploy", "launcher", *flags]) == 3
    assert "4 nodes asked, 0 in cloud.hosts" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "place"), [("kuberay", ""), ("sky", ""), ("launcher", "aws"), ("launcher", "gcp")])
def test_the_bundled_places_accept_the_run_of_the_readme(kind: str, place: str, tmp_path: Path) -> None:
    flags = [
        "--config",
        "lm_124m",
        "--data.source",
        "python",
        "--nodes",
        "4",
        "--gpus-per-node",
        "8",
        "--output",
        str(tmp_path / "out"),
    ]
    assert run_command(["deploy", kind, *flags, *(["--place", place] if place else [])]) == 0
    assert (tmp_path / "out").is_dir()


def test_local_data_is_refused_unless_it_is_below_the_storage(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    place = {"nodes": 2, "storage": str(tmp_path / "runs"), "shared": True, "cloud": {"hosts": ["a", "b"]}}
    (tmp_path / "place.yaml").write_text(yaml.safe_dump(place))
    codes = []
    for folder in (tmp_path, tmp_path / "runs"):
        (folder / "text.txt").write_text("x")
        flags = ["--config", "lm_python", "--nodes", "2", "--place", str(tmp_path / "place.yaml")]
        flags += ["--output", str(tmp_path / "out"), "--data.source", str(folder / "text.txt")]
        codes.append(run_command(["deploy", "launcher", *flags]))
    assert codes == [3, 0]
