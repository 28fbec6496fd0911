"""Text generation with a decoder and a key-value cache: temperature, top-k, top-p, for a batch of prompts.

Networks of users' own have no cache: the newest ids of each row are computed anew for each token.

Prompts of different lengths are padded on the left and the padding is masked, so each row continues at its own last token.
When the context is full, the cache is rebuilt from the newer half of each row.

    for ids in generate(model, [[1, 2, 3], [4]], tokens=100, temperature=0.8):
        ...                                                   # the next id of every prompt, a list of 2
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from raystride.model.attention import LayerCache
from raystride.model.transformer import Decoder

PADDING = 0


class CausalNetwork(Protocol):
    """A network that predicts each next token from those before it."""

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the last hidden states (B, T, C) of ids (B, T) int64; those of a position do not depend on later ids."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits (..., V) of hidden states (..., C)."""
        ...


def generate(
    model: Decoder | CausalNetwork,
    prompts: list[list[int]],
    *,
    tokens: int,
    context: int = 1024,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[list[int]]:
    """Yields the next id of each prompt, `tokens` times. No prompt may be empty; `temperature` 0 is greedy.

    `context` is the number of newest ids that a network without a cache sees; a decoder knows its own.

    Raises ValueError if there is no prompt, or one without ids.
    """
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token; begin an empty one with the tokenizer's end token")
    assert isinstance(model, nn.Module)
    device = next(model.parameters()).device  # a stage of a model need not have its embedding
    generator = torch.Generator(device=device).manual_seed(seed)
    rows = [list(prompt) for prompt in prompts]
    caches: list[LayerCache] = []
    was_training = model.training
    model.eval()
    try:
        for _ in range(tokens):
            with torch.no_grad():  # not inference mode: a sharded model keeps the gathered tensors
                if not isinstance(model, Decoder):
                    logits = _compute_last_logits(model, [row[-context:] for row in rows], device)
                elif not caches or caches[0].length >= model.shape.context:
                    # The first pass, or no room for one more position: start over from the newer half.
                    keep = model.shape.context if not caches else max(1, model.shape.context // 2)
                    caches, padding = _allocate_caches(model, rows, keep)
                    logits = _prefill_caches(model, [row[-keep:] for row in rows], caches, padding)
                else:
                    logits = _decode_step(model, [row[-1] for row in rows], caches, padding)
                chosen = choose_token(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            next_ids: list[int] = chosen.tolist()
            for row, token in zip(rows, next_ids, strict=True):
                row.append(token)
            yield next_ids
    finally:
        model.train(was_training)


def _compute_last_logits(model: CausalNetwork, rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """Returns the logits (B, V) after each row's last token; padding follows it, where it changes nothing."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [PADDING] * (longest - len(row)) for row in rows], device=device)
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    return model.logits(model.hidden(ids)[torch.arange(len(rows), device=device), last])


def choose_token(
    logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Samples an id a row from logits (B, V). Top-p keeps the fewest likeliest ids that reach p (Holtzman, 2020)."""
    if temperature == 0:
        return logits.argmax(-1)
    ordered, ids = (logits.float() / temperature).sort(dim=-1, descending=True)
    if top_k:
        ordered[:, top_k:] = -torch.inf
    probabilities = ordered.softmax(-1)
    # The mass before an id, so that the likeliest one always stays.
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    picked = torch.multinomial(probabilities, 1, generator=generator)
    return ids.gather(-1, picked)[:, 0]


def _allocate_caches(model: Decoder, rows: list[list[int]], keep: int) -> tuple[list[LayerCache], torch.Tensor]:
    """Returns empty caches for `context` positions, and the number of padding positions before each row, (B)."""
    lengths = [min(len(row), keep) for row in rows]
    caches = [LayerCache(model.shape.context) for _ in range(model.shape.layers)]
    return caches, torch.tensor([max(lengths) - length for length in lengths], device=next(model.parameters()).device)


def _prefill_caches(model: Decoder, rows: list[list[int]], caches: list[LayerCache], padding: torch.Tensor) -> torch.Tensor:
    """Runs the prompts through the model; returns the logits (B, V) after each row's last token."""
    longest = max(map(len, rows))
    ids = torch.tensor([[PADDING] * (longest - len(row)) + row for row in rows], device=padding.device)
    columns = torch.arange(longest, device=padding.device)
    mask = None
    if padding.any():
        # A row of padding alone would have no key to look at; it looks at itself and its result is never read.
        mask = (columns[None, :] >= padding[:, None])[:, None, None, :] | torch.eye(
            longest, dtype=torch.bool, device=padding.device
        )
    hidden = model.hidden(ids, (columns[None] - padding[:, None]).clamp(min=0), caches, mask)
    return model.logits(hidden[:, -1])


def _decode_step(model: Decoder, last: list[int], caches: list[LayerCache], padding: torch.Tensor) -> torch.Tensor:
    """Runs one more token a row against the caches; returns logits (B, V)."""
    column = caches[0].length
    ids = torch.tensor(last, device=padding.device)[:, None]
    mask = None
    if padding.any():
        columns = torch.arange(column + 1, device=padding.device)
        mask = (columns[None, :] >= padding[:, None])[:, None, None, :]
    hidden = model.hidden(ids, (column - padding)[:, None], caches, mask)
    return model.logits(hidden[:, -1])
