"""Something non-empty to assert about.

for shard in some(folder.glob("*.arrow")): assert shard.stat().st_size
"""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def some(items: Iterable[T]) -> list[T]:
    """Returns the items as a list. Fails where there are none: asserts in a loop over nothing pass."""
    found = list(items)
    assert found, "there is nothing to check"
    return found
