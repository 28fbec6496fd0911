"""What was read is shown: files, classes, text that a tokenizer lost, and what was cut, dropped or skipped."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from raystride.pipelines.config import Config, DataConfig, TokenizerConfig
from raystride.pipelines.data.prepare import prepare as preparation
from raystride.pipelines.data.prepare.data_lines import describe_classes, list_data_lines
from raystride.pipelines.data.prepare.lost_text import MAX_STRETCHES, STRETCH, TextSample
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.prepare.one_source import PreparedData
from raystride.pipelines.data.prepare.prepare import check_first_rows, prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.classification import Classification
from raystride.pipelines.data.tasks.task import Document
from raystride.pipelines.data.tokenizers.byte_pairs import CharacterEncoder
from raystride.pipelines.launch.train_job import train
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import write_tokenizer
from tests.errors import refused
from tests.pipelines.launch.test_kept_data import Lines
from tests.tiny import tiny

LABELS = ("ham", "ham", "spam", "spam", "Spam", "cafe\u0301", "caf\u00e9", "spam\u200b")
RUSSIAN = "Это строка русского текста"


def write_labelled(folder: Path, labels: Sequence[str] = (*LABELS * 10, "odd")) -> Path:
    """Writes a CSV file of a text for each label."""
    rows = "".join(f"the cat number {number},{label}\n" for number, label in enumerate(labels))
    (folder / "mails.csv").write_text(f"text,label\n{rows}")
    return folder / "mails.csv"


def settings(source: Path, task: str = "classification", **data: Any) -> Config:
    """Returns settings of a task on a source."""
    found, base = DataConfig(source=str(source), validation="tail", validation_fraction=0.2, **data), tiny(source)
    return replace(base, task=task, data=found, model=replace(base.model, context=32))


def prepared(config: Config, storage: Path) -> tuple[PreparedData, list[str]]:
    """Prepares, and returns the lines about the data."""
    lines: list[str] = []
    result = prepare(RunContext(config, Folder(str(storage)), log=lines.append), build_task(config), on_ray=False)
    return result, lines


def english(folder: Path, **changes: Any) -> TokenizerConfig:
    """Returns a tokenizer of pairs that knows the letters of English alone, and no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over a lazy dog cat 0123456789"], trainer)
    tokenizer.save(str(folder / "english.json"))
    return TokenizerConfig(kind="file", file=str(folder / "english.json"), **changes)


def write_texts(folder: Path, texts: Sequence[str], name: str = "texts.jsonl") -> Path:
    """Writes texts as JSON lines."""
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / name


CLASSES = [
    "files: 1 read",
    "classes: ham 20, spam 20, Spam 10, cafe\u0301 10, caf\u00e9 10, 'spam\\u200b' 10, odd 1",
    "warning: classes look alike, and are different ones: 'Spam' and 'spam' and 'spam\\u200b', 'cafe\\u0301' and 'caf\u00e9'"
    "; give each one spelling in the data",
    "warning: a class has one document: 'odd'",
]


def test_classes_are_shown_and_those_that_look_alike_are_warned_of(tmp_path: Path) -> None:
    config = settings(write_labelled(tmp_path))
    result, lines = prepared(config, tmp_path / "runs")
    assert lines[-4:] == [f"data: {line}" for line in CLASSES]
    assert result.manifest.learned["labels"] == sorted({*LABELS, "odd"}), "they are shown, and stay classes of their own"
    again, found = prepared(config, tmp_path / "runs")
    assert again.reused
    assert "prepared before" in found[0]
    assert found[1:] == lines[-4:], "data that was prepared before is shown alike"


@pytest.mark.parametrize("shard_mib", [64, 0.0005])
def test_parts_are_counted_together(tmp_path: Path, shard_mib: float) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        write_labelled(tmp_path / "data", LABELS * 10).rename(tmp_path / f"data/{name}.csv")
    config = replace(settings(tmp_path / "data", shard_mib=shard_mib), tokenizer=english(tmp_path))
    result, lines = prepared(config, tmp_path / "runs")
    assert (len(result.manifest.splits["train"]) > 1) == (shard_mib < 1)
    assert [line.removeprefix("data: ") for line in lines[-3:-1]] == [
        "files: 2 read",
        "classes: ham 40, spam 40, Spam 20, cafe\u0301 20, caf\u00e9 20, 'spam\\u200b' 20",
    ]


