"""A checkpoint's files: of those on a store only the bytes that are needed come."""

import json
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.device_mesh import init_device_mesh

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import MANIFEST
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.checkpoint.train_state import TrainState
from raystride.pipelines.train.checkpoint.writer import CheckpointReader, CheckpointWriter, load, save
from tests.distributed import run_distributed
from tests.pipelines.train.checkpoints import train_model
from tests.storage import uri as uri_of


def test_a_reader_takes_only_the_rows_that_it_needs(s3: str, tmp_path: Path) -> None:
    model, optimizer = train_model(0)
    checkpoints = Checkpoints(Folder.from_uri(uri_of(s3, f"rows{tmp_path}")), "a1", keep=2)
    checkpoints.save(model, optimizer, TrainState(step=1), {}, best=False)
    checkpoints.finish()
    found = checkpoints.find_newest()
    assert found is not None
    reader = CheckpointReader(found.folder, found.manifest, 0, {})
    reader.read_metadata()
    name, weight = "model.embedding.weight", model.embedding.weight.detach()
    index = MetadataIndex(name, torch.Size([0, 0]))
    rows, columns = torch.Size([3, 2]), torch.Size([4, 5])
    item = ReadItem(LoadItemType.TENSOR, index, torch.Size([0, 0]), index, rows, columns)
    wanted = reader._read_request(item)
    assert wanted.bytes == 4 * weight.shape[1] * 4
    content, first = reader._read_range(wanted.file, wanted.offset, wanted.offset + wanted.bytes)
    assert len(content) == wanted.bytes
    assert torch.equal(wanted.extract_tensor(content, first), weight[3:7, 2:7])


class Broken(Folder):
    """A store that breaks off the first tries of a file, each after one chunk more."""

    tries = 0

    def put_chunks(self, name: str, pieces: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Takes some chunks of each try, and all of the last."""
        for number in range(self.tries):
            list(islice(pieces(), number + 1))
        super().put_chunks(name, pieces)


@pytest.mark.parametrize("tries", range(4))
@pytest.mark.parametrize("indexed", [False, True])
def test_a_file_that_is_begun_several_times_has_its_pieces_once(
    tmp_path: Path, tries: int, indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "tries", tries)
    place = Broken(str(tmp_path))
    tensors = {name: torch.arange(3.0 + size) for size, name in enumerate("abc")}
    save(tensors, CheckpointWriter(place, "a1", "a1-x", 0, {"step": 1}, 0, {}, indexed=indexed), None)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    manifest = place.read_json(MANIFEST)
    stated = manifest["files"]["a1-x/rank-0.bin"]
    assert (stated["bytes"], stated["sha256"]) == (4 * 12, place.sha256("a1-x/rank-0.bin"))
    load(found, CheckpointReader(place, manifest, 0, found))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


ROWS, COLUMNS = 6, 3


def _save_and_read_sharded(rank: int, world: int, folder: str) -> tuple[list[str], bool]:
    """Saves a tensor by rows over the ranks, and reads it with nothing there but this rank's own files."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    place, header = Folder.from_uri(folder), {"step": 1}
    tensors: dict[str, torch.Tensor] = {"weight": distribute_tensor(whole, mesh, [Shard(0)])}
    group = dist.new_group(backend="gloo")
    save(tensors, CheckpointWriter(place, "a1", "a1-x", rank, header, 0, {}, indexed=True), group)
    manifest = place.read_json(MANIFEST)
    files = sorted(manifest["files"])
    seen = {name: stated for name, stated in manifest["files"].items() if name.startswith(f"a1-x/rank-{rank}.")}
    empty: dict[str, torch.Tensor] = {"weight": distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)])}
    reader = CheckpointReader(place, manifest | {"files": seen}, rank, empty)
    load(empty, reader)
    return files, torch.equal(empty["weight"].full_tensor(), whole)  # type: ignore[attr-defined]


def test_a_rank_finds_in_its_own_file_what_it_wrote_itself(tmp_path: Path) -> None:
    for files, same in run_distributed(_save_and_read_sharded, 2, str(tmp_path)):
        assert files == ["a1-x/rank-0.bin", "a1-x/rank-0.npy", "a1-x/rank-1.bin", "a1-x/rank-1.npy"]
        assert same
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["tensors"] == {"weight": {"dtype": "float32", "size": [ROWS, COLUMNS]}}
    whole = {"weight": torch.zeros(ROWS, COLUMNS)}
    load(whole, CheckpointReader(Folder(str(tmp_path)), manifest, 0, whole))
    assert torch.equal(whole["weight"], torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS))
