"""Errors that a user can cause, by their fields: a sentence may be worded anew, what it is about may not.

with refused("train.steps", -1): TrainConfig(steps=-1)
with refused("data.follow", True, names=["data.start_after_mib"]): DataConfig(follow=True)
with unreadable("rows.csv", line=3, column="text"): read("data/rows.csv")
with cannot_run("nodes", "5", "4"): plan(...)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import ANY

import pytest

from raystride.pipelines.config import SettingError
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.launch.cluster.cluster import CannotRun


@contextmanager
def refused(setting: str, value: Any = ANY, *, names: Sequence[str] = ()) -> Iterator[pytest.ExceptionInfo[SettingError]]:
    """Expects a SettingError about this setting and value, which says both and the `names` of whatever else is concerned."""
    with pytest.raises(SettingError) as raised:
        yield raised
    error = raised.value
    assert (error.setting, error.value) == (setting, value), str(error)
    assert not [name for name in (setting, *names) if name not in str(error)], str(error)


@contextmanager
def unreadable(file: str = "", *, names: Sequence[str] = (), **fields: Any) -> Iterator[pytest.ExceptionInfo[DataError]]:
    """Expects a DataError about a file of this name, or ending, with these fields, which says the `names`, too."""
    with pytest.raises(DataError) as raised:
        yield raised
    error = raised.value
    assert error.file.endswith(file), str(error)
    assert {name: getattr(error, name) for name in fields} == fields, str(error)
    assert not [name for name in (file, *names) if name not in str(error)], str(error)


@contextmanager
def cannot_run(problem: str, *names: str) -> Iterator[pytest.ExceptionInfo[CannotRun]]:
    """Expects a CannotRun with a failed check of this name, which says all `names`, as the sentence does."""
    with pytest.raises(CannotRun) as raised:
        yield raised
    error = raised.value
    assert any(problem == check and all(name in found for name in names) for check, found in error.problems), error.problems
    assert not [name for name in (problem, *names) if name not in str(error)], str(error)