def test_of_many_classes_the_most_frequent_and_the_rarest_are_named() -> None:
    (line,) = describe_classes({f"c{number:02d}": 100 - number for number in range(57)})
    assert line.startswith("57 classes: c00 100, c01 99, ")
    assert line.endswith("c19 81, 34 more, c54 46, c55 45, c56 44")
    few = describe_classes({f"c{number:02d}": 1 for number in range(23)})
    assert len(few[0].split(", ")) == 23
    long, shown = "x" * 500, describe_classes({"x" * 500: 1, "a\nb": 1})
    assert long not in shown[0]
    assert "\n" not in shown[0]


@pytest.mark.parametrize(
    ("names", "alike"),
    [
        (["not spam", "not  spam"], True),
        (["not spam", "not\u00a0spam"], True),
        (["Straße", "STRASSE"], True),
        (["a\u200db", "ab"], True),
        (["\ufb01x", "fix"], True),
        (["spam", "ham"], False),
        (["a b", "ab"], False),
    ],
)
def test_names_look_alike_by_what_a_reader_sees(names: list[str], alike: bool) -> None:
    assert (len(describe_classes(dict.fromkeys(names, 5))) > 1) == alike


def test_a_class_of_validation_alone_is_warned_of(tmp_path: Path) -> None:
    held = write_labelled(tmp_path, ["ham", "new", "new"]).rename(tmp_path / "held.csv")
    config = settings(write_labelled(tmp_path, ["ham", "spam"] * 4))
    config = replace(config, data=replace(config.data, validation="source", validation_source=str(held)))
    _, lines = prepared(config, tmp_path / "runs")
    assert "data: files: 1 read, 1 more to validate on" in lines
    assert lines[-1] == "data: warning: no document to train on, but some to validate, in 'new'"


def test_a_manifest_of_an_earlier_version_shows_less(tmp_path: Path) -> None:
    result, _ = prepared(settings(write_labelled(tmp_path)), tmp_path / "runs")
    known = {key: result.manifest.source[key] for key in ("kind", "name", "files", "bytes")}
    replace(result.manifest, source=known | {"cut": 3}).save(result.folder)
    found = list_data_lines(Manifest.load(result.folder), result.folder)
    assert found == ["files: 1 read", "cut: 3 of 81 examples (3.7%) are longer than model.context allows"]


def test_a_mixture_has_a_line_a_source(tmp_path: Path) -> None:
    for name, labels in (("web", ["ham", "spam"] * 20), ("mail", ["ham", "ham", "Ham", "spam"] * 10)):
        (tmp_path / name).mkdir()
        write_labelled(tmp_path / name, labels)
        (tmp_path / name / "README.md").write_text("about it")
    config = settings(tmp_path / "web")
    sources = {name: {"source": str(tmp_path / name)} for name in ("web", "mail")}
    config = replace(config, data=replace(config.data, source="python", sources=sources))
    _, lines = prepared(config, tmp_path / "runs")
    assert [line for line in lines if "classes" in line] == [
        "data: web: files: 1 read; left out README.md: about the data; classes: ham 20, spam 20",
        "data: mail: files: 1 read; left out README.md: about the data; classes: ham 20, Ham 10, spam 10",
        "data: warning: mail: classes look alike, and are different ones: 'Ham' and 'ham'; give each one "
        "spelling in the data",
    ]


