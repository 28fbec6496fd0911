"""A preparation with few words, and the text that its shards stand for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raystride.pipelines.config import Config, DataConfig, TokenizerConfig
from raystride.pipelines.data.prepare.one_source import PreparedData
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.data.tokenizers import load_tokenizer
from raystride.pipelines.system.storage.folder import Folder

Prepare = Callable[..., PreparedData]


def settings(source: object, *, tokenizer: str = "bytes", vocabulary_size: int = 4096, **data: Any) -> Config:
    """A configuration for the source; `data` are settings of that section."""
    text = TokenizerConfig(kind=tokenizer, vocabulary_size=vocabulary_size)  # type: ignore[arg-type]
    return replace(Config(), data=DataConfig(source=str(source), **data), tokenizer=text)


def prepared(
    config: Config, storage: Path | str, *, on_ray: bool = False, log: Callable[[str], None] = print
) -> PreparedData:
    """Prepares for a language model."""
    return prepare(RunContext(config, Folder.from_uri(str(storage)), log=log), LanguageModel(config), on_ray=on_ray)


@pytest.fixture
def run(tmp_path: Path) -> Prepare:
    """Prepares a source in this process, under a storage of the test's own."""

    def of(source: object, **changes: Any) -> PreparedData:
        return prepared(settings(source, **changes), tmp_path / "storage")

    return of


def rows(result: PreparedData, split: str) -> list[dict[str, Any]]:
    """Every row of a split's shards, checked against what the manifest says of them."""
    found: list[dict[str, Any]] = []
    assert result.folder.local
    for shard in result.manifest.splits[split]:
        path = result.folder.local / shard.file
        assert (path.stat().st_size, result.folder.sha256(shard.file)) == (shard.bytes, shard.sha256)
        with pa.ipc.open_file(str(path)) as reader:
            assert reader.num_record_batches == 1
            batch = reader.get_batch(0)
        mapped = np.memmap(path, result.manifest.id_type, "r", shard.ids_offset, (shard.tokens,))
        assert np.array_equal(mapped, batch.column("ids").flatten().to_numpy())
        assert sum(batch.column("begins").to_pylist()) == shard.documents
        found += batch.to_pylist()
    return found


def documents(result: PreparedData, split: str) -> list[str]:
    """The texts of a split's documents: ids up to each end token, decoded; what follows the last one counts as one."""
    encoder = load_tokenizer(result.folder / "tokenizer")
    texts: list[list[int]] = [[]]
    for row in rows(result, split):
        for i in row["ids"]:
            if i == encoder.end_id:
                texts.append([])
            else:
                texts[-1].append(i)
    return [encoder.decode(ids) for ids in (texts if texts[-1] else texts[:-1])]
