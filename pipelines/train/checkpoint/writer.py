"""Reads and writes the files of a checkpoint: raw little-endian tensor bytes, one file per rank, and a JSON manifest written
last.

PyTorch Distributed Checkpoint plans the writing of tensor pieces and their assembly on another number of workers; its stock
storage pickles. Here nothing is pickled, so loading cannot run code: the manifest is JSON, and a tensor is a byte range of a
file with its SHA-256 in the manifest.

    step-00000500/
      MANIFEST-<term>.json              written last, and sealed: without it there is no checkpoint
      MANIFEST.json                     the same content, for 0.3
      <attempt>-<group>/rank-0.bin ...  bytes of tensors;  tokenizer/... and other small files

    save(tensors, CheckpointWriter(folder, attempt, data, rank, header, fed_digest, extra), group)
    load(tensors, CheckpointReader(folder, manifest, rank, tensors))
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

from raystride.pipelines.system.storage.folder import CHUNK_BYTES, Folder
from raystride.pipelines.system.storage.sealed import seal_json
from raystride.pipelines.train.checkpoint.fence import AttemptSuperseded
from raystride.pipelines.train.checkpoint.index import encode_index, find_pieces, index_file_name, to_dcp_metadata
from raystride.pipelines.train.checkpoint.layout import MANIFEST, manifest_name
from raystride.pipelines.train.checkpoint.plan import file_entries, save_by_rank
from raystride.pipelines.train.checkpoint.retention import data_folder
from raystride.pipelines.train.checkpoint.verify import FORMAT, INDEXED
from raystride.pipelines.train.distributed.collectives import first_failure

# One worker saves and loads without a process group; DCP warns of it.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", module="torch.distributed")
_MAX_READ_BYTES, _MAX_GAP_BYTES = 64 << 20, 1 << 20
"""Maximum bytes of a remote file per read, and bytes between two ranges that are read rather than skipped."""


@dataclass(frozen=True)
class StoredPiece:
    """The location of a piece of a tensor."""

    file: str
    offset: int
    bytes: int
    sha256: str = field(default="", compare=False)
    """SHA-256 of the whole file."""
    file_bytes: int = field(default=0, compare=False)
    ends: list[dict[str, Any]] = field(default_factory=list, compare=False)
    """Size and hash of the file's first and last part."""
    index: dict[str, Any] = field(default_factory=dict, compare=False)
    """Size and hash of the writer's index file, if the manifest does not list the pieces."""


