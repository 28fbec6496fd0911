"""Tokens of a micro-batch over the workers of a group: together all of them, each with its position, target and dropout."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig
from raystride.pipelines.train.strategies.mesh import context as sharder
from raystride.pipelines.train.strategies.mesh.context import ContextSharder, ShardedDocuments
from tests.forwards import GroupPlace


def fed_to(workers: int, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor) -> list[Any]:
    """Returns the tokens of each worker of a group."""
    return [ContextSharder(GroupPlace(rank, workers))(inputs, targets) for rank in range(workers)]  # type: ignore[arg-type]


def test_a_worker_alone_has_all_as_it_is() -> None:
    ids, targets = torch.arange(6).view(2, 3), torch.arange(6).view(2, 3) + 1
    whole = ContextSharder()((ids,), targets)
    assert (whole.ids is ids, whole.targets is targets, whole.positions, whole.documents) == (True, True, None, None)
    documents = torch.tensor([0, 2, 6])
    packed = ContextSharder()((ids, documents), targets)
    assert packed.documents is documents
    assert packed.positions is not None
    assert packed.positions.tolist() == [[0, 1, 0], [1, 2, 3]]


@given(
    workers=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    rows=st.integers(1, 3),
    packed=st.booleans(),
)
def test_workers_have_all_tokens_together_as_many_each(workers: int, lengths: list[int], rows: int, packed: bool) -> None:
    lengths = lengths if packed else [lengths[0]] * rows
    tokens, shape = sum(lengths), (1, sum(lengths)) if packed else (rows, lengths[0])
    ids, targets = torch.arange(tokens).view(shape) + 100, torch.arange(tokens).view(shape) + 1000
    offsets = torch.tensor([sum(lengths[:number]) for number in range(len(lengths) + 1)])
    padding = -tokens % (2 * workers)
    place = [position for length in lengths for position in range(length)]
    ends = [*offsets.tolist(), *([tokens + padding] if padding else [])]
    parts = fed_to(workers, (ids, offsets) if packed else (ids,), targets)
    counted = [part.targets != -100 for part in parts]
    real = [part.ids[counts].tolist() for part, counts in zip(parts, counted, strict=True)]
    assert sorted(token for some in real for token in some) == list(range(100, 100 + tokens))
    for rank, (part, counts) in enumerate(zip(parts, counted, strict=True)):
        assert part.ids.shape == part.targets.shape == part.positions.shape == (1, (tokens + padding) // workers)
        assert ((part.targets - part.ids)[counts] == 900).all()
        assert part.positions[counts].tolist() == [place[token - 100] for token in real[rank]]
        assert isinstance(part.documents, ShardedDocuments)
        assert part.documents.plan.offsets == tuple(ends), "what fills up is a document of its own, which no other sees"
        assert part.documents.plan.rows[rank][counts[0]].tolist() == [token - 100 for token in real[rank]]


def decoder(dropout: float = 0.5) -> Decoder:
    """A small one."""
    return Decoder(ModelConfig(layers=1, heads=2, hidden_size=4, context=4, dropout=dropout), 5)


def test_a_decoder_is_entered_if_there_is_a_group() -> None:
    alone, together = decoder(), decoder()
    plain = alone.blocks[0].attention.packed
    ContextSharder().install_attention(alone)
    assert alone.blocks[0].attention.packed is plain
    assert alone.dropout.part is None
    spread = ContextSharder(GroupPlace(0, 2))  # type: ignore[arg-type]
    spread.install_attention(together)
    assert together.blocks[0].attention.packed == spread._attention
    assert together.dropout.part is not None


def test_what_fills_up_takes_no_number_of_a_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharder.dist, "get_rank", lambda group: group.number)
    found = torch.zeros(6, dtype=torch.int64)
    for rank in range(2):
        spread, model = ContextSharder(GroupPlace(rank, 2)), decoder()  # type: ignore[arg-type]
        spread.install_attention(model)
        part = spread((torch.arange(6).view(2, 3),), torch.zeros(2, 3))
        assert model.dropout.part is not None
        shape, cut = model.dropout.part((1, 4, 1), part.documents)
        assert shape == (1, 6, 1), "as one worker draws for two rows of three"
        counts = part.targets[0] != -100
        found[part.ids[0][counts]] = cut(torch.arange(6).view(1, 6, 1))[0, counts, 0]
    assert found.tolist() == list(range(6))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dropout_sees_this_workers_tokens_of_the_whole_mask(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(sharder.dist, "get_rank", lambda group: group.number)
    spread, model = ContextSharder(GroupPlace(rank, 2)), decoder()  # type: ignore[arg-type]
    spread.install_attention(model)
    part = spread((torch.arange(8).view(1, 8),), torch.zeros(1, 8))
    assert model.dropout.part is not None
    shape, cut = model.dropout.part((1, 4, 3), part.documents)
    assert shape == (1, 8, 3)
    mask = torch.arange(24).view(1, 8, 3)
    assert torch.equal(cut(mask), mask[:, part.ids[0]])
    shape, cut = model.dropout.part((2, 4, 3), None)
    assert shape == (2, 4, 3)
    assert torch.equal(cut(mask), mask), "who writes text has all of its tokens"


def test_a_part_of_a_dropouts_part_is_cut_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharder.dist, "get_rank", lambda group: group.number)
    spread, model = ContextSharder(GroupPlace(1, 2)), decoder()  # type: ignore[arg-type]
    model.dropout.part = lambda shape, _: ((shape[0], 2 * shape[1], shape[2]), lambda mask: mask[:, ::2])
    spread.install_attention(model)
    part = spread((torch.arange(8).view(1, 8),), torch.zeros(1, 8))
    shape, cut = model.dropout.part((1, 2, 3), part.documents)
    assert shape == (1, 8, 3)
    mask = torch.arange(24).view(1, 8, 3)
    # The worker's tokens first, and every other one of these.
    assert torch.equal(cut(mask), mask[:, part.ids[0]][:, ::2])
