"""Applies a user's function to a trained model and a dataset, in parts, in this process or on a cluster's workers.

job = ApplyJob(chosen=chosen, settings=settings, function=fn, data=dataset)
[job.run_part(model, part) for part in cut_dataset(job.dataset, settings.batch)]      # rows: [{"prediction": 3}, ...]
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from raystride.pipelines.config import SettingError
from raystride.pipelines.config.jobs import ApplyConfig
from raystride.pipelines.data.plugins import refuse_unpicklable
from raystride.pipelines.data.prepare.code_hash import hash_code, qualified_name
from raystride.pipelines.data.sources.pieces import Part
from raystride.pipelines.evaluate.answering import prepare_device
from raystride.pipelines.evaluate.load_run import SelectedRun
from raystride.pipelines.evaluate.parts import file_schema, write_record
from raystride.pipelines.evaluate.rows import Row, infer_schema, open_writer, split_chunks
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.own_model.dataset import IndexedDataset, describe_sample, open_dataset
from raystride.pipelines.train.own_model.definition import OwnModel, describe_error
from raystride.pipelines.train.own_model.network import autocast_module
from raystride.pipelines.train.own_model.samples import Collate, NestedBatch, read_batch
from raystride.pipelines.train.own_model.shared import is_in_memory, share_data

NUM_PARTS = 64
"""Number of parts of a dataset, if it has so many batches: those of a killed prediction that are done are kept."""

UserFunction = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class SampleRange(Part):
    """The work of one task: a range of a dataset's samples."""

    first: int = 0
    last: int = 0
    sample_bytes: int = 1

    @property
    def bytes(self) -> int:
        """Approximate bytes of the samples."""
        return (self.last - self.first) * self.sample_bytes


def cut_dataset(dataset: IndexedDataset, batch: int) -> list[Part]:
    """Returns the parts of a dataset, the same on any number of workers: whole batches, except for the last."""
    length = len(dataset)
    size = batch * -(-length // (batch * NUM_PARTS))
    sample_bytes = len(pickle.dumps(dataset[0])) if length else 1
    return [
        SampleRange(number, (), None, first, min(first + size, length), sample_bytes)
        for number, first in enumerate(range(0, length, size or 1))
    ]


@dataclass(frozen=True, kw_only=True)
class ApplyJob:
    """Common parameters of all parts; it is sent to every worker."""

    chosen: SelectedRun
    settings: ApplyConfig
    function: UserFunction
    """Called as function(model, batch) without gradients, the batch on the model's device; returns a row per sample: a
    tensor, an array, a list, or a mapping of these by the names of columns."""
    data: Any
    """What `open_dataset` takes."""
    collate: Collate | None = None
    folder: Folder | None = None
    """Folder of a file a part; None: rows are returned."""
    form: Literal["parquet"] = "parquet"
    split: None = None
    graded: bool = False
    fixed: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what was opened here."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @cached_property
    def dataset(self) -> IndexedDataset:
        """The samples. Raises DataError if they cannot be indexed."""
        return open_dataset(self.data)

    def for_workers(self) -> "ApplyJob":
        """Returns the job with data in memory put into Ray's object store. Raises SettingError for what cannot be sent."""
        parts = {"fn": self.function, "collate": self.collate, "data": None if is_in_memory(self.data) else self.data}
        refuse_unpicklable(parts)
        return replace(self, data=share_data(self.data))

    @cached_property
    def origin(self) -> dict[str, Any]:
        """Everything that affects the rows, as JSON."""
        return {
            "weights": self.chosen.identity,
            "step": self.chosen.step,
            "samples": len(self.dataset),
            "sample": describe_sample(self.dataset[0]) if len(self.dataset) else None,
            "code": hash_code(map(qualified_name, filter(None, (self.function, self.collate))), follow_installed=False),
            **{key: getattr(self.settings, key) for key in ("run", "batch", "precision")},
        }

    def load_predictor(self) -> nn.Module:
        """Loads the model onto its device. Raises SettingError if there is none."""
        device, model = prepare_device(self.settings), self.chosen.open().model
        return getattr(model, "users_module", model).to(device)  # type: ignore[no-any-return]

    def run_part(self, model: nn.Module, part: Part) -> Any:
        """Returns the rows of a part, or writes them into its file and returns the record of it."""
        assert isinstance(part, SampleRange)
        rows = self._apply(model, part)
        if self.folder is None:
            return list(rows)
        import pyarrow as pa

        plain = [{name: _to_plain(value) for name, value in row.items()} for row in rows]
        schemas, name = (pa.schema([]), infer_schema(plain)), f"{part.number:05d}.{self.form}"
        with (
            self.folder.writer(name) as stream,
            open_writer(self.form, stream, file_schema(*schemas, fixed=False)) as writer,
        ):
            for chunk in split_chunks(Row(row) for row in plain):
                writer.write(chunk)
        return write_record(self.folder, part, name, schemas, written=len(plain), rows=len(plain))

    def _apply(self, model: nn.Module, part: SampleRange) -> Iterator[dict[str, Any]]:
        device = next((value.device for value in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        size = self.settings.batch
        own = getattr(self.chosen.task, "own_model", None)
        collate = self.collate or (own.collate if isinstance(own, OwnModel) else None)
        for first in range(part.first, part.last, size):
            numbers = np.arange(first, min(first + size, part.last))
            batch = NestedBatch(read_batch(self.dataset, collate, numbers, self.chosen.config.seed)).to(device)
            with torch.inference_mode(), autocast_module(self.settings.precision, device):
                try:
                    returned = self.function(model, batch.content)
                except Exception as error:
                    message = f"fn raised {describe_error(error)}, for samples {first} to {numbers[-1]}"
                    raise SettingError(message, setting="fn") from error
            yield from split_rows(returned, len(numbers))


def split_rows(returned: Any, count: int) -> list[dict[str, Any]]:
    """Returns what a function returned for a batch as a row per sample; what has no name is named `prediction`.

    Raises SettingError unless it has `count` values of each.
    """
    columns = returned if isinstance(returned, Mapping) else {"prediction": returned}
    if isinstance(returned, Sequence) and len(returned) == count and all(isinstance(row, Mapping) for row in returned):
        return [dict(row) for row in returned]
    arrays = {str(name): _to_values(values) for name, values in columns.items()}
    for name, values in arrays.items():
        length = len(values) if hasattr(values, "__len__") and getattr(values, "shape", None) != () else None
        if length != count:
            rule = "must return a value per sample of the batch"
            found = f"a {type(values).__name__}" if length is None else f"{length}"
            message = f"fn {rule}, and returned {found} as {name!r} for {count} samples"
            raise SettingError(message, setting="fn", value=length, allowed=count)
    return [{name: _to_number(values[index]) for name, values in arrays.items()} for index in range(count)]


def _to_values(values: Any) -> Any:
    """Returns a tensor as an array on the host, and other values as they are."""
    if not isinstance(values, torch.Tensor):
        return values
    return values.detach().to("cpu", torch.float32 if values.dtype == torch.bfloat16 else values.dtype).numpy()


def _to_number(value: Any) -> Any:
    """Returns a scalar as Python's number, and other values as they are."""
    return value.item() if isinstance(value, np.generic) or getattr(value, "shape", None) == () else value


def _to_plain(value: Any) -> Any:
    """Returns a value as Arrow takes it: arrays and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value