class CheckpointWriter(StorageWriter):  # type: ignore[misc]
    """Writes one checkpoint into `folder`; every rank creates one. The coordinator's `header` becomes part of the
    manifest."""

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
        wait_for_copies: Callable[[], None] = lambda: None,
        indexed: bool = False,
        term: int = 0,
    ) -> None:
        self.term = term
        """The term that names the manifest; see `checkpoint.layout`."""
        self.folder, self.attempt, self.rank, self.header = folder, attempt, rank, header
        self.data = data
        """The folder of this group's files inside the checkpoint's: no two groups of workers ever write the same file."""
        self.fed_digest, self.extra = fed_digest, extra
        self.fence = fence
        """Raises if this group may no longer write; entered before anything is written, and around the commit."""
        self.wait_for_copies = wait_for_copies
        """Waits until the tensors are in main memory."""
        self.indexed = indexed
        """Whether each rank plans for itself, and writes an index file of its pieces."""
        self.fed: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing, but is required by DCP: one writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP received no path: the writer knows its folder."""
        return checkpoint_id is None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Waits for the tensors here, so that DCP reports a failure to all ranks. Folders appear with their first file."""
        self.wait_for_copies()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds this rank's digest of the samples fed since the previous checkpoint, for the coordinator."""
        return replace(plan, storage_data=(self.rank, self.fed_digest))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Collects the digests of all ranks. Raises the fence's error if a later group writes here."""
        self.check_fence(dict(plan.storage_data for plan in plans))
        return plans

    def check_fence(self, fed: Mapping[int, int]) -> None:
        """Stores the ranks' digests on the coordinator. Raises the fence's error if a later group writes here."""
        with _picklable_errors(), self.fence():
            pass
        self.fed = {str(rank): f"{digest:016x}" for rank, digest in fed.items()}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Writes this rank's pieces into one file, in chunks, hashing them on the way. Raises OSError if it fails."""
        name = f"{self.data}/rank-{self.rank}.bin"
        digest, offset = hashlib.sha256(), 0
        written_items: list[tuple[WriteItem, int, int]] = []
        ends: list[dict[str, Any]] = []

        def pieces() -> Iterator[memoryview]:
            nonlocal digest, written_items, offset, ends
            digest, written_items, offset = hashlib.sha256(), [], 0  # a retry begins at the beginning
            first = last = memoryview(b"")
            for item in plan.items:
                data = _tensor_bytes(planner.resolve_data(item))
                for position in range(0, len(data), CHUNK_BYTES):
                    last = data[position : position + CHUNK_BYTES]
                    first = first or last
                    digest.update(last)
                    yield last
                written_items.append((item, offset, len(data)))
                offset += len(data)
            ends = [{"bytes": len(end), "sha256": hashlib.sha256(end).hexdigest()} for end in (first, last)]

        index = b""
        if plan.items:
            with _picklable_errors():
                self.folder.put_chunks(name, pieces)
                if self.indexed:
                    index = encode_index(written_items)
                    self.folder.put(index_file_name(self.data, self.rank), index)
        stated = {"bytes": len(index), "sha256": hashlib.sha256(index).hexdigest()} if index else {}
        stated |= {"file": index_file_name(self.data, self.rank)} if index else {}
        whole = StoredPiece(name, 0, 0, digest.hexdigest(), offset, ends, stated)
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                WriteResult(item.index, size, replace(whole, offset=position, bytes=size))
                for item, position, size in written_items
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: small files, then the manifest, in one atomic put.

        Raises TypeError for a value that is not a tensor, and the fence's error if a later attempt writes here.
        """
        written = [result for rank in results for result in rank]
        pieces = {result.index: result.storage_data for result in written}
        tensors = {name: _tensor_to_json(name, entry, pieces) for name, entry in metadata.state_dict_metadata.items()}
        self.commit(tensors, file_entries(written))

    def commit(self, tensors: Mapping[str, Any], files: dict[str, Any]) -> None:
        """Writes the small files, then the manifest with these tensors and files. Raises the fence's error."""
        with _picklable_errors():
            for name, content in self.extra.items():
                path = f"{self.data}/{name}"
                self.folder.put(path, content)
                files[path] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            content = seal_json(
                {
                    "format": INDEXED if self.indexed else FORMAT,
                    "attempt": self.attempt,
                    "term": self.term,
                    "folder": self.data,
                    **self.header,
                    "fed": self.fed,
                    "files": files,
                    "tensors": tensors,
                }
            )
            with self.fence():
                self._put_manifest(content)

    def _put_manifest(self, content: bytes) -> None:
        """Commits. A group that was stopped since it looked whether there is one replaces none of a later group."""
        name = manifest_name(self.term)
        if self.term:
            if self.folder.exists(name):  # of this group, after a validation, or of one that this group replaces
                self.folder.put(name, content)
            else:
                try:
                    self.folder.put_new(name, content)
                except FileExistsError:
                    raise AttemptSuperseded(f"a later group of {self.attempt} has saved this step") from None
        self.folder.put(MANIFEST, content)


