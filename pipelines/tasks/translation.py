"""Translation: from a text to another one, with the encoder-decoder of "Attention Is All You Need".

An example is the number of the source's ids, these ids, the last of which ends the source, and the target's. The decoder
starts from the target's end token and learns to give it at the end. Validation writes translations, greedily, and adds up
what BLEU (Papineni et al., 2002) and chrF (Popović, 2015) are made of, as sacreBLEU counts it.

    task = Translation(config, {"vocabulary_size": 8192, "end_id": 0}, encoders)
    (source, lengths, target_inputs), targets = task.collate(rows, None)     # (B, S), (B), (B, T), (B, T), int64
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from raystride.model.shape import translator_flops_per_token
from raystride.pipelines.config import Config
from raystride.pipelines.tasks.overlap import Overlap
from raystride.pipelines.tasks.padding import pad
from raystride.pipelines.tasks.row_losses import row_losses
from raystride.pipelines.tasks.task import IGNORED, Column, Document, Encoders, Facts, Inputs, Rows, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.model.translator import Translator


class Translation(Task):
    """Translation by an encoder with a decoder."""

    metrics = ("val_loss", "val_bleu", "val_chrf")

    def __init__(self, config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> None:
        super().__init__(config, facts, encoders)
        if not config.tokenizer.shared:
            self.tokenizers = ("tokenizer", "target_tokenizer")

    @property
    def columns(self) -> tuple[Column, ...]:
        """The source and the target."""
        data = self.config.data
        return (Column("data.column", data.column), Column("data.target_column", data.target_column, answer=True))

    @property
    def ids(self) -> int:
        """A bound of the numbers in an example: of both sides' ids, and of the length of a source."""
        sizes = (int(self.facts[f"{side}vocabulary_size"]) for side in self._sides)
        return max(*sizes, self.config.model.context + 1)

    @property
    def _sides(self) -> tuple[str, str]:
        """What the names of source and target facts begin with."""
        return "", "" if self.config.tokenizer.shared else "target_"

    @property
    def target_end_id(self) -> int:
        """The id that starts and ends a target."""
        return int(self.facts[f"{self._sides[1]}end_id"])

    def texts(self, document: Document, tokenizer: str) -> Iterable[str]:
        """Both sides, where one tokenizer is shared, else the side of this tokenizer."""
        if self.config.tokenizer.shared:
            return document
        return document[1:] if tokenizer == "target_tokenizer" else document[:1]

    def learn(self, surveys: Sequence[Facts]) -> Facts:
        """Sizes and end tokens of the vocabularies."""
        target = self.encoders[self.tokenizers[-1]]
        own = {"target_vocabulary_size": target.vocabulary_size, "target_end_id": target.end_id}
        return {**super().learn(surveys), **({} if self.config.tokenizer.shared else own)}

    def shaped_by(self) -> dict[str, Any]:
        """What shapes examples besides: the context, beyond which they are cut off, and whether the vocabulary is shared."""
        return {"context": self.config.model.context, "shared": self.config.tokenizer.shared}

    def encode(self, document: Document) -> tuple[np.ndarray, None]:
        """Both sides, each as far as it fits the context; a question has an empty target."""
        first, last, most = self.encoders["tokenizer"], self.encoders[self.tokenizers[-1]], self.config.model.context - 1
        source = first.encode(document[0])[:most]
        target = last.encode(document[1])[:most] if len(document) > 1 else np.empty(0, np.uint32)
        return np.concatenate(([np.uint32(len(source) + 1)], source, [np.uint32(first.end_id)], target)), None

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns both sides, as much of them as the context holds."""
        middle = int(ids[0]) + 1
        target = self.encoders[self.tokenizers[-1]].decode(ids[middle:].tolist())
        return self.encoders["tokenizer"].decode(ids[1:middle].tolist()), target

    def sizes(self, firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Lengths of source and target of each example, (n, 2), each with its end token."""
        return np.stack((firsts, lengths - firsts), 1)

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Sources (B, S), their lengths (B), and targets (B, T) behind a start token; then targets (B, T)
        with an end token.
        """
        import torch

        end = np.array([self.target_end_id])
        source, lengths = pad([row[1 : int(row[0]) + 1] for row in rows])
        targets = [row[int(row[0]) + 1 :] for row in rows]
        target_inputs, _ = pad([np.concatenate((end, target)) for target in targets])
        wanted, _ = pad([np.concatenate((target, end)) for target in targets], IGNORED)
        if masks is not None:
            wanted[~torch.tensor([bool(mask.any()) for mask in masks])] = IGNORED
        return (source, lengths, target_inputs), wanted

    def flops_per_token(self, model: "nn.Module", tokens: float) -> float:
        """Operations to train on a token of either side, as both are counted, where the sides are equally long."""
        words = int(self.facts[f"{self._sides[1]}vocabulary_size"])
        return translator_flops_per_token(self.config.model, words, tokens / 2) / 2

    def build_model(self) -> "Translator":
        """A freshly initialised encoder-decoder."""
        from raystride.model.translator import Translator

        return Translator(
            self.config.model,
            int(self.facts["vocabulary_size"]),
            None if self.config.tokenizer.shared else int(self.facts["target_vocabulary_size"]),
            label_smoothing=self.config.objective.label_smoothing,
        )

    @property
    def counted(self) -> int:
        """How many whole numbers BLEU and chrF are made of."""
        return Overlap.NUMBERS

    def measure(
        self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor", *, together: bool = False
    ) -> "tuple[torch.Tensor, ...]":
        """The loss, and how much greedy translations have in common with the targets."""
        import torch

        loss_sum, counted = model(*inputs, targets)
        written = self._translate(model, inputs, beams=1, together=together)
        encoder = self.encoders[self.tokenizers[-1]]
        wanted = [encoder.decode([i for i in row if i not in (IGNORED, encoder.end_id)]) for row in targets.tolist()]
        counts = Overlap().counts(written, wanted).sum(0)
        return loss_sum, counted, torch.from_numpy(counts).to(targets.device)

    def losses(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """The loss sum of each sample in nats, and its targets that count, both (B)."""
        return row_losses(model.logits, model.hidden(*inputs), targets)  # type: ignore[operator, arg-type]

    def score(self, loss_sum: float, targets: float, counts: np.ndarray) -> dict[str, float]:
        """Mean loss in nats a token, BLEU and chrF, both of 0 to 100."""
        overlap = Overlap()
        return super().score(loss_sum, targets, counts) | {
            "val_bleu": overlap.bleu(counts),
            "val_chrf": overlap.chrf(counts),
        }

    def answer(self, model: "nn.Module", inputs: Inputs) -> list[dict[str, Any]]:
        """The translations, as `decoding` asks for them."""
        return [{"translation": text} for text in self._translate(model, inputs, beams=self.config.decoding.beams)]

    def grades(self, table: Mapping[str, Any]) -> Callable[[np.ndarray], dict[str, float]]:
        """Loss, BLEU and chrF of answered samples."""
        overlap, grades = Overlap(), super().grades(table)
        counts = overlap.counts(table[self.given("translation")], table[self.columns[1].name])

        def of(weights: np.ndarray) -> dict[str, float]:
            sums = weights @ counts
            return grades(weights) | {"bleu": overlap.bleu(sums), "chrf": overlap.chrf(sums)}

        return of

    @property
    def signatures(self) -> dict[str, str]:
        """sacreBLEU's signatures of BLEU and chrF, by metric."""
        return Overlap().signatures()

    def _translate(self, model: "nn.Module", inputs: Inputs, *, beams: int, together: bool = False) -> list[str]:
        from raystride.model.beam import translate

        source, lengths = inputs[:2]
        decoding, context = self.config.decoding, self.config.model.context
        # Workers that hold the model in shards must take equally many steps, whatever their sources.
        longest = decoding.longest or (context if together else source.shape[1] + 50)
        ids = translate(
            model,  # type: ignore[arg-type]
            source,
            lengths,
            start_id=self.target_end_id,
            end_id=self.target_end_id,
            longest=min(longest, context),
            beams=beams,
            length_penalty=decoding.length_penalty,
            finish_together=together,
        )
        encoder = self.encoders[self.tokenizers[-1]]
        return [encoder.decode(row) for row in ids]
