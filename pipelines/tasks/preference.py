"""Preferences: pairs of answers to a prompt, of which one is preferred (DPO: Rafailov et al., 2023; IPO: Azar et al., 2023).

An example is a pair, so none is divided: the number of ids of its longer sequence, of the chosen one, and of the prompt, and
1 where something was cut off; the prompt with the chosen answer; the prompt with the rejected one; and, but with
`objective.reference_free`, both answers' log-probabilities to the reference, as four numbers below 2^16. Prompts and answers
are written as in the task `completion`.

    task = Preference(config, {"vocabulary_size": 4096, "end_id": 0}, encoders)
    (ids, words, reference), targets = task.collate(rows, None)   # (2B, T), (2B, T), (B, 2), (B)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from raystride.pipelines.config import Config
from raystride.pipelines.tasks.completion import Completion
from raystride.pipelines.tasks.messages import Turns, shared_prompt, texts_of, unpack_messages
from raystride.pipelines.tasks.padding import pad
from raystride.pipelines.tasks.reference import Reference, as_ids, from_ids, weights_sha256
from raystride.pipelines.tasks.task import (
    IGNORED,
    ChatTemplate,
    Column,
    Document,
    Encoded,
    Encoders,
    Facts,
    Inputs,
    Rows,
    Task,
    mean,
)
from raystride.pipelines.tokenizers import Tokenizers

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.model.preference import PreferenceDecoder

HEAD, TAIL = 4, 4
"""Numbers before the ids, and those behind them where there is a reference."""
UNIT = 2.0**20
"""Validation counts figures in units of 1 / UNIT, as whole numbers, whose sums are the same on any number of workers."""


class Preference(Completion):
    """Training of a decoder on which of two answers is preferred. Raises SettingError where there is no reference."""

    packs = False

    def __init__(self, config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> None:
        super().__init__(config, facts, encoders)
        self.free = config.objective.reference_free
        if config.model.init_from is None and not self.free:  # "": weights are given in another way
            raise config.model.error(
                "init_from",
                "must name the model to start with, which is the reference as well; or set objective.reference_free",
            )
        names = ("accuracy", "margin", "chosen_reward", "rejected_reward", *([] if self.free else ["kl"]))
        self._names, self.metrics = names, ("val_loss", *(f"val_{name}" for name in names))
        self._reference: Reference | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """The prompt, where it is not in the answers, the answer that is preferred, and the other one."""
        data = self.config.data
        answers = [("data.chosen_column", data.chosen_column), ("data.rejected_column", data.rejected_column)]
        found = [Column(*each, "messages", answer=True) for each in answers]
        return (*(self.asked if data.prompt_column else ()), *found)

    @property
    def asked(self) -> tuple[Column, ...]:
        """The prompt."""
        return (Column("data.prompt_column", self.config.data.prompt_column or "prompt", "messages"),)

    @property
    def ids(self) -> int:
        """A bound of the numbers in an example."""
        return max(int(self.facts["vocabulary_size"]), self.config.model.context + 2, 0 if self.free else 2**16)

    def texts(self, document: Document, tokenizer: str) -> Iterable[str]:
        """What is said in the prompt and in both answers."""
        return [text for field in document for text in texts_of(unpack_messages(field))]

    def shaped_by(self) -> dict[str, Any]:
        """As in `completion`, and the hash of the reference."""
        return super().shaped_by() | {"reference": None if self.free else weights_sha256(self._base)}

    @property
    def _base(self) -> str:
        assert self.config.model.init_from  # the settings say so
        return self.config.model.init_from

    def encode(self, document: Document) -> tuple[np.ndarray, None]:  # type: ignore[override]
        """The pair, with zeros for the reference. Of what is longer than context + 1, the prompt's beginning goes first, but
        for one id, then the answers' ends. Raises ValueError for messages without a chat template, and for answers that
        are the same."""
        if len(document) == 1:
            return self.prompt(document[0]), None
        prompt, *answers = self._turns(document)
        if answers[0] == answers[1]:
            raise ValueError("has two answers that are the same, of which none can be preferred")
        asked, room = self._prompt(prompt), self.config.model.context + 1
        said = [self._answer(prompt, answer) for answer in answers]
        whole = len(asked) + max(map(len, said))
        asked = asked[-max(1, room - max(map(len, said))) :]
        chosen, rejected = (np.concatenate((asked, each))[:room] for each in said)
        head = (max(len(chosen), len(rejected)), len(chosen), len(asked), whole > room)
        return np.concatenate((np.array(head, np.uint32), chosen, rejected, np.zeros(self._tail, np.uint32))), None

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns the prompt, if it has a column of its own, and both answers."""
        middle, asked = HEAD + int(ids[1]), int(ids[2])
        parts = ids[HEAD : HEAD + asked], ids[HEAD + asked : middle], ids[middle + asked : len(ids) - self._tail]
        texts = tuple(self.encoders["tokenizer"].decode(part.tolist()) for part in parts)
        return texts[3 - len(self.columns) :]

    def example(self, document: Document) -> Encoded:
        """The pair of `encode`, and whether something was cut off. Raises as `encode` does."""
        return Task.example(self, document)

    @property
    def _tail(self) -> int:
        return 0 if self.free else TAIL

    def _turns(self, document: Document) -> Sequence[Turns]:
        """Prompt, chosen and rejected answer."""
        fields = [unpack_messages(field) for field in document]
        return fields if self.config.data.prompt_column else shared_prompt(*fields)

    def prompt(self, text: str) -> np.ndarray:
        """Ids of a prompt, a text or the JSON of messages, with what leads in its answer in a chat."""
        return self._prompt(unpack_messages(text))

    def _prompt(self, prompt: Turns) -> np.ndarray:
        if isinstance(prompt, str):
            return super().prompt(prompt)
        return self._chat.question(prompt)

    def _answer(self, prompt: Turns, answer: Turns) -> np.ndarray:
        encoder = self.encoders["tokenizer"]
        if encoder.chat or not isinstance(prompt, str) or not isinstance(answer, str):
            return self._chat.answer(prompt, answer)
        return np.append(encoder.encode(answer), np.uint32(encoder.end_id))

    @property
    def _chat(self) -> ChatTemplate:
        if chat := self.encoders["tokenizer"].chat:
            return chat
        raise ValueError("has messages, and the tokenizer has no chat template: see tokenizer.chat_template")

    def is_cut(self, example: np.ndarray) -> bool:
        """Whether the prompt or an answer was longer."""
        return bool(example[3])

    @property
    def wants_gpu(self) -> bool:
        """Whether there is a reference to compute, and GPUs may do it."""
        return not self.free and self.config.scaling.device != "cpu"

    def complete(self, examples: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """The examples with their reference. Raises SettingError where the model of `model.init_from` cannot be read."""
        if self.free or not len(examples):
            return examples
        if self._reference is None:
            assert isinstance(self.encoders, Tokenizers)
            place = self.encoders.place / "tokenizer"
            self._reference = Reference(self.build_model, self._base, place, on_gpu=self.wants_gpu)
        sizes = [2 * int(row[0]) for row in examples]
        found = self._reference.log_probabilities(sizes, lambda some: self.sequences([examples[each] for each in some]))
        return [np.concatenate((row[:-TAIL], as_ids(each))) for row, each in zip(examples, found, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        """Without the reference, which each process loads for itself."""
        return self.__dict__ | {"_reference": None}

    def sizes(self, firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Both sequences are padded to the longer one, (n, 2)."""
        return np.stack((firsts, firsts), 1)

    def tokens_of(self, numbers: float) -> float:
        """Ids of both sequences, the prompt's twice."""
        return numbers - HEAD - self._tail

    @property
    def targets_per_sample(self) -> float:  # type: ignore[override]
        """One: the pair."""
        return 1.0

    def sequences(self, rows: Rows) -> "tuple[torch.Tensor, torch.Tensor]":
        """Ids and the words that follow them, (2B, T) both: the chosen answers, then the rejected; prompts are IGNORED."""
        read, wanted = [], []
        for side in range(2):
            for row in rows:
                middle = HEAD + int(row[1])
                ids = row[HEAD:middle] if side == 0 else row[middle : len(row) - self._tail]
                words = ids[1:].astype(np.int64)
                words[: int(row[2]) - 1] = IGNORED
                read.append(ids[:-1])
                wanted.append(words)
        return pad(read)[0], pad(wanted, IGNORED)[0]

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Ids and words as `sequences` gives them, the reference (B, 2) fp32, zeros without one, and targets (B): 0, where a
        pair counts."""
        import torch

        ids, words = self.sequences(rows)
        reference = torch.zeros(len(rows), 2)
        if not self.free:
            reference = torch.from_numpy(np.stack([from_ids(row[-TAIL:]) for row in rows]))
        counts = [True] * len(rows) if masks is None else [bool(mask.any()) for mask in masks]
        return (ids, words, reference), torch.tensor([0 if some else IGNORED for some in counts])

    def build_model(self) -> "PreferenceDecoder":
        """A freshly initialised decoder with a loss of pairs."""
        from raystride.model.preference import PairRule, PreferenceDecoder

        objective = self.config.objective
        rule = PairRule(objective.preference, objective.beta, objective.label_smoothing)
        return PreferenceDecoder(self.config.model, int(self.facts["vocabulary_size"]), rule)

    @property
    def counted(self) -> int:
        """How many figures there are."""
        return len(self._names) + 1

    def measure(
        self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor", *, together: bool = False
    ) -> "tuple[torch.Tensor, ...]":
        """The sum of the plain losses, pairs that count, and their figures in units of 1 / UNIT."""
        losses, figures = self._graded(model, inputs, targets != IGNORED)
        return losses.sum(), (targets != IGNORED).sum(), (figures.sum(0)[: self.counted] * UNIT).round()

    def losses(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """The plain loss of each pair, (B), and whether it counts, (B) bool."""
        counts = targets != IGNORED
        return self._graded(model, inputs, counts)[0], counts

    def answer(self, model: "nn.Module", inputs: Inputs) -> list[dict[str, Any]]:
        """The rewards of both answers, beta times their log-ratios."""
        import torch

        _, figures = self._graded(model, inputs, torch.ones(len(inputs[2]), dtype=torch.bool, device=inputs[2].device))
        return [{"chosen_reward": chosen, "rejected_reward": rejected} for chosen, rejected in figures[:, 3:5].tolist()]

    def _graded(self, model: "nn.Module", inputs: Inputs, counts: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Losses without label smoothing, (B), and FIGURES (B, 6), zeros where a pair does not count (counts (B), bool)."""
        from raystride.model.preference import answer_lengths, pair_figures, pair_losses

        rule, ratios = model.rule, model.log_ratios(*inputs)  # type: ignore[operator]
        losses = pair_losses(ratios, answer_lengths(inputs[1]), rule._replace(label_smoothing=0.0))  # type: ignore
        return losses.where(counts, 0.0), pair_figures(ratios, counts, rule.beta)  # type: ignore[union-attr, arg-type]

    def take_sums(self, model: "nn.Module") -> "torch.Tensor | None":
        """Of the pairs that this worker has trained on since the last call."""
        import torch

        from raystride.model.preference import FIGURES, PreferenceDecoder

        network = next(each for each in model.modules() if isinstance(each, PreferenceDecoder))
        if (found := network.take_figures()) is None:  # a worker without a slot
            found = torch.zeros(len(FIGURES), dtype=torch.float64, device=next(model.parameters()).device)
        return found

    def train_scores(self, sums: Sequence[float]) -> dict[str, float]:
        """Means over the pairs."""
        return {f"train_{name}": mean(each, sums[0]) for name, each in zip(self._names, sums[1:], strict=False)}

    def score(self, loss_sum: float, targets: float, counts: np.ndarray) -> dict[str, float]:
        """Mean loss, how often the preferred answer has the greater reward, the mean margin and rewards, and `val_kl`."""
        pairs, *sums = counts.tolist()
        means = {f"val_{name}": mean(each, pairs) for name, each in zip(self._names, sums, strict=True)}
        # The pairs are counted in the same units as the rest.
        return Task.score(self, loss_sum, targets, counts) | means

    def grades(self, table: Mapping[str, Any]) -> Callable[[np.ndarray], dict[str, float]]:
        """Loss, accuracy, margin and rewards of answered pairs."""
        grades = Task.grades(self, table)
        chosen, rejected = (np.asarray(table[self.given(f"{name}_reward")], float) for name in ("chosen", "rejected"))
        figures = {"accuracy": chosen > rejected, "margin": chosen - rejected}
        figures |= {"chosen_reward": chosen, "rejected_reward": rejected}

        def of(weights: np.ndarray) -> dict[str, float]:
            total = float(weights.sum())
            return grades(weights) | {name: mean(float(weights @ each), total) for name, each in figures.items()}

        return of
