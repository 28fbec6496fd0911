"""The files of one checkpoint: raw little-endian tensor bytes, a file a rank, and a JSON manifest committed last.

PyTorch Distributed Checkpoint plans who writes which piece of which tensor and how pieces are put together on another number
of workers; its stock storage pickles. Here nothing is pickled, so nothing that is loaded can run code: the manifest is JSON,
and a tensor is the bytes between two offsets of a file whose SHA-256 the manifest states.

    step-00000500/
      MANIFEST.json                     the last thing written: without it there is no checkpoint
      <attempt>-<group>/rank-0.bin ...  bytes of tensors;  tokenizer/... and other small files

    save(tensors, CheckpointWriter(folder, attempt, data, rank, header, fed_digest, extra), group)
    load(tensors, CheckpointReader(folder, manifest, rank, tensors), group)
"""

import hashlib
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from raystride.pipelines.files import PIECE, Folder
from raystride.pipelines.train.agreement import portable, put_together
from raystride.pipelines.train.index import as_metadata, index_name, index_of, pieces_of
from raystride.pipelines.train.names import MANIFEST
from raystride.pipelines.train.planning import files_of, first_failure, save_by_rank
from raystride.pipelines.train.pruning import data_of
from raystride.pipelines.train.whole import FORMAT, INDEXED

# One worker saves and loads without a process group, which DCP takes for a mistake.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", module="torch.distributed")
_READ, _GAP = 64 << 20, 1 << 20
"""Bytes of a remote file that are read together at most, and bytes between two ranges that are rather read than left out."""


@dataclass(frozen=True)
class StoredPiece:
    """Where a piece of a tensor lies."""

    file: str
    offset: int
    bytes: int
    sha256: str = field(default="", compare=False)
    """Of the whole file."""
    file_bytes: int = field(default=0, compare=False)
    index: dict[str, Any] = field(default_factory=dict, compare=False)
    """Size and hash of the file that says where its writer's pieces lie, where the manifest does not."""


