"""A checkpoint's metadata at many ranks, for `benchmarks.scale`: where pieces lie, who writes them, and what reading takes.

PyTorch's own stand-in for a group (`fake`) has this process be one rank of so many, with its real sharded tensors; the files
of all others are written by the real code from what these ranks would have written.
"""

import tempfile
import time
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan, create_default_local_save_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.scale_rows import Row
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import parse_sealed, put_sealed
from raystride.pipelines.train.checkpoint.index import (
    encode_index,
    encode_table,
    find_pieces,
    hash_name,
    index_file_name,
    to_dcp_metadata,
)
from raystride.pipelines.train.checkpoint.layout import MANIFEST
from raystride.pipelines.train.checkpoint.plan import Holdings, holdings_of, split_own_and_shared
from raystride.pipelines.train.distributed.collectives import BRANCHES

TENSORS, MAX_PIECES = 3000, 3_072_000
"""A thousand parameters with their two moments; and as many of them as make three million pieces."""
ROWS, WIDTH = 16_384, 64


def sharded(ranks: int, rank: int, count: int) -> dict[str, torch.Tensor]:
    """The tensors of a rank, by rows over all of them, with an empty group around them; no numbers are made."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.Size([ROWS, WIDTH])
    local = torch.empty(-(-whole[0] // ranks), WIDTH, device="meta")
    return {
        f"model.layers.{number}.weight": DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole, stride=(WIDTH, 1)
        )
        for number in range(count)
    }


def write_files(folder: Folder, names: list[str], ranks: int) -> dict[str, Any]:
    """The files of all ranks, and the manifest."""
    rows, keys = ROWS // ranks, [hash_name(name) for name in names]
    size = rows * WIDTH * 4
    for rank in range(ranks):
        begin, sizes = (rank * rows, 0), (rows, WIDTH)
        table = [([key, number * size, size], begin, sizes) for number, key in enumerate(keys)]
        folder.put(index_file_name("d", rank), encode_table(table))
    hashed = {"bytes": len(names) * size, "sha256": "0" * 64}
    files = {f"d/rank-{rank}.{kind}": hashed for rank in range(ranks) for kind in ("bin", "npy")}
    fed = {str(rank): f"{rank:016x}" for rank in range(ranks)}
    tensors = {name: {"dtype": "float32", "size": [ROWS, WIDTH]} for name in names}
    manifest = {"format": 2, "folder": "d", "world": ranks, "fed": fed, "files": files, "tensors": tensors}
    put_sealed(folder, MANIFEST, manifest)
    return manifest


def checkpoint_rows(ranks: int) -> Iterator[Row]:
    """What a save makes each rank and the first one compute, and a resume each of the same, half and another number."""
    count = min(TENSORS, MAX_PIECES // ranks)
    began = time.perf_counter()
    tensors = sharded(ranks, ranks // 2, count)
    plan = create_default_local_save_plan(tensors, False)
    own, shared = split_own_and_shared(tensors, plan.items, ranks)
    held = holdings_of(tensors, shared, ranks // 2)
    index = encode_index([(item, 0, 0) for item in own])
    seconds = time.perf_counter() - began
    yield Row("checkpoint, a rank's plan", ranks, seconds=seconds, bytes=len(index), note=f"{count} tensors")
    began = time.perf_counter()
    reduce(Holdings.merge, [holdings_of(tensors, {}, rank) for rank in range(min(ranks - 1, BRANCHES))], held)
    merged = time.perf_counter() - began
    yield Row("checkpoint, merged by the first", ranks, seconds=merged, note=f"of {min(ranks - 1, BRANCHES)} below it")
    with tempfile.TemporaryDirectory() as place:
        folder = Folder(place)
        began = time.perf_counter()
        write_files(folder, list(tensors), ranks)
        wrote = time.perf_counter() - began
        size = sum(path.stat().st_size for path in Path(place).glob("d/*"))
        note = f"{count * ranks:,} pieces, {wrote / ranks:.4f} s a rank"
        yield Row("checkpoint, index files of all", ranks, bytes=size, note=note)
        began = time.perf_counter()
        content = folder.read(MANIFEST)
        manifest = parse_sealed(content, MANIFEST)
        seconds = time.perf_counter() - began
        yield Row("resume, manifest", ranks, seconds=seconds, bytes=len(content), note="read by one, told all")
        for readers, said in ((ranks, "as many ranks"), (ranks // 2, "half of them"), (ranks * 3 // 4, "three quarters")):
            rank = readers // 2
            wanted = sharded(readers, rank, count)
            began = time.perf_counter()
            pieces = find_pieces(folder, manifest, "d", rank, wanted)
            create_default_local_load_plan(wanted, to_dcp_metadata(manifest["tensors"], pieces))
            seconds = time.perf_counter() - began
            read = len({piece["file"] for each in pieces.values() for piece in each})
            note = f"{read} ranks' files hold it"
            yield Row(f"resume, {said}", ranks, seconds=seconds, bytes=read * size / ranks, note=note)
        wanted = sharded(ranks, ranks - 1, count)
        began = time.perf_counter()
        find_pieces(folder, manifest | {"world": 1}, "d", 0, wanted)
        note = "as where a mesh orders its ranks otherwise"
        yield Row("resume, all files are looked into", ranks, seconds=time.perf_counter() - began, bytes=size, note=note)
        began = time.perf_counter()
        one = {name: torch.empty(ROWS, WIDTH, device="meta") for name in tensors}
        find_pieces(folder, manifest, "d", 0, one)
        yield Row("resume, one process has it all", ranks, seconds=time.perf_counter() - began, bytes=size)
    dist.destroy_process_group()
