"""Task: the interface of a training task. One file in this folder a task.

    task = build_task(config)                               # before the data is known: columns and metrics
    ids, mask = task.encode(document)                       # while preparing: one document -> one example
    task = build_task(config, manifest.facts, encoders)     # from then on with the facts that preparation learned
    inputs, targets = task.collate(rows, masks)             # while feeding: the model's inputs, on the host
    loss_sum, counted = task.build_model()(*inputs, targets)    # while training
    metrics = task.score(loss_sum, targets, counts)         # while validating

PyTorch is imported lazily: the driver and the workers that prepare data never need it, and the import takes seconds.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np

from raystride.model.shape import IGNORED as IGNORED
from raystride.pipelines.config import Config
from raystride.pipelines.data.tasks.encoder import Encoders as Encoders

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.pipelines.observability.observers.observer import Observer

Document = tuple[str, ...]
"""A row of a source: the values of the task's columns. An image is a data URI of its file (RFC 2397)."""
Facts = Mapping[str, Any]
"""Facts that preparation learned from the data, as JSON: `vocabulary_size`, `end_id`, the names of labels, ... A run that
started from a pretrained model also has `base_ids`: its ids that begin (`bos`), end (`eos`) and pad (`pad`) a text."""
NO_TOKENS: Facts = {"vocabulary_size": 0, "end_id": 0}
"""Facts of data without tokens."""
Rows = Sequence[np.ndarray] | np.ndarray
"""Some samples: vectors of numbers, or of booleans for masks; windows are the rows of one matrix."""
Inputs = tuple["torch.Tensor", ...]
"""The model's inputs without the targets."""


class Encoded(NamedTuple):
    """An example as it is prepared."""

    ids: np.ndarray
    """Its numbers (n)."""
    mask: np.ndarray | None
    """Loss mask (n); None: all count."""
    cut: int = 0
    """Ids of the document before it was truncated, or True if they were not counted; 0: it was not truncated."""


class SetMetrics(Protocol):
    """Collects what metrics of the whole validation set are computed from."""

    def add(self, batch: int, model: "nn.Module") -> None:
        """Takes what the model has measured in a batch of this number, over all workers."""
        ...

    def compute(self, world: int, device: "torch.device") -> dict[str, float]:
        """Returns the metrics of all batches of all workers, the same on each. Collective."""
        ...


NetworkMethods = Mapping[str, tuple[str, ...]]
"""Jobs that need a method of a task's network, by its name."""
TRAINING = "training"
"""The job without whose methods a network is refused, in `Task.network_methods`."""


@dataclass(frozen=True)
class Column:
    """A column that a task reads from every row."""

    setting: str
    """The setting with its name, for errors: `data.column`."""
    name: str
    """Its name in the data."""
    kind: Literal["text", "label", "image", "messages", "tools"] = "text"
    """Text; a label (text, number or boolean, read as text); an image file's bytes; text or messages, which become their
    JSON (`tasks.messages`); optional tools, a JSON list."""
    answer: bool = False
    """Whether it is an output of the model. Such columns come last; documents for prediction lack them."""


@dataclass(frozen=True)
class Window:
    """Windows that cut samples from the stream of all tokens."""

    length: int
    """Tokens in a sample."""
    stride: int
    """Tokens from the beginning of a sample to that of the next one."""


