"""A preparation is made once in spite of interruptions, and its shards have the same bytes in every mode."""

import gzip
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config, LaunchConfig, TokenizerConfig, TrainConfig
from raystride.pipelines.data.prepare.class_split import validates
from raystride.pipelines.data.prepare.fingerprint import identity
from raystride.pipelines.data.prepare.hash_list import SUFFIX, hash_list_name, parse_hash_list
from raystride.pipelines.data.prepare.one_source import BYTES_SPEEDUP
from raystride.pipelines.data.prepare.prepare import needs_ray, prepare
from raystride.pipelines.data.prepare.progress import SPEED_FILE, load_stages
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.data.tasks.task import Column, Document, Facts
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.conftest import Prepare, documents, prepared, rows, settings
from tests.pipelines.data.prepare.tasks import TINY, Labelled, Pictures, as_csv, as_json, made
from tests.some import some


def fingerprint(config: Config) -> str:
    """Returns the fingerprint of a preparation for a language model."""
    return identity(config, LanguageModel(config)).data


LINES = "".join(f"line {i}: some words of text\n" for i in range(20_000))


def tree(folder: Path) -> dict[str, bytes]:
    """Returns every file below a folder with its content, except timings."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SPEED_FILE]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for i in range(40):
        (tmp_path / f"data/{i:02d}.txt").write_text(LINES[i * 10_000 :][:10_000])
    return tmp_path / "data"


def test_ray_is_needed_for_large_data_that_is_not_prepared(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, storage = settings(corpus), Folder(str(tmp_path / "runs"))
    context = RunContext(config, storage)
    following = replace(config, data=replace(config.data, start_after_mib=1.0, follow=True))
    assert not needs_ray(context)
    assert needs_ray(context.with_config(following))
    monkeypatch.setattr("raystride.pipelines.data.prepare.one_source.MAX_LOCAL_BYTES", 39 * 10_000 // BYTES_SPEEDUP)
    assert needs_ray(context)
    assert not needs_ray(context.with_config(replace(config, launch=LaunchConfig(mode="inline"))))
    prepared(config, tmp_path / "runs")
    assert not needs_ray(context)


def test_a_finished_preparation_is_reused_until_a_file_is_lost(corpus: Path, tmp_path: Path) -> None:
    config = settings(corpus, tokenizer="bpe", vocabulary_size=300, shard_mib=0.05)
    lines: list[str] = []
    first = prepared(config, tmp_path / "runs", log=lines.append)
    again = prepared(config, tmp_path / "runs", log=lines.append)
    assert (first.reused, again.reused) == (False, True)
    assert again.manifest == first.manifest
    assert "prepared before" in lines[-2]
    assert first.folder.names() == [
        "documents.hashes",
        "documents.hashes.sha256",
        "files.parquet",
        "files.parquet.sha256",
        "manifest.json",
        "manifest.json.sha256",
        SPEED_FILE,
        "tokenizer",
        "train",
        "validation",
    ]
    assert first.folder.local
    for shard in (shard for split in first.manifest.splits.values() for shard in split):
        parse_hash_list(first.folder.read(hash_list_name(shard.file)), shard.top_hash)
    (first.folder.local / first.manifest.splits["train"][0].file).unlink()
    repaired = prepared(config, tmp_path / "runs")
    assert not repaired.reused
    assert repaired.manifest == first.manifest


def test_the_fingerprint_depends_on_inputs_of_the_shards(corpus: Path) -> None:
    config = settings(corpus)
    same = [
        replace(config, storage="elsewhere", run="other", seed=7),
        replace(
            config,
            data=replace(config.data, shuffle="none", prefetch=9, column="other", encoding="UTF8", source=f"{corpus}/"),
        ),
        replace(config, train=TrainConfig(slots=2), tokenizer=replace(config.tokenizer, vocabulary_size=999)),
    ]
    other = [
        replace(config, data=replace(config.data, validation_fraction=0.2)),
        replace(config, data=replace(config.data, shard_mib=1.0)),
        replace(config, data=replace(config.data, on_error="skip")),
        replace(config, data=replace(config.data, source=f"{corpus}/0*.txt")),
        replace(config, tokenizer=TokenizerConfig(kind="characters")),
        replace(config, tokenizer=TokenizerConfig(kind="bpe")),
        replace(config, tokenizer=TokenizerConfig(kind="bpe", training_mib=1.0)),
        replace(config, tokenizer=TokenizerConfig(kind="bpe", lowercase=True)),
    ]
    assert {fingerprint(each) for each in same} == {fingerprint(config)}
    assert len({fingerprint(each) for each in [config, *other]}) == 1 + len(other)
    before = fingerprint(config)
    os.utime(corpus / "00.txt", (1, 1))
    assert fingerprint(config) != before


def test_moved_data_has_the_same_fingerprint(corpus: Path, tmp_path: Path) -> None:
    before = fingerprint(settings(corpus))
    corpus.rename(tmp_path / "moved")
    assert fingerprint(settings(tmp_path / "moved")) == before


KILLED = """
import sys, time
from pathlib import Path
import raystride.pipelines.data.prepare.shards as shards
from tests.pipelines.conftest import prepared, settings
finish = shards.ShardWriter.finish
def slow(*arguments):
    time.sleep(0.15)
    return finish(*arguments)
