"""A row of a table is what its header says: it comes out as it was put in, or is refused by its line."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources.csv_reader import CsvReader
from raystride.pipelines.data.sources.dialects import CsvSettings
from raystride.pipelines.data.sources.faults import Fault, FaultError
from raystride.pipelines.data.sources.pieces import File, Slice
from raystride.pipelines.data.tasks.task import Column
from tests.errors import unreadable
from tests.pipelines.data.sources.documents import open_documents

TEXT = Column("data.column", "text")
NAMED = (TEXT, Column("data.label_column", "label", "label"))


def read(path: Path, columns: tuple[Column, ...] = NAMED, **data: Any) -> list[tuple[str, ...]]:
    found = open_documents(DataConfig(source=str(path), **data), str(path), columns)
    return [document for part in found.parts for _, document in found.read(part)]


def written(path: Path, content: str) -> Path:
    path.write_text(content, newline="")
    return path


GOOD = "".join(f"plain text {number},{('ham', 'spam')[number % 2]}\n" for number in range(60))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (f"text,label\n{GOOD}plain, but,ham\n", 62),
        ("label,text\n" + "spam,good text\n" * 60 + "spam,hello, my friend\n", 62),
        ("text,label\nhello, world 1,spam\nhello, world 2,ham\n", 2),
        ("text,label\nhello,world, 3,spam\n", 2),
        ("text,label,id\none,ham,1\ntwospam,2\n", 3),
        ("text,label\none,ham\ntwo,spam,,x\n", 3),
        ('text,label\none, "ham\nor, spam"\n', 2),
    ],
)
@pytest.mark.parametrize("ending", [".csv", ".tsv", ";.csv"])
def test_a_row_with_other_fields_is_refused_by_its_line(tmp_path: Path, content: str, line: int, ending: str) -> None:
    delimiter = {".csv": ",", ".tsv": "\t", ";.csv": ";"}[ending]
    path = written(tmp_path / f"rows{ending}", content.replace(",", delimiter))
    if '"' in content and ending == ".tsv":
        return  # between tabs these quotes are text
    with unreadable(path.name, line=line, names=["--data.on_error skip"]):
        read(path)
    # What follows a quote that is not closed is read by its fields alone.
    assert '"' in content or all(label in ("ham", "spam") for _, label in read(path, on_error="skip"))


def test_what_is_surplus_and_empty_is_no_fault(tmp_path: Path) -> None:
    wanted = [("one", "ham"), ("two", "spam")]
    for content in (
        "text,label\none,ham,\ntwo,spam,\n",
        "text,label,\none,ham,\ntwo,spam,\n",
        "text,label,\none,ham\ntwo,spam\n",
        "text,label\none,ham,, \ntwo,spam\n,,,,\n\n , , \n",
        ",text,label\n0,one,ham\n1,two,spam\n",
    ):
        assert read(written(tmp_path / "rows.csv", content)) == wanted, content
    path = written(tmp_path / "rows.csv", "label,text,note\nham,one,,\nspam,two,,\n")
    assert read(path) == wanted
    with unreadable("rows.csv", line=3):  # has it lost a delimiter before a column that is empty?
        read(written(tmp_path / "rows.csv", "a,text\nx,one\n,x,\n"), (TEXT,))


def test_the_first_row_without_a_header_may_be_the_wrong_one(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.csv", "hello, my friend,ham\none,ham\ntwo,spam\n")
    columns = (Column("data.column", "0"), Column("data.label_column", "1", "label"))
    with unreadable("rows.csv", line=1):
        read(path, columns, header=False)
    assert read(path, columns, header=False, on_error="skip") == [("one", "ham"), ("two", "spam")]


def test_files_put_together_keep_no_header_as_a_document(tmp_path: Path) -> None:
    content = "text,label\none,x\ntwo,y\ntext,label\nthree,x\n Text,LABEL\nfour,y\n"
    assert read(written(tmp_path / "rows.csv", content)) == [("one", "x"), ("two", "y"), ("three", "x"), ("four", "y")]
    assert read(written(tmp_path / "rows.csv", "text\none\ntext\ntwo\n"), (TEXT,)) == [("one",), ("two",)]
    for other in ("label,text\nx,three", "id,label,text\n3,x,three", "label,text,id\nx,three,", "text,id,label\nthree,,x"):
        path = written(tmp_path / "rows.csv", f"text,label\none,x\ntwo,y\n{other}\n")
        with unreadable("rows.csv", line=4, names=["another header", other.partition("\n")[0].replace(",", " | ")]):
            read(path)
        assert read(path, on_error="skip") == [("one", "x"), ("two", "y")]


def test_rulers_are_no_documents(tmp_path: Path) -> None:
    wanted = [("one", "x"), ("two", "y")]
    for ruler in ("-----,-----", ":---,---:", "====,==", " ----- , ---"):
        assert read(written(tmp_path / "rows.csv", f"text,label\n{ruler}\none,x\n{ruler}\ntwo,y\n")) == wanted
    path = written(tmp_path / "rows.csv", "text\n----\none\n----\ntwo\n")
    assert read(path, (TEXT,)) == [("one",), ("----",), ("two",)]
    assert read(written(tmp_path / "rows.csv", "text,label\n-,--\n")) == [("-", "--")]


def test_blanks_before_a_quote_are_not_part_of_a_field(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.csv", 'text,label\n"b", "x"\n"c",  "x, ""y"""\n" ""d""", z\n" ""e""",  "z"\n')
    assert read(path) == [("b", "x"), ("c", 'x, "y"'), (' "d"', "z"), (' "e"', "z")]
    with unreadable("rows.csv", line=2, column="text", names=["--data.quote none"]):
        read(written(tmp_path / "rows.csv", 'label,text\nx, "b" c\n'))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, form: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = written(tmp_path / f"rows.{form}", "text,label,text\none,ham,other\n")
    if form == "parquet":
        pq.write_table(pa.table([pa.array([value]) for value in ("one", "ham", "other")], ["text", "label", "text"]), path)
    with unreadable(path.name, column="text", names=["2 columns 'text'"]):
        read(path)
    assert read(path, (Column("data.column", "label"),)) == [("ham",)]


