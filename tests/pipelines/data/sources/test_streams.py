"""Compressed files, of one frame or several, yield the same documents as plain ones."""

import gzip
from itertools import pairwise
from pathlib import Path

import pytest
from pyarrow import compress

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.tasks.task import Column
from tests.errors import unreadable
from tests.pipelines.data.sources.documents import open_documents

TEXT = (Column("data.column", "text"),)
FILES = {
    "a.txt": "".join(f"café {i}\n" for i in range(2000)),
    "a.csv": "id,text\n" + "".join(f'{i},"café, {i}"\n' for i in range(2000)),
    "a.jsonl": "".join(f'{{"text": "café {i}"}}\n' for i in range(2000)),
}
SKIPPED = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"any"
"""A frame that decoders pass over (RFC 8878), as tools for seeking in zstd files write it."""


def read(path: Path) -> list[str]:
    found = open_documents(DataConfig(source=str(path)), str(path), TEXT)
    return [document[0] for part in found.parts for _, document in found.read(part)]


def frames(content: bytes, cuts: list[int]) -> bytes:
    return SKIPPED.join(compress(content[a:b], "zstd", asbytes=True) for a, b in pairwise([0, *cuts, len(content)]))


@pytest.mark.parametrize("name", list(FILES))
def test_zstd_files_of_several_frames_are_read_as_plain_ones(tmp_path: Path, name: str) -> None:
    content = FILES[name].encode()
    (tmp_path / name).write_bytes(content)
    plain = read(tmp_path / name)
    for cuts in ([], [len(content) // 2], [1, 777, 778, 20_000]):
        (tmp_path / f"{name}.zst").write_bytes(frames(content, cuts))
        assert read(tmp_path / f"{name}.zst") == plain


@pytest.mark.parametrize("name", list(FILES))
def test_a_zstd_file_that_ends_early_is_broken(tmp_path: Path, name: str) -> None:
    whole = frames(FILES[name].encode(), [9000])
    (tmp_path / f"{name}.zst").write_bytes(whole[:-3])
    with unreadable(f"{name}.zst", names=["truncated"]):
        read(tmp_path / f"{name}.zst")


@pytest.mark.parametrize("name", list(FILES))
def test_gzip_files_with_padding_are_whole_and_others_broken(tmp_path: Path, name: str) -> None:
    content = FILES[name].encode()
    (tmp_path / name).write_bytes(content)
    packed = gzip.compress(content[:5000]) + gzip.compress(content[5000:])
    for padding in (b"", b"\0" * 7, b"\0" * 100_000):
        (tmp_path / f"{name}.GZ").write_bytes(packed + padding)
        assert read(tmp_path / f"{name}.GZ") == read(tmp_path / name)
    for broken in (packed[:-9], packed + b"garbage", packed[:-2000] + b"\0" * 2000):
        (tmp_path / f"{name}.gz").write_bytes(broken)
        with unreadable(f"{name}.gz", names=["truncated or broken"]):
            read(tmp_path / f"{name}.gz")
