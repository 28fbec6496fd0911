"""A checkpoint read without PyTorch Distributed Checkpoint holds the same bits; what is not so simple is left to that."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from raystride.pipelines.files import Folder
from raystride.pipelines.train.checkpoint import Checkpoints, Found
from raystride.pipelines.train.state import TrainState
from raystride.pipelines.train.storage import CheckpointReader, load
from raystride.pipelines.train.whole import read_whole
from tests.pipelines.train.checkpoints import trained

NAME = "model.embedding.weight"


@pytest.fixture
def found(tmp_path: Path) -> Found:
    """A checkpoint of one worker."""
    checkpoints = Checkpoints(Folder.at(str(tmp_path)), "a1", keep=2)
    checkpoints.save(*trained(0), TrainState(step=1), {}, best=False)
    checkpoints.finish()
    newest = checkpoints.newest()
    assert newest is not None
    return newest


def _empty(found: Found) -> dict[str, torch.Tensor]:
    tensors = found.manifest["tensors"]
    return {name: torch.zeros(entry["size"], dtype=getattr(torch, entry["dtype"])) for name, entry in tensors.items()}


def test_it_reads_the_same_bits(found: Found) -> None:
    ours, theirs = _empty(found), _empty(found)
    assert read_whole(ours, found.folder, found.manifest)
    load(theirs, CheckpointReader(found.folder, found.manifest, 0, theirs), None)
    assert len(ours) > 3
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_pieces_are_put_together(found: Found) -> None:
    whole = _empty(found)
    assert read_whole(whole, found.folder, found.manifest)
    manifest = deepcopy(found.manifest)
    (chunk,) = manifest["tensors"][NAME]["chunks"]
    rows, columns = chunk["sizes"]
    row = chunk["bytes"] // rows
    manifest["tensors"][NAME]["chunks"] = [
        chunk | {"sizes": [3, columns], "bytes": 3 * row},
        chunk
        | {"sizes": [rows - 3, columns], "offsets": [3, 0], "offset": chunk["offset"] + 3 * row, "bytes": (rows - 3) * row},
    ]
    again = {NAME: torch.zeros(rows, columns)}
    assert read_whole(again, found.folder, manifest)
    assert torch.equal(again[NAME], whole[NAME])


def test_what_is_not_so_simple_is_left_alone(found: Found) -> None:
    manifest = deepcopy(found.manifest)
    wanted = _empty(found)
    assert not read_whole(wanted | {"model.other": torch.zeros(1)}, found.folder, manifest)
    assert not read_whole({NAME: torch.zeros(1, 1)}, found.folder, manifest)
    del manifest["tensors"][NAME]["chunks"]  # of many ranks each says in a file of its own where its pieces lie
    assert not read_whole(wanted, found.folder, manifest)
    assert not any(tensor.any() for tensor in wanted.values())
