"""Preference learning from pairs of a chosen and a rejected answer (DPO: Rafailov et al., 2023; IPO: Azar et al., 2023).

An example is a whole pair: the number of ids of its longer sequence, of the chosen one, and of the prompt, and 1 if it was
truncated; the prompt with the chosen answer; the prompt with the rejected one; and, without `objective.reference_free`, the
reference's log-probabilities of both answers, as four numbers below 2^16. Prompts and answers are rendered as in the task
`completion`.

    task = Preference(config, {"vocabulary_size": 4096, "end_id": 0}, encoders)
    (ids, words, reference), targets = task.collate(rows, None)   # (2B, T), (2B, T), (B, 2), (B)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raystride.pipelines.config import Config
from raystride.pipelines.data.tasks.completion import Completion
from raystride.pipelines.data.tasks.encoder import Encoders
from raystride.pipelines.data.tasks.messages import Message, Turns, message_texts, split_shared_prompt, unpack_messages
from raystride.pipelines.data.tasks.reference import Reference, floats_to_ids, ids_to_floats, weights_sha256
from raystride.pipelines.data.tasks.rows import pad_sequences
from raystride.pipelines.data.tasks.task import (
    IGNORED,
    TRAINING,
    Column,
    Document,
    Encoded,
    Facts,
    Inputs,
    NetworkMethods,
    Rows,
    Task,
    mean,
)
from raystride.pipelines.data.tokenizers import Tokenizers

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.model.preference import PreferenceDecoder

HEADER_LENGTH, REFERENCE_LENGTH = 4, 4
"""Numbers before the ids, and numbers after them if there is a reference."""
UNITS_PER_ONE = 2.0**20
"""Validation counts figures as integers in units of 1 / UNITS_PER_ONE, so that sums are equal on any number of workers."""


class Preference(Completion):
    """Preference learning of a decoder (DPO, IPO). Raises SettingError if there is no reference."""

    packs = False
    network_methods: ClassVar[NetworkMethods] = {
        **Completion.network_methods,
        "log_ratios": (TRAINING,),
        "pop_figures": (TRAINING,),
    }

    def __init__(self, config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> None:
        super().__init__(config, facts, encoders)
        self.is_reference_free = config.objective.reference_free
        if config.model.init_from is None and not self.is_reference_free:  # "": weights are provided in another way
            raise config.model.error(
                "init_from",
                "must name the model to start with, which is the reference as well; or set objective.reference_free",
            )
        names = ("accuracy", "margin", "chosen_reward", "rejected_reward", *([] if self.is_reference_free else ["kl"]))
        self._names, self.metrics = names, ("val_loss", *(f"val_{name}" for name in names))
        self._reference: Reference | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """The prompt, unless the answers include it, the chosen answer, and the rejected one."""
        data = self.config.data
        answers = [("data.chosen_column", data.chosen_column), ("data.rejected_column", data.rejected_column)]
        found = [Column(*setting, "messages", answer=True) for setting in answers]
        return (*(self.asked if data.prompt_column else ()), *found)

    @property
    def asked(self) -> tuple[Column, ...]:
        """The prompt."""
        return (Column("data.prompt_column", self.config.data.prompt_column or "prompt", "messages"),)

    @property
    def ids(self) -> int:
        """An upper bound of the numbers in an example."""
        return max(int(self.facts["vocabulary_size"]), self.config.model.context + 2, 0 if self.is_reference_free else 2**16)

    def texts(self, document: Document, tokenizer: str) -> Iterable[str]:
        """Returns the contents of the prompt and of both answers."""
        return [text for field in document for text in message_texts(unpack_messages(field))]

    def shaped_by(self) -> dict[str, Any]:
        """Returns the same as in `completion`, and the hash of the reference."""
        return super().shaped_by() | {"reference": None if self.is_reference_free else weights_sha256(self._base_model)}

    @property
    def _base_model(self) -> str:
        assert self.config.model.init_from  # the settings say so
        return self.config.model.init_from

    def encode(self, document: Document) -> tuple[np.ndarray, None]:  # type: ignore[override]
        """Returns the pair, with zeros for the reference.

        If a sequence is longer than context + 1, the prompt is cut from the left down to one id, then the answers from the
        right. Raises ValueError for messages without a chat template, and for answers that are equal, or become so by it.
        """
        return self._encode_whole(document).ids, None

    def example(self, document: Document) -> Encoded:
        """Returns the pair of `encode`, and the ids of the longer sequence if it does not fit. Raises as `encode` does."""
        return self._encode_whole(document) if self._inherits(Preference, "encode") else Task.example(self, document)

    def _encode_whole(self, document: Document) -> Encoded:
        if len(document) == 1:
            return Encoded(self.prompt(document[0]), None)
        prompt, *answers = self._parse_turns(document)
        if answers[0] == answers[1]:
            raise ValueError("has two answers that are the same, of which none can be preferred")
        (prompt_ids, chosen), (others, rejected) = (self.encode_exchange(prompt, answer) for answer in answers)
        if not np.array_equal(prompt_ids, others):
            raise ValueError("has a prompt whose last token depends on the answer: the tokenizer joins them")
        answer_ids, room = (chosen, rejected), self.config.model.context + 1
        whole = len(prompt_ids) + max(map(len, answer_ids))
        prompt_ids = self.fit_prompt(prompt_ids, room - max(map(len, answer_ids)))
        chosen, rejected = (np.concatenate((prompt_ids, answer))[:room] for answer in answer_ids)
        if np.array_equal(chosen, rejected):
            cut = f"cut to model.context, {self.config.model.context} tokens" if whole > room else "written in tokens"
            raise ValueError(f"has two answers that are the same once they are {cut}, of which none can be preferred")
        head = (max(len(chosen), len(rejected)), len(chosen), len(prompt_ids), whole > room)
        ids = (np.array(head, np.uint32), chosen, rejected, np.zeros(self._reference_length, np.uint32))
        return Encoded(np.concatenate(ids), None, whole if whole > room else 0)

    def describe_losses(self, documents: Iterable[Document]) -> list[str]:
        """Returns lines about what prompts and chosen answers hold and the chat template does not write."""
        if not self.writes_chats:
            return []
        return self._chat_template.describe_losses((chat, ()) for document in documents if (chat := self._join(document)))

    def _join(self, document: Document) -> Sequence[Message]:
        """Returns the messages of prompt and chosen answer; none if one of them is a text."""
        try:
            prompt, chosen, _ = self._parse_turns(document)
        except ValueError:  # a fault, which encoding the pair reports
            return ()
        return () if isinstance(prompt, str) or isinstance(chosen, str) else (*prompt, *chosen)

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns the prompt, if it has a column of its own, and both answers."""
        middle, asked = HEADER_LENGTH + int(ids[1]), int(ids[2])
        parts = (
            ids[HEADER_LENGTH : HEADER_LENGTH + asked],
            ids[HEADER_LENGTH + asked : middle],
            ids[middle + asked : len(ids) - self._reference_length],
        )
        texts = tuple(self.encoders["tokenizer"].decode(part.tolist()) for part in parts)
        return texts[3 - len(self.columns) :]

    @property
    def _reference_length(self) -> int:
        return 0 if self.is_reference_free else REFERENCE_LENGTH

    def _parse_turns(self, document: Document) -> Sequence[Turns]:
        """Returns prompt, chosen and rejected answer."""
        fields = [unpack_messages(field) for field in document]
        return fields if self.config.data.prompt_column else split_shared_prompt(*fields)

    def prompt(self, text: str) -> np.ndarray:
        """Returns the ids of a prompt, a text or the JSON of messages, in a chat with the header of its answer."""
        return self._encode_prompt(unpack_messages(text))

    def _encode_prompt(self, prompt: Turns) -> np.ndarray:
        if isinstance(prompt, str):
            return super().prompt(prompt)
        return self._chat_template.question(prompt)

    def is_cut(self, example: np.ndarray) -> bool:
        """Returns whether the prompt or an answer was truncated."""
        return bool(example[3])

    @property
    def wants_gpu(self) -> bool:
        """Whether there is a reference to compute, and GPUs are allowed."""
        return not self.is_reference_free and self.config.scaling.device != "cpu"

    def complete(self, examples: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Returns the examples with reference log-probabilities. Raises SettingError if the model of `model.init_from` is
        unreadable."""
        if self.is_reference_free or not len(examples):
            return examples
        if self._reference is None:
            assert isinstance(self.encoders, Tokenizers)
            tokenizer_folder = self.encoders.parent / "tokenizer"
            self._reference = Reference(self.build_model, self._base_model, tokenizer_folder, on_gpu=self.wants_gpu)
        sizes = [2 * int(row[0]) for row in examples]
        found = self._reference.log_probabilities(
            sizes, lambda chosen: self.sequences([examples[number] for number in chosen])
        )
        return [
            np.concatenate((row[:-REFERENCE_LENGTH], floats_to_ids(values)))
            for row, values in zip(examples, found, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the reference: each process loads it for itself."""
        return self.__dict__ | {"_reference": None}

    def sizes(self, firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the padded lengths of both sequences, (n, 2): that of the longer one."""
        return np.stack((firsts, firsts), 1)

    def tokens_of(self, numbers: float) -> float:
        """Returns the ids of both sequences, the prompt's counted twice."""
        return numbers - HEADER_LENGTH - self._reference_length

    @property
    def targets_per_sample(self) -> float:  # type: ignore[override]
        """One: the pair."""
        return 1.0

    def sequences(self, rows: Rows) -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns ids and next ids, both (2B, T): the chosen sequences, then the rejected; prompts are IGNORED."""
        read, wanted = [], []
        for side in range(2):
            for row in rows:
                middle = HEADER_LENGTH + int(row[1])
                ids = row[HEADER_LENGTH:middle] if side == 0 else row[middle : len(row) - self._reference_length]
                words = ids[1:].astype(np.int64)
                words[: int(row[2]) - 1] = IGNORED
                read.append(ids[:-1])
                wanted.append(words)
        return pad_sequences(read)[0], pad_sequences(wanted, IGNORED)[0]

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Returns ids and next ids of `sequences`, the reference (B, 2) fp32, and targets (B).

        The reference is zeros if there is none; a target is 0 if the pair counts.
        """
        import torch

        ids, words = self.sequences(rows)
        reference = torch.zeros(len(rows), 2)
        if not self.is_reference_free:
            reference = torch.from_numpy(np.stack([ids_to_floats(row[-REFERENCE_LENGTH:]) for row in rows]))
        counts = [True] * len(rows) if masks is None else [bool(mask.any()) for mask in masks]
        return (ids, words, reference), torch.tensor([0 if counted else IGNORED for counted in counts])

    def build_model(self) -> "PreferenceDecoder":
        """Returns a freshly initialised decoder with a pairwise loss."""
        from raystride.model.preference import PairRule, PreferenceDecoder

        objective = self.config.objective
        rule = PairRule(objective.preference, objective.beta, objective.label_smoothing)
        return PreferenceDecoder(self.config.model, int(self.facts["vocabulary_size"]), rule)

    @property
    def counted(self) -> int:
        """Number of figures."""
        return len(self._names) + 1

    def measure(
        self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor", *, together: bool = False
    ) -> "tuple[torch.Tensor, ...]":
        """Returns the sum of plain losses, the number of counted pairs, and figures in units of 1 / UNITS_PER_ONE."""
        losses, figures = self._losses_and_figures(model, inputs, targets != IGNORED)
        return losses.sum(), (targets != IGNORED).sum(), (figures.sum(0)[: self.counted] * UNITS_PER_ONE).round()

    def losses(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns the plain loss of each pair, (B), and whether it counts, (B) bool."""
        counts = targets != IGNORED
        return self._losses_and_figures(model, inputs, counts)[0], counts

    def answer(self, model: "nn.Module", inputs: Inputs) -> list[dict[str, Any]]:
        """Returns the rewards of both answers, beta times their log-ratios."""
        return self._rewards(self._losses_and_figures(model, inputs, _all_true(inputs[2]))[1])

    def answer_with_losses(
        self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor"
    ) -> "tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor]":
        """Returns the results of `answer` and of `losses` from one forward, unless a plug-in has methods of its own."""
        if not self._inherits(Preference, "answer", "losses"):
            return super().answer_with_losses(model, inputs, targets)
        losses, figures = self._losses_and_figures(model, inputs, _all_true(inputs[2]))
        counts = targets != IGNORED
        return self._rewards(figures), losses.where(counts, 0.0), counts

    @staticmethod
    def _rewards(figures: "torch.Tensor") -> list[dict[str, Any]]:
        return [{"chosen_reward": chosen, "rejected_reward": rejected} for chosen, rejected in figures[:, 3:5].tolist()]

    def _losses_and_figures(
        self, model: "nn.Module", inputs: Inputs, counts: "torch.Tensor"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns losses without label smoothing, (B), and FIGURES (B, 6), zeros for pairs that do not count (counts (B),
        bool)."""
        from raystride.model.preference import answer_lengths, pair_figures, pair_losses

        rule, ratios = model.rule, model.log_ratios(*inputs)  # type: ignore[operator]
        losses = pair_losses(ratios, answer_lengths(inputs[1]), rule._replace(label_smoothing=0.0))  # type: ignore
        return losses.where(counts, 0.0), pair_figures(ratios, counts, rule.beta)  # type: ignore[union-attr, arg-type]

    def take_sums(self, model: "nn.Module") -> "torch.Tensor | None":
        """Returns metric sums over the pairs of this worker since the last call."""
        import torch

        from raystride.model.preference import FIGURES, PreferenceDecoder

        network = next(module for module in model.modules() if isinstance(module, PreferenceDecoder))
        if (found := network.pop_figures()) is None:  # a worker without a slot
            found = torch.zeros(len(FIGURES), dtype=torch.float64, device=next(model.parameters()).device)
        return found

    def train_scores(self, sums: Sequence[float]) -> dict[str, float]:
        """Returns means over the pairs."""
        return {f"train_{name}": mean(total, sums[0]) for name, total in zip(self._names, sums[1:], strict=False)}

    def score(self, loss_sum: float, targets: float, counts: np.ndarray) -> dict[str, float]:
        """Returns mean loss, accuracy (chosen reward is greater), mean margin and rewards, and `val_kl`."""
        pairs, *sums = counts.tolist()
        means = {f"val_{name}": mean(total, pairs) for name, total in zip(self._names, sums, strict=True)}
        # The pairs are counted in the same units as the rest.
        return Task.score(self, loss_sum, targets, counts) | means

    def grades(self, table: Mapping[str, Any]) -> Callable[[np.ndarray], dict[str, float]]:
        """Returns loss, accuracy, margin and rewards of predicted pairs."""
        grades = Task.grades(self, table)
        chosen, rejected = (np.asarray(table[self.given(f"{name}_reward")], float) for name in ("chosen", "rejected"))
        figures = {"accuracy": chosen > rejected, "margin": chosen - rejected}
        figures |= {"chosen_reward": chosen, "rejected_reward": rejected}

        def grade_with_weights(weights: np.ndarray) -> dict[str, float]:
            total = float(weights.sum())
            return grades(weights) | {name: mean(float(weights @ values), total) for name, values in figures.items()}

        return grade_with_weights

    def proportions(self, table: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """Returns the accuracy: pairs whose chosen answer has the greater reward."""
        chosen, rejected = (np.asarray(table[self.given(f"{name}_reward")], float) for name in ("chosen", "rejected"))
        return {"accuracy": (int((chosen > rejected).sum()), len(chosen))}


def _all_true(like: "torch.Tensor") -> "torch.Tensor":
    """Returns a mask of all pairs, (B) bool."""
    import torch

    return torch.ones(len(like), dtype=torch.bool, device=like.device)