class Task:
    """Base class of training tasks; each task overrides what is particular to it.

    Raises SettingError if bundles are set (`train.slot_tokens`) but samples are windows, which are equally long, and if
    documents are to be packed (`train.packing`) but the task does not pack.
    """

    tokenizers: tuple[str, ...] = ("tokenizer",)
    """Names of its tokenizers: folders of these names are beside the shards."""
    surveyed: ClassVar[bool] = False
    """Whether `survey` must see all documents before the first is encoded, which takes an additional pass."""
    packs: ClassVar[bool] = False
    """Whether the task supports packed documents without padding (`train.packing`)."""
    reads_dataset: ClassVar[bool] = False
    """Whether it has samples of its own (`open_samples`, `describe_dataset`), so that no documents are prepared."""
    unit: ClassVar[str] = "tokens"
    """Unit in which reports count the samples seen: targets as `tokens`, samples as `examples`, `pairs`, `images` or
    `samples`. Throughput counts tokens, except of `images` and `samples`."""
    metrics: tuple[str, ...] = ("val_loss",)
    """Metrics of `score`, for `validation.metric`."""
    continues_text: ClassVar[bool] = False
    """Whether a prediction is a text that the network continues."""
    network_methods: ClassVar[NetworkMethods] = {}
    """What a network has besides `forward`: methods, each with the jobs that need it (see `tasks.contract`)."""

    def __init__(self, config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> None:
        self.config, self.facts, self.encoders = config, facts or {}, encoders or {}
        if config.train.slot_tokens and self.window:
            raise config.train.error("slot_tokens", f"must be 0 with task `{config.task}`, whose samples are equally long")
        if type(self).loss is not Task.loss and config.scaling.pipeline > 1:
            raise config.scaling.error("pipeline", "must be 1 with a task that has a loss of its own")
        if config.train.packing != "none" and not self.packs:
            raise config.train.error("packing", f"must be `none` with task `{config.task}`, which does not pack documents")

    @property
    def window(self) -> Window | None:
        """Windows that cut samples from the concatenated examples; None: each example is a sample."""
        return None

    def knowing(self, facts: Facts, encoders: Encoders) -> Self:
        """Returns the same task with these facts and tokenizers."""
        return type(self)(self.config, facts, encoders)

    def under(self, config: Config) -> Self:
        """Returns the same task with other settings, and the same facts and tokenizers."""
        return type(self)(config, self.facts, self.encoders)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns that the task reads from a row; a source without columns gives only the first one."""
        return (Column("data.column", self.config.data.column),)

    @property
    def asked(self) -> tuple[Column, ...]:
        """Input columns: all but the label or the target that the model predicts."""
        return tuple(column for column in self.columns if not column.answer)

    def shaped_by(self) -> dict[str, Any]:
        """Returns inputs of examples besides columns and tokenizers, as JSON, for the fingerprint; needs no facts."""
        return {}

    @property
    def ids(self) -> int:
        """Upper bound of the numbers in examples (exclusive); needs the facts."""
        return int(self.facts["vocabulary_size"])

    def texts(self, document: Document, tokenizer: str) -> Iterable[str]:
        """Returns the texts of a document on which this tokenizer is trained."""
        return document[:1]

    def survey(self, documents: Iterable[Document]) -> Facts:
        """Returns a summary of some of the documents, as JSON; `learn` gets one for each part of the data."""
        return {}

    def learn(self, surveys: Sequence[Facts]) -> Facts:
        """Returns the facts from all parts' surveys and the tokenizers. Raises SettingError if they do not suit the task."""
        encoder = self.encoders[self.tokenizers[0]]
        return {"vocabulary_size": encoder.vocabulary_size, "end_id": encoder.end_id}

    def describe_losses(self, documents: Iterable[Document]) -> list[str]:
        """Returns lines about what some documents hold and examples do not; preparation logs them. Not reading `documents`
        costs nothing."""
        return []

    def encode(self, document: Document) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns an example: its numbers (n), below `ids`, and a loss mask (n) or None. Raises ValueError if it cannot be
        encoded.

        Raises NotImplementedError if a task has no such method.
        """
        raise NotImplementedError

    def example(self, document: Document) -> Encoded:
        """Returns the example of `encode`, and whether it was truncated, as `is_cut` says; a task that knows counts the ids
        of the whole document (`Encoded.cut`). Raises as `encode` does."""
        ids, mask = self.encode(document)
        return Encoded(ids, mask, len(ids) > 0 and self.is_cut(ids))

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns the document of an example of `encode`, as far as the example still has it; an image has no file anymore.

        Raises NotImplementedError if a task has no such method: its prepared data can only be scored from the raw data.
        """
        raise NotImplementedError

    def complete(self, examples: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Second encoding pass: returns the examples of `encode` with features that are computed in batches.

        Preparation and evaluation call it with any batches: the result for an example depends on that one alone, except
        rounding.
        """
        return examples

    @property
    def wants_gpu(self) -> bool:
        """Whether `complete` is faster on a GPU; preparation on Ray then requests one a task, if the cluster has any."""
        return False

    def is_cut(self, example: np.ndarray) -> bool:
        """Returns whether the document was truncated in this example, as far as known; preparation counts those."""
        return False

    @property
    def begin_ids(self) -> Sequence[int]:
        """Ids at the beginning of a document in a stream; a later piece of a document has none."""
        return ()

    @property
    def writes_chats(self) -> bool:
        """Whether a chat template renders a decoder's prompts and answers."""
        return False

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the tokenizer's, and those of the pretrained model of the run (`base_ids`)."""
        base = self.facts.get("base_ids", {}).get("eos", ())
        return tuple(dict.fromkeys((*self.encoders[self.tokenizers[0]].end_ids, *base)))

    def prompt(self, text: str) -> np.ndarray:
        """Returns the ids (n) that a decoder continues; if empty, it starts like a new document."""
        return self.encoders[self.tokenizers[0]].encode(text)

    def question(self, document: Document) -> np.ndarray:
        """Returns the prompt's ids (n) for a document; its last field may be missing."""
        return self.prompt(document[0])

    def answer_bytes(self, document: Document) -> int:
        """Returns the bytes of the graded part of a document."""
        return len(document[-1].encode())

    def sizes(self, firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the lengths (n, k) of the examples' k sequences, for padding, from the examples' first numbers and
        lengths."""
        return lengths[:, None]

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Returns the model's inputs and targets of some samples; where masks are False, targets are IGNORED.

        Raises NotImplementedError if a task has no such method.
        """
        raise NotImplementedError

    @property
    def draws(self) -> int:
        """Random numbers for each training sample, for `collate_drawn`; 0: no augmentation."""
        return 0

    def collate_drawn(self, rows: Rows, masks: Rows | None, draws: np.ndarray) -> "tuple[Inputs, torch.Tensor]":
        """Returns the same as `collate`, with augmentation by draws from [0, 1), (n, `draws`), from seed, epoch and sample
        alone."""
        return self.collate(rows, masks)

    def unpack(self, inputs: Inputs) -> Inputs:
        """Finishes the inputs on the device, ahead of the loop."""
        return inputs

    def loss(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns the sum of the losses of a batch, and the number of targets that count, scalars: by default what the
        network's `forward` returns.

        A task that overrides it trains and validates by its own loss. `model.hidden`, `model.logits` and this default are
        there for it.
        """
        found: tuple[torch.Tensor, torch.Tensor] = model.forward_of_network(*inputs, targets)  # type: ignore[operator]
        return found

    def build_model(self) -> "nn.Module":
        """Returns the network, initialised under the current seed: model(*inputs, targets) -> (loss sum, targets counted).

        Raises NotImplementedError if a task has no such method.
        """
        raise NotImplementedError

    def describe_dataset(self) -> Facts:
        """Returns what identifies model and data, as JSON, of a task that `reads_dataset`; see `own_model.task`.

        Raises NotImplementedError for other tasks.
        """
        raise NotImplementedError

    def open_samples(self, split: str) -> Any:
        """Returns the samples (`feed.samples.Samples`) of `train` or `validation`, of a task that `reads_dataset`.

        Raises NotImplementedError for other tasks, whose samples are prepared.
        """
        raise NotImplementedError

    @classmethod
    def parts_to_send(cls) -> Mapping[str, Any]:
        """Returns what of a script's task is pickled to workers, by name."""
        return {"the task": cls}

    @classmethod
    def for_workers(cls) -> "type[Task]":
        """Returns the class as it is sent to the workers of a training on a running Ray."""
        return cls

    @classmethod
    def for_inference(cls) -> "type[Task]":
        """Returns the class as processes need it that only use the model; it is sent to them."""
        return cls

    def build_optimizer(self, model: "nn.Module") -> Any:
        """Returns an optimiser of its own (`train.checkpoint.train_state.Updater`); None: that of the settings."""
        return None

    def build_observers(self) -> "list[Observer]":
        """Returns observers of this worker's training, besides those that are registered."""
        return []

    def learning_rate_factor(self, step: int, total_steps: int) -> float | None:
        """Returns the factor of the learning rate at a step, 0 for the first; None: by the schedule of the settings."""
        return None

    def see_held_out(self, documents: Iterable[Document]) -> str:
        """Configures validation from some validation documents, the same on every worker; returns a line about it, or "".

        Not reading `documents` costs nothing.
        """
        return ""

    def measure(
        self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor", *, together: bool = False
    ) -> "tuple[torch.Tensor, ...]":
        """Returns loss sum and counted targets of a validation batch, and, if `counted` or `summed` is k, numbers (k) for
        `score`.

        `together`: the workers compute collectively, so all must call the model equally often.
        """
        loss_sum, counted = model(*inputs, targets)
        return loss_sum, counted

    def take_sums(self, model: "nn.Module") -> "torch.Tensor | None":
        """Returns sums (k) over this worker's samples since the last call, for `train_scores`; None if the task has none."""
        return None

    def train_scores(self, sums: Sequence[float]) -> dict[str, float]:
        """Returns metrics by name, prefixed `train_`, from such sums over all workers."""
        return {}

    def score(self, loss_sum: float, targets: float, counts: np.ndarray) -> dict[str, float]:
        """Returns metrics by name, including `val_loss`, from the sums over all validation samples."""
        return {"val_loss": mean(loss_sum, targets)}

    def answer(self, model: "nn.Module", inputs: Inputs) -> list[dict[str, Any]]:
        """Returns the predictions for some samples, by name: a label and its probability, a translation, ...

        Raises NotImplementedError if a task has no such method.
        """
        raise NotImplementedError

    def losses(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns the loss sum of each sample and its number of counted targets, both (B)."""
        import torch

        # One by one, since a model returns only the sum; tasks with a faster way override this.
        alone = [model(*(tensor[i : i + 1] for tensor in inputs), targets[i : i + 1]) for i in range(len(targets))]
        sums, counts = zip(*alone, strict=True)
        return torch.stack(sums), torch.stack(counts)

    def answer_with_losses(
        self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor"
    ) -> "tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor]":
        """Returns the results of `answer` and of `losses`; a task that has both from one forward overrides it."""
        return self.answer(model, inputs), *self.losses(model, inputs, targets)

    @classmethod
    def _inherits(cls, base: "type[Task]", *methods: str) -> bool:
        """Whether these methods are those of `base`, not a plug-in's own."""
        return all(getattr(cls, name) is getattr(base, name) for name in methods)

    def given(self, name: str) -> str:
        """Returns the column name of a prediction's part in a table of predictions: `_given` is appended if a data column
        has it."""
        return f"{name}_given" if name in {column.name for column in self.columns} else name

    def grade(self, table: Mapping[str, Any]) -> dict[str, float]:
        """Returns metrics of predicted samples from the columns `loss`, `targets`, those of `answer`, and the document's
        own."""
        return self.grades(table)(np.ones(len(table[self.given("loss")])))

    def grades(self, table: Mapping[str, Any]) -> Callable[[np.ndarray], dict[str, float]]:
        """Returns the same metrics as a function of the samples' weights (n): 1, or counts of a bootstrap."""
        losses, targets = (np.asarray(table[self.given(name)], float) for name in ("loss", "targets"))
        return lambda weights: {"loss": mean(float(weights @ losses), float(weights @ targets))}

    def proportions(self, table: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """Returns the metrics that are proportions, each with the rows that count and all rows that it is of."""
        return {}

    @property
    def without_interval(self) -> frozenset[str]:
        """Metrics whose interval by resampling would be wrong, as resampling biases them."""
        return frozenset()

    @property
    def signatures(self) -> dict[str, str]:
        """Signatures of metrics, by name, for metrics that must be quoted with one."""
        return {}

    @property
    def counted(self) -> int:
        """Number of whole numbers of `measure` besides loss and targets."""
        return 0

    @property
    def summed(self) -> int:
        """Number of other numbers of `measure`, in place of `counted`: they are added in the order of the batches."""
        return 0

    def open_set_metrics(self) -> "SetMetrics | None":
        """Returns what collects the metrics of the whole set in a validation; None if the task has none."""
        return None

    def tokens_of(self, numbers: float) -> float:
        """Returns the tokens of an example of this many numbers, as counted by `tokens_per_second` and energy."""
        return numbers

    def flops_per_token(self, model: "nn.Module", tokens: float) -> float | None:
        """Returns the training operations per token for examples of this many tokens; None if unknown: there is no MFU."""
        count = getattr(model, "flops_per_token", None)
        return float(count()) if count else None

    @property
    def targets_per_sample(self) -> float | None:
        """Targets of a sample, for scaling the loss before their number is known; None: as many as its numbers."""
        return None


def mean(total: float, count: float) -> float:
    """Returns the quotient, or NaN if the count is 0."""
    return total / count if count else math.nan