def _insert(lines: list[str], line: int, at: float, delimiter: str) -> None:
    position = round(at * len(lines[line]))
    lines[line] = lines[line][:position] + delimiter + lines[line][position:]


def _remove(lines: list[str], line: int, at: float, delimiter: str) -> None:
    places = [index for index, character in enumerate(lines[line]) if character == delimiter]
    place = places[min(int(at * len(places)), len(places) - 1)]
    lines[line] = lines[line][:place] + lines[line][place + 1 :]


def _repeat_header(lines: list[str], line: int, at: float, delimiter: str) -> None:
    lines.insert(line, lines[0])


def _other_header(lines: list[str], line: int, at: float, delimiter: str) -> None:
    """As if a file with the columns in another order were appended."""
    for number in range(line, len(lines)):
        lines[number] = delimiter.join(reversed(lines[number].split(delimiter)))
    lines.insert(line, delimiter.join(reversed(lines[0].split(delimiter))))


def _ruler(lines: list[str], line: int, at: float, delimiter: str) -> None:
    lines.insert(line, delimiter.join(["----"] * (lines[0].count(delimiter) + 1)))


def _end_lines(lines: list[str], line: int, at: float, delimiter: str) -> None:
    lines[line:] = [row + delimiter for row in lines[line:]]


def _move_quote(lines: list[str], line: int, at: float, delimiter: str) -> None:
    quote = "" if delimiter == "\t" else '"'  # between tabs quotes are text
    lines[line] = delimiter.join(f" {quote}{field}{quote}" for field in lines[line].split(delimiter))


BREAKS = [_insert, _remove, _repeat_header, _other_header, _ruler, _end_lines, _move_quote]
FIELD = st.text(st.sampled_from("abcé 1.-'\U0001f600"), min_size=1, max_size=6).filter(lambda field: field.strip() == field)


@given(
    rows=st.integers(2, 4).flatmap(
        lambda width: st.lists(st.lists(FIELD, min_size=width, max_size=width), min_size=1, max_size=8)
    ),
    names=st.permutations(["text", "label", "id", "note"]),
    delimiter=st.sampled_from(",;\t|"),
    spoil=st.sampled_from(BREAKS),
    line=st.integers(0, 99),
    at=st.floats(0, 1),
    columns=st.sampled_from([NAMED, NAMED[:1], NAMED[1:]]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_document_comes_out_that_was_not_put_in(
    tmp_path: Path,
    rows: list[list[str]],
    names: list[str],
    delimiter: str,
    spoil: Callable[[list[str], int, float, str], None],
    line: int,
    at: float,
    columns: tuple[Column, ...],
) -> None:
    wanted = [column.name for column in columns]
    header = sorted(names[: len(rows[0])], key=names.index)
    header = [*dict.fromkeys([*wanted, *header])][: len(rows[0])]
    header.sort(key=names.index)
    lines = [delimiter.join(row) for row in [header, *rows]]
    put_in = {tuple(row[header.index(name)] for name in wanted) for row in rows}
    spoil(lines, 1 + line % len(rows), at, delimiter)
    path = written(tmp_path / "rows.csv", "".join(f"{row}\n" for row in lines))
    reader, found, faults = CsvReader(columns, CsvSettings(delimiter=delimiter)), set(), []
    try:
        for item in reader.read(Slice(File(str(path), "rows.csv", path.stat().st_size), 0, None, 0)):
            if isinstance(item, Fault):
                faults.append(item)
            else:
                found.add(tuple(field.strip() for field in item.document))
    except FaultError as faulty:
        faults.append(faulty.fault)
    assert put_in.issuperset(found)
    assert put_in == found if not faults else all(", line " in fault.place for fault in faults)


def test_a_well_formed_table_is_read_whole(tmp_path: Path) -> None:
    stream = io.StringIO(newline="")
    rows = [["text", "label"], *([f'{i}, "quoted"\nand more', str(i % 3)] for i in range(500))]
    csv.writer(stream).writerows(rows)
    assert read(written(tmp_path / "rows.csv", stream.getvalue())) == [tuple(row) for row in rows[1:]]
