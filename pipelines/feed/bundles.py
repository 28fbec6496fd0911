"""Length bucketing: bundles of examples of similar length with a bounded number of tokens, padding included.

Examples are sorted by the length of their first sequence, then of the next, with random tie-breaking, and cut before the
example that would not fit: a bundle takes (examples) x (sum of the longest of each sequence) tokens. Bundles are fixed; the
order of bundles is that of samples (`feed.order`) and changes each epoch, as in fairseq (Ott et al., 2019).

    bundles = bundle_examples(sizes, max_tokens=2048, seed=0)     # sizes (n, k): lengths of each example's k sequences
    bundles.members(3)                                        # numbers of the examples in bundle 3, int64
    bundles.padding                                           # fraction of padding tokens, 0.03
"""

from dataclasses import dataclass

import numpy as np

from raystride.pipelines.feed.order import mix64


@dataclass(frozen=True)
class Bundles:
    """Assignment of all examples to bundles, each to exactly one."""

    order: np.ndarray
    """Numbers of examples, (n), in bundle order."""
    edges: np.ndarray
    """Start of each bundle in `order`, and n, (num_bundles + 1)."""
    padding: float
    """Fraction of padding tokens over all bundles."""

    @property
    def num_bundles(self) -> int:
        """Number of bundles."""
        return len(self.edges) - 1

    def members(self, number: int) -> np.ndarray:
        """Returns the numbers of the examples in a bundle, (m) int64."""
        return self.order[self.edges[number] : self.edges[number + 1]]


def bundle_examples(sizes: np.ndarray, max_tokens: int, seed: int = 0) -> Bundles:
    """Builds bundles of at most `max_tokens` tokens, padding included; a longer example is a bundle of its own."""
    examples, sequences = sizes.shape
    tie_break = mix64(np.arange(examples, dtype=np.uint64) + mix64(np.array([seed], np.uint64)))
    order = np.lexsort((tie_break, *(sizes[:, column] for column in reversed(range(sequences)))))
    ordered = sizes[order]
    edges, padded = [0], 0
    while (first := edges[-1]) < examples:
        # No more than this fit, since the following examples are no shorter in their first sequence.
        window = ordered[first : first + max(1, max_tokens // max(1, int(ordered[first, 0])))]
        padded_sizes = np.arange(1, len(window) + 1) * np.maximum.accumulate(window, axis=0).sum(1)
        num_fitting = max(1, int(np.searchsorted(padded_sizes, max_tokens, side="right")))
        edges.append(first + num_fitting)
        padded += int(padded_sizes[num_fitting - 1])
    return Bundles(order, np.array(edges), 1.0 - float(sizes.sum()) / padded if padded else 0.0)
