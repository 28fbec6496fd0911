"""Tables with any delimiter, with a header or without; an error for an ambiguous one shows its first line."""

import csv
import gzip
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.data.prepare.fingerprint import identity, known_fingerprints
from raystride.pipelines.data.prepare.opened_sources import open_sources
from raystride.pipelines.data.sources.faults import DataError, Fault
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.task import Column
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused, unreadable
from tests.pipelines.data.sources.documents import open_documents

TEXTS = ['Fears for T, N; "pension" | talks', "two\nlines", "naïve\tjoke, 日本語", "The rest; of it, all"] * 5
LABELS = ["3", "4", "2", "1"] * 5
NAMED = (Column("data.column", "text"), Column("data.label_column", "label", "label"))
BY_NUMBER = (Column("data.column", "2"), Column("data.label_column", "0", "label"))


def write(path: Path, delimiter: str = ",", *, header: list[str] | None = None, end: str = "\r\n", quoting: int = 0) -> Path:
    """Rows of a label, a title and a text; `end` is that of lines."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter, lineterminator=end, quoting=quoting)  # type: ignore[arg-type]
        writer.writerows([header] if header else [])
        writer.writerows([label, f"title {i}", text] for i, (label, text) in enumerate(zip(LABELS, TEXTS, strict=True)))
    return path


def read(path: Path, wanted: tuple[Column, ...] = NAMED, **data: Any) -> list[tuple[str, ...]]:
    found = open_documents(DataConfig(source=str(path), **data), str(path), wanted)
    return [document for part in found.parts for _, document in found.read(part)]


EXPECTED = list(zip(TEXTS, LABELS, strict=True))


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_any_usual_delimiter_is_found(tmp_path: Path, delimiter: str, suffix: str, end: str) -> None:
    header = write(tmp_path / f"a{suffix}", delimiter, header=["label", "title", "text"], end=end)
    assert read(header) == EXPECTED
    bare = write(tmp_path / f"b{suffix}", delimiter, end=end)
    assert read(bare, BY_NUMBER) == EXPECTED
    assert read(bare, columns=("label", "title", "text")) == EXPECTED


@pytest.mark.parametrize(
    ("name", "character"), [("semicolon", ";"), ("pipe", "|"), ("tab", "\t"), ("~", "~"), ("\\t", "\t")]
)
def test_a_named_delimiter_is_taken(tmp_path: Path, name: str, character: str) -> None:
    path = write(tmp_path / "rows.csv", character, header=["label", "title", "text"])
    assert read(path, delimiter=name) == EXPECTED


@pytest.mark.parametrize("wrong", ["", "ab", '"', "\n"])
def test_no_delimiter(wrong: str) -> None:
    with refused("data.delimiter", wrong):
        DataConfig(delimiter=wrong)


def test_names_are_in_place_of_a_header(tmp_path: Path) -> None:
    names = ("label", "title", "text")
    assert read(write(tmp_path / "a.csv", header=["x", "y", "z"]), header=True, columns=names) == EXPECTED
    assert read(write(tmp_path / "b.csv", header=list(names)), columns=names) == EXPECTED
    assert read(write(tmp_path / "c.csv"), header=False, columns=names) == EXPECTED
    with unreadable("a.csv", settings=("data.columns", "data.delimiter"), names=["3 fields", "x | y | z"]):
        read(tmp_path / "a.csv", header=True, columns=names[1:])


def test_a_mark_quotes_and_other_encodings(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", ";", quoting=csv.QUOTE_ALL)
    content = path.read_bytes().decode()
    path.write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert read(path, BY_NUMBER, header=False) == EXPECTED
    path.write_bytes(content.encode("utf-16"))
    assert read(path, BY_NUMBER, encoding="utf-16") == EXPECTED
    with unreadable("rows.csv", line=None, settings=("data.encoding",), names=["utf-16"]):
        read(path)
    path.write_bytes(b"label;text\n1;caf\xe9\n")
    assert read(path, encoding="latin-1") == [("café", "1")]
    with unreadable("rows.csv", line=2, column="text", settings=("data.encoding", "data.on_error"), names=["latin-1"]):
        read(path)


def test_what_is_missing_is_asked_for_with_what_was_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv")
    seen = r"first line looks like data: 3 \| title 0 \| Fears for T, N; \"pens\.\.\.; if there is no header give "
    with pytest.raises(
        DataError, match=rf"rows.csv: has no column 'text': the {seen}--data.header false and columns by number"
    ):
        read(path)
    with unreadable("rows.csv", column="text", names=["1: title 0", "--data.column NUMBER", "--data.columns"]):
        read(path, header=False)
    with unreadable("rows.csv", column="7", names=["0 to 2", "--data.column"]):
        read(path, (Column("data.column", "7"),), header=False)
    path.write_text("id;body\n1;some words\n")
    with unreadable("rows.csv", column="text", names=["id, body", "--data.col"]):
        read(path)
    path.write_text("apple,pear\nplum,fig\n")
    with unreadable("rows.csv", settings=("data.header",), names=["apple | pear"]):
        read(path, (Column("data.column", "0"),))
    assert read(path, (Column("data.column", "0"),), header=True) == [("plum",)]
    assert read(path, (Column("data.column", "0"),), header=False) == [("apple",), ("plum",)]
    path.write_text("label,text\nspam,one\nham\n")
    with unreadable("rows.csv", line=3, column="text", settings=("data.delimiter", "data.on_error"), names=["ham"]):
        read(path)


def test_a_line_of_names_over_numbers_is_none_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("stars,words\n" + "".join(f"{i % 5},text {i}\n" for i in range(9)))
    assert len(read(path, (Column("data.column", "1"),))) == 9


def known(config: Config) -> list[str]:
    """Returns the fingerprint of a source, and those of the same source in earlier versions."""
    task = build_task(config)
    return list(known_fingerprints(config, task, *open_sources(config, task)))


def test_a_run_of_an_earlier_version_finds_its_preparation_and_a_new_one_reads_by_the_new_rules(tmp_path: Path) -> None:
    """The numbers are those of the version before these settings."""
    path = tmp_path / "rows.csv"
    path.write_bytes(b"label,text\r\n1,one\r\n")
    os.utime(path, ns=(10**18, 10**18))
    config = replace(Config(), data=DataConfig(source=str(path)))
    assert known(config)[2:] == ["ae74bc2a9b3addfb"] * 2
    before, storage = identity(config, build_task(config)).data, Folder.from_uri(str(tmp_path))
    assert before == known(config)[0] != "ae74bc2a9b3addfb"
    (storage / ".prepared/ae74bc2a9b3addfb").put("manifest.json", "{}")
    assert identity(config, build_task(config), storage=storage).data == before
    assert replace(config, data=DataConfig(source="rows.csv")).default_run_of_0_3("p") == "p-8cef1478"
    for change in ({"header": True}, {"delimiter": "comma"}, {"columns": ("a", "text")}):
        other = replace(config, data=replace(config.data, **change))  # type: ignore[arg-type]
        assert identity(other, build_task(other)).data != before
    assert replace(config, data=replace(config.data, header=False)).default_run("p") != config.default_run("p")


ANY = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('",;\t\n\r '), max_size=9)
FIELDS = st.lists(st.tuples(ANY, ANY, ANY), min_size=1, max_size=12)


@given(rows=FIELDS, delimiter=st.sampled_from(",;|~"), quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
       end=st.sampled_from(["\n", "\r\n", "\r"]), head=st.sampled_from([40, 1 << 16]))  # fmt: skip
@hypothesis_settings(max_examples=60, deadline=None)
def test_what_a_writer_of_csv_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str, str]],
    delimiter: str,
    quoting: int,
    end: str,
    head: int,
) -> None:
    stream = io.StringIO(newline="")
    quoting = quoting if end == "\r\n" else csv.QUOTE_ALL  # Python's writer quotes line ends of the other kind alone then
    writer = csv.writer(stream, delimiter=delimiter, lineterminator=end, quoting=quoting)  # type: ignore[arg-type]
    writer.writerows([["label", "title", "text"], *rows])
    path = tmp_path_factory.mktemp("any") / "rows.csv"
    path.write_bytes(stream.getvalue().encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raystride.pipelines.data.sources.dialects.HEAD_BYTES", head)
        patch.setattr("raystride.pipelines.data.sources.csv_reader.HEAD_BYTES", head)
        found = read(path, on_error="skip", delimiter=delimiter)
    assert found == [(text, label.strip()) for label, _, text in rows if text and label.strip()]


@given(rows=st.lists(st.tuples(*[st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.just('"'), max_size=9)] * 2),
                     min_size=1, max_size=12))  # fmt: skip
@hypothesis_settings(max_examples=60, deadline=None)
def test_without_quotes_all_text_between_tabs_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("any") / "rows.tsv"
    path.write_text("".join(f"{text}\t{label}\n" for text, label in [("text", "label"), *rows]), newline="")
    found = read(path, on_error="skip", quote="none")
    assert found == [(text, label.strip()) for text, label in rows if text and label.strip()]


def test_only_a_field_that_begins_with_a_quote_or_blanks_before_it_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('label,text\n1,5" pipe\n2,he said "yes"\n3, "no", \n4,"a ""b"", c"\n')
    assert read(path) == [('5" pipe', "1"), ('he said "yes"', "2"), ("no", "3"), ('a "b", c', "4")]


BROKEN = [  # a file, and line and column of where the field begins
    ("rows.csv", 'text,label\n"Hello,a\nx,b\ny,c\n', 2, "text"),
    ("rows.csv", 'text,label\nx,b\n"Hello,a\nx,b\n"Bye,a\n', 3, "text"),
    ("rows.csv", 'text,label\n"a" b,c\n', 2, "text"),
    ("rows.csv", 'text,label\n"two\nlines" x,c\n', 2, "text"),
    ("rows.csv", 'text,label\n"two\nlines","x\ny"z\n', 3, "label"),
    ("rows.csv", 'text,label\nx,"b', 2, "label"),
    ("rows.csv", '"text,label\nx,b\n', 1, "0"),
    ("rows.csv", '"text" y,label\nx,b\n', 1, "0"),
    ("rows.csv", 'text;label\rx;b\r"x;c\r', 3, "text"),
    ("rows.csv", 'text,label\r\nx,b\r\n"x,c\r\n', 3, "text"),
    ("rows.csv", "text,label\n" + "x,b\n" * 40_000 + '"x,c\n' + "x,b\n" * 40_000, 40_002, "text"),
]


@pytest.mark.parametrize(("name", "content", "line", "column"), BROKEN)
def test_a_quoted_field_without_an_end_is_named_by_its_beginning(
    tmp_path: Path, name: str, content: str, line: int, column: str
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
    for file in (name, f"{name}.gz"):
        with unreadable(
            file, line=line, column=column, settings=("data.quote", "data.on_error"), names=["--data.quote none"]
        ):
            read(tmp_path / file)
    if line > 1:
        assert len(read(tmp_path / name, quote="none", on_error="skip")) > 0


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_what_follows_a_row_that_is_none_is_read(tmp_path: Path, end: str, name: str) -> None:
    rows = [f"word {number},{number % 2}" for number in range(200)]
    rows[10], rows[50], rows[120], rows[199] = '"Hello,0', '"Bye,0', '"two" x,0', '"open,1'
    rows[30] = f'"lines{end}of{end}one",1'
    content = end.join(["text,label", *rows]).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    found = read(tmp_path / name, on_error="skip")
    wanted = [tuple(row.rsplit(",", 1)) for row in rows if '"' not in row]
    assert [row for row in found if "\n" not in row[0] and "\r" not in row[0]] == wanted
    assert len(found) == 196
    (part,) = open_documents(DataConfig(on_error="skip"), str(tmp_path / name), NAMED).parts
    source = open_source(DataConfig(), str(tmp_path / name), NAMED)
    faults = [item.place.rpartition(" ")[2] for item in source.reader.read(part.slices[0]) if isinstance(item, Fault)]
    assert faults == ["12", "54", "124", "203"]


def test_the_rest_of_a_row_that_is_none_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('text,label\n"one, two\nthree\nfour, five, six" x,1\nseven,1\n')
    assert read(tmp_path / "rows.csv", on_error="skip") == [("seven", "1")]


TABS = [  # rows, and whether quotes quote
    ('text\tlabel\n"Hello\ta\nx\tb\n"Bye\ta\n', False),
    ('text\tlabel\n"Hello," he said.\ta\n', False),
    ('text\tlabel\n"All of it."\ta\nnot "all" of it\tb\n', False),
    ('text\tlabel\n"All of it."\ta\nnothing\tb\n', False),
    ('text\tlabel\n"begins\ta\nx\tb\nends"\ta\n', False),
    ('text\tlabel\n"two\nlines"\ta\nx\tb\n', True),
    ('text\tlabel\n"a\ttab"\ta\nx\tb\n', True),
    ('"text"\t"label"\n"x"\t"a"\n', True),
    ('text\tlabel\n"he said ""yes"""\ta\nx\tb\n', True),
]


