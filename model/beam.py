"""Decoding of translations with a key-value cache: greedy or beam search.

The best `beams` continuations of a sentence are kept at each step; finished ones leave the search, which is over when no
hypothesis can reach a better score than the best translation found. A translation Y of |Y| ids, its end id included, has

    score(Y) = log P(Y | X) / lp(Y),  lp(Y) = (5 + |Y|)^a / (5 + 1)^a        (Wu et al., 2016, eq. 14, without coverage)

Finished sentences leave the batch. One beam is greedy decoding, with any penalty.

    translations = translate(model, source, lengths, start_id=1, end_id=2, longest=60, beams=4)     # lists of ids
"""

import torch

from raystride.model.translator import DecodingState, Translator


def translate(
    model: Translator,
    source: torch.Tensor,
    lengths: torch.Tensor,
    *,
    start_id: int,
    end_id: int,
    longest: int,
    beams: int = 1,
    length_penalty: float = 0.6,
    finish_together: bool = False,
) -> list[list[int]]:
    """Returns the ids of each source's (B, S) translation, B at least 1, without end id; at most `longest`, ended or not.

    `length_penalty` is a above; 0 compares plain probabilities. `finish_together` always runs `longest` steps: workers
    with a sharded model compute together, and must run equally many steps.

    Raises ValueError if a number is out of range, or `longest` exceeds the positions of the model.
    """
    if beams < 1 or length_penalty < 0:
        raise ValueError(f"beams is {beams} and length_penalty {length_penalty}: give at least 1, and at least 0")
    if not 1 <= longest <= model.shape.context:
        raise ValueError(f"longest is {longest}: it must be at least 1 and at most model.context, {model.shape.context}")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():  # not inference mode: a sharded model keeps the gathered tensors
            decoding = DecodingState(model.encode(source, lengths), lengths, model.shape.layers, longest)
            search = _Search(len(source), beams, longest, end_id, length_penalty, source.device)
            last = torch.full((len(source) * beams,), start_id, device=source.device)
            for _ in range(longest):
                parents, going = search.extend(model.decode(last, decoding))
                if not going and not finish_together:
                    break
                # If none is left, workers with shards still step on together: one sentence continues unused.
                rows, sentences = search.keep(parents, going or [0])
                if sentences is not None:
                    decoding.select_sentences(sentences)
                if rows is not None:
                    decoding.select(rows)
                last = search.last
    finally:
        model.train(was_training)
    return [[word for word in row if word != end_id] for row in search.results()]


class _Search:
    """Beam search state: hypotheses of unfinished sentences, and the best translation of every sentence so far."""

    def __init__(self, sentences: int, beams: int, longest: int, end_id: int, penalty: float, device: torch.device) -> None:
        self._end_id, self._longest, self._penalty = end_id, longest, penalty
        self._length = 0
        self._numbers = list(range(sentences))
        """Indices of the sentences in the search; the rows of the tensors below."""
        self._words = torch.full((sentences, beams, longest), end_id, device=device)
        self._scores = torch.full((sentences, beams), -torch.inf, device=device)
        self._scores[:, 0] = 0.0  # all beams start equal: one of them is enough
        self._best = self._words[:, 0].clone()
        self._best_scores = self._scores.new_full((sentences,), -torch.inf)
        self._done: dict[int, torch.Tensor] = {}

    @property
    def last(self) -> torch.Tensor:
        """Newest word of every row."""
        return self._words[:, :, self._length - 1].flatten()

    def extend(self, logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Appends a word to each row from logits (B K, V); returns parent beams (B, K) and the unfinished sentences."""
        (sentences, beams), words = self._scores.shape, logits.shape[-1]
        steps = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        totals = self._scores[..., None] + steps.view(sentences, beams, words)
        scores, chosen = totals.flatten(1).topk(beams)
        parents, new = chosen // words, chosen % words
        self._words = self._words.gather(1, parents[..., None].expand_as(self._words))
        self._words[:, :, self._length] = new
        self._length += 1
        ended = new == self._end_id if self._length < self._longest else torch.ones_like(new, dtype=torch.bool)
        best, place = (scores / self._length_divisor(self._length)).masked_fill(~ended, -torch.inf).max(1)
        better = best > self._best_scores
        words_of_best = self._words.gather(1, place[:, None, None].expand(-1, 1, self._longest))[:, 0]
        self._best = torch.where(better[:, None], words_of_best, self._best)
        self._best_scores = torch.where(better, best, self._best_scores)
        self._scores = scores.masked_fill(ended, -torch.inf)
        # A hypothesis only becomes less likely, and is divided by at most the divisor of the longest translation.
        reachable = self._scores.amax(1) / self._length_divisor(self._longest)
        done = (self._best_scores >= reachable).tolist()
        for sentence in (sentence for sentence, over in enumerate(done) if over):
            self._done[self._numbers[sentence]] = self._best[sentence]
        return parents, [sentence for sentence, over in enumerate(done) if not over]

    def keep(self, parents: torch.Tensor, going: list[int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Keeps only these sentences; returns the rows and the sentences to select, None if all stay in place."""
        sentences, beams = parents.shape
        if beams == 1 and len(going) == sentences:
            return None, None
        rows = parents + torch.arange(0, sentences * beams, beams, device=parents.device)[:, None]
        if len(going) == sentences:
            return rows.flatten(), None
        kept = torch.tensor(going, device=parents.device)
        self._numbers = [self._numbers[sentence] for sentence in going]
        self._words, self._scores = self._words[kept], self._scores[kept]
        self._best, self._best_scores = self._best[kept], self._best_scores[kept]
        return rows[kept].flatten(), kept

    def results(self) -> list[list[int]]:
        """Returns the best words of every sentence in order, padded with end ids."""
        return [self._done[number].tolist() for number in sorted(self._done)]

    def _length_divisor(self, length: int) -> float:
        return float(((5.0 + length) / 6.0) ** self._penalty)
