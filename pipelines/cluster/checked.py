"""How a private part of Ray is looked at before it counts: whether it is there, and whether it is as `internals` knows it.

with as_known():                                          # NotThere for what a changed part raises
    found = private_part("ray.some.module", "name")       # or NotThere: ray.some.module.name is gone
    check_takes(found, 1, key="value")                    # or NotThere: how it is called now
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class NotThere(Exception):
    """A private part of Ray is not where it was, or not as it was; the message says which."""


@contextmanager
def as_known(*others: type[Exception]) -> Iterator[None]:
    """Raises NotThere for what a part that has changed raises, and for `others`."""
    changed: tuple[type[Exception], ...] = (ImportError, AttributeError, TypeError, KeyError, *others)
    try:
        yield
    except NotThere:
        raise
    except changed as error:
        *_, last = str(error).strip().splitlines() or [""]  # an actor that died says why at the end
        raise NotThere(f"{type(error).__name__}: {last}") from error


def private_part(module: str, name: str) -> Any:
    """A private name. Raises NotThere."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NotThere(f"{module}.{name} is gone") from error


def check_takes(function: Any, *arguments: Any, **named: Any) -> None:
    """Raises NotThere where the function cannot be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise NotThere(f"{function.__qualname__}: {error}") from error


def check_overrides(ours: type, *names: str) -> type:
    """Our class, whose methods of these names stand for those of the class below it. Raises NotThere where they do not:
    nothing would fail then, they would just not be called."""
    base: Any = ours.__mro__[1]
    for name in names:
        theirs = getattr(base, name, None)
        if theirs is None:
            raise NotThere(f"{base.__name__}.{name} is gone")
        if callable(theirs) and list(inspect.signature(theirs).parameters) != list(
            inspect.signature(getattr(ours, name)).parameters
        ):
            raise NotThere(f"{base.__name__}.{name} takes {inspect.signature(theirs)}")
    return ours
