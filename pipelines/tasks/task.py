"""What is trained, as the spine sees it: what a task knows and nobody else. One file in this folder a task.

    task = build_task(config)                               # before the data is known: which columns, which metrics
    ids, mask = task.encode(document)                       # while preparing: one document -> one example
    task = build_task(config, manifest.facts, encoders)     # from then on it knows what preparation learned
    inputs, targets = task.collate(rows, masks)             # while feeding: what the model is fed, on the host
    loss_sum, counted = task.build_model()(*inputs, targets)    # while training
    metrics = task.score(loss_sum, targets, counts)         # while validating

PyTorch is imported only where it is used: the driver and the workers that prepare data never need it, and it takes seconds.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np

from raystride.model.shape import IGNORED as IGNORED
from raystride.pipelines.config import Config
from raystride.pipelines.tasks.messages import Message, Turns

if TYPE_CHECKING:
    import torch
    from torch import nn

Document = tuple[str, ...]
"""What a source yields: the values of the task's columns. An image is a data URI of its file (RFC 2397)."""
Facts = Mapping[str, Any]
"""What preparation learned of the data, as JSON: `vocabulary_size`, `end_id`, the names of labels, ..."""
Rows = Sequence[np.ndarray] | np.ndarray
"""Some samples: vectors of numbers, or of truth values for masks; windows are one matrix, whose rows they are."""
Inputs = tuple["torch.Tensor", ...]
"""What a model takes besides the targets."""


