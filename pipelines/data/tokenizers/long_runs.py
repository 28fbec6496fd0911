"""Cuts texts without a break, which pre-tokenizers and merges would take more than linear time for."""

import re
from itertools import pairwise

WINDOW = 16384
"""Characters between two searches for a break; a run that stays uncut is shorter than two windows."""

_BREAK, _SOLID = re.compile(r"\s"), re.compile(r"\S")


def split_long_runs(text: str) -> list[str]:
    """Returns the text's pieces in order, cut around every aligned window that is all blank or has no blank at all."""
    if len(text) < 2 * WINDOW:
        return [text]
    cuts = {0, len(text)}
    for start in range(0, len(text) - WINDOW + 1, WINDOW):
        stop = start + WINDOW
        if not (_BREAK.search(text, start, stop) and _SOLID.search(text, start, stop)):
            cuts |= {start, stop}
    edges = sorted(cuts)
    return [text[start:stop] for start, stop in pairwise(edges)]
