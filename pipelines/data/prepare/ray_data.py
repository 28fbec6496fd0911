"""Preparation on Ray Data: one read task a part, tokenised and written in the same task.

Read, map and write fuse into one operator, so text and ids stay inside a process and only records travel. Ray Data wraps the
errors of a task; the caller gets the DataError itself.

    for record in run_parts(job, parts): ...                  # ray.init was called before
    run_task(function, argument)                              # one plain task
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import ray
from ray.data import DataContext
from ray.data.block import Block, BlockMetadata
from ray.data.datasource import Datasink, Datasource, ReadTask, WriteResult

from raystride.pipelines.data.prepare.near_duplicates import (
    Bands,
    Collisions,
    SignedParts,
    compute_band_rows,
    find_collisions,
)
from raystride.pipelines.data.prepare.stages import Preparation, prepare_part, read_part, tokenise_table, write_part
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.pieces import Part
from raystride.pipelines.system.storage.folder import Folder

_BLOCK_BYTES = 8 << 20
_ROWS_OF_STRETCH = 4 << 20
"""Rows of bands that a task groups at once: 100 MB."""
_ROW = ("document", "key")

Result = TypeVar("Result")


class PartRefs:
    """Parts in the object store, so that a task carries a reference: a part may be of a hundred thousand files."""

    def __init__(self, parts: Iterable[Part]) -> None:
        """Requires ray.init."""
        self._refs = {part.number: ray.put(part) for part in parts}

    def __getitem__(self, number: int) -> Part:
        """Returns a part by its number, in any process of the cluster."""
        part: Part = ray.get(self._refs[number])
        return part

    def __iter__(self) -> "Iterator[ray.ObjectRef[Part]]":
        """Yields the references, in the order of the parts."""
        return iter(self._refs.values())


def _read_part(job: "ray.ObjectRef[Preparation]", part: "ray.ObjectRef[Part]") -> Iterator[pa.Table]:
    return read_part(*ray.get([job, part]))


class _Parts(Datasource):  # type: ignore[misc]
    """Data source with a read task a part."""

    def __init__(self, job: Preparation, parts: list[Part]) -> None:
        super().__init__()
        self._job, self._parts, self._refs = ray.put(job), parts, PartRefs(parts)

    def estimate_inmemory_data_size(self) -> int:
        return sum(part.bytes for part in self._parts)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        def task(part: Part, ref: "ray.ObjectRef[Part]") -> ReadTask:
            metadata = BlockMetadata(num_rows=None, size_bytes=part.bytes, input_files=None, exec_stats=None)
            return ReadTask(partial(_read_part, self._job, ref), metadata)

        return list(map(task, self._parts, self._refs))


class _Shards(Datasink[dict[str, Any]]):  # type: ignore[misc]
    """Data sink that writes the shards of the part in a task."""

    def __init__(self, job: Preparation) -> None:
        self._job = job
        self.records: list[dict[str, Any]] = []

    def write(self, blocks: Iterable[Block], ctx: Any) -> dict[str, Any]:
        return write_part(self._job, blocks)

    def on_write_complete(self, write_result: WriteResult[dict[str, Any]]) -> None:
        self.records = list(write_result.write_returns)


def run_jobs(jobs: Sequence[tuple[Preparation, list[Part]]]) -> list[list[dict[str, Any]]]:
    """Prepares the parts of several sources on the cluster, as one job, and returns their records by source.

    Raises DataError as a stage raised it.
    """
    if len(jobs) == 1:
        return [run_parts(*jobs[0])]
    # Plain tasks: an operator of Ray Data is of one source.
    gpus = int(any(job.task.wants_gpu for job, _ in jobs) and ray.cluster_resources().get("GPU", 0) > 0)
    remote = ray.remote(prepare_part).options(num_gpus=gpus)
    refs = [[remote.remote(shared, part) for part in PartRefs(parts)] for job, parts in jobs for shared in [ray.put(job)]]
    with _unwrap_errors():
        return [ray.get(own) for own in refs]


def run_parts(job: Preparation, parts: list[Part]) -> list[dict[str, Any]]:
    """Prepares the parts on the cluster and returns their records. Raises DataError as a stage raised it."""
    if job.task.wants_gpu and ray.cluster_resources().get("GPU"):
        # Plain tasks: in Ray Data, operators that map whole blocks cannot request a GPU.
        return run_each(prepare_part, job, parts, gpus=1)
    sink = _Shards(job)
    with quiet_ray_data(), _unwrap_errors():
        texts = ray.data.read_datasource(_Parts(job, parts), override_num_blocks=len(parts))
        texts.map_batches(_TokeniseTable(job), batch_size=None, batch_format="pyarrow", zero_copy_batch=True).write_datasink(
            sink
        )
    return sink.records


class _TokeniseTable:
    """The second stage as an object, since Ray Data names operators after the mapped callable."""

    def __init__(self, job: Preparation) -> None:
        self._job = job
        self.__name__ = "tokenise"

    def __call__(self, table: pa.Table) -> pa.Table:
        return tokenise_table(self._job, table)


def run_each(
    function: Callable[[Preparation, Part], Result], job: Preparation, parts: Iterable[Part], *, gpus: int = 0
) -> list[Result]:
    """Returns the function's results in order, from a task a part with `gpus` GPUs each. Raises DataError as it does."""
    remote, shared = ray.remote(function).options(num_gpus=gpus), ray.put(job)
    with _unwrap_errors():
        results: list[Result] = ray.get([remote.remote(shared, part) for part in PartRefs(parts)])
        return results