class ChatTemplate(Protocol):
    """How a tokenizer writes turns of a chat; see `raystride.pipelines.tokenizers.chat`."""

    def question(self, prompt: Turns) -> np.ndarray:
        """Ids up to where the answer begins."""
        ...

    def answer(self, prompt: Turns, completion: Turns) -> np.ndarray:
        """Ids of the answer and of what ends it."""
        ...

    def conversation(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a whole chat, and which of them the assistant says."""
        ...

    def opening(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> np.ndarray:
        """Ids of a chat up to where the next answer begins."""
        ...


class Encoded(NamedTuple):
    """An example as it is prepared."""

    ids: np.ndarray
    """Its numbers (n)."""
    mask: np.ndarray | None
    """Which of them count in the loss (n); None: all."""
    cut: bool = False
    """Whether something of the document did not fit into it."""


class Encoder(Protocol):
    """A tokenizer as preparation and generation use it; see `raystride.pipelines.tokenizers`."""

    vocabulary_size: int
    end_id: int

    @property
    def chat(self) -> ChatTemplate | None:
        """The chat template of the tokenizer, where it has one."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids (uint32) of a text, without an end token."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of some ids; bytes that are no whole character become U+FFFD."""
        ...


Encoders = Mapping[str, Encoder]
"""A task's tokenizers by the names that it gives them."""


@dataclass(frozen=True)
class Column:
    """A column that a task reads of every row."""

    setting: str
    """The setting that names it, for errors: `data.column`."""
    name: str
    """What the data calls it."""
    kind: Literal["text", "label", "image", "messages", "tools"] = "text"
    """Text; a label (text, number or truth value, taken as text); an image file's bytes; text or messages, which become
    their JSON (`tasks.messages`); tools, whose JSON is a list, and which a row may lack."""
    answer: bool = False
    """Whether it is what the model is to give: a document without it, as the last of several, is a question."""


@dataclass(frozen=True)
class Window:
    """How samples are cut from the stream of all tokens."""

    length: int
    """Tokens in a sample."""
    stride: int
    """Tokens from one sample's beginning to the next one's."""


class Task:
    """A thing that Raystride can train; each task overrides what is particular to it.

    Raises SettingError where bundles are asked for (`train.slot_tokens`) but samples are windows, which are equally long,
    and where documents are to be packed (`train.packing`) but the task has none.
    """

    tokenizers: tuple[str, ...] = ("tokenizer",)
    """Its tokenizers: folders under these names lie beside the shards."""
    surveyed: ClassVar[bool] = False
    """Whether `survey` must see all documents before the first is encoded, which takes a pass of its own."""
    packs: ClassVar[bool] = False
    """Whether the task can read documents that lie one after another without padding, as `train.packing` says."""
    metrics: tuple[str, ...] = ("val_loss",)
    """What `score` measures, for `validation.metric`."""

    def __init__(self, config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> None:
        self.config, self.facts, self.encoders = config, facts or {}, encoders or {}
        if config.train.slot_tokens and self.window:
            raise config.train.error("slot_tokens", f"must be 0 with task `{config.task}`, whose samples are equally long")
        if config.train.packing != "none" and not self.packs:
            raise config.train.error("packing", f"must be `none` with task `{config.task}`, which does not pack documents")

    @property
    def window(self) -> Window | None:
        """How samples are cut from the concatenated examples; None: each example is a sample."""
        return None

    def knowing(self, facts: Facts, encoders: Encoders) -> Self:
        """The same task, which knows this of the data and has these tokenizers."""
        return type(self)(self.config, facts, encoders)

    def under(self, config: Config) -> Self:
        """The same task under other settings, which has the same facts and tokenizers."""
        return type(self)(config, self.facts, self.encoders)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that the task reads of a row; a source without columns gives the first one alone."""
        return (Column("data.column", self.config.data.column),)

    @property
    def asked(self) -> tuple[Column, ...]:
        """The columns of a question: all but the label or the target that the model is to find."""
        return tuple(column for column in self.columns if not column.answer)

    def shaped_by(self) -> dict[str, Any]:
        """What shapes the task's examples besides its columns and tokenizers, as JSON; known without facts."""
        return {}

    @property
    def ids(self) -> int:
        """All numbers in examples are below this; known with the facts."""
        return int(self.facts["vocabulary_size"])

    def texts(self, document: Document, tokenizer: str) -> Iterable[str]:
        """What this tokenizer is trained on in a document."""
        return document[:1]

    def survey(self, documents: Iterable[Document]) -> Facts:
        """What is to be known of some of the documents, as JSON; `learn` gets one of these for each part of the data."""
        return {}

    def learn(self, surveys: Sequence[Facts]) -> Facts:
        """The facts from all parts' surveys and the tokenizers. Raises SettingError where they do not suit the task."""
        encoder = self.encoders[self.tokenizers[0]]
        return {"vocabulary_size": encoder.vocabulary_size, "end_id": encoder.end_id}

    def encode(self, document: Document) -> tuple[np.ndarray, np.ndarray | None]:
        """An example: its numbers (n), below `ids`, and a loss mask (n) or None. Raises ValueError: why it can be none.

        Raises NotImplementedError where a task has no such method.
        """
        raise NotImplementedError

    def example(self, document: Document) -> Encoded:
        """The example of `encode`, and whether something was cut off, as `is_cut` says. Raises as `encode` does."""
        ids, mask = self.encode(document)
        return Encoded(ids, mask, len(ids) > 0 and self.is_cut(ids))

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns the document of an example of `encode`, as far as the example still has it; an image has no file any more.

        Raises NotImplementedError if a task has no such method: its prepared data can only be scored from the raw data.
        """
        raise NotImplementedError

    def complete(self, examples: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """The examples of `encode` with what is found of many at once; preparation and evaluation give it some of them.

        What an example gets depends on that one alone, but for rounding.
        """
        return examples

    @property
    def wants_gpu(self) -> bool:
        """Whether `complete` is faster where there is a GPU; preparation on Ray then takes one a task, if there is any."""
        return False

    def is_cut(self, example: np.ndarray) -> bool:
        """Whether something of the document did not fit into this example; preparation counts those of which it is known."""
        return False

    def prompt(self, text: str) -> np.ndarray:
        """The ids (n) after which a decoder writes on; where there are none, it starts as a new document does."""
        return self.encoders[self.tokenizers[0]].encode(text)

    def question(self, document: Document) -> np.ndarray:
        """The ids (n) after which a decoder answers a document, whose last field may be missing."""
        return self.prompt(document[0])

    def answer_bytes(self, document: Document) -> int:
        """Bytes of what a decoder is graded on in a document."""
        return len(document[-1].encode())

    def sizes(self, firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """What examples are padded by, (n, k): the lengths of their k sequences, from their first numbers and lengths."""
        return lengths[:, None]

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """The model's inputs and targets of some samples; with masks all False, targets that do not count (IGNORED).

        Raises NotImplementedError where a task has no such method.
        """
        raise NotImplementedError

    @property
    def draws(self) -> int:
        """Numbers that are drawn for each sample that is trained on, for `collate_drawn`; 0: samples never vary."""
        return 0

    def collate_drawn(self, rows: Rows, masks: Rows | None, draws: np.ndarray) -> "tuple[Inputs, torch.Tensor]":
        """As `collate`, of samples that vary by draws from [0, 1), (n, `draws`): by seed, epoch and sample alone."""
        return self.collate(rows, masks)

    def unpack(self, inputs: Inputs) -> Inputs:
        """What is still to be done to inputs on the device, ahead of the loop."""
        return inputs

    def build_model(self) -> "nn.Module":
        """The network, initialised under the current seed: model(*inputs, targets) -> (loss sum, targets counted).

        Raises NotImplementedError where a task has no such method.
        """
        raise NotImplementedError

    def measure(
        self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor", *, together: bool = False
    ) -> "tuple[torch.Tensor, ...]":
        """Loss sum and targets counted of a validation batch, and, where `counted` is k, whole numbers (k) for `score`.

        `together`: several workers compute at once what none can alone, so all must call the model equally often.
        """
        loss_sum, counted = model(*inputs, targets)
        return loss_sum, counted

    def take_sums(self, model: "nn.Module") -> "torch.Tensor | None":
        """Sums (k) over this worker's samples since the last call, for `train_scores`; None of a task that has none."""
        return None

    def train_scores(self, sums: Sequence[float]) -> dict[str, float]:
        """Metrics by name, `train_` before it, from such sums over all workers."""
        return {}

    def score(self, loss_sum: float, targets: float, counts: np.ndarray) -> dict[str, float]:
        """Metrics by name, `val_loss` among them, from the sums over all validation samples."""
        return {"val_loss": mean(loss_sum, targets)}

    def answer(self, model: "nn.Module", inputs: Inputs) -> list[dict[str, Any]]:
        """What the model says to each of some samples, by name: a label and how sure it is, a translation, ...

        Raises NotImplementedError where a task has no such method.
        """
        raise NotImplementedError

    def losses(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """The loss sum of each sample and its targets that count, both (B)."""
        import torch

        # One by one, since a model gives the sum alone; tasks that know a faster way override this.
        alone = [model(*(each[i : i + 1] for each in inputs), targets[i : i + 1]) for i in range(len(targets))]
        sums, counts = zip(*alone, strict=True)
        return torch.stack(sums), torch.stack(counts)

    def given(self, name: str) -> str:
        """What a part of an answer is called in a table of answered samples: `_given` follows a name that a column has."""
        return f"{name}_given" if name in {column.name for column in self.columns} else name

    def grade(self, table: Mapping[str, Any]) -> dict[str, float]:
        """Metrics of answered samples from the columns `loss`, `targets`, those of `answer`, and the document's own."""
        return self.grades(table)(np.ones(len(table[self.given("loss")])))

    def grades(self, table: Mapping[str, Any]) -> Callable[[np.ndarray], dict[str, float]]:
        """The same metrics as a function of how often each sample counts (n): once, or as a bootstrap drew it."""
        losses, targets = (np.asarray(table[self.given(name)], float) for name in ("loss", "targets"))
        return lambda weights: {"loss": mean(float(weights @ losses), float(weights @ targets))}

    @property
    def signatures(self) -> dict[str, str]:
        """How metrics were computed, by their names, where that is to be quoted with them."""
        return {}

    @property
    def counted(self) -> int:
        """How many whole numbers `measure` gives besides loss and targets."""
        return 0

    def tokens_of(self, numbers: float) -> float:
        """Tokens of an example of so many numbers, as `tokens_per_second` and energy count them."""
        return numbers

    def flops_per_token(self, model: "nn.Module", tokens: float) -> float | None:
        """Operations to train on a token of examples of so many; None where the model does not tell: there is no MFU."""
        count = getattr(model, "flops_per_token", None)
        return float(count()) if count else None

    @property
    def targets_per_sample(self) -> float | None:
        """Targets of a sample as the loss is scaled before their number is known; None: as many as its numbers."""
        return None


def mean(total: float, count: float) -> float:
    """The quotient, or NaN where nothing was counted."""
    return total / count if count else math.nan