class CheckpointReader(StorageReader):  # type: ignore[misc]
    """Reads a rank's `targets` from a checkpoint with this manifest."""

    def __init__(self, folder: Folder, manifest: dict[str, Any], rank: int, targets: Mapping[str, torch.Tensor]) -> None:
        self.folder, self.manifest, self.rank, self.targets = folder, manifest, rank, targets
        self.pieces: dict[MetadataIndex, StoredPiece] = {}
        self.sizes: dict[MetadataIndex, list[int]] = {}
        self.mapped: dict[str, mmap.mmap] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing, but is required by DCP: one reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP received no path: the reader knows its folder."""
        return checkpoint_id is None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns sizes and types of all tensors, and the pieces that this rank needs, from the manifest and index files."""
        tensors = self.manifest["tensors"]
        pieces = find_pieces(self.folder, self.manifest, data_folder(self.manifest), self.rank, self.targets)
        for name, chunks in pieces.items():
            for chunk in chunks:
                index = MetadataIndex(name, torch.Size(chunk["offsets"]))
                self.pieces[index] = StoredPiece(chunk["file"], chunk["offset"], chunk["bytes"])
                self.sizes[index] = chunk["sizes"]
        return to_dcp_metadata(tensors, pieces)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the manifest already has everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns DCP's plan of the pieces that this rank reads."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns DCP's plans: ranks read independently."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Copies the pieces that this rank needs into its tensors: from mapped files, or by ranges from a remote store."""
        by_file: dict[str, list[_ReadRequest]] = {}
        for item in plan.items:
            if (request := self._read_request(item)).bytes:
                by_file.setdefault(request.file, []).append(request)
            else:
                planner.commit_tensor(item, planner.resolve_tensor(item).detach())
        for file, requests in by_file.items():
            for run in _adjacent_requests(requests):
                begin, end = run[0].offset, max(request.offset + request.bytes for request in run)
                content, first = self._read_range(file, begin, end)
                for request in run:
                    target = planner.resolve_tensor(request.item).detach()
                    target.copy_(request.extract_tensor(content, first))
                    planner.commit_tensor(request.item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_request(self, item: ReadItem) -> "_ReadRequest":
        """Returns the byte range of a read item: its needed rows, contiguous in a stored piece."""
        index = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
        piece, sizes = self.pieces[index], list(self.sizes[index])
        dtype: torch.dtype = getattr(torch, self.manifest["tensors"][item.storage_index.fqn]["dtype"])
        if not sizes or not piece.bytes:
            return _ReadRequest(item, piece.file, piece.offset, piece.bytes, dtype, sizes)
        row = piece.bytes // sizes[0]
        first, count = item.storage_offsets[0], item.lengths[0]
        return _ReadRequest(item, piece.file, piece.offset + first * row, count * row, dtype, [count, *sizes[1:]])

    def _read_range(self, file: str, begin: int, end: int) -> "tuple[mmap.mmap | bytearray, int]":
        """Returns a buffer with the bytes [begin, end) of a file, and the buffer's offset in the file."""
        if not self.folder.local:
            return bytearray().join(self.folder.read_chunks(file, begin, end)), begin
        if file not in self.mapped:
            with (self.folder.local / file).open("rb") as stream:
                # Copy on write: PyTorch accepts no read-only memory, and the file must not change.
                self.mapped[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self.mapped[file], 0


@dataclass(frozen=True)
class _ReadRequest:
    """A byte range of a file, and its target."""

    item: ReadItem
    file: str
    offset: int
    bytes: int
    dtype: torch.dtype
    sizes: list[int]
    """Sizes of the tensor in these bytes."""

    def extract_tensor(self, content: "mmap.mmap | bytearray", first: int) -> torch.Tensor:
        """Returns the tensor, from a buffer that begins at the file's byte `first`."""
        start = self.offset - first
        raw = torch.frombuffer(content, dtype=torch.uint8, offset=start, count=self.bytes)
        # A piece may begin at any byte; a view of another type needs alignment.
        tensor = (raw.clone() if start % 16 else raw).view(self.dtype).reshape(self.sizes)
        for dimension in range(1, len(self.sizes)):
            tensor = tensor.narrow(dimension, self.item.storage_offsets[dimension], self.item.lengths[dimension])
        return tensor


def _adjacent_requests(targets: list[_ReadRequest]) -> Iterator[list[_ReadRequest]]:
    """Groups ranges of one file that are read at once: neighbours, up to `_MAX_READ_BYTES` bytes."""
    run: list[_ReadRequest] = []
    for request in sorted(targets, key=lambda request: request.offset):
        end = run[-1].offset + run[-1].bytes if run else 0
        if run and (
            request.offset > end + _MAX_GAP_BYTES or request.offset + request.bytes - run[0].offset > _MAX_READ_BYTES
        ):
            yield run
            run = []
        run.append(request)
    if run:
        yield run


class CheckpointSaveError(Exception):
    """A save failed on some rank. All ranks raise it for the same save, so all can decide alike."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause
        """The first rank's error."""


def save(tensors: dict[str, torch.Tensor], writer: CheckpointWriter, group: dist.ProcessGroup | None) -> None:
    """Writes a checkpoint; all ranks of `group` call it together (None: one worker).

    Raises CheckpointSaveError on all of them if one failed, and the group's error if it has broken.
    """
    if writer.indexed and group is not None:
        if failures := save_by_rank(tensors, writer, group):
            raise CheckpointSaveError(first_failure(failures, dist.get_world_size(group)))
        return
    try:
        dcp.state_dict_saver.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointSaveError(_first_cause(error)) from None


def load(tensors: dict[str, torch.Tensor], reader: CheckpointReader) -> None:
    """Fills `tensors` in place. Raises the error of reading.

    Each rank reads for itself: nothing needs common planning, and the plans of all would not fit into one of them.
    """
    try:
        dcp.state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise _first_cause(error) from None


def _first_cause(error: CheckpointException) -> BaseException:
    """Returns the first rank's error: DCP's exception has all ranks' tracebacks in its text."""
    rank, (cause, _) = min(error.failures.items())
    cause.add_note(f"on rank {rank} of {len(error.failures)} that failed")
    return cause  # type: ignore[no-any-return]


@contextmanager
def _picklable_errors() -> Iterator[None]:
    """Converts errors of stores' clients to OSError: other ranks receive them pickled, and not all survive that."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("builtins", "raystride"):
            raise
        raise OSError(f"{type(error).__name__}: {error}") from None


def _tensor_to_json(name: str, entry: Any, pieces: dict[MetadataIndex, StoredPiece]) -> dict[str, Any]:
    """Returns a tensor's size and type, and the locations of its pieces."""
    if not isinstance(entry, TensorStorageMetadata):
        raise TypeError(f"{name} is no tensor: what a checkpoint holds besides tensors belongs into its header")
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    chunks = []
    for chunk in entry.chunks:
        piece = pieces[MetadataIndex(name, chunk.offsets)]
        place = {"file": piece.file, "offset": piece.offset, "bytes": piece.bytes}
        chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **place})
    return {"dtype": dtype, "size": list(entry.size), "chunks": chunks}


def _tensor_bytes(tensor: Any) -> memoryview:
    """Returns a tensor's bytes, on the host, in row-major order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
