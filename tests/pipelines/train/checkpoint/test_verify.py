"""A checkpoint read without PyTorch Distributed Checkpoint holds the same bits; what is not so simple is left to that."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.manager import Checkpoints, ValidCheckpoint
from raystride.pipelines.train.checkpoint.train_state import TrainState
from raystride.pipelines.train.checkpoint.verify import read_local
from raystride.pipelines.train.checkpoint.writer import CheckpointReader, load
from tests.pipelines.train.checkpoints import train_model

NAME = "model.embedding.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> ValidCheckpoint:
    """A checkpoint of one worker."""
    checkpoints = Checkpoints(Folder.from_uri(str(tmp_path)), "a1", keep=2)
    checkpoints.save(*train_model(0), TrainState(step=1), {}, best=False)
    checkpoints.finish()
    newest = checkpoints.find_newest()
    assert newest is not None
    return newest


def _empty(checkpoint: ValidCheckpoint) -> dict[str, torch.Tensor]:
    tensors = checkpoint.manifest["tensors"]
    return {name: torch.zeros(entry["size"], dtype=getattr(torch, entry["dtype"])) for name, entry in tensors.items()}


def test_it_reads_the_same_bits(checkpoint: ValidCheckpoint) -> None:
    ours, theirs = _empty(checkpoint), _empty(checkpoint)
    assert read_local(ours, checkpoint.folder, checkpoint.manifest)
    load(theirs, CheckpointReader(checkpoint.folder, checkpoint.manifest, 0, theirs))
    assert len(ours) > 3
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_pieces_are_put_together(checkpoint: ValidCheckpoint) -> None:
    whole = _empty(checkpoint)
    assert read_local(whole, checkpoint.folder, checkpoint.manifest)
    manifest = deepcopy(checkpoint.manifest)
    (chunk,) = manifest["tensors"][NAME]["chunks"]
    rows, columns = chunk["sizes"]
    row = chunk["bytes"] // rows
    manifest["tensors"][NAME]["chunks"] = [
        chunk | {"sizes": [3, columns], "bytes": 3 * row},
        chunk
        | {"sizes": [rows - 3, columns], "offsets": [3, 0], "offset": chunk["offset"] + 3 * row, "bytes": (rows - 3) * row},
    ]
    again = {NAME: torch.zeros(rows, columns)}
    assert read_local(again, checkpoint.folder, manifest)
    assert torch.equal(again[NAME], whole[NAME])


def test_what_is_not_so_simple_is_left_alone(checkpoint: ValidCheckpoint) -> None:
    manifest = deepcopy(checkpoint.manifest)
    wanted = _empty(checkpoint)
    assert not read_local(wanted | {"model.other": torch.zeros(1)}, checkpoint.folder, manifest)
    assert not read_local({NAME: torch.zeros(1, 1)}, checkpoint.folder, manifest)
    del manifest["tensors"][NAME]["chunks"]  # of many ranks each says in a file of its own where its pieces lie
    assert not read_local(wanted, checkpoint.folder, manifest)
    assert not any(tensor.any() for tensor in wanted.values())
