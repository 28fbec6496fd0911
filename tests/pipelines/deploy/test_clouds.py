"""Files for Ray's cluster launcher and SkyPilot; tests/deploy/test_clouds.py has them as they are rendered."""

import pytest

from raystride.pipelines.deploy.clouds import look_at_launcher, look_at_sky
from raystride.pipelines.deploy.schemas import FileError
from tests.errors import rejected


def test_a_file_without_what_it_needs_is_refused() -> None:
    sentence = r"^cluster\.yaml is nothing for Ray's cluster launcher: the file: 'provider' is a required property$"
    with pytest.raises(FileError, match=sentence):
        look_at_launcher({"cluster.yaml": "cluster_name: x"})
    with rejected("task.yaml", "num_nodes", "'two'", "'integer'"):
        look_at_sky({"task.yaml": "num_nodes: two"})


def test_the_least_files_are_taken() -> None:
    look_at_launcher({"cluster.yaml": "{cluster_name: x, provider: {type: local, head_ip: a, worker_ips: []}}"})
    look_at_sky({"task.yaml": "{resources: {accelerators: 'H100:8'}, run: 'true'}"})
