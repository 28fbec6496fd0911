"""A prediction is one file a part in the order of the input, resumes after a kill, and names its refusals."""

import csv
import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from raystride.pipelines.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    PredictorConfig,
    SampleConfig,
    SettingError,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.pieces import File, Part, Slice
from raystride.pipelines.evaluate.load_run import select_run
from raystride.pipelines.evaluate.parts import RECORDS_FOLDER, PredictJob, predict_part
from raystride.pipelines.evaluate.prediction import (
    MANIFEST,
    InputData,
    PredictionResult,
    RowMeter,
    predict,
    predict_locally,
)
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken
from tests.errors import unreadable
from tests.flips import flip
from tests.fork_server import CONTEXT
from tests.pipelines.evaluate.conftest import texts, train, write_rows
from tests.some import some
from tests.tiny import tiny

ROWS = texts(400)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Some kB of questions, enough for several parts."""
    return write_rows(tmp_path / "questions.jsonl", [{"text": row["text"]} for row in ROWS])


def _predict(storage: Folder, source: object, output: Path, run: str = "labels", **changes: Any) -> PredictionResult:
    settings = {key: changes.pop(key) for key in ("precision", "on_error", "batch", "average") if key in changes}
    answering = PredictorConfig(run=run, **settings)
    chosen = select_run(storage, run, "last", answering.average)
    run_parts = changes.pop("run_parts", predict_locally)
    given = InputData(source=str(source), **{key: changes.pop(key) for key in ("kind", "column") if key in changes})
    return predict(chosen, answering, given, Folder(str(output)), run_parts, **{"log": lambda _: None} | changes)


def _rows(output: Path) -> list[dict[str, Any]]:
    rows = []
    for name in json.loads((output / MANIFEST).read_text())["files"]:
        if name.endswith(".parquet"):
            rows += parquet.read_table(output / name).to_pylist()
        else:
            rows += [json.loads(line) for line in (output / name).read_text().splitlines()]
    return rows


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 50))), max_size=12))
def test_a_part_counts_once_however_often_the_progress_is_read(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, int] | None]
) -> None:
    """Parts that finish in any order, one perhaps again with other rows, and readings (None) in between."""
    folder, parts = Folder(str(tmp_path_factory.mktemp("meter"))), [_part(number) for number in range(4)]
    meter, seen, known = RowMeter(folder, parts), dict[int, int](), dict[int, int]()
    for event in [*events, None, None]:
        if event:
            known[event[0]] = event[1]
            (folder / RECORDS_FOLDER).put_json(f"{event[0]:05d}.json", {"rows": event[1]})
            continue
        seen = known | seen
        line = meter.read()
        assert line.startswith(f"{len(seen)}/4 parts, {sum(seen.values()):,} rows, ")
        assert meter.done == sum(parts[number].bytes for number in seen) <= meter.total


def _part(number: int) -> Part:
    file = File("/a", "a", 10 + number)
    return Part(number, (Slice(file, 0, file.size, file.size),), None)


def test_both_formats_hold_all_answers_in_order(trained: Folder, questions: Path, tmp_path: Path) -> None:
    first = _predict(trained, questions, tmp_path / "a")
    assert (first.rows, first.skipped) == (len(ROWS), 0)
    assert len(first.files) > 2
    _predict(trained, questions, tmp_path / "b", form="jsonl")
    rows = _rows(tmp_path / "a")
    assert rows == _rows(tmp_path / "b")
    assert [row["text"] for row in rows] == [row["text"] for row in ROWS]
    assert set(rows[0]) == {"text", "prediction", "probability", "probabilities", "reason"}


def test_a_line_of_a_text_file_is_a_question_whatever_its_column(trained: Folder, tmp_path: Path) -> None:
    lines = tmp_path / "questions.txt"
    lines.write_text("ripe apple\nripe pear\n")
    _predict(trained, lines, tmp_path / "a", form="jsonl")
    named = write_rows(tmp_path / "other.jsonl", [{"fruit": "ripe apple"}, {"fruit": "ripe pear"}])
    _predict(trained, named, tmp_path / "b", form="jsonl", column="fruit")
    one, other = _rows(tmp_path / "a"), _rows(tmp_path / "b")
    assert [row["text"] for row in one] == [row.pop("fruit") for row in other]
    assert [row["prediction"] for row in one] == [row["prediction"] for row in other]


def _answer_slowly(storage: Folder, source: Path, output: Path) -> None:
    """Stands still after two parts, so that the kill comes in the middle."""

    def run_parts(job: PredictJob, parts: list[Part]) -> None:
        predictor = job.load_predictor()
        for part in parts[:2]:
            predict_part(job, predictor, part)
        (output / f"{parts[2].number:05d}.jsonl.tmp-half").write_text("{")
        while True:
            pass

    _predict(storage, source, output, form="jsonl", run_parts=run_parts)


@pytest.mark.long
def test_killed_predictions_resume_with_the_same_result(trained: Folder, questions: Path, tmp_path: Path) -> None:
    fresh: list[str] = []
    _predict(trained, questions, tmp_path / "whole", form="jsonl", log=fresh.append)
    assert not [line for line in fresh if "going on" in line]
    output = tmp_path / "killed"
    process = CONTEXT.Process(target=_answer_slowly, args=(trained, questions, output), daemon=True)
    process.start()
    while not list(output.glob("*.tmp-half")):
        assert process.is_alive()
    process.kill()
    process.join()
    before = {path: path.stat().st_mtime_ns for path in output.glob("*.jsonl")}
    assert len(before) == 2
    assert json.loads((output / MANIFEST).read_text())["complete"] is False
    said: list[str] = []
    _predict(trained, questions, output, form="jsonl", log=said.append)
    assert said[0].startswith("going on with what was interrupted: 2 of ")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert _rows(output) == _rows(tmp_path / "whole")
    assert _predict(trained, questions, output, form="jsonl").rate is None


def test_a_damaged_file_is_made_again(trained: Folder, questions: Path, tmp_path: Path) -> None:
    _predict(trained, questions, tmp_path / "a", form="jsonl")
    whole, folder = _rows(tmp_path / "a"), Folder(str(tmp_path / "a"))
    for name in ("00001.jsonl", f"{RECORDS_FOLDER}/00001.json"):
        content = folder.read(name)
        for damaged in (b"", flip(content, 8 * len(content) // 2)):
            folder.put(name, damaged)
            assert _predict(trained, questions, tmp_path / "a", form="jsonl").rate
            assert _rows(tmp_path / "a") == whole
    written = folder.read(MANIFEST)
    folder.put(MANIFEST, flip(written, 8 * len(written) // 2))
    with pytest.raises(SealBroken, match=rf"{MANIFEST}.*: remove it, and its parts are done again"):
        _predict(trained, questions, tmp_path / "a", form="jsonl")
    folder.remove(MANIFEST)
    said: list[str] = []
    _predict(trained, questions, tmp_path / "a", form="jsonl", log=said.append)
    assert not [line for line in said if "going on" in line], "nothing says what the parts are made of"
    assert _rows(tmp_path / "a") == whole


@pytest.mark.parametrize(
    ("change", "key", "before", "now"),
    [
        ({"precision": "bf16"}, "precision", "fp32", "bf16"),
        ({"average": 2}, "weights", ANY, None),
        ({"form": "jsonl"}, "format", "parquet", "jsonl"),
    ],
)
def test_other_settings_or_weights_are_refused_the_folder(
    trained: Folder, questions: Path, tmp_path: Path, change: dict[str, Any], key: str, before: Any, now: str | None
) -> None:
    _predict(trained, questions, tmp_path / "a")
    names = [f"{key} {before!r} before, {now!r} now" if now else f"{key} "]
    with pytest.raises(SettingError) as raised:
        _predict(trained, questions, tmp_path / "a", **change)
    assert raised.value.allowed == {key: before}
    assert not [name for name in (str(tmp_path / "a"), *names) if name not in str(raised.value)]


def test_other_questions_are_refused_the_folder(trained: Folder, questions: Path, tmp_path: Path) -> None:
    _predict(trained, questions, tmp_path / "a")
    write_rows(questions, [{"text": "another"}])
    with pytest.raises(SettingError, match=r"input '.*' before"):
        _predict(trained, questions, tmp_path / "a")


def test_invalid_inputs_fail_or_are_counted(trained: Folder, tmp_path: Path) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text('{"text": "ripe apple"}\n{"words": "ripe pear"}\n{"text": "ripe plum"}\n')
    with unreadable("bad.jsonl", line=2, column="text", names=["words"]):
        _predict(trained, source, tmp_path / "a")
    found = _predict(trained, source, tmp_path / "b", on_error="skip")
    assert (found.rows, found.skipped) == (2, 1)
    assert "line 2" in found.faults[0]["place"]
    (nothing,) = (row for row in _rows(tmp_path / "b") if row["prediction"] is None)
    assert (nothing["words"], nothing["text"]) == ("ripe pear", None)
    assert "no column" in nothing["reason"]


def test_translations_and_continuations_are_written(trained: Folder, questions: Path, tmp_path: Path) -> None:
    few = write_rows(tmp_path / "few.jsonl", [{"text": row["text"]} for row in ROWS[:6]])
    _predict(trained, few, tmp_path / "a", run="translates")
    assert all(isinstance(row["prediction"], str) for row in some(_rows(tmp_path / "a")))
    _predict(trained, few, tmp_path / "b", run="writes", sample=SampleConfig(tokens=5))
    assert all(len(row["prediction"]) <= 5 for row in some(_rows(tmp_path / "b")))


@pytest.mark.long
def test_ray_answers_the_same(ray_cluster: None, trained: Folder, questions: Path, tmp_path: Path) -> None:
    from raystride.pipelines.launch.cluster.answering import predict_on_ray

    def run_parts(job: PredictJob, parts: list[Part]) -> None:
        predict_on_ray(job, parts, workers=min(2, len(parts)), per_worker={"CPU": 1})

    _predict(trained, questions, tmp_path / "a", run_parts=run_parts, form="jsonl")
    _predict(trained, questions, tmp_path / "b", form="jsonl")
    assert _rows(tmp_path / "a") == _rows(tmp_path / "b")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"words": "ripe pear"}\n')
    with unreadable(line=1, column="text"):
        _predict(trained, bad, tmp_path / "c", run_parts=run_parts)


def test_images_are_answered_by_their_files(tmp_path: Path) -> None:
    for label, shade in (("dark", 20), ("light", 220)):
        for number in range(12):
            path = tmp_path / "pictures" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), shade + number).save(path)
    config = tiny(
        tmp_path,
        task="images",
        data=DataConfig(source=str(tmp_path / "pictures"), validation_fraction=0.3),
        model=ModelConfig(channels=(4,), hidden=(8,)),
        validation=ValidationConfig(every=0),
        checkpoint=CheckpointConfig(every=3),
        train=TrainConfig(steps=3, slots=1, slot_size=8),
    )
    train(config, tmp_path, "pictures-run")
    _predict(Folder(str(tmp_path)), tmp_path / "pictures", tmp_path / "out", run="pictures-run")
    rows = _rows(tmp_path / "out")
    assert len(rows) == 24
    assert rows[0]["image"] == str(tmp_path / "pictures" / "dark" / "0.png")
    assert {row["prediction"] for row in rows} <= {"dark", "light"}


def test_every_column_stays_and_answers_have_names_of_their_own(trained: Folder, tmp_path: Path) -> None:
    rows = [{"id": i, "text": row["text"], "label": "truth", "prediction": None} for i, row in enumerate(ROWS[:9])]
    places = {"jsonl": tmp_path / "a.jsonl", "parquet": tmp_path / "a.parquet", "csv": tmp_path / "a.csv"}
    places["jsonl"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), places["parquet"])
    places["csv"].write_text(
        "id;text;label;prediction\n" + "".join(f"{i};{row['text']};truth;\n" for i, row in enumerate(rows))
    )
    import datasets

    datasets.Dataset.from_list([{**row, "prediction": ""} for row in rows]).save_to_disk(tmp_path / "hub")
    expected: list[Any] = []
    for source in (*places.values(), tmp_path / "hub"):
        for form in ("parquet", "jsonl"):
            _predict(trained, source, output := tmp_path / f"{source.name}-{form}", form=form)
            found = _rows(output)
            names = ["id", "text", "label", "prediction", "prediction_given", "probability", "probabilities", "reason"]
            assert [list(row) for row in found] == [names] * 9
            assert [(int(row["id"]), row["text"], row["label"]) for row in found] == [
                (row["id"], row["text"], "truth") for row in rows
            ]
            for row in found:
                assert set(row["probabilities"]) == {"apple", "pear", "plum"}
                assert max(row["probabilities"], key=row["probabilities"].get) == row["prediction_given"]
            answers = [row["prediction_given"] for row in found]
            expected = expected or answers
            assert answers == expected


def test_values_of_several_types_become_text(trained: Folder, tmp_path: Path) -> None:
    mixed = write_rows(tmp_path / "a.jsonl", [{"text": "ripe pear", "n": value} for value in (1, "x", None, [2])])  # type: ignore
    _predict(trained, mixed, tmp_path / "a")
    assert [row["n"] for row in _rows(tmp_path / "a")] == ["1", "x", None, "[2]"]


def test_a_folder_in_which_nothing_was_answered_is_free(trained: Folder, questions: Path, tmp_path: Path) -> None:
    def nobody(job: PredictJob, parts: list[Part]) -> None:
        (tmp_path / "a" / "00000.parquet").write_text("half")
        raise DataError("the disk is gone")

    with pytest.raises(DataError):
        _predict(trained, questions, tmp_path / "a", run_parts=nobody)
    write_rows(questions, [{"text": "ripe apple"}])
    assert _predict(trained, questions, tmp_path / "a", form="jsonl").files == ["00000.jsonl"]
    assert not (tmp_path / "a" / "00000.parquet").exists()
    with unreadable(column="body"):
        _predict(trained, questions, tmp_path / "c", column="body")
    assert not (tmp_path / "c").exists()


ASKED = ["ripe apple", "", "ripe pear", "", "", 'a "ripe" plum', ""]


def _as_json(folder: Path) -> Path:
    rows = [{"text": text or None, "n": number} for number, text in enumerate(ASKED)]
    (folder / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))  # a blank line is no row
    return folder / "a.jsonl"


def _as_array(folder: Path) -> Path:
    (folder / "a.json").write_text(json.dumps([{"text": text, "n": number} for number, text in enumerate(ASKED)]))
    return folder / "a.json"


def _as_csv(folder: Path) -> Path:
    with (folder / "a.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("n", "text"), *enumerate(ASKED)])
    return folder / "a.csv"


def _as_tsv_gz(folder: Path) -> Path:
    content = "".join(f"{number}\t{text}\n" for number, text in [("n", "text"), *enumerate(ASKED)])
    (folder / "a.tsv.gz").write_bytes(gzip.compress(content.encode()))
    return folder / "a.tsv.gz"


def _as_parquet(folder: Path) -> Path:
    table = pa.table({"n": range(len(ASKED)), "text": [text or None for text in ASKED]})
    parquet.write_table(table, folder / "a.parquet", row_group_size=3)
    return folder / "a.parquet"


def _as_dataset(folder: Path) -> Path:
    import datasets

    datasets.Dataset.from_dict({"text": ASKED, "n": range(len(ASKED))}).save_to_disk(folder / "hub")
    return folder / "hub"


def _as_lines(folder: Path) -> Path:
    (folder / "a.txt").write_text("".join(f"{text}\n" for text in ASKED))
    return folder / "a.txt"


def _as_folder(folder: Path) -> Path:
    for number, text in enumerate(ASKED):
        (folder / "in" / str(number)).mkdir(parents=True)
        (folder / "in" / str(number) / "a.txt").write_text(text)
    return folder / "in"


def _as_tar(folder: Path) -> Path:
    import io
    import tarfile

    with tarfile.open(folder / "a.tar", "w") as tar:
        for number, text in enumerate(ASKED):
            for ending, content in (("txt", text), ("json", json.dumps({"n": number}))):
                info = tarfile.TarInfo(f"{number}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content.encode()))
    return folder / "a.tar"


FORMS = [_as_json, _as_array, _as_csv, _as_tsv_gz, _as_parquet, _as_dataset, _as_lines, _as_folder, _as_tar]


@pytest.mark.parametrize("write", FORMS)
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_every_row_comes_out_in_its_place(trained: Folder, tmp_path: Path, write: Callable[[Path], Path], form: str) -> None:
    source = write(tmp_path)
    kind = {"_as_folder": "folders", "_as_tar": "webdataset"}.get(write.__name__, "auto")
    found = _predict(trained, source, tmp_path / "out", form=form, kind=kind)
    assert (found.rows, found.skipped) == (3, 4)
    assert len(found.faults) == 4
    rows = _rows(tmp_path / "out")
    assert [row["text"] or "" for row in rows] == ASKED
    if "n" in rows[0]:
        assert [int(row["n"]) for row in rows] == list(range(len(ASKED)))
    for row, text in zip(rows, ASKED, strict=True):
        assert (row["prediction"] is None, row["probability"] is None) == (not text, not text)
        assert bool(row["reason"]) == (not text)


def test_rows_that_are_none_come_out_if_they_are_skipped(trained: Folder, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(
        '{"text": "ripe apple", "id": 1}\nno json\n[1]\n{"text": 7, "id": 2}\n{"text": "ripe pear", "id": 3}\n'
    )
    for form in ("parquet", "jsonl"):
        found = _predict(trained, source, tmp_path / form, form=form, on_error="skip")
        assert (found.rows, found.skipped) == (2, 3)
        rows = _rows(tmp_path / form)
        assert [row.get("id") for row in rows] == [1, None, None, 2, 3]
        assert [row["prediction"] is None for row in rows] == [False, True, True, True, False]
    source.write_bytes(b"ripe apple\nbad \xff\n\nripe pear\n")
    found = _predict(trained, source, tmp_path / "lines", kind="lines", on_error="skip")
    assert [row["reason"] is None for row in _rows(tmp_path / "lines")] == [True, False, False, True]


def test_a_question_that_nothing_can_be_said_to_is_written_without_an_answer(trained: Folder, tmp_path: Path) -> None:
    for run in ("labels", "translates", "writes"):
        source = write_rows(tmp_path / "a.jsonl", [{"text": ""}, {"text": ""}])
        found = _predict(trained, source, tmp_path / run, run=run, sample=SampleConfig(tokens=3))
        assert (found.rows, found.skipped) == (0, 2)
        assert [row["prediction"] for row in _rows(tmp_path / run)] == [None, None]
    source.write_text("")
    with unreadable("a.jsonl", names=["empty"]):
        _predict(trained, source, tmp_path / "none")


def test_outputs_are_read_as_folders(trained: Folder, tmp_path: Path) -> None:
    """Though types and columns of parts differ, and one was killed in the middle."""
    import pandas

    texts = [row["text"] for row in ROWS]
    rows: list[dict[str, Any]] = [{"text": text, "n": number, "none": None} for number, text in enumerate(texts)]
    for number, row in enumerate(rows):
        half = number > len(rows) / 2
        row |= {"m": str(number) if half else number, "tags": [], "late": {}} | (
            {"late": {"x": 1}, "tags": ["t"]} if half else {}
        )
    rows[5] |= {"prediction": "theirs", "prediction_given": "too", "reason": "why"}
    source = write_rows(tmp_path / "a.jsonl", rows)
    output = tmp_path / "out"
    output.mkdir()
    (output / "00000.parquet.tmp-0123abcd").write_text("half")
    assert len(_predict(trained, source, output).files) > 2
    found = pandas.read_parquet(output)
    assert list(found["text"]) == texts
    assert list(found["m"]) == [str(row["m"]) for row in rows]
    assert found["tags"][399].tolist() == ["t"]
    assert parquet.read_table(output).num_rows == len(texts)
    assert len({parquet.read_schema(path) for path in output.glob("*.parquet")}) == 1
    assert set(found["prediction_given_given"]) <= {"apple", "pear", "plum"}
    assert (found["prediction"][5], found["prediction_given"][5], found["reason"][5]) == ("theirs", "too", "why")
    assert list(found.columns)[-1] == "reason_given"
    names = {path.name for path in output.iterdir() if not path.name.endswith(".parquet")}
    assert names == {MANIFEST, "_raystride"}
    assert _predict(trained, source, output).rate is None
    again = _predict(trained, output, tmp_path / "again")
    assert again.rows == len(texts)


def test_arrow_schemas_are_kept(trained: Folder, tmp_path: Path) -> None:
    import datasets

    from tests.pipelines.evaluate.test_rows import ARROW

    table = ARROW.set_column(0, "text", pa.array(["ripe apple", None, "ripe pear"], pa.large_string()))
    (tmp_path / "in").mkdir()
    parquet.write_table(table, tmp_path / "in" / "0.parquet", row_group_size=2)
    more = table.drop_columns(["money"]).append_column("late", pa.array([1, 2, 3], pa.int16()))
    parquet.write_table(more, tmp_path / "in" / "1.parquet")
    _predict(trained, tmp_path / "in", output := tmp_path / "out")
    found = parquet.read_table(output)
    assert found.num_rows == 6
    for column in table.schema:
        assert found.schema.field(column.name).type == column.type
        values = found[column.name].to_pylist()
        assert repr(values[:3]) == repr(table[column.name].to_pylist())
    assert found["late"].to_pylist() == [None, None, None, 1, 2, 3]
    assert len({parquet.read_schema(path) for path in output.glob("*.parquet")}) == 1
    plain = table.drop_columns(["map", "nothing", "kind", "took", "time"])  # which the library has not
    datasets.Dataset(plain).save_to_disk(tmp_path / "hub")
    _predict(trained, tmp_path / "hub", tmp_path / "hub-out")
    found = parquet.read_table(tmp_path / "hub-out")
    assert {name: found.schema.field(name).type for name in plain.column_names} == {
        name: datasets.load_from_disk(tmp_path / "hub").data.schema.field(name).type for name in plain.column_names
    }
    _predict(trained, tmp_path / "in", tmp_path / "lines", form="jsonl")
    first = _rows(tmp_path / "lines")[0]
    assert (first["when"][-9:], first["big"], first["map"]) == ("123456789", 2**64 - 1, {"k": 1})


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_columns_of_one_name_all_stay(trained: Folder, tmp_path: Path, form: str) -> None:
    (tmp_path / "a.csv").write_text("n,text,n,n.1\n1,ripe apple,2,3\n")
    columns = [pa.array([value]) for value in ("1", "ripe apple", "2", "3")]
    parquet.write_table(pa.Table.from_arrays(columns, names=["n", "text", "n", "n.1"]), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        _predict(trained, tmp_path / name, tmp_path / f"{name}-out", form=form)
        (row,) = _rows(tmp_path / f"{name}-out")
        assert [row[column] for column in ("n", "n.2", "n.1")] == ["1", "2", "3"]


def test_json_lines_hold_no_nan(trained: Folder, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ripe apple", "t": NaN, "u": [Infinity]}\n')
    parquet.write_table(pa.table({"text": ["ripe apple"], "t": [math.nan], "u": [[math.inf]]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        _predict(trained, tmp_path / name, output := tmp_path / f"{name}-out", form="jsonl")
        line = (output / "00000.jsonl").read_text()
        assert json.loads(line, parse_constant=pytest.fail)["t"] is None


def _write_version_0_2(output: Path, *, complete: bool) -> None:
    manifest = json.loads((output / MANIFEST).read_text())
    (output / MANIFEST).unlink()
    (output / "predictions.json").write_text(json.dumps(manifest | {"complete": complete}))
    (output / "_raystride").rename(output / "parts")


def test_outputs_of_earlier_versions_are_found_or_refused(trained: Folder, questions: Path, tmp_path: Path) -> None:
    whole = _predict(trained, questions, tmp_path / "a", form="jsonl")
    _write_version_0_2(tmp_path / "a", complete=True)
    again = _predict(trained, questions, tmp_path / "a", form="jsonl")
    assert (again.rate, again.rows, again.files) == (None, whole.rows, whole.files)
    with pytest.raises(SettingError, match="precision"):
        _predict(trained, questions, tmp_path / "a", form="jsonl", precision="bf16")
    _predict(trained, questions, tmp_path / "b", form="jsonl")
    _write_version_0_2(tmp_path / "b", complete=False)
    with pytest.raises(SettingError) as raised:
        _predict(trained, questions, tmp_path / "b", form="jsonl")
    assert (raised.value.setting, "earlier version" in str(raised.value)) == ("output", True)
    for path in (tmp_path / "b").glob("*.jsonl"):
        path.unlink()
    assert _predict(trained, questions, tmp_path / "b", form="jsonl").rows == whole.rows
    assert not (tmp_path / "b" / "predictions.json").exists()
    assert not (tmp_path / "b" / "parts").exists()