shards.ShardWriter.finish = slow
prepared(settings(sys.argv[1], tokenizer="bpe", vocabulary_size=300, shard_mib=0.03), sys.argv[2])
"""


def test_a_killed_preparation_goes_on_and_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    config = settings(corpus, tokenizer="bpe", vocabulary_size=300, shard_mib=0.03)
    whole = prepared(config, tmp_path / "whole")
    target = tmp_path / "killed" / ".prepared" / whole.manifest.fingerprint
    command = [sys.executable, "-c", KILLED, str(corpus), str(tmp_path / "killed")]
    for parts in (2, 5):
        with subprocess.Popen(command) as process:
            while len(list(target.glob("parts/*.json"))) < parts and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        assert not (target / "manifest.json").exists()
    done = sorted(target.glob("train/*.arrow"))
    kept = {path: path.stat().st_mtime_ns for path in done[2:5]}
    done[0].write_bytes(b"damaged after it was written")
    done[1].with_suffix(SUFFIX).unlink()
    (target / "train/00000.arrow.tmp-deadbeef").write_bytes(b"left by the killed writer")
    os.utime(target / "train/00000.arrow.tmp-deadbeef", (1, 1))
    lines: list[str] = []
    resumed = prepared(config, tmp_path / "killed", log=lines.append)
    assert "going on with a preparation that was interrupted" in lines[0]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert resumed.manifest == whole.manifest
    assert whole.folder.local
    assert tree(target) == tree(whole.folder.local)


@pytest.mark.long
def test_two_preparations_at_once(corpus: Path, tmp_path: Path) -> None:
    config = settings(corpus, tokenizer="bpe", vocabulary_size=300, shard_mib=0.03)
    command = [sys.executable, "-c", KILLED, str(corpus), str(tmp_path / "both")]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    alone = prepared(config, tmp_path / "alone")
    both = prepared(config, tmp_path / "both")
    assert both.reused
    assert both.folder.local
    assert alone.folder.local
    assert tree(both.folder.local) == tree(alone.folder.local)


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60), min_size=1, max_size=12),
    more=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60), max_size=12),
)
def test_no_document_moves_when_others_are_added(texts: list[str], more: list[str]) -> None:
    fraction = 0.3
    before = {text: validates(Piece((text[:4096],)), {}, fraction) for text in texts}
    after = {text: validates(Piece((text[:4096],)), {}, fraction) for text in more + texts}
    assert {text: after[text] for text in texts} == before
    assert all(validates(Piece((text,)), {}, 0.999999999) for text in texts)


def test_adding_files_moves_no_document(corpus: Path, run: Prepare) -> None:
    before = run(corpus, validation_fraction=0.3)
    old = {split: set(documents(before, split)) for split in ("train", "validation")}
    for i in range(100, 130):
        (corpus / f"{i}.txt").write_text(f"a new document {i}")
    after = run(corpus, validation_fraction=0.3)
    assert all(old[split] <= set(documents(after, split)) for split in some(old))


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=40, max_size=3000),
    fraction=st.floats(0.1, 0.9),
    shard_kib=st.integers(1, 4),
    kind=st.sampled_from(["bytes", "characters"]),
)
@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_shards_together_are_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, fraction: float, shard_kib: int, kind: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "text.txt").write_bytes(text.encode())
    config = settings(
        folder / "text.txt", tokenizer=kind, vocabulary_size=10_000,
        validation="tail", validation_fraction=fraction, shard_mib=shard_kib / 1024,
    )  # fmt: skip
    result = prepared(config, folder / "runs")
    train, validation = documents(result, "train"), documents(result, "validation")
    assert len(train) == len(validation) == 1
    assert train[0] + validation[0] == text
    cut = int(len(text.encode()) * (1 - fraction))
    assert 0 <= len(train[0].encode()) - cut <= 3


def test_the_tail_of_one_ascii_file_is_that_of_nanogpt(tmp_path: Path, run: Prepare) -> None:
    (tmp_path / "input.txt").write_text(LINES)
    result = run(tmp_path / "input.txt", tokenizer="characters", validation="tail", validation_fraction=0.1)
    assert documents(result, "train") == [LINES[: int(len(LINES) * 0.9)]]
    assert documents(result, "validation") == [LINES[int(len(LINES) * 0.9) :]]
    assert not any(row["ends"] for row in rows(result, "train"))
    assert [row["ends"] for row in rows(result, "validation")][-1]


class Chat(LanguageModel):
    """Leaves out of the loss all text before a colon."""

    def encode(self, document: Document) -> tuple[np.ndarray, np.ndarray]:
        ids, _ = super().encode(document)
        return ids, (np.arange(len(ids)) > document[0].index(":")).astype(np.uint8)


def test_a_loss_mask_is_kept_and_found(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text("".join(f'{{"text": "ask {"x" * i}: answer"}}\n' for i in range(50)))
    config = settings(tmp_path / "chat.jsonl", validation="tail", validation_fraction=0.2)
    result = prepare(RunContext(config, Folder.from_uri(str(tmp_path / "runs"))), Chat(config), on_ray=False)
    assert result.folder.local
    for split in ("train", "validation"):
        (shard,) = result.manifest.splits[split]
        assert shard.mask_offset
        mask = np.memmap(result.folder.local / shard.file, np.uint8, "r", shard.mask_offset, (shard.tokens,))
        assert mask.tolist() == [m for row in rows(result, split) for m in row["loss_mask"]]
        assert all(len(row["loss_mask"]) == len(row["ids"]) for row in rows(result, split))
        assert 0 < mask.mean() < 1


def test_large_vocabularies_take_four_bytes(tmp_path: Path, run: Prepare) -> None:
    letters = [chr(point) for point in range(0x4E00, 0x4E00 + 20_000)] + [chr(p) for p in range(0x20000, 0x20000 + 50_000)]
    (tmp_path / "rare.txt").write_text("".join(letters))
    result = run(tmp_path / "rare.txt", tokenizer="characters", vocabulary_size=80_000, validation="tail")
    assert result.manifest.id_type == "uint32"
    assert result.manifest.vocabulary_size == 70_002
    assert documents(result, "train") + documents(result, "validation") == [
        "".join(letters)[: len(documents(result, "train")[0])],
        "".join(letters)[len(documents(result, "train")[0]) :],
    ]


def test_in_this_process_ray_is_not_imported(corpus: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from tests.pipelines.conftest import prepared, settings;"
        "prepared(settings(sys.argv[1]), sys.argv[2], log=lambda line: None); print({'ray', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(corpus), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.long
def test_the_default_settings_prepare_the_standard_library(tmp_path: Path) -> None:
    result = prepared(Config(), tmp_path)
    assert result.manifest.tokens("train") > 1e6
    assert 0.01 < result.manifest.tokens("validation") / result.manifest.tokens("train") < 0.15
    assert len(result.manifest.splits["train"]) >= 8


def test_a_task_of_examples_gets_long_files_whole(tmp_path: Path) -> None:
    class Whole(Labelled):
        surveyed = False

        @property
        def columns(self) -> tuple[Column, ...]:
            return super().columns[:1]

        def learn(self, surveys: Sequence[Facts]) -> Facts:
            return {"vocabulary_size": 257, "end_id": 256, "labels": ["long"]}

        def encode(self, document: Document) -> tuple[np.ndarray, None]:
            return self.encoders["tokenizer"].encode(document[0]), None

    texts = ["".join(f"{n} line {i}\n" for i in range(150_000)) for n in range(3)]
    for number, text in enumerate(texts[:2]):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "2.txt.gz").write_bytes(gzip.compress(texts[2].encode(), 1))
    config = settings(tmp_path, shard_mib=0.1, validation="tail", validation_fraction=0.5)
    result = made(Whole, config, tmp_path / "runs")
    found = [bytes(row["ids"]).decode() for split in ("train", "validation") for row in rows(result, split)]
    assert found == texts


class Interrupted(Labelled):
    """Fails while encoding, and counts surveys."""

    surveys = 0
    broken = True

    def survey(self, documents: Iterable[Document]) -> Facts:
        type(self).surveys += 1
        return super().survey(documents)

    def encode(self, document: Document) -> tuple[np.ndarray, None]:
        if self.broken and document[0].startswith("text 150:"):
            raise MemoryError
        return super().encode(document)


class StopsInSurvey(Interrupted):
    """Fails in the third survey, and counts them."""

    def survey(self, documents: Iterable[Document]) -> Facts:
        if self.broken and type(self).surveys == 3:
            raise MemoryError
        return super().survey(documents)

    def encode(self, document: Document) -> tuple[np.ndarray, None]:
        return Labelled.encode(self, document)


def test_an_interrupted_survey_goes_on(tmp_path: Path) -> None:
    config, lines = settings(as_json(tmp_path), shard_mib=TINY, validation_fraction=0.2), list[str]()
    with pytest.raises(MemoryError):
        made(StopsInSurvey, config, tmp_path / "runs")
    StopsInSurvey.surveys, StopsInSurvey.broken = 0, False
    result = made(StopsInSurvey, config, tmp_path / "runs", log=lines.append)
    (parts,) = (int(found[1]) for line in lines if (found := re.search(r"surveying .*, 3 of (\d+) parts", line)))
    assert StopsInSurvey.surveys == parts - 3 > 3
    assert result.manifest == made(Labelled, config, tmp_path / "whole").manifest
    assert load_stages(result.folder)["seconds"]["survey"] > 0


def test_an_interrupted_preparation_does_not_survey_again(tmp_path: Path) -> None:
    config = settings(as_json(tmp_path), shard_mib=TINY, validation_fraction=0.2)
    with pytest.raises(MemoryError):
        made(Interrupted, config, tmp_path / "runs")
    surveys = Interrupted.surveys
    Interrupted.broken = False
    result = made(Interrupted, config, tmp_path / "runs")
    assert Interrupted.surveys == surveys > 3
    assert result.manifest == made(Labelled, config, tmp_path / "whole").manifest


def test_the_fingerprint_knows_the_columns_and_the_task(tmp_path: Path) -> None:
    class Shaped(Labelled):
        def shaped_by(self) -> dict[str, Any]:
            return {"longest": 7}

    config = settings(as_csv(tmp_path))
    data = config.data
    same = [config, replace(config, data=replace(data, target_column="other", test_source="x", encoding="utf8"))]
    other = [
        config,
        replace(config, data=replace(data, column="n")),
        replace(config, data=replace(data, label_column="n")),
        replace(config, data=replace(data, encoding="latin-1")),
        replace(config, tokenizer=TokenizerConfig(kind="characters")),
    ]
    assert len({identity(each, Labelled(each)).data for each in same}) == 1
    found = {identity(each, Labelled(each)).data for each in other}
    assert len(found | {identity(config, Shaped(config)).data, identity(config, Pictures(config)).data}) == 7


def test_numbers_that_are_out_of_bounds_are_a_defect(tmp_path: Path) -> None:
    class Narrow(Labelled):
        ids = 100

    with pytest.raises(RuntimeError, match=r"example holds \d+, but its numbers must be below `ids`, 100"):
        made(Narrow, settings(as_csv(tmp_path)), tmp_path / "runs")


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
def test_on_ray_labels_are_the_same(tmp_path: Path) -> None:
    config = settings(as_csv(tmp_path), shard_mib=TINY, validation_fraction=0.2)
    alone, cluster = (made(Labelled, config, tmp_path / str(ray), on_ray=ray) for ray in (False, True))
    assert cluster.manifest == alone.manifest


def test_data_is_prepared_without_pandas(tmp_path: Path) -> None:
    """Its import was an eighth of the preparation of 64 MB."""
    (tmp_path / "lines.txt").write_text("".join(f"line {number}\n" for number in range(200)))
    program = f"""
import sys
from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import load_settings
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder

given = {{"data.source": {str(tmp_path / "lines.txt")!r}, "data.kind": "lines", "tokenizer.kind": "bytes"}}
config = load_settings(Config, given).settings
prepare(RunContext(config, Folder({str(tmp_path / "storage")!r})), build_task(config), on_ray=False)
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