def test_a_tokenizer_that_loses_most_of_the_text_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path, [f"{RUSSIAN} cat"] * 20)
    config = replace(settings(texts, "language_model"), tokenizer=english(tmp_path))
    monkeypatch.setattr("raystride.pipelines.data.prepare.one_source.prepare_jobs", None)
    names = ["88.5% of the text", "sampled characters", "'т'", "--tokenizer.kind bpe"]
    with refused("tokenizer.file", str(tmp_path / "english.json"), names=names):
        prepared(config, tmp_path / "runs")
    with refused("tokenizer.file", names=names):
        check_first_rows(RunContext(config, Folder(str(tmp_path))))
    with refused("model.init_from", str(tmp_path)):
        prepared(replace(config, model=replace(config.model, init_from=str(tmp_path))), tmp_path / "runs")
    with refused("tokenizer.vocabulary_size", 3):
        prepared(replace(config, tokenizer=TokenizerConfig(kind="characters", vocabulary_size=3)), tmp_path / "runs")


def test_a_tokenizer_that_cannot_encode_the_data_is_refused_by_its_file(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<|end|>": 0, "cat": 1}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    config = settings(write_texts(tmp_path, ["cat"] * 9 + ["dog"]), "language_model")
    config = replace(config, tokenizer=TokenizerConfig(kind="file", file=str(tmp_path / "words.json")))
    with refused("tokenizer.file", names=["Missing [UNK] token"]):
        check_first_rows(RunContext(config, Folder(str(tmp_path))))


def test_text_that_a_tokenizer_loses_is_shown_from_a_thousandth_on(tmp_path: Path) -> None:
    def lines(lost: int) -> list[str]:
        texts = write_texts(tmp_path, [*["a" * 100] * 49, "a" * (100 - lost) + "ж" * lost])
        config = replace(settings(texts, "language_model"), tokenizer=english(tmp_path))
        return [line for line in prepared(config, tmp_path / "runs")[1] if "cannot write" in line]

    (line,) = lines(5)
    assert "warning: the tokenizer cannot write 0.1% of the text (5 of 5,000 sampled characters), such as 'ж'" in line
    assert not lines(4)


def test_a_byte_level_tokenizer_is_not_measured(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"<|end|>": True})
    kinds = (TokenizerConfig(kind="file", file=str(tmp_path / "tokenizer.json")), TokenizerConfig(kind="bytes"))
    for tokenizer in kinds:
        config = replace(settings(write_texts(tmp_path, [RUSSIAN] * 50), "language_model"), tokenizer=tokenizer)
        result, lines = prepared(config, tmp_path / "runs")
        assert not [line for line in lines if "cannot write" in line]
        assert "lost_text" not in result.manifest.source


def sampled(texts: Sequence[str], seed: int = 0, part_bytes: int = 1 << 30) -> list[str]:
    """Returns the stretches that are sampled of texts."""
    task = build_task(tiny(Path("unused"))).knowing({}, {"tokenizer": CharacterEncoder("a")})
    sample = TextSample(task, part_bytes, seed=seed)
    for text in texts:
        sample.add((text,))
    return sample._stretches["tokenizer"]


def test_a_sample_is_all_of_a_small_text_and_a_bounded_part_of_a_large_one() -> None:
    words = [f"word{number}" for number in range(5000)]
    assert "".join(sampled([" ".join(words)])) == " ".join(words)
    assert sampled(words[:10]) == words[:10]
    assert "".join(sampled(["x" * 5000])) == "x" * 5000, "a text without blanks is divided as well"
    many = [" ".join(words)] * 100
    assert len(sampled(many)) == MAX_STRETCHES
    assert max(map(len, sampled(many))) <= 2 * STRETCH
    assert {word for stretch in sampled(many) for word in stretch.split()} <= set(words), "no word is cut"
    assert sampled(many) == sampled(many) != sampled(many, seed=1)
    numbers = [int(text) for text in sampled([str(number) for number in range(10_000)])]
    assert abs(sum(numbers) / len(numbers) - 5000) < 500, "all are equally likely"
    assert len(sampled(many, part_bytes=1000)) == 64


PAIRS = [{"text": "a" * size, "target": "b" * 5, "chosen": "c" * size, "rejected": "d"} for size in (5, 12, 40)]


