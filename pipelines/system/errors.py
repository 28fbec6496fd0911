"""Errors that all packages raise: of a setting that cannot work, and of a storage that cannot be read."""

import copy
import pickle
from typing import Any, Self

from raystride.pipelines.system.credentials import redact, redact_all_uris


class SettingError(ValueError):
    """A setting has a value that cannot work. The message names the setting, the value and what is allowed.

    So do the fields, where it is one setting: `setting` by its full name, `value` without secrets, and `allowed`: the words
    of a choice, the limits of a range by name (`{"at_least": 1}`), or a rule in words.
    """

    def __init__(self, message: str = "", *, setting: str = "", value: Any = None, allowed: Any = None) -> None:
        super().__init__(redact(message))
        self.setting, self.value, self.allowed = setting, redact_all_uris(value), allowed

    @classmethod
    def from_error(cls, error: Exception) -> Self:
        """Returns the same error as one of a setting, with those of the fields that it has."""
        known = {name: getattr(error, name) for name in ("setting", "value", "allowed") if hasattr(error, name)}
        return cls(str(error), **known)


class Unreadable(OSError):
    """A storage could not be read, after all retries. What is there may be whole: this is never taken for damage."""


def picklable_error(error: BaseException) -> BaseException:
    """Returns the error itself if it survives pickling, else a RuntimeError with its text."""
    try:
        pickle.dumps(error)
        copy.copy(error)  # is rebuilt in the same way as a pickled one
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def root_cause(error: BaseException) -> BaseException:
    """Returns the error that Ray's errors wrap, at last; without a wrapper the error itself."""
    return cause_chain(error)[-1]


def cause_chain(error: BaseException) -> list[BaseException]:
    """Returns the error and the errors that it wraps, the root cause last."""
    wrapped = (getattr(error, name, None) for name in ("cause", "controller_failure", "health_check_failure"))
    inner = next(filter(None, wrapped), None)
    return [error, *cause_chain(inner)] if isinstance(inner, BaseException) else [error]
