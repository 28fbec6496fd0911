"""Predicts with a trained model: labels, translations and continuations of documents, and losses if the answers are known.

An input is a document without its answer, with the task's columns. With grading, whole documents also get their loss; those
of a task with windows are cut into windows, each a sample without an answer.

    predictor = Predictor(open_run(storage, "my-run"), Answering(run="my-run"))
    list(predictor.predict([("free money",)]))                # [{"text": "free money", "label": "spam", ...}]
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from raystride.pipelines.config import PredictorConfig, SampleConfig
from raystride.pipelines.data.prepare.stages import id_type
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.tasks.contract import refuse_missing
from raystride.pipelines.data.tasks.task import Document
from raystride.pipelines.data.tasks.text_generation import write_rows
from raystride.pipelines.evaluate.load_run import LoadedModel
from raystride.pipelines.system.heap import keep_freed_memory
from raystride.pipelines.train.precision import Precision
from raystride.pipelines.train.randomness import VALIDATION, micro_batch_seed, preserve_generators, seed_generators

SORTED_BATCHES = 16
"""Number of batches whose samples are sorted by length together, to reduce padding."""

T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """A sample to predict."""

    fields: dict[str, Any]
    """The document's columns, as they are written beside the prediction."""
    ids: np.ndarray
    mask: np.ndarray | None = None
    row: Mapping[str, Any] | None = None
    """The whole row of the data, if it is kept."""


def prepare_device(settings: PredictorConfig) -> torch.device:
    """Returns the device of a model, after this process's threads, memory and products are as the settings say.

    Raises SettingError if there is no such device.
    """
    cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise settings.error("device", "must be auto or cpu where there is no GPU that PyTorch can use")
    Precision(settings.precision).set_matmul_precision()
    if not cuda:
        keep_freed_memory()
        if settings.threads:
            torch.set_num_threads(settings.threads)
    return torch.device("cuda" if cuda else "cpu")


