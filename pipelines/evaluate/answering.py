"""What a trained model says to some documents: labels, translations, continuations, and how well they fit what is known.

A question is a document without its answer, as the task's columns have it. Graded, whole documents get their loss as well;
those of a task with windows are cut into windows, each of which is a sample without an answer.

    answerer = Answerer(open_run(storage, "my-run"), Answering(run="my-run"))
    list(answerer.answer([("free money",)]))                  # [{"text": "free money", "label": "spam", ...}]
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Answering, Sample
from raystride.pipelines.evaluate.opening import Opened
from raystride.pipelines.evaluate.writing import write_rows
from raystride.pipelines.prepare.stages import id_type
from raystride.pipelines.sources.pieces import Piece
from raystride.pipelines.tasks.task import Document
from raystride.pipelines.train.precision import Precision

WINDOW = 16
"""Batches whose samples are sorted by length together, so that little is padding."""

T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """A sample that is to be answered."""

    fields: dict[str, Any]
    """The document's columns, as they stand beside the answer."""
    ids: np.ndarray
    mask: np.ndarray | None = None
    row: Mapping[str, Any] | None = None
    """The whole row of the data, where that is kept."""


class Answerer:
    """A model in this process, on its device; `graded` says whether documents are whole and get a loss."""

    def __init__(self, opened: Opened, settings: Answering, sample: Sample | None = None, *, graded: bool = False) -> None:
        """`sample` says how a decoder writes. Raises SettingError where there is no such device."""
        cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
        if cuda and not torch.cuda.is_available():
            raise settings.error("device", "must be auto or cpu where there is no GPU that PyTorch can use")
        self.device = torch.device("cuda" if cuda else "cpu")
        self.model, self.task, self.settings, self.graded = opened.model.to(self.device), opened.task, settings, graded
        self.sample = (sample or Sample()) if isinstance(self.model, Decoder) and not graded else None
        self._precision = Precision(settings.precision)
        self._precision.use_products()
        self._columns = self.task.columns if graded else self.task.asked
        self._type = np.int64 if self.task.window else np.dtype(str(id_type(self.task)))
        if settings.threads and not cuda:
            torch.set_num_threads(settings.threads)

    def answer(self, documents: Iterable[Document]) -> Iterator[dict[str, Any]]:
        """The columns of each document with its answer, in order. Raises ValueError where one is no question."""
        return self.answers(example for document in documents for example in self.examples(Piece(document)))

    def examples(self, piece: Piece) -> list[Example]:
        """The samples of a document. Raises ValueError where it can be none."""
        values = zip(self._columns, piece.document, strict=True)
        # A picture's file says more to a reader than its bytes do, and takes less room.
        fields: dict[str, Any] = {
            column.name: piece.place or value if column.kind == "image" else value for column, value in values
        }
        if self.sample:
            return [Example(fields, self.task.question(piece.document), row=piece.row)]
        ids, mask = self.task.encode(piece.document)
        if self.task.window:
            return list(self._windows(piece.document, ids if piece.ends else ids[:-1], begins=piece.begins))
        return [self._example(fields, piece.document, ids, mask, piece.row)]

    def prepared_examples(self, ids: np.ndarray, mask: np.ndarray | None, *, begins: bool, place: str) -> list[Example]:
        """Returns the samples of a prepared example; `begins` says whether a document begins with it."""
        document = self.task.decode(ids, mask)
        if self.task.window:
            return list(self._windows(document, ids, begins=begins))
        values = zip(self._columns, document, strict=True)
        fields = {column.name: place if column.kind == "image" else value for column, value in values}
        return [self._example(fields, document, ids, mask)]

    def _example(
        self,
        fields: dict[str, Any],
        document: Document,
        ids: np.ndarray,
        mask: np.ndarray | None,
        row: Mapping[str, Any] | None = None,
    ) -> Example:
        if self.graded and isinstance(self.model, Decoder):
            fields[self.task.given("bytes")] = self.task.answer_bytes(document)
        return Example(fields, ids.astype(self._type, copy=False), mask, row)

    def _windows(self, document: Document, ids: np.ndarray, *, begins: bool) -> Iterator[Example]:
        """A document by itself: each of its tokens is predicted once, from those before it in its window."""
        window, encoder = self.task.window, self.task.encoders["tokenizer"]
        assert window
        # A document begins after the end token of another one, as in training.
        stream = np.concatenate(([encoder.end_id] if begins else [], ids)).astype(np.int64)
        last, size = len(stream) - 1, len(document[0].encode())
        for first in range(0, last, window.stride):
            found = stream[first : first + window.length]
            filled = np.full(window.length, encoder.end_id)
            filled[: len(found)] = found
            text = encoder.decode([i for i in found[1:].tolist() if i != encoder.end_id])
            # Its share of the bytes by tokens: cut between two tokens, a character may have no length of its own.
            share = size * min(first + window.stride, last) // last - size * first // last
            fields = {self._columns[0].name: text, self.task.given("bytes"): share}
            yield Example(fields, filled, np.arange(window.length) < len(found))

    def answers(self, examples: Iterable[Example]) -> Iterator[dict[str, Any]]:
        """The fields of each example with its answer, in the order of the examples."""
        for example, found in self.pairs(examples):
            fields = example.fields
            yield fields | {f"{name}_given" if name in fields else name: value for name, value in found.items()}

    def pairs(self, examples: Iterable[Example]) -> Iterator[tuple[Example, dict[str, Any]]]:
        """Each example with its answer, in the order of the examples."""
        batch, some = self.settings.batch, iter(examples)
        while window := list(islice(some, WINDOW * batch)):
            order = self._by_length(window)
            found: dict[int, dict[str, Any]] = {}
            for numbers in (order[i : i + batch] for i in range(0, len(order), batch)):
                found |= zip(numbers, self._batch([window[number] for number in numbers]), strict=True)
            for number, example in enumerate(window):
                yield example, found[number]

    def _by_length(self, examples: list[Example]) -> list[int]:
        """Their numbers, longest first, so that what does not fit into memory shows at once."""
        lengths = np.array([len(example.ids) for example in examples])
        if self.sample or self.task.window:
            return [int(number) for number in np.argsort(-lengths, kind="stable")]
        firsts = np.array([int(example.ids[0]) for example in examples])
        sizes = self.task.sizes(firsts, lengths)
        return [int(number) for number in np.lexsort(-sizes.T[::-1])]

    def _batch(self, examples: list[Example]) -> list[dict[str, Any]]:
        with torch.inference_mode(), self._precision.autocast(self.device):
            if self.sample:
                return self._continue(examples, self.sample)
            masks = [np.ones(len(each.ids), bool) if each.mask is None else each.mask for each in examples]
            masked = any(each.mask is not None for each in examples)
            rows: Any = self.task.complete([example.ids for example in examples])
            inputs, targets = self.task.collate(np.stack(rows) if self.task.window else rows, masks if masked else None)
            inputs = self.task.unpack(tuple(each.to(self.device) for each in inputs))
            answers = self.task.answer(self.model, inputs) or [{} for _ in examples]
            if not self.graded:
                return answers
            losses, counts = self.task.losses(self.model, inputs, targets.to(self.device))
            graded = zip(answers, losses.tolist(), counts.tolist(), strict=True)
            return [answer | {"loss": loss, "targets": int(count)} for answer, loss, count in graded]

    def _continue(self, examples: list[Example], sample: Sample) -> list[dict[str, Any]]:
        prompts = [example.ids.tolist() for example in examples]
        pieces = list(write_rows(self.model, self.task, sample, prompts))  # type: ignore[arg-type]
        return [{"continuation": "".join(row)} for row in zip(*pieces, strict=True)]
