"""Remote store for tests, `far://`, thread-safe: a local folder with counted and optionally damaged reads.

It stands for the stores of `pyarrow` and `fsspec`, whose own memory file system several threads cannot read at once.
"""

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
from fsspec.spec import AbstractFileSystem

from raystride.pipelines.config import DataConfig, ModelConfig, TrainConfig
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import Task, build_task
from raystride.pipelines.system.storage.folder import Folder
from tests.tiny import tiny


class FarStore(AbstractFileSystem):  # type: ignore[misc]
    """`far:///a/b` is the local file `/a/b`."""

    protocol = "far"
    cachable = False
    reads: ClassVar[list[tuple[str, int, int]]] = []
    """Path, first byte and bytes of each read so far, sizes and whole files but for `.arrow` left out."""
    damage: ClassVar[Callable[[str, bytes], bytes]] = staticmethod(lambda path, content: content)
    """Transformation of the content read."""
    lock: ClassVar[Any] = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("far://").strip("/")

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """As fsspec asks for it."""
        local = Path(self._strip_protocol(path))
        found = local.stat()
        return {"name": str(local), "size": found.st_size, "type": "directory" if local.is_dir() else "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """As fsspec asks for it."""
        names = [f"{self._strip_protocol(path)}/{name}" for name in sorted(os.listdir(self._strip_protocol(path)))]
        return [self.info(name) for name in names] if detail else names

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.FileIO:
        return _Counted(self._strip_protocol(path), mode)


class _Counted(io.FileIO):
    def read(self, size: int | None = -1) -> bytes:
        at = self.tell()
        content = super().read(-1 if size is None else size) or b""
        name = str(self.name)
        if name.endswith(".arrow"):
            with FarStore.lock:
                FarStore.reads.append((name, at, len(content)))
        return FarStore.damage(name, content) if content else content


fsspec.register_implementation("far", FarStore, clobber=True)


def far_folder(path: Path) -> Folder:
    """Returns a local folder as a remote one."""
    return Folder(f"far://{path}")


def fetched_bytes() -> int:
    """Returns the bytes of shards read so far."""
    return sum(size for _, _, size in FarStore.reads)


def reset_store() -> None:
    """Resets the store's damage and its list of reads."""
    FarStore.reads.clear()
    FarStore.damage = staticmethod(lambda path, content: content)


def prepared_text(folder: Path, size: int, context: int = 16) -> tuple[Folder, Manifest, Task]:
    """Prepares a text of random bytes, one 2-byte token each, in several shards below a folder."""
    text = folder / "text.txt"
    letters = np.random.default_rng(0).integers(97, 123, size).astype(np.uint8)
    letters[::64] = 10
    text.write_bytes(letters.tobytes())
    data = DataConfig(source=str(text), kind="lines", validation="tail", validation_fraction=0.1, shard_mib=size / 4 / 2**20)
    config = tiny(text, data=data, model=ModelConfig(context=context), train=TrainConfig())
    task = build_task(config)
    done = prepare(RunContext(config, Folder.from_uri(str(folder)), log=lambda _: None), task, on_ray=False)
    assert len(done.manifest.splits["train"]) > 1
    return done.folder, done.manifest, task
