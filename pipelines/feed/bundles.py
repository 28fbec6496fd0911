"""Examples of like length, put together once into bundles that padded hold at most so many tokens.

Examples are sorted by the length of their first sequence, then of the next, equal ones by chance, and cut where one more
would not fit: a bundle takes (examples) x (sum of the longest of each sequence) tokens. What is together stays together; the
order of bundles is that of samples (`feed.order`), another one each epoch. So does fairseq (Ott et al., 2019).

    bundles = bundle(sizes, most=2048, seed=0)                # sizes (n, k): lengths of each example's k sequences
    bundles.members(3)                                        # the numbers of some examples, int64
    bundles.padding                                           # the share of tokens that are padding, 0.03
"""

from dataclasses import dataclass

import numpy as np

from raystride.pipelines.feed.order import mix64


@dataclass(frozen=True)
class Bundles:
    """All examples, each in one bundle."""

    order: np.ndarray
    """Numbers of examples, (n), as they lie in the bundles."""
    edges: np.ndarray
    """Where bundles begin in `order`, and n, (count + 1)."""
    padding: float
    """The share of tokens that are padding, over all bundles."""

    @property
    def count(self) -> int:
        """How many bundles there are."""
        return len(self.edges) - 1

    def members(self, number: int) -> np.ndarray:
        """Numbers of the examples in a bundle, (m) int64."""
        return self.order[self.edges[number] : self.edges[number + 1]]


def bundle(sizes: np.ndarray, most: int, seed: int = 0) -> Bundles:
    """Bundles of at most `most` tokens, padding included; an example that is longer by itself is a bundle of its own."""
    examples, sequences = sizes.shape
    chance = mix64(np.arange(examples, dtype=np.uint64) + mix64(np.array([seed], np.uint64)))
    order = np.lexsort((chance, *(sizes[:, column] for column in reversed(range(sequences)))))
    ordered = sizes[order]
    edges, padded = [0], 0
    while (first := edges[-1]) < examples:
        # No more than this fit, since those that follow are no shorter in their first sequence.
        window = ordered[first : first + max(1, most // max(1, int(ordered[first, 0])))]
        held = np.arange(1, len(window) + 1) * np.maximum.accumulate(window, axis=0).sum(1)
        fitting = max(1, int(np.searchsorted(held, most, side="right")))
        edges.append(first + fitting)
        padded += int(held[fitting - 1])
    return Bundles(order, np.array(edges), 1.0 - float(sizes.sum()) / padded if padded else 0.0)
