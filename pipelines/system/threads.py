"""Maps a function over many small items in threads, a stretch of them at a time.

for result in map_in_threads(check, files, 16): ...       # in the order of the files
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_STRETCH = 256
"""Items that a thread takes at once: handing one over takes as long as a small file, and 1.5 kB."""


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[Result]:
    """Yields the function's results in the order of the items. Raises as the function does."""
    stretch = max(1, min(MAX_STRETCH, len(items) // (4 * threads)))
    with ThreadPoolExecutor(threads) as pool:
        firsts = range(0, len(items), stretch)
        for results in pool.map(lambda first: list(map(function, items[first : first + stretch])), firsts):
            yield from results
