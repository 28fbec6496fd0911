"""What tests share: one small Ray cluster for a whole session, and no deadlines, since machines are shared."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("raystride", deadline=None, max_examples=50)
settings.load_profile("raystride")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of two cores, started once."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