def run_task(function: Callable[..., Result], *arguments: Any) -> Result:
    """Returns the function's result, computed in one task. Raises DataError, SettingError as it does."""
    with _unwrap_errors():
        result: Result = ray.get(ray.remote(function).remote(*arguments))
        return result


def group_bands(folder: Folder, signed: SignedParts, bands: Bands) -> Collisions:
    """Finds documents that share a band, on the cluster: rows of all parts are grouped by ranges of their keys."""
    documents = signed[-1][1] + 1 if signed else 0
    stretches = max(1, int(ray.cluster_resources().get("CPU", 1)), documents * bands.count // _ROWS_OF_STRETCH)

    def stretch_rows(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        places = zip(batch["part"].tolist(), batch["first"].tolist(), strict=True)
        found = [compute_band_rows(folder, part, first, bands) for part, first in places]
        numbers, keys = (np.concatenate([rows[column] for rows in found]) for column in (0, 1))
        return {"stretch": (keys % np.uint64(stretches)).astype(np.int64), "document": numbers, "key": keys.view(np.int64)}

    def collide(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        numbers, keys = find_collisions(batch["document"], batch["key"].view(np.uint64))
        return {"document": numbers, "key": keys.view(np.int64)}

    with quiet_ray_data(), _unwrap_errors():
        parts = ray.data.from_items([{"part": part, "first": first} for part, first in signed])
        grouped = parts.map_batches(stretch_rows, batch_size=1, batch_format="numpy").groupby("stretch")
        batches = list(grouped.map_groups(collide, batch_format="numpy").iter_batches(batch_size=None, batch_format="numpy"))
    found = [np.concatenate([batch[name] for batch in batches if name in batch] or [np.empty(0, np.int64)]) for name in _ROW]
    return found[0].astype(np.int64), found[1].astype(np.int64).view(np.uint64)


@contextmanager
def quiet_ray_data() -> Iterator[None]:
    """Sets Ray Data to keep the order of the parts, use small blocks and log nothing."""
    logger, context = logging.getLogger("ray.data"), DataContext.get_current()
    options = context.execution_options
    before = logger.level, context.enable_progress_bars, context.target_max_block_size, options.preserve_order
    logger.setLevel(logging.CRITICAL)
    context.enable_progress_bars, context.target_max_block_size, options.preserve_order = False, _BLOCK_BYTES, True
    try:
        yield
    finally:
        logger.setLevel(before[0])
        context.enable_progress_bars, context.target_max_block_size, options.preserve_order = before[1:]


@contextmanager
def _unwrap_errors() -> Iterator[None]:
    """Raises the DataError or SettingError inside an error of Ray."""
    try:
        yield
    except Exception as error:
        inner = _find_own_error(error)
        if inner is None:
            raise
        # A DataError has one line; Ray Data appends others to every error.
        raise type(inner)(str(inner).splitlines()[0]) from None


def _find_own_error(error: BaseException | None) -> ValueError | None:
    from raystride.pipelines.config import SettingError

    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, ValueError) and type(error) in (DataError, SettingError):
            return error
        seen.add(id(error))
        error = getattr(error, "cause", None) or error.__cause__
    return None
