"""On Ray Data the shards have the same bytes as from one process, and errors arrive as they were raised."""

from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import Config, DataConfig, TokenizerConfig
from raystride.pipelines.data.prepare.one_source import Work, prepare_jobs
from raystride.pipelines.data.prepare.opened_sources import open_sources
from raystride.pipelines.data.prepare.parts import divide_into_parts
from raystride.pipelines.data.prepare.ray_data import run_parts
from raystride.pipelines.data.prepare.sections import shards_of_record
from raystride.pipelines.data.prepare.stages import Preparation, read_part, tokenise_table, write_part
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.pieces import File, Part
from raystride.pipelines.data.sources.source import Source
from raystride.pipelines.data.sources.text import TextReader
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.data.tokenizers import Tokenizers, train_tokenizer
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused, unreadable
from tests.pipelines.conftest import prepared, settings
from tests.pipelines.data.prepare.test_prepare import LINES, tree

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_ray_data_writes_the_same_bytes_as_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(LINES)
    config = settings(
        tmp_path / "text.txt", tokenizer="bpe", vocabulary_size=500, validation="tail", shard_mib=0.05
    )  # fmt: skip
    alone = prepared(config, tmp_path / "alone")
    capfd.readouterr()
    lines: list[str] = []
    cluster = prepared(config, tmp_path / "cluster", on_ray=True, log=lines.append)
    assert len(cluster.manifest.splits["train"]) > 5
    assert cluster.manifest == alone.manifest
    assert alone.folder.local
    assert cluster.folder.local
    assert tree(cluster.folder.local) == tree(alone.folder.local)
    assert [line for line in lines if not line.startswith("preparing: ")] == lines[-3:]
    shown = capfd.readouterr()
    assert "Dataset" not in shown.out + shown.err
    assert prepared(config, tmp_path / "cluster", on_ray=True).reused


def _begin(config: Config, folder: Folder) -> tuple[Preparation, tuple[Part, ...]]:
    """Returns the job of a text's preparation, and its parts."""
    task = LanguageModel(config, {"vocabulary_size": 257, "end_id": 256})
    source, _ = open_sources(config, task)
    train_tokenizer(config.tokenizer, iter([]), folder / "tokenizer", print)
    task = task.knowing(task.facts, Tokenizers(folder, task.tokenizers))
    job = Preparation(folder, {"train": source.reader, "validation": source.reader}, task, 0.05, False)
    return job, divide_into_parts(source, None, config.data)


def test_an_interrupted_preparation_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    """Begun by one process, ended by two."""
    (tmp_path / "text.txt").write_text(LINES)
    config = settings(tmp_path / "text.txt", validation="tail", shard_mib=0.05)
    whole = prepared(config, tmp_path / "whole")
    folder = type(whole.folder)(f"{tmp_path}/begun/.prepared/{whole.manifest.fingerprint}")
    job, parts = _begin(config, folder)
    for part in parts[3:6]:
        write_part(job, (tokenise_table(job, table) for table in read_part(job, part)))
    lines: list[str] = []
    ended = prepared(config, tmp_path / "begun", on_ray=True, log=lines.append)
    assert f"3 of {len(parts)} parts are done" in lines[0]
    assert ended.manifest == whole.manifest


@pytest.mark.parametrize("done", [(0,), (1,), (0, 2)])
def test_sources_that_are_done_leave_each_other_their_own_records(tmp_path: Path, done: tuple[int, ...]) -> None:
    works = []
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n{LINES[: 20_000 * (number + 1)]}")
        config = settings(tmp_path / f"{number}.txt", validation="tail", shard_mib=0.01)
        works.append(Work(*_begin(config, Folder(str(tmp_path / str(number)))), True, print))
    for number in done:
        prepare_jobs([replace(works[number], on_ray=False)], print)
    for work, records in zip(works, prepare_jobs(works, print), strict=True):
        assert [record["part"] for record in records] == [part.number for part in work.parts]
        shards = [
            shard for record in records for split in ("train", "validation") for shard in shards_of_record(record, split)
        ]
        assert len(shards) >= 2
        assert all(work.job.folder.sha256(shard["file"]) == shard["sha256"] for shard in shards)


def test_an_error_of_the_data_comes_out_as_it_is(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text("good")
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    with unreadable("/bad.txt", settings=("data.encoding", "data.on_error"), names=["0xe9 at 3"]) as raised:
        prepared(settings(tmp_path), tmp_path / "runs", on_ray=True)
    assert type(raised.value) is DataError
    assert raised.value.__cause__ is None


def test_an_error_of_the_tokenizer_comes_out_as_it_is(tmp_path: Path) -> None:
    from tests.pipelines.data.tokenizers.test_training import write_tokenizer

    (tmp_path / "text.txt").write_text(LINES)
    file = write_tokenizer(tmp_path / "tokenizer.json", end=None)
    config = settings(tmp_path / "text.txt", validation="tail")
    config = replace(config, tokenizer=TokenizerConfig(kind="file", file=str(file)))
    with refused("tokenizer.end_token", None):
        prepared(config, tmp_path / "runs", on_ray=True)


def test_parts_of_a_hundred_thousand_files_come_to_the_tasks(tmp_path: Path) -> None:
    """Ray Data ends with a traceback if a task, with the list of its files, is larger than a mebibyte."""
    config = settings(tmp_path, on_error="skip")
    files = [File(f"/nowhere/train/n01443537/images/{number:09d}.txt", f"{number:09d}.xz", 700) for number in range(200_000)]
    source = Source("text", tuple(files), TextReader(skip=True))
    parts = divide_into_parts(source, None, config.data)
    assert len(parts) == 16
    task = build_task(config).knowing({"vocabulary_size": 257, "end_id": 256}, {})
    job = Preparation(Folder(str(tmp_path / "prepared")), {"train": source.reader}, task, 0.05, skip=True)
    assert sum(record["skipped"] for record in run_parts(job, list(parts))) == len(files)


def test_the_sources_of_a_mixture_are_one_job_and_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("web", "code"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n{LINES[:100_000]}")
    sources = {name: {"source": str(tmp_path / f"{name}.txt")} for name in ("web", "code")}
    data = DataConfig(sources=sources, validation="tail", shard_mib=0.03)  # type: ignore[arg-type]
    config = replace(settings("python"), data=data)
    alone, cluster = (prepared(config, tmp_path / place, on_ray=place == "cluster") for place in ("alone", "cluster"))
    assert cluster.manifest.sources == alone.manifest.sources
    for fingerprint in alone.manifest.sources.values():
        places = [tmp_path / place / ".prepared" / fingerprint for place in ("alone", "cluster")]
        assert len(list(places[0].rglob("*.arrow"))) > 3
        assert tree(places[0]) == tree(places[1])
