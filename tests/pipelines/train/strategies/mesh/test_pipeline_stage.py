"""Stages of a decoder, one after another, beside the decoder: hidden states, losses, caches, and what each of them holds."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from raystride.model.attention import LayerCache
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig
from raystride.pipelines.train.strategies.mesh.context import LocalTokens
from raystride.pipelines.train.strategies.mesh.pipeline import DecoderStage

WORDS, CONTEXT = 13, 8


def decoder(flavour: Any = "llama", **changes: Any) -> Decoder:
    """A decoder of three blocks, which computes without dropout."""
    torch.manual_seed(0)
    return Decoder(
        ModelConfig(architecture=flavour, layers=3, heads=2, hidden_size=8, context=CONTEXT, **changes), WORDS
    ).eval()


def stages_of(model: Decoder, *ends: int) -> list[DecoderStage]:
    """The stages that end with these blocks."""
    borders = [0, *ends, 3]
    ranges = [range(begin, end) for begin, end in pairwise(borders)]
    return [DecoderStage(model, blocks, first=blocks.start == 0, last=blocks.stop == 3) for blocks in ranges]


def ids_of(*shape: int) -> torch.Tensor:
    """Random ids of that shape."""
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("flavour", ["llama", "gpt2", "original"])
@pytest.mark.parametrize("ends", [(), (1,), (2,), (1, 2)])
@torch.no_grad()
def test_stages_one_after_another_are_the_decoder(flavour: str, ends: tuple[int, ...]) -> None:
    model, ids = decoder(flavour), ids_of(2, CONTEXT)
    positions = torch.arange(CONTEXT).flip(0)[None]
    for beside in ({}, {"positions": positions}):
        x = torch.full((2, CONTEXT, 8), 99.0)  # which the first stage does not look at
        for stage in stages_of(model, *ends):
            x = stage.forward_blocks(x, ids, **beside)
        torch.testing.assert_close(x, model.hidden(ids, **beside))


@torch.no_grad()
def test_each_stage_fills_the_caches_of_its_own_layers() -> None:
    model, ids = decoder(), ids_of(1, 5)
    stages, caches = stages_of(model, 1), [LayerCache(5) for _ in range(3)]
    x = stages[0].forward_blocks(torch.empty(0), ids[:, :3], caches=caches)
    assert [cache.length for cache in caches] == [3, 0, 0]
    stages[1].forward_blocks(x, ids[:, :3], caches=caches)
    assert [cache.length for cache in caches] == [3, 3, 3]
    positions = torch.tensor([[3, 4]])
    for stage in stages:
        x = stage.forward_blocks(x, ids[:, 3:], positions, caches=caches, mask=torch.ones(2, 5).tril(3).bool()[None, None])
    torch.testing.assert_close(x, model.hidden(ids)[:, 3:])


@torch.no_grad()
def test_documents_do_not_see_each_other_through_stages() -> None:
    model, ids = decoder(), ids_of(1, CONTEXT)
    documents, positions = torch.tensor([0, 3, CONTEXT]), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    x = torch.empty(0)
    for stage in stages_of(model, 2):
        x = stage.forward_blocks(x, ids, positions, documents=documents)
    apart = [model.hidden(ids[:, :3]), model.hidden(ids[:, 3:])]
    torch.testing.assert_close(x, torch.cat(apart, 1))


@pytest.mark.parametrize(
    ("flavour", "tied", "first", "last"),
    [
        ("gpt2", True, {"embedding", "positions"}, {"norm", "head"}),
        ("llama", False, {"embedding"}, {"norm", "head"}),
        ("llama", True, {"embedding"}, {"norm", "head"}),
    ],
)
def test_what_stands_at_the_ends_belongs_to_their_stages(flavour: str, tied: bool, first: set[str], last: set[str]) -> None:
    model = decoder(flavour, tie_embeddings=tied)
    begin, middle, end = stages_of(model, 1, 2)
    assert [set(stage.ends) for stage in (begin, middle, end)] == [first, set(), last]
    assert (end.ends["head"] is model.embedding) is tied
    assert begin.ends["embedding"] is model.embedding
    assert [list(stage.blocks) for stage in (begin, middle, end)] == [[block] for block in model.blocks]
    assert middle.decoder is model
    assert set(middle.parameters()) == set(model.blocks[1].parameters()), "and nothing of the decoder beside"


class Step:
    """A step's micro-batches, and the stages that computed them."""

    def __init__(self, *local_tokens: LocalTokens) -> None:
        self._local_tokens = local_tokens
        self.entered: list[int] = []
        self.within = False

    def local_tokens(self, number: int) -> LocalTokens:
        return self._local_tokens[number]

    @contextmanager
    def _inside_context(self, number: int) -> Iterator[None]:
        self.entered.append(number)
        self.within = True
        yield
        self.within = False

    def micro_batch_context(self, number: int) -> AbstractContextManager[None]:
        return self._inside_context(number)

    def loss(self, number: int, loss_sum: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        assert not self.within, "the loss is computed inside, and taken outside"
        return loss_sum * 1000 + counted + number

    def unpack_stream(self, buffer: torch.Tensor, number: int) -> torch.Tensor:
        shape = self._local_tokens[number].ids.shape
        return buffer.flatten(0, 1)[: shape.numel()].view(*shape, -1)

    def pack_stream(self, stream: torch.Tensor) -> torch.Tensor:
        return torch.cat((stream.flatten(0, 1), torch.full((2, stream.shape[-1]), torch.nan)))[None]


@torch.no_grad()
def test_a_micro_batch_is_looked_up_by_its_number_and_the_last_stage_gives_its_loss() -> None:
    model = decoder()
    batches = [
        LocalTokens(ids_of(1, 4), None, None, ids_of(1, 4)),
        LocalTokens(ids_of(2, 5), None, None, ids_of(2, 5).fill_(-100)),
    ]
    batches[1].targets[0, 2:] = 3
    step, (first, last) = Step(*batches), stages_of(model, 2)
    first.step = last.step = step
    x = first(torch.empty(0), torch.tensor([1]))
    assert x.shape == (1, 12, 8), "a buffer, of which the next stage takes what the micro-batch has"
    loss = last(x, torch.tensor([1]))
    expected, counted = model(batches[1].ids, batches[1].targets)
    assert counted == 3
    assert loss.item() == pytest.approx(expected.item() * 1000 + 3 + 1, rel=1e-5)
    assert step.entered == [1, 1]
