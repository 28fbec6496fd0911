"""The files of one checkpoint: raw little-endian tensor bytes, a file a rank, and a JSON manifest committed last.

PyTorch Distributed Checkpoint plans who writes which piece of which tensor and how pieces are put together on another number
of workers; its stock storage pickles. Here nothing is pickled, so nothing that is loaded can run code: the manifest is JSON,
and a tensor is the bytes between two offsets of a file whose SHA-256 the manifest states.

    step-00000500/
      MANIFEST.json                     the last thing written: without it there is no checkpoint
      <attempt>/rank-0.bin ...          bytes of tensors;  tokenizer/... and other small files

    save(tensors, CheckpointWriter(folder, attempt, rank, header, fed_digest, extra), group)
    load(tensors, CheckpointReader(folder, manifest), group)
"""

import hashlib
import mmap
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from raystride.pipelines.files import Folder
from raystride.pipelines.train.names import MANIFEST

# One worker saves and loads without a process group, which DCP takes for a mistake.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", module="torch.distributed")
FORMAT = 1


@dataclass(frozen=True)
class StoredPiece:
    """Where a piece of a tensor lies."""

    file: str
    offset: int
    bytes: int
    sha256: str = field(default="", compare=False)
    """Of the whole file."""
    file_bytes: int = field(default=0, compare=False)


class CheckpointWriter(StorageWriter):  # type: ignore[misc]
    """Writes one checkpoint into `folder`; every rank makes one. The coordinator's `header` becomes part of the manifest."""

    def __init__(
        self,
        folder: Folder,
        attempt: str,
        rank: int,
        header: dict[str, Any],
        fed_digest: int,
        extra: dict[str, bytes],
        may_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.attempt, self.rank, self.header = folder, attempt, rank, header
        self.fed_digest, self.extra = fed_digest, extra
        self.may_commit = may_commit
        """Raises where this attempt no longer may; asked just before the commit."""
        self.fed: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do, though DCP asks for it: one writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP was given no path of its own: the writer knows its folder."""
        return checkpoint_id is None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: folders appear with their first file."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds to the plan what the coordinator is to know: the digest of what this rank fed since the checkpoint before."""
        return replace(plan, storage_data=(self.rank, self.fed_digest))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Collects the digests of all ranks."""
        self.fed = {str(rank): f"{digest:016x}" for rank, digest in (plan.storage_data for plan in plans)}
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Writes this rank's pieces into one file, hashing them on the way."""
        name = f"{self.attempt}/rank-{self.rank}.bin"
        digest, offset, placed = hashlib.sha256(), 0, []
        if plan.items:
            with self.folder.writer(name) as stream:
                for item in plan.items:
                    data = _bytes_of(planner.resolve_data(item))
                    stream.write(data)
                    digest.update(data)
                    placed.append((item.index, StoredPiece(name, offset, len(data))))
                    offset += len(data)
        sha256 = digest.hexdigest()
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [WriteResult(index, piece.bytes, replace(piece, sha256=sha256, file_bytes=offset)) for index, piece in placed]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: small files, then the manifest, in one atomic put.

        Raises TypeError for what is no tensor, and what `may_commit` raises where a later attempt writes here.
        """
        written = [result for rank in results for result in rank]
        pieces = {result.index: result.storage_data for result in written}
        files = {piece.file: {"bytes": piece.file_bytes, "sha256": piece.sha256} for piece in pieces.values()}
        for name, content in self.extra.items():
            path = f"{self.attempt}/{name}"
            self.folder.put(path, content)
            files[path] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        tensors = {name: _tensor_to_json(name, entry, pieces) for name, entry in metadata.state_dict_metadata.items()}
        self.may_commit()
        self.folder.put_json(
            MANIFEST,
            {
                "format": FORMAT,
                "attempt": self.attempt,
                **self.header,
                "fed": self.fed,
                "files": files,
                "tensors": tensors,
            },
        )


class CheckpointReader(StorageReader):  # type: ignore[misc]
    """Reads tensors of a checkpoint whose manifest is given."""

    def __init__(self, folder: Folder, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.pieces: dict[MetadataIndex, StoredPiece] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do, though DCP asks for it: one reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP was given no path of its own: the reader knows its folder."""
        return checkpoint_id is None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Sizes, types and pieces of all tensors, from the manifest's JSON."""
        metadata = Metadata(state_dict_metadata={})
        for name, entry in self.manifest["tensors"].items():
            chunks = []
            for chunk in entry["chunks"]:
                offsets = torch.Size(chunk["offsets"])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk["sizes"])))
                self.pieces[MetadataIndex(name, offsets)] = StoredPiece(chunk["file"], chunk["offset"], chunk["bytes"])
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: all that is needed is in the manifest already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as DCP made it: which pieces this rank reads."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as DCP made them: ranks read without each other."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Copies the pieces that this rank needs into its tensors."""
        with tempfile.TemporaryDirectory() as scratch:
            mapped: dict[str, mmap.mmap] = {}
            for item in plan.items:
                entry = self.manifest["tensors"][item.storage_index.fqn]
                piece = self.pieces[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
                if piece.file not in mapped:
                    mapped[piece.file] = _map(self.folder, piece.file, Path(scratch))
                chunk = next(c for c in entry["chunks"] if torch.Size(c["offsets"]) == item.storage_index.offset)
                source = _tensor_of(mapped[piece.file], piece, getattr(torch, entry["dtype"]), chunk["sizes"])
                for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    source = source.narrow(dimension, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(source)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def save(tensors: dict[str, torch.Tensor], writer: CheckpointWriter, group: dist.ProcessGroup | None) -> None:
    """Writes a checkpoint; all ranks of `group` call it together (None: one worker). Raises what the first rank raised."""
    with _plain_errors():
        dcp.state_dict_saver.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)


def load(tensors: dict[str, torch.Tensor], reader: CheckpointReader, group: dist.ProcessGroup | None) -> None:
    """Fills `tensors` in place; all ranks of `group` call it together. Raises what the first rank raised."""
    with _plain_errors():
        dcp.state_dict_loader.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """DCP gathers what ranks raise into one BaseException with all tracebacks in its text; the first cause says more."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        cause.add_note(f"on rank {rank} of {len(error.failures)} that failed")
        raise cause from None


