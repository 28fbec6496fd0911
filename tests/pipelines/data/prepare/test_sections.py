"""A packed file, which cannot be divided, gives a shard each `data.shard_mib`, and a kill loses one of them."""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare import stages
from raystride.pipelines.data.prepare.document_hashes import read_hashes
from raystride.pipelines.data.prepare.generations import read_generation
from raystride.pipelines.data.prepare.one_source import PreparedData
from raystride.pipelines.data.sources import text
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.conftest import prepared, settings
from tests.waiting import wait_until

LINES = [f"{number} {number * number} {number**3} {'of a packed file ' * (number % 7)}" for number in range(3_000)]


def test_a_packed_text_and_the_parts_of_a_tail_are_in_sections_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 1 << 14)
    source = _write(tmp_path / "texts")
    by_source: dict[str, Any] = {"kind": "text", "validation": "source", "validation_source": str(source)}
    for options in (by_source, {"kind": "lines", "validation": "tail"}):
        whole = prepared(settings(source, shard_mib=4096, **options), tmp_path / "whole")
        found = prepared(settings(source, shard_mib=0.02, **options), tmp_path / "few")
        assert len(found.manifest.splits["train"]) > 5
        for split in ("train", "validation"):
            assert (_tokens(found, split) == _tokens(whole, split)).all()
            assert found.manifest.documents(split) == whole.manifest.documents(split)


def _shards(folder: Folder) -> list[list[str]]:
    """Returns the shards of each generation."""
    found, number = list[list[str]](), 0
    while manifest := read_generation(folder, number):
        found.append([shard.file for split in ("train", "validation") for shard in manifest.splits[split]])
        number += 1
    return found


def test_training_begins_while_a_packed_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its generations are the same whether the preparation was interrupted or not."""
    monkeypatch.setattr(stages, "_TABLE_ROWS", 100)
    config = settings(_write(tmp_path / "texts"), kind="lines", shard_mib=0.02, start_after_mib=0.05)
    whole = prepared(config, tmp_path / "whole")
    (folder,) = (tmp_path / "begun" / ".prepared" / whole.folder.name,)
    tokenise, counts = stages.tokenise_table, list[int]()

    def killed(job: Any, table: Any) -> Any:
        counts.append(table.num_rows)
        if sum(counts) > 2_000:
            wait_until(lambda: len(_shards(Folder(str(folder)))) > 1, "two generations of a file that is being read")
            raise KeyboardInterrupt
        return tokenise(job, table)

    with monkeypatch.context() as patched:
        patched.setattr("raystride.pipelines.data.prepare.stages.tokenise_table", killed)
        with pytest.raises(KeyboardInterrupt):
            prepared(config, tmp_path / "begun")
    assert not (folder / "parts").exists()
    begun = _shards(Folder(str(folder)))
    found = prepared(config, tmp_path / "begun")
    shards = _shards(found.folder)
    assert shards[: len(begun)] == begun
    assert shards == _shards(whole.folder)
    assert [len(some) for some in shards[:-1]] == [6] * (len(shards) - 1), "three sections of both splits have 0.05 MiB"
    assert sorted(file for some in shards for file in some) == sorted(
        shard.file for split in ("train", "validation") for shard in found.manifest.splits[split]
    )
    assert replace(found.manifest) == whole.manifest


def _write(folder: Path) -> Path:
    folder.mkdir()
    with gzip.open(folder / "all.txt.gz", "wt") as file:
        file.writelines(f"{line}\n" for line in LINES)
    return folder / "all.txt.gz"


def _tokens(found: PreparedData, split: str) -> np.ndarray:
    stream = TokenStream(found.folder, found.manifest, split, NodeCache(Path("/none"), 0))
    return stream.read_windows(np.array([0]), stream.tokens)[0][0]


def test_a_packed_file_gives_the_same_stream_in_several_shards(tmp_path: Path) -> None:
    source = _write(tmp_path / "texts")
    whole = prepared(settings(source, kind="lines", shard_mib=4096), tmp_path / "whole")
    lines = list[str]()
    found = prepared(settings(source, kind="lines", shard_mib=0.02), tmp_path / "few", log=lines.append)
    assert lines[0] == (
        "data: all.txt.gz is packed (0 MB) and so read by one process: unpack it, or split it into files of some 100 "
        "MB, and up to 2 processes read it at once"
    )
    files = [shard.file for shard in found.manifest.splits["train"]]
    assert files == [f"train/00000-{number:04d}.arrow" for number in range(len(files))]
    assert len(files) > 5
    assert [shard.file for shard in whole.manifest.splits["train"]] == ["train/00000.arrow"]
    for split in ("train", "validation"):
        assert (_tokens(found, split) == _tokens(whole, split)).all()
        assert found.manifest.documents(split) == whole.manifest.documents(split)
    hashes, others = read_hashes(found.folder), read_hashes(whole.folder)
    assert hashes is not None
    assert others is not None
    assert (hashes.hashes == others.hashes).all()
    assert not (found.folder / "sections").exists()


def test_a_kill_loses_a_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(_write(tmp_path / "texts"), kind="lines", shard_mib=0.02)
    whole = prepared(config, tmp_path / "whole")
    tokenise, texts = stages.tokenise_table, list[str]()

    def killed(job: Any, table: Any) -> Any:
        texts.extend(text for text in table["text"].to_pylist() if text)
        if len(texts) > 2_000 and monkeypatch is not None and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        return tokenise(job, table)

    monkeypatch.setattr(stages, "_TABLE_ROWS", 100)
    monkeypatch.setattr("raystride.pipelines.data.prepare.stages.tokenise_table", killed)
    with pytest.raises(KeyboardInterrupt):
        prepared(config, tmp_path / "begun")
    (folder,) = (tmp_path / "begun" / ".prepared").iterdir()
    written = sorted(path.name for path in (folder / "sections").glob("*.json"))
    assert len(written) > 3
    (folder / "train" / f"00000-{len(written) - 1:04d}.arrow").write_bytes(b"damaged")
    (tmp_path / "again").touch()
    texts.clear()
    found = prepared(config, tmp_path / "begun")
    assert replace(found.manifest) == whole.manifest
    assert 0 < len(texts) < 2_000
    for split in ("train", "validation"):
        assert (_tokens(found, split) == _tokens(whole, split)).all()
