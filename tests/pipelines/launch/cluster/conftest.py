"""Fixtures of the tests that take private parts of Ray away."""

from importlib import import_module

import pytest

from raystride.pipelines.launch.cluster import fallback
from raystride.pipelines.launch.cluster.cluster import RAY_ENVIRONMENT


@pytest.fixture(scope="module")
def ray_train_is_imported() -> None:
    """Before a name goes that it uses: in another Ray it would use none that is gone."""
    import_module("ray.train.torch")


@pytest.fixture
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `cluster` sets for every job; and nothing has been warned of yet."""
    monkeypatch.setattr(fallback, "_warned", set())
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