class CheckpointWriter(StorageWriter):  # type: ignore[misc]
    """Writes one checkpoint into `folder`; every rank makes one. The coordinator's `header` becomes part of the manifest."""

    def __init__(
        self,
        folder: Folder,
        attempt: str,
        data: str,
        rank: int,
        header: dict[str, Any],
        fed_digest: int,
        extra: dict[str, bytes],
        fence: Callable[[], AbstractContextManager[None]] = nullcontext,
        arrived: Callable[[], None] = lambda: None,
        indexed: bool = False,
    ) -> None:
        self.folder, self.attempt, self.rank, self.header = folder, attempt, rank, header
        self.data = data
        """The folder of this group's files inside the checkpoint's: no two groups of workers ever write the same file."""
        self.fed_digest, self.extra = fed_digest, extra
        self.fence = fence
        """Raises if this group may no longer write; entered before anything is written, and around the commit."""
        self.arrived = arrived
        """Waits until the tensors are in main memory."""
        self.indexed = indexed
        """Whether each rank plans for itself, and says in a file of its own where its pieces lie."""
        self.fed: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do, though DCP asks for it: one writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP was given no path of its own: the writer knows its folder."""
        return checkpoint_id is None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Waits for the tensors, here where DCP tells all ranks of one that fails. Folders appear with their first file."""
        self.arrived()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds to the plan what the coordinator is to know: the digest of what this rank fed since the checkpoint before."""
        return replace(plan, storage_data=(self.rank, self.fed_digest))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Collects the digests of all ranks. Raises what the fence raises if a later group writes here."""
        self.allow(dict(plan.storage_data for plan in plans))
        return plans

    def allow(self, fed: Mapping[int, int]) -> None:
        """Has the coordinator note what the ranks fed. Raises what the fence raises if a later group writes here."""
        with _portable(), self.fence():
            pass
        self.fed = {str(rank): f"{digest:016x}" for rank, digest in fed.items()}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Writes this rank's pieces into one file, in parts, hashing them on the way. Raises OSError where it cannot."""
        name = f"{self.data}/rank-{self.rank}.bin"
        digest, offset = hashlib.sha256(), 0
        placed: list[tuple[WriteItem, int, int]] = []

        def pieces() -> Iterator[memoryview]:
            nonlocal digest, placed, offset
            digest, placed, offset = hashlib.sha256(), [], 0  # a try that failed begins at the beginning
            for item in plan.items:
                data = _bytes_of(planner.resolve_data(item))
                for at in range(0, len(data), PIECE):
                    digest.update(data[at : at + PIECE])
                    yield data[at : at + PIECE]
                placed.append((item, offset, len(data)))
                offset += len(data)

        index = b""
        if plan.items:
            with _portable():
                self.folder.put_pieces(name, pieces)
                if self.indexed:
                    index = index_of(placed)
                    self.folder.put(index_name(self.data, self.rank), index)
        stated = {"bytes": len(index), "sha256": hashlib.sha256(index).hexdigest()} if index else {}
        stated |= {"file": index_name(self.data, self.rank)} if index else {}
        whole = StoredPiece(name, 0, 0, digest.hexdigest(), offset, stated)
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [WriteResult(item.index, size, replace(whole, offset=at, bytes=size)) for item, at, size in placed]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: small files, then the manifest, in one atomic put.

        Raises TypeError for what is no tensor, and what the fence raises if a later attempt writes here.
        """
        written = [result for rank in results for result in rank]
        pieces = {result.index: result.storage_data for result in written}
        tensors = {name: _tensor_to_json(name, entry, pieces) for name, entry in metadata.state_dict_metadata.items()}
        self.commit(tensors, files_of(written))

    def commit(self, tensors: Mapping[str, Any], files: dict[str, Any]) -> None:
        """Writes the small files, then the manifest that names these tensors and files. Raises what the fence raises."""
        with _portable():
            for name, content in self.extra.items():
                path = f"{self.data}/{name}"
                self.folder.put(path, content)
                files[path] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            with self.fence():
                self.folder.put_json(
                    MANIFEST,
                    {
                        "format": INDEXED if self.indexed else FORMAT,
                        "attempt": self.attempt,
                        "folder": self.data,
                        **self.header,
                        "fed": self.fed,
                        "files": files,
                        "tensors": tensors,
                    },
                )


class CheckpointReader(StorageReader):  # type: ignore[misc]
    """Reads what a rank `wanted` of a checkpoint whose manifest is given."""

    def __init__(self, folder: Folder, manifest: dict[str, Any], rank: int, wanted: Mapping[str, torch.Tensor]) -> None:
        self.folder, self.manifest, self.rank, self.wanted = folder, manifest, rank, wanted
        self.pieces: dict[MetadataIndex, StoredPiece] = {}
        self.sizes: dict[MetadataIndex, list[int]] = {}
        self.mapped: dict[str, mmap.mmap] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do, though DCP asks for it: one reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP was given no path of its own: the reader knows its folder."""
        return checkpoint_id is None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Sizes and types of all tensors, and the pieces that this rank needs, from the manifest and its ranks' files."""
        tensors = self.manifest["tensors"]
        pieces = pieces_of(self.folder, self.manifest, data_of(self.manifest), self.rank, self.wanted)
        for name, chunks in pieces.items():
            for chunk in chunks:
                index = MetadataIndex(name, torch.Size(chunk["offsets"]))
                self.pieces[index] = StoredPiece(chunk["file"], chunk["offset"], chunk["bytes"])
                self.sizes[index] = chunk["sizes"]
        return as_metadata(tensors, pieces)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: all that is needed is in the manifest already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as DCP made it: which pieces this rank reads."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as DCP made them: ranks read without each other."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Copies the pieces that this rank needs into its tensors: from mapped files, or by ranges from a remote store."""
        by_file: dict[str, list[_Wanted]] = {}
        for item in plan.items:
            if (wanted := self._wanted(item)).bytes:
                by_file.setdefault(wanted.file, []).append(wanted)
            else:
                planner.commit_tensor(item, planner.resolve_tensor(item).detach())
        for file, wanted_there in by_file.items():
            for run in _runs(wanted_there):
                begin, end = run[0].offset, max(wanted.offset + wanted.bytes for wanted in run)
                content, first = self._content(file, begin, end)
                for wanted in run:
                    target = planner.resolve_tensor(wanted.item).detach()
                    target.copy_(wanted.cut(content, first))
                    planner.commit_tensor(wanted.item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _wanted(self, item: ReadItem) -> "_Wanted":
        """Where what a rank wants of a stored piece lies: of its rows those that it needs, which lie side by side."""
        index = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
        piece, sizes = self.pieces[index], list(self.sizes[index])
        dtype: torch.dtype = getattr(torch, self.manifest["tensors"][item.storage_index.fqn]["dtype"])
        if not sizes or not piece.bytes:
            return _Wanted(item, piece.file, piece.offset, piece.bytes, dtype, sizes)
        row = piece.bytes // sizes[0]
        first, count = item.storage_offsets[0], item.lengths[0]
        return _Wanted(item, piece.file, piece.offset + first * row, count * row, dtype, [count, *sizes[1:]])

    def _content(self, file: str, begin: int, end: int) -> "tuple[mmap.mmap | bytearray, int]":
        """A buffer that holds the bytes [begin, end) of a file, and at which byte of the file it begins."""
        if not self.folder.local:
            return bytearray().join(self.folder.read_pieces(file, begin, end)), begin
        if file not in self.mapped:
            with (self.folder.local / file).open("rb") as stream:
                # Copied where it is written to: PyTorch takes no read-only memory, and the file must stay as it is.
                self.mapped[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self.mapped[file], 0


@dataclass(frozen=True)
class _Wanted:
    """A range of a file, and what of it goes where."""

    item: ReadItem
    file: str
    offset: int
    bytes: int
    dtype: torch.dtype
    sizes: list[int]
    """Of the tensor that these bytes are."""

    def cut(self, content: "mmap.mmap | bytearray", first: int) -> torch.Tensor:
        """The tensor, from a buffer that begins at the file's byte `first`."""
        at = self.offset - first
        raw = torch.frombuffer(content, dtype=torch.uint8, offset=at, count=self.bytes)
        # A piece may begin at any byte; a view of another type needs its own alignment.
        tensor = (raw.clone() if at % 16 else raw).view(self.dtype).reshape(self.sizes)
        for dimension in range(1, len(self.sizes)):
            tensor = tensor.narrow(dimension, self.item.storage_offsets[dimension], self.item.lengths[dimension])
        return tensor


