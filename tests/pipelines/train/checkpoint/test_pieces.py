"""Pieces of a whole tensor say where they lie, and together they are the whole."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from raystride.model.cut import Cut
from raystride.pipelines.train.checkpoint.pieces import Pieces, parameters_sha256

WHOLE = torch.arange(60.0).reshape(10, 6)
CUTS = {
    "rows of two heads": [Cut((10, 6), 0, (range(2), range(5, 8))), Cut((10, 6), 0, (range(2, 5), range(8, 10)))],
    "columns": [Cut((10, 6), 1, (range(3),)), Cut((10, 6), 1, (range(3, 4), range(4, 6)))],
    "all here": [Cut((10, 6), 0, (range(10),)), Cut((10, 6), 0, ())],
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=list(CUTS))
def test_what_workers_write_is_the_whole_once(cuts: list[Cut]) -> None:
    found = torch.full_like(WHOLE, -1)
    for cut in cuts:
        held = Pieces(cut.local_part(WHOLE), cut)
        assert (held.shape, held.dtype) == (WHOLE.shape, WHOLE.dtype)
        assert torch.equal(held.to_local(), cut.local_part(WHOLE))
        items = held.__create_write_items__("weight", None)
        assert [item.tensor_data.chunk for item in items] == held.__create_chunk_list__()
        for item in items:
            assert (item.index.fqn, item.tensor_data.size) == ("weight", WHOLE.shape)
            assert item.tensor_data.properties.dtype == WHOLE.dtype
            chunk = item.tensor_data.chunk
            assert item.index.offset == chunk.offsets
            place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            assert (found[place] == -1).all(), "written twice"
            found[place] = held.__get_tensor_shard__(item.index)
    assert torch.equal(found, WHOLE)


def test_a_piece_that_is_not_here_is_an_error_and_nothing_is_computed() -> None:
    cut = Cut((10, 6), 0, (range(2, 4),))
    held = Pieces(cut.local_part(WHOLE), cut)
    with pytest.raises(ValueError, match=r"no piece of weight begins at \(0, 0\) here"):
        held.__get_tensor_shard__(SimpleNamespace(fqn="weight", offset=torch.Size((0, 0))))
    with pytest.raises(NotImplementedError, match="to_local"):
        held + 1
    detached = held.detach()
    assert isinstance(detached, Pieces)
    assert (detached.cut, detached.shape) == (cut, WHOLE.shape)
    moments = held.with_local(torch.ones(2, 6))
    assert (moments.cut, moments.to_local().tolist()) == (cut, torch.ones(2, 6).tolist())


def test_the_hash_of_a_run_sees_imaginary_parts() -> None:
    """They were left out: two networks that differ in them alone had one hash."""
    hashes = set()
    for number in (1 + 2j, 1 + 3j):
        network = nn.Linear(2, 2)
        nn.init.zeros_(network.weight)
        nn.init.zeros_(network.bias)
        network.scale = nn.Parameter(torch.tensor([number]))
        hashes.add(parameters_sha256(network))
    assert len(hashes) == 2
