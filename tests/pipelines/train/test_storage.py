"""A checkpoint's files: of those on a store only the bytes that are needed come."""

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from raystride.pipelines.files import Folder
from raystride.pipelines.train.checkpoint import Checkpoints
from raystride.pipelines.train.state import TrainState
from raystride.pipelines.train.storage import CheckpointReader
from tests.pipelines.train.checkpoints import trained
from tests.storage import uri as uri_of


def test_a_reader_takes_only_the_rows_that_it_needs(s3: str, tmp_path: Path) -> None:
    model, optimizer = trained(0)
    checkpoints = Checkpoints(Folder.at(uri_of(s3, f"rows{tmp_path}")), "a1", keep=2)
    checkpoints.save(model, optimizer, TrainState(step=1), {}, best=False)
    checkpoints.finish()
    found = checkpoints.newest()
    assert found is not None
    reader = CheckpointReader(found.folder, found.manifest)
    reader.read_metadata()
    name, weight = "model.embedding.weight", model.embedding.weight.detach()
    index = MetadataIndex(name, torch.Size([0, 0]))
    rows, columns = torch.Size([3, 2]), torch.Size([4, 5])
    item = ReadItem(LoadItemType.TENSOR, index, torch.Size([0, 0]), index, rows, columns)
    wanted = reader._wanted(item)
    assert wanted.bytes == 4 * weight.shape[1] * 4
    content, first = reader._content(wanted.file, wanted.offset, wanted.offset + wanted.bytes)
    assert len(content) == wanted.bytes
    assert torch.equal(wanted.cut(content, first), weight[3:7, 2:7])