def check_file(folder: Folder, name: str, stated: dict[str, Any]) -> str | None:
    """What is wrong with a file of a checkpoint, or None: missing, of another size, of another hash."""
    if not folder.exists(name):
        return f"{name} is missing"
    if folder.sha256(name) != stated["sha256"]:
        return f"{name} differs from the manifest's SHA-256"
    return None


def _tensor_to_json(name: str, entry: Any, pieces: dict[MetadataIndex, StoredPiece]) -> dict[str, Any]:
    if not isinstance(entry, TensorStorageMetadata):
        raise TypeError(f"{name} is no tensor: what a checkpoint holds besides tensors belongs into its header")
    chunks = []
    for chunk in entry.chunks:
        piece = pieces[MetadataIndex(name, chunk.offsets)]
        place = {"file": piece.file, "offset": piece.offset, "bytes": piece.bytes}
        chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **place})
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "size": list(entry.size), "chunks": chunks}


def _bytes_of(tensor: Any) -> memoryview:
    """A tensor's bytes, on the host, in row-major order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _map(folder: Folder, name: str, scratch: Path) -> mmap.mmap:
    # A name has slashes in it; the copy lies flat.
    path = folder.local / name if folder.local else scratch / hashlib.sha256(name.encode()).hexdigest()
    if not folder.local:
        folder.download(name, path)
    with path.open("rb") as stream:
        # Copied where it is written to: PyTorch takes no read-only memory, and the file must stay as it is.
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def _tensor_of(mapped: mmap.mmap, piece: StoredPiece, dtype: torch.dtype, sizes: list[int]) -> torch.Tensor:
    if not piece.bytes:
        return torch.empty(sizes, dtype=dtype)
    raw = torch.frombuffer(mapped, dtype=torch.uint8, offset=piece.offset, count=piece.bytes)
    # A piece may begin at any byte; a view of another type needs its own alignment.
    return (raw.clone() if piece.offset % 16 else raw).view(dtype).reshape(sizes)
