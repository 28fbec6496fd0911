"""Splitting of texts without a break for thousands of characters, so that every encoder can process the pieces.

BPE merges inside a piece that its pattern cuts out, and the pattern itself is matched with a bounded stack: a megabyte of
blanks ends tiktoken with "Max stack size" (measured), and merges of a long piece cost more than linear time.

    split_long_runs("def main(): ...")        # ["def main(): ..."], nearly free: one short search a window
    split_long_runs("a" * 100_000)            # 7 texts of at most 2 * WINDOW characters; joined they are the same text
"""

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