class Predictor:
    """A model in this process, on its device; if `graded`, documents are whole and get a loss."""

    def __init__(
        self, opened: LoadedModel, settings: PredictorConfig, sample: SampleConfig | None = None, *, graded: bool = False
    ) -> None:
        """Loads the model onto its device; `sample` configures a decoder's text. Raises SettingError if the device does not
        exist."""
        self.device = prepare_device(settings)
        self.model, self.task, self.settings, self.graded = opened.model.to(self.device), opened.task, settings, graded
        self.sample = (sample or SampleConfig()) if self.task.continues_text and not graded else None
        refuse_missing(self.task, self.model, "evaluate" if graded else "predict")
        self._precision = Precision(settings.precision)
        self._columns = self.task.columns if graded else self.task.asked
        self._type = np.int64 if self.task.window else np.dtype(str(id_type(self.task)))

    def predict(self, documents: Iterable[Document]) -> Iterator[dict[str, Any]]:
        """Yields the columns of each document with its prediction, in order. Raises ValueError if one is no valid input."""
        return self.predict_examples(example for document in documents for example in self.build_examples(Piece(document)))

    def build_examples(self, piece: Piece) -> list[Example]:
        """Returns the samples of a document. Raises ValueError if it cannot be one."""
        values = zip(self._columns, piece.document, strict=True)
        # A picture's path is more readable than its bytes, and smaller.
        fields: dict[str, Any] = {
            column.name: piece.place or value if column.kind == "image" else value for column, value in values
        }
        if self.sample:
            return [Example(fields, self.task.question(piece.document), row=piece.row)]
        ids, mask = self.task.encode(piece.document)
        if self.task.window:
            begin = 0 if piece.begins else len(self.task.begin_ids)
            return list(self._split_windows(piece.document, ids[begin : len(ids) - (not piece.ends)], begins=piece.begins))
        return [self._build_example(fields, piece.document, ids, mask, piece.row)]

    def build_prepared_examples(
        self, ids: np.ndarray, mask: np.ndarray | None, *, begins: bool, place: str
    ) -> list[Example]:
        """Returns the samples of a prepared example; `begins`: a document begins with it."""
        document = self.task.decode(ids, mask)
        if self.task.window:
            return list(self._split_windows(document, ids, begins=begins))
        values = zip(self._columns, document, strict=True)
        fields = {column.name: place if column.kind == "image" else value for column, value in values}
        return [self._build_example(fields, document, ids, mask)]

    def _build_example(
        self,
        fields: dict[str, Any],
        document: Document,
        ids: np.ndarray,
        mask: np.ndarray | None,
        row: Mapping[str, Any] | None = None,
    ) -> Example:
        if self.graded and self.task.continues_text:
            fields[self.task.given("bytes")] = self.task.answer_bytes(document)
        return Example(fields, ids.astype(self._type, copy=False), mask, row)

    def _split_windows(self, document: Document, ids: np.ndarray, *, begins: bool) -> Iterator[Example]:
        """Yields a document's windows: each of its tokens is predicted once, from those before it in its window."""
        window, encoder = self.task.window, self.task.encoders["tokenizer"]
        assert window
        # A document begins with the tokenizer's begin ids, or else after the end token of another one, as in training.
        lead = [encoder.end_id] if begins and not self.task.begin_ids else []
        stream = np.concatenate((lead, ids)).astype(np.int64)
        last, size = len(stream) - 1, len(document[0].encode())
        for start in range(0, last, window.stride):
            window_ids = stream[start : start + window.length]
            filled = np.full(window.length, encoder.end_id)
            filled[: len(window_ids)] = window_ids
            text = encoder.decode([i for i in window_ids[1:].tolist() if i != encoder.end_id])
            # Bytes are divided by tokens: a character cut between two tokens has no length of its own.
            num_bytes = size * min(start + window.stride, last) // last - size * start // last
            fields = {self._columns[0].name: text, self.task.given("bytes"): num_bytes}
            fields[self.task.given("begins")] = begins and start == 0
            yield Example(fields, filled, np.arange(window.length) < len(window_ids))

    def predict_examples(self, examples: Iterable[Example]) -> Iterator[dict[str, Any]]:
        """Yields the fields of each example with its prediction, in the order of the examples."""
        for example, answer in self.predict_pairs(examples):
            fields = example.fields
            yield fields | {f"{name}_given" if name in fields else name: value for name, value in answer.items()}

    def predict_pairs(self, examples: Iterable[Example]) -> Iterator[tuple[Example, dict[str, Any]]]:
        """Yields each example with its prediction, in the order of the examples."""
        batch, remaining, num_batches = self.settings.batch, iter(examples), 0
        while window := list(islice(remaining, SORTED_BATCHES * batch)):
            order = self._order_by_length(window)
            answers: dict[int, dict[str, Any]] = {}
            for numbers in (order[i : i + batch] for i in range(0, len(order), batch)):
                with self._seeded(num_batches):
                    answers |= zip(numbers, self._predict_batch([window[number] for number in numbers]), strict=True)
                num_batches += 1
            for number, example in enumerate(window):
                yield example, answers[number]

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Seeds what a graded batch draws by its number, as in a validation; generators are as before afterwards."""
        if not self.graded:
            yield
            return
        with preserve_generators(self.device):
            seed_generators(self.device, micro_batch_seed(self.task.config.seed, VALIDATION, number))
            yield

    def _order_by_length(self, examples: list[Example]) -> list[int]:
        """Returns their indices, longest first, so that an out-of-memory error shows at once."""
        lengths = np.array([len(example.ids) for example in examples])
        if self.sample or self.task.window:
            return [int(number) for number in np.argsort(-lengths, kind="stable")]
        firsts = np.array([int(example.ids[0]) for example in examples])
        sizes = self.task.sizes(firsts, lengths)
        return [int(number) for number in np.lexsort(-sizes.T[::-1])]

    def _predict_batch(self, examples: list[Example]) -> list[dict[str, Any]]:
        with torch.inference_mode(), self._precision.autocast(self.device):
            if self.sample:
                return self._generate_batch(examples, self.sample)
            masks = [np.ones(len(example.ids), bool) if example.mask is None else example.mask for example in examples]
            has_masks = any(example.mask is not None for example in examples)
            rows: Any = self.task.complete([example.ids for example in examples])
            inputs, targets = self.task.collate(np.stack(rows) if self.task.window else rows, masks if has_masks else None)
            inputs = self.task.unpack(tuple(tensor.to(self.device) for tensor in inputs))
            if not self.graded:
                return self.task.answer(self.model, inputs) or [{} for _ in examples]
            answers, losses, counts = self.task.answer_with_losses(self.model, inputs, targets.to(self.device))
            graded = zip(answers or [{} for _ in examples], losses.tolist(), counts.tolist(), strict=True)
            return [answer | {"loss": loss, "targets": int(count)} for answer, loss, count in graded]

    def _generate_batch(self, examples: list[Example], sample: SampleConfig) -> list[dict[str, Any]]:
        prompts = [example.ids.tolist() for example in examples]
        pieces = list(write_rows(self.model, self.task, sample, prompts))  # type: ignore[arg-type]
        return [{"continuation": "".join(row)} for row in zip(*pieces, strict=True)]
