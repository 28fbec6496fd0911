"""Who writes what where nobody looks at all ranks: each piece once, by one that holds it; loaded is what was saved."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import MANIFEST
from raystride.pipelines.train.checkpoint.plan import Holdings, assign_writers
from raystride.pipelines.train.checkpoint.writer import CheckpointReader, CheckpointSaveError, CheckpointWriter, load, save
from raystride.pipelines.train.distributed import collectives as agreement
from raystride.pipelines.train.distributed.collectives import all_reduce_object
from tests.distributed import run_distributed

PIECES = st.dictionaries(
    st.tuples(st.sampled_from("abcdef"), st.tuples(st.integers(0, 3))), st.integers(0, 100), max_size=12
)


@given(pieces=PIECES, cuts=st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=4), ranks=st.integers(1, 5))
def test_each_shared_piece_is_written_by_one_that_holds_it(pieces: dict[Any, int], cuts: list[set[int]], ranks: int) -> None:
    listed = list(pieces.items())
    tables = [
        ([listed[at] for at in sorted(cut) if at < len(listed)], list(range(number * ranks, (number + 1) * ranks)))
        for number, cut in enumerate(cuts)
    ]
    writers = assign_writers(tables)
    assert set(writers) == {place for held, _ in tables for place, _ in held}
    for place, rank in writers.items():
        assert any(rank in holders and place in dict(held) for held, holders in tables)
    if len(tables) == 1:  # whoever writes most has at most one piece more than the average
        loads = [sum(pieces[place] for place, rank in writers.items() if rank == each) for each in range(ranks)]
        assert max(loads) <= sum(loads) / ranks + max(pieces.values(), default=0)


@given(sizes=st.lists(st.integers(1, 100), max_size=12), ranks=st.integers(1, 5))
def test_each_piece_goes_to_the_rank_that_has_the_least_bytes_before_it(sizes: list[int], ranks: int) -> None:
    pieces: list[tuple[tuple[str, tuple[int, ...]], int]] = [((f"w{at}", (0,)), size) for at, size in enumerate(sizes)]
    writers, loads = assign_writers([(pieces, list(range(ranks)))]), [0] * ranks
    for place, size in sorted(pieces, key=lambda piece: (-piece[1], piece[0])):
        assert loads[writers[place]] == min(loads)
        loads[writers[place]] += size


def test_what_ranks_hold_is_put_together() -> None:
    """Ranks of a mesh hold tensors of their own; those with just the same pieces are listed together."""
    piece = (("w", (0,)), 4)
    first = Holdings({"a": {"size": [1]}}, {"x": ([piece], [0])}, {0: 5})
    second = Holdings({"b": {"size": [2]}}, {"x": ([piece], [1]), "y": ([piece], [1])}, {1: 6}, {1: OSError("full")})
    found = first.merge(second)
    assert found.tensors == {"a": {"size": [1]}, "b": {"size": [2]}}
    assert found.shared == {"x": ([piece], [0, 1]), "y": ([piece], [1])}
    assert found.fed == {0: 5, 1: 6}
    assert list(found.failures) == [1]


def _together(rank: int, world: int, branches: int) -> Any:
    agreement.BRANCHES = branches
    return all_reduce_object({rank: f"rank {rank}"}, lambda one, other: one | other, dist.new_group(backend="gloo"))


def test_what_all_tell_reaches_all() -> None:
    assert run_distributed(_together, 5, 2) == [{rank: f"rank {rank}" for rank in range(5)}] * 5


def _numbers(rows: int, columns: int, first: int) -> torch.Tensor:
    return torch.arange(first, first + rows * columns, dtype=torch.float32).reshape(rows, columns)


def _tensors(world: int, zero: bool) -> dict[str, torch.Tensor]:
    """Returns a rank's tensors: cut over all ranks, over some with copies on others, equal on all."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    flat = init_device_mesh("cpu", (world,))
    pairs = init_device_mesh("cpu", (2, world // 2)) if world > 1 else init_device_mesh("cpu", (1, 1))
    made = {"cut": _numbers(7, 3, 0), "copied": _numbers(8, 2, 100), "few": _numbers(2, 2, 200), "same": _numbers(4, 4, 300)}
    made |= {"number": torch.tensor(7.0), "other": _numbers(3, 1, 400)}
    made = {name: torch.zeros_like(tensor) if zero else tensor for name, tensor in made.items()}
    for name in ("cut", "few"):
        made[name] = distribute_tensor(made[name], flat, [Shard(0)])
    made["copied"] = distribute_tensor(made["copied"], pairs, [Replicate(), Shard(0)])
    return made


def _save_tensors(rank: int, world: int, folder: str) -> None:
    writer = CheckpointWriter(Folder(folder), "a1", "a1-x", rank, {"step": 1, "world": world}, rank, {}, indexed=True)
    save(_tensors(world, False), writer, dist.new_group(backend="gloo"))


def _load_tensors(rank: int, world: int, folder: str) -> list[bool]:
    place = Folder(folder)
    tensors, right = _tensors(world, True), _tensors(world, False)
    load(tensors, CheckpointReader(place, place.read_json(MANIFEST), rank, tensors))
    return [torch.equal(_local(tensors[name]), _local(right[name])) for name in right]


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    run_distributed(_save_tensors, 4, str(tmp_path))
    manifest = Folder(str(tmp_path)).read_json(MANIFEST)
    assert manifest["format"] == 2
    assert manifest["fed"] == {str(rank): f"{rank:016x}" for rank in range(4)}
    numbers = sum(torch.Size(entry["size"]).numel() for entry in manifest["tensors"].values())
    stored = sum(stated["bytes"] for name, stated in manifest["files"].items() if name.endswith(".bin"))
    assert stored == 4 * numbers  # each number once
    for readers in (1, 4):
        assert all(all(same) for same in run_distributed(_load_tensors, readers, str(tmp_path)))


def _refused_save(rank: int, world: int, folder: str) -> str:
    try:
        _save_tensors(rank, world, folder)
    except CheckpointSaveError as failed:
        return f"{type(failed.cause).__name__}: {failed.cause}; {failed.cause.__notes__}"
    return ""


def test_all_ranks_learn_what_one_could_not_write(tmp_path: Path) -> None:
    (tmp_path / "a1-x" / "rank-1.bin" / "in the way").mkdir(parents=True)
    said = set(run_distributed(_refused_save, 4, str(tmp_path)))
    assert len(said) == 1
    assert "rank-1.bin" in (text := said.pop())
    assert "on rank 1 of 4" in text
    assert not (tmp_path / MANIFEST).exists()
