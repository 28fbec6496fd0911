"""How much texts have in common with references: BLEU and chrF from counts that add up, as sacreBLEU (Post, 2018) counts.

overlap = Overlap()
counts = overlap.counts(["a cat sat"], ["the cat sat"])  # (1, 28) whole numbers, one row a text
overlap.bleu(counts.sum(0)), overlap.chrf(counts.sum(0))  # of 0 to 100
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np


class Overlap:
    """sacreBLEU's BLEU (13a, mixed case, exponential smoothing) and chrF2."""

    NUMBERS: ClassVar[int] = 28
    """Of a text: lengths of text and reference and four orders of n-grams, right and all; for chrF six orders of three."""

    def __init__(self) -> None:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        self._bleu, self._chrf = BLEU(), CHRF()

    def counts(self, texts: Sequence[str], references: Sequence[str]) -> np.ndarray:
        """What both scores are made of, (n, NUMBERS), one row a text."""
        bleu = self._bleu._extract_corpus_statistics(texts, [references])
        chrf = self._chrf._extract_corpus_statistics(texts, [references])
        return np.concatenate((np.array(bleu, float), np.array(chrf, float)), 1)

    def bleu(self, counts: np.ndarray) -> float:
        """BLEU from the sum of some rows."""
        return float(self._bleu._compute_score_from_stats([int(count) for count in counts[:10]]).score)

    def chrf(self, counts: np.ndarray) -> float:
        """chrF from the sum of some rows."""
        return float(self._chrf._compute_score_from_stats([int(count) for count in counts[10:]]).score)

    def signatures(self) -> dict[str, str]:
        """How each was computed, as it is to be quoted."""
        self.counts(["a"], ["a"])  # sacreBLEU signs what it has computed
        return {"bleu": str(self._bleu.get_signature()), "chrf": str(self._chrf.get_signature())}
