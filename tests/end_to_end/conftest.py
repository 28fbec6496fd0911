"""Trained runs of every task are those of the tests of `evaluate`."""

from tests.pipelines.evaluate.conftest import trained

__all__ = ["trained"]
