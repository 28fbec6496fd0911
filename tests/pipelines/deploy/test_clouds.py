"""Files for Ray's cluster launcher and SkyPilot; tests/deploy/test_clouds.py has them as they are rendered."""

import pytest

from raystride.pipelines.config import SettingError
from raystride.pipelines.deploy.clouds import look_at_launcher, look_at_sky


def test_a_file_without_what_it_needs_is_refused() -> None:
    with pytest.raises(SettingError, match="'provider' is a required property"):
        look_at_launcher({"cluster.yaml": "cluster_name: x"})
    with pytest.raises(SettingError, match="num_nodes: 'two' is not of type 'integer'"):
        look_at_sky({"task.yaml": "num_nodes: two"})


def test_the_least_files_are_taken() -> None:
    look_at_launcher({"cluster.yaml": "{cluster_name: x, provider: {type: local, head_ip: a, worker_ips: []}}"})
    look_at_sky({"task.yaml": "{resources: {accelerators: 'H100:8'}, run: 'true'}"})