@pytest.mark.parametrize(
    ("task", "data", "cut", "longest"),
    [
        ("classification", {"label_column": "target"}, 1, 40),
        ("translation", {}, 1, 41),
        ("completion", {}, 2, 46),
        ("preference", {"prompt_column": "target"}, 2, 46),
    ],
)
def test_each_task_that_cuts_says_how_much(tmp_path: Path, task: str, data: dict[str, Any], cut: int, longest: int) -> None:
    rows = [row | ({"target": str(number)} if task == "classification" else {}) for number, row in enumerate(PAIRS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    config = settings(tmp_path / "rows.jsonl", task, **{"target_column": "target"} | data)
    objective = replace(config.objective, reference_free=task == "preference")
    config = replace(config, objective=objective, model=replace(config.model, context=16))
    _, lines = prepared(config, tmp_path / "runs")
    share = f"{4 * cut} of 12 examples ({cut / 3:.1%})"
    assert f"data: cut: {share} are longer than model.context allows, the longest has {longest} tokens" in lines


class Short(Classification):
    """Encodes the end of a text."""

    def encode(self, document: Document) -> tuple[Any, None]:
        ids, _ = super().encode((document[0][-3:], *document[1:]))
        return ids, None


def test_an_encode_of_a_users_own_is_used(tmp_path: Path) -> None:
    config = settings(write_labelled(tmp_path))
    task = Short(config)
    prepare(RunContext(config, Folder(str(tmp_path / "runs"))), task, on_ray=False)
    encoders = {"tokenizer": CharacterEncoder("".join(map(chr, range(128))))}
    known = task.knowing({"labels": ["ham", "spam"], "vocabulary_size": 130}, encoders)
    assert len(known.example(("a long text", "ham")).ids) == 4


def test_rows_that_are_dropped_or_skipped_are_shown(tmp_path: Path) -> None:
    texts = write_texts(tmp_path, ["x", *["a longer text"] * 20])
    with texts.open("a") as file:
        file.write("{broken\n")
    config = settings(texts, "language_model", on_error="skip", min_characters=5)
    _, lines = prepared(config, tmp_path / "runs")
    assert "data: left out 1 too short" in lines
    (line,) = [line for line in lines if "skipped" in line]
    assert line.startswith(f"data: 1 files or documents skipped, the first {texts}, the line at byte ")


def test_a_check_shows_the_first_rows_or_all_that_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "FIRST_ROWS", 40)
    context = RunContext(settings(write_labelled(tmp_path)), Folder(str(tmp_path / "runs")))
    assert check_first_rows(context)[:2] == [
        CLASSES[0],
        "classes of the first 40 rows: ham 10, spam 10, Spam 5, cafe\u0301 5, caf\u00e9 5, 'spam\\u200b' 5",
    ]
    prepared(context.config, tmp_path / "runs")
    assert check_first_rows(context) == CLASSES


def test_a_check_shows_all_classes_of_folders(tmp_path: Path) -> None:
    """Their first files are of one class."""
    for split, count in (("train", 30), ("test", 5)):
        for label in ("cat", "dog", "Dog"):
            (tmp_path / "texts" / split / label).mkdir(parents=True)
            for number in range(count):
                (tmp_path / "texts" / split / label / f"{number}.txt").write_text(f"the {label} number {number}")
    lines = check_first_rows(RunContext(settings(tmp_path / "texts"), Folder(str(tmp_path / "runs"))))
    assert "classes of 90 files: Dog 30, cat 30, dog 30" in lines
    assert any("look alike" in line for line in lines)


def test_a_trainings_first_screen_its_end_and_its_page_show_files_and_classes(tmp_path: Path) -> None:
    config, screen, storage = settings(write_labelled(tmp_path)), Lines(), Folder(str(tmp_path / "runs"))
    config = replace(config, run="mine", launch=replace(config.launch, mode="inline"), train=replace(config.train, steps=1))
    train(config, storage, screen)
    begin = [number for number, line in enumerate(screen.lines) if line == f"data: {CLASSES[0]}"]
    assert screen.lines[begin[0] :][:4] == [f"data: {line}" for line in CLASSES]
    closing = screen.lines[-1].splitlines()
    assert f"data     {CLASSES[0]}" in closing
    assert f"         {CLASSES[1]}" in closing
    page = (storage / "mine").read("report.html").decode()
    assert "<h2>Data</h2>" in page
    assert "<li>classes: ham 20, spam 20" in page
