"""Guarded use of a library's private API. It may change with any version: it is checked before use, with a fallback.

try:
    with guard_private_api(RayActorError):                # errors of a changed API become PrivateApiMissing
        base = import_private("library._private", "Thing")
        check_signature(base.run, self, worker=1)         # does it accept these arguments?
        return check_overrides(OurThing, "run")           # does our method override one with the same signature?
except PrivateApiMissing as error:
    warn_fallback(error, "the public way, which takes longer", warn)
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any

Warn = Callable[[str], None]


class PrivateApiMissing(Exception):
    """A private part of Ray is missing or has changed; the message names it."""


_warned: set[str] = set()


def warn_fallback(missing: object, instead: str, warn: Warn) -> None:
    """Warns once per process that `missing` is replaced by the fallback `instead`."""
    if instead not in _warned:
        warn(fallback_warning(missing, instead))
        _warned.add(instead)


def fallback_warning(missing: object, instead: str) -> str:
    """Returns the warning that `missing` is replaced by the fallback `instead`."""
    return f"Ray {version('ray')} is not as Raystride knows it ({missing}): {instead}"


@contextmanager
def guard_private_api(*others: type[Exception]) -> Iterator[None]:
    """Turns errors that a changed private API causes, and the errors `others`, into PrivateApiMissing."""
    changed: tuple[type[Exception], ...] = (ImportError, AttributeError, TypeError, KeyError, *others)
    try:
        yield
    except PrivateApiMissing:
        raise
    except changed as error:
        *_, last = str(error).strip().splitlines() or [""]  # a dead actor's message ends with the cause
        raise PrivateApiMissing(f"{type(error).__name__}: {last}") from error


def import_private(module: str, name: str) -> Any:
    """Returns a private attribute of a module. Raises PrivateApiMissing."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PrivateApiMissing(f"{module}.{name} is gone") from error


def check_signature(function: Any, *arguments: Any, **named: Any) -> None:
    """Raises PrivateApiMissing if the function cannot be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise PrivateApiMissing(f"{function.__qualname__}: {error}") from error


def check_overrides(subclass: type, *names: str) -> type:
    """Returns the subclass if its methods `names` override base methods with the same parameters; raises PrivateApiMissing
    otherwise: without this check a method that Ray no longer calls would go unnoticed."""
    base: Any = subclass.__mro__[1]
    for name in names:
        base_method = getattr(base, name, None)
        if base_method is None:
            raise PrivateApiMissing(f"{base.__name__}.{name} is gone")
        if callable(base_method) and list(inspect.signature(base_method).parameters) != list(
            inspect.signature(getattr(subclass, name)).parameters
        ):
            raise PrivateApiMissing(f"{base.__name__}.{name} takes {inspect.signature(base_method)}")
    return subclass