@pytest.mark.parametrize(("content", "quoted"), TABS)
@pytest.mark.parametrize("name", ["rows.tsv", "rows.csv"])
def test_between_tabs_quotes_are_text_unless_the_first_rows_show_otherwise(
    tmp_path: Path, content: str, quoted: bool, name: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    if quoted:
        wanted = [tuple(row) for row in csv.reader(io.StringIO(content), delimiter="\t")][1:]
    else:
        wanted = [tuple(line.split("\t")) for line in content.splitlines()[1:]]
    assert read(path) == wanted
    (line,) = open_source(DataConfig(source=str(path)), str(path), NAMED).describe()
    assert line.startswith(f"quotes in {path}")
    assert ("quote fields, as" in line) == quoted


def test_what_comes_otherwise_than_before_is_prepared_anew(tmp_path: Path) -> None:
    """And nothing else is: the numbers are those of the version before `data.quote`."""
    found = {}
    for name, content in [
        ("plain.tsv", b"label\ttext\n1\tone\n"),
        ("quoted.tsv", b'label\ttext\n1\t"two\nlines"\n'),
        ("middle.tsv", b'label\ttext\n1\t5" pipe\n'),
        ("stray.tsv", b'label\ttext\n1\t"one\n2\t"two\n'),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        os.utime(path, ns=(10**18, 10**18))
        config = replace(Config(), data=DataConfig(source=str(path)))
        found[name] = known(config)[-1]
        explicit = replace(config, data=replace(config.data, quote="none"))
        assert (known(explicit)[-1] == found[name]) == (name == "stray.tsv")
    assert found | {"stray.tsv": ""} == BEFORE_QUOTE


BEFORE_QUOTE = {
    "plain.tsv": "bb669d4a262dfa08",
    "quoted.tsv": "106082e8689f514b",
    "middle.tsv": "a025670f9d5cc4b8",
    "stray.tsv": "",
}


def test_lines_may_end_with_cr_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for content in ("text,label\rx,1\ry,2", "text,label\rx,1\ry,2\r", '"text","label"\r"x","1"\r"y","2"\r'):
        path.write_bytes(content.encode())
        assert read(path) == [("x", "1"), ("y", "2")]
    path.write_bytes(b'text,label\r"two\nlines",1\r"and\r\nmore",2\n"a\rb",3\r\n')
    assert read(path) == [("two\nlines", "1"), ("and\r\nmore", "2"), ("a\rb", "3")]
    path.write_bytes("\ufefftext,label\rx,1\r".encode("utf-16"))
    assert read(path, encoding="utf-16") == [("x", "1")]
    path.write_bytes(b"text,label\nx\ry,1\n")
    with unreadable("rows.csv", line=2, names=["CR"]):
        read(path)


@pytest.mark.parametrize("content", [b"\n\n", b"\xef\xbb\xbf", b"\r\r\r", b"\xef\xbb\xbf\r\n"])
def test_a_file_with_bytes_is_not_called_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with unreadable("rows.csv", names=["no rows", f"{len(content)} bytes"]) as raised:
        read(tmp_path / "rows.csv")
    assert "empty" not in str(raised.value)
    (tmp_path / "rows.csv").write_bytes(b"")
    with unreadable("rows.csv", names=["is empty"]):
        read(tmp_path / "rows.csv")
