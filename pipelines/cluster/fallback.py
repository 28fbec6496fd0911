"""How a private part of a library is used that may change with any version: looked at before it counts, else done without.

try:
    with known(RayActorError):                            # what a changed part raises becomes NotThere
        base = part("library._private", "Thing")
        takes(base.run, self, worker=1)                   # can it be called so?
        return overrides(OurThing, "run")                 # are our methods those that it calls?
except NotThere as error:
    fell_back(error, "the public way, which takes longer", warn)
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any

Warn = Callable[[str], None]


class NotThere(Exception):
    """A private part of Ray is not where it was, or not as it was; the message says which."""


def say(text: str) -> None:
    """Warns on the screen, where there is no record yet."""
    print(f"warning: {text}", file=sys.stderr)


_told: set[str] = set()


def fell_back(missing: object, instead: str, warn: Warn) -> None:
    """Warns, once a process, of what is done instead."""
    if instead not in _told:
        warn(fallen(missing, instead))
        _told.add(instead)


def fallen(missing: object, instead: str) -> str:
    """Returns the warning: what is missing, and what is done instead."""
    return f"Ray {version('ray')} is not as Raystride knows it ({missing}): {instead}"


@contextmanager
def known(*others: type[Exception]) -> Iterator[None]:
    """Raises NotThere for what a part that has changed raises, and for `others`."""
    changed: tuple[type[Exception], ...] = (ImportError, AttributeError, TypeError, KeyError, *others)
    try:
        yield
    except NotThere:
        raise
    except changed as error:
        *_, last = str(error).strip().splitlines() or [""]  # an actor that died says why at the end
        raise NotThere(f"{type(error).__name__}: {last}") from error


def part(module: str, name: str) -> Any:
    """A private name. Raises NotThere."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NotThere(f"{module}.{name} is gone") from error


def takes(function: Any, *arguments: Any, **named: Any) -> None:
    """Raises NotThere where the function cannot be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise NotThere(f"{function.__qualname__}: {error}") from error


def overrides(ours: type, *names: str) -> type:
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