def _runs(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Ranges of one file in groups that are read at once: neighbours, up to `_READ` bytes."""
    run: list[_Wanted] = []
    for each in sorted(wanted, key=lambda each: each.offset):
        end = run[-1].offset + run[-1].bytes if run else 0
        if run and (each.offset > end + _GAP or each.offset + each.bytes - run[0].offset > _READ):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


class NotWritten(Exception):
    """A save that went wrong on some rank. All ranks get it, of the same save, so all can decide alike what follows."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause
        """What the first rank raised."""


def save(tensors: dict[str, torch.Tensor], writer: CheckpointWriter, group: dist.ProcessGroup | None) -> None:
    """Writes a checkpoint; all ranks of `group` call it together (None: one worker).

    Raises NotWritten on all of them where one failed, and what the group raises where it has broken.
    """
    if writer.indexed and group is not None:
        if failures := save_by_rank(tensors, writer, group):
            raise NotWritten(first_failure(failures, dist.get_world_size(group)))
        return
    try:
        dcp.state_dict_saver.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise NotWritten(_first_cause(error)) from None


def load(tensors: dict[str, torch.Tensor], reader: CheckpointReader, group: dist.ProcessGroup | None) -> None:
    """Fills `tensors` in place; all ranks of `group` call it together. Raises what the first rank raised.

    Each reads for itself: there is nothing to plan together, and all that they want would not fit into one of them.
    """
    failures: dict[int, BaseException] = {}
    try:
        dcp.state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        failures[reader.rank] = portable(_first_cause(error))
    if group:
        failures = put_together(failures, lambda one, other: one | other, group)
    if failures:
        raise first_failure(failures, dist.get_world_size(group) if group else 1) from None


def _first_cause(error: CheckpointException) -> BaseException:
    """DCP gathers what ranks raise into one BaseException with all tracebacks in its text; the first cause says more."""
    rank, (cause, _) = min(error.failures.items())
    cause.add_note(f"on rank {rank} of {len(error.failures)} that failed")
    return cause  # type: ignore[no-any-return]


@contextmanager
def _portable() -> Iterator[None]:
    """What clients of stores raise, as OSError: on its way to other ranks it is pickled, which not all of them survive."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("builtins", "raystride"):
            raise
        raise OSError(f"{type(error).__name__}: {error}") from None


def _tensor_to_json(name: str, entry: Any, pieces: dict[MetadataIndex, StoredPiece]) -> dict[str, Any]:
    """A tensor's size and type, and where its pieces lie."""
    if not isinstance(entry, TensorStorageMetadata):
        raise TypeError(f"{name} is no tensor: what a checkpoint holds besides tensors belongs into its header")
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    chunks = []
    for chunk in entry.chunks:
        piece = pieces[MetadataIndex(name, chunk.offsets)]
        place = {"file": piece.file, "offset": piece.offset, "bytes": piece.bytes}
        chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **place})
    return {"dtype": dtype, "size": list(entry.size), "chunks": chunks}


def _bytes_of(tensor: Any) -> memoryview:
    """A tensor's bytes, on the host, in row-major order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
