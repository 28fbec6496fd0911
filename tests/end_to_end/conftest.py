"""Trained runs of every task are those of the tests of `evaluate`; the wheel and the user's project are in `installed`."""

from tests.end_to_end.installed import project, site
from tests.pipelines.evaluate.conftest import trained

__all__ = ["project", "site", "trained"]
