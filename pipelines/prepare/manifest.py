"""What a finished preparation says of itself: shards with counts, hashes and the byte offset at which their ids begin.

A shard is an Arrow IPC file of one uncompressed record batch, so the ids of all its documents lie side by side in one
buffer. The manifest names that buffer's offset, and a reader maps ids with numpy alone:

    manifest = Manifest.load(folder)                          # FileNotFoundError: the preparation is not finished
    shard = manifest.splits["train"][0]
    ids = np.memmap(folder.local / shard.file, manifest.id_type, "r", shard.ids_offset, (shard.tokens,))
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from raystride.pipelines.files import Folder

FILE = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One Arrow IPC file of prepared documents."""

    file: str
    """Path inside the prepared folder, `train/00003.arrow` for instance."""
    tokens: int
    """Ids in the file, end tokens included."""
    documents: int
    """Documents that begin in the file."""
    bytes: int
    """Size of the file."""
    sha256: str
    """Hash of the file, 64 hexadecimal digits."""
    ids_offset: int
    """Byte at which the ids begin, `tokens` of them in the manifest's `id_type`, little-endian."""
    mask_offset: int | None = None
    """Byte at which the loss mask begins, one byte a token, 0 where the loss leaves the token out; None: no mask."""
    rows_offset: int | None = None
    """Byte at which the rows' first tokens begin, one int64 a row and the number of tokens; None: of an older version."""
    rows: int = 0
    """Rows: the documents that begin here, and one that only goes on here, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole preparation. It is written last, so where it stands everything that it names is complete."""

    fingerprint: str
    """Hash of the source's files and of the settings that shape the shards."""
    id_type: str
    """`uint8`, `uint16` or `uint32`."""
    vocabulary_size: int
    """Ids that the tokenizer can give."""
    end_id: int
    """The id that ends a document."""
    splits: dict[str, list[Shard]]
    """The shards of `train` and `validation`, in the order of the stream."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where the documents came from: kind, files, bytes."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """What was left out under `data.on_error skip`: file or document, and the reason."""
    tokenizers: list[str] = field(default_factory=lambda: ["tokenizer"])
    """Names of the folders in which the tokenizers lie."""
    learned: dict[str, Any] = field(default_factory=dict)
    """What else the task learned of the data, the names of labels for instance."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a task is told of the data."""
        return {"vocabulary_size": self.vocabulary_size, "end_id": self.end_id} | self.learned

    def tokens(self, split: str) -> int:
        """Ids of a split."""
        return sum(shard.tokens for shard in self.splits[split])

    def documents(self, split: str) -> int:
        """Documents of a split."""
        return sum(shard.documents for shard in self.splits[split])

    def save(self, folder: Folder) -> None:
        """Commits the preparation, atomically."""
        folder.put_json(FILE, {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, folder: Folder) -> "Manifest":
        """Reads the manifest of a folder.

        Raises FileNotFoundError where the preparation is not finished, ValueError for another format.
        """
        content = folder.read_json(FILE)
        if content.pop("format", None) != FORMAT:
            raise ValueError(f"{folder / FILE} has another format than {FORMAT}: remove the folder to prepare it again")
        splits = {name: [Shard(**shard) for shard in shards] for name, shards in content.pop("splits").items()}
        return cls(splits=splits, **content)
