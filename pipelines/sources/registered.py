"""Your own data sets: the one place to edit. A function that yields documents becomes a source under the name you give it.

    @register_source("poems")
    def poems() -> Iterator[str]:
        for path in sorted(Path("/data/poems").glob("*.txt")):
            yield path.read_text()

    python ray_jobs/train.py --data.source poems

A document of several columns is a tuple in the order of the task's, or a dict by their names: {"text": ..., "label": ...}.
Yield in the same order each time. The function runs in one task and its documents are written as they come, so memory stays
bounded; for more than some gigabytes write JSON lines or Parquet files instead, which every worker can read a part of.
"""

from collections.abc import Iterator

from raystride.pipelines.sources.registry import register_source


@register_source("arithmetic")
def arithmetic() -> Iterator[str]:
    """A toy: every sum of two numbers below 100, a document each. Small enough to learn in a minute."""
    for first in range(100):
        for second in range(100):
            yield f"{first}+{second}={first + second}"
