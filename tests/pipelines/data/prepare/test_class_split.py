"""The validation documents of a classifier: as many of each class as its share, also of a rare one."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.data.prepare.class_split import CLASS_BOUNDS, SmallestHashes, find_bounds, validates
from raystride.pipelines.data.prepare.parts import divide_without_validation, read_part_items
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.conftest import settings

counts = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 200), min_size=2)


def _pieces(counts: dict[str, int]) -> list[Piece]:
    return [Piece((f"{label} number {number}", label)) for label, count in counts.items() for number in range(count)]


def _bounds(parts: list[list[Piece]], fraction: float) -> dict[str, int]:
    found = []
    for part in parts:
        hashes = SmallestHashes(fraction)
        assert list(hashes.watch(part)) == [piece.document for piece in part]
        found.append(json.loads(json.dumps(hashes.found())))
    return find_bounds(found, fraction)


@given(counts=counts, fraction=st.floats(0.0, 0.9), step=st.integers(1, 9))
def test_each_class_validates_by_its_share_however_its_documents_lie(
    counts: dict[str, int], fraction: float, step: int
) -> None:
    pieces = _pieces(counts)
    bounds = _bounds([pieces], fraction)
    assert _bounds([pieces[first::step] for first in range(step)], fraction) == bounds
    chosen = [piece.document[1] for piece in pieces if validates(piece, {CLASS_BOUNDS: bounds}, fraction)]
    for label, count in counts.items():
        assert abs(chosen.count(label) - fraction * count) <= 1
        assert chosen.count(label) < count, "something is left to train on"
    kept = sum(fraction * count > count - 1 for count in counts.values())  # classes that would validate whole
    assert abs(len(chosen) - fraction * len(pieces)) <= 0.5 + kept


texts = st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.sampled_from([1, 9, 60, 250]))


@given(
    parts=st.lists(st.lists(texts, max_size=3), min_size=2, max_size=4),
    fraction=st.sampled_from([0.05, 0.1, 0.2, 0.3]),
    order=st.randoms(use_true_random=False),
)
def test_nothing_validates_beyond_what_a_part_has_kept_whatever_their_order(
    parts: list[list[tuple[str, int, int]]], fraction: float, order: Random
) -> None:
    """Parts with many equal texts, of which one keeps not all hashes."""
    found = []
    for part in parts:
        hashes = SmallestHashes(fraction)
        list(hashes.watch(Piece((f"text {number}", label)) for label, number, times in part for _ in range(times)))
        found.append(hashes.found())
    bounds = find_bounds(found, fraction)
    for part_hashes in found:
        for label, (count, kept) in part_hashes.items():
            assert len(kept) == count or bounds[label] <= kept[-1], "others may be like the last, or come after it"
    assert find_bounds(order.sample(found, len(found)), fraction) == bounds


def test_equal_texts_of_a_class_stay_together() -> None:
    pieces = [Piece((text, "a")) for text in ("one", "two", "two", "two", "three", "four")]
    bounds = _bounds([pieces], 0.5)
    assert len({validates(piece, {CLASS_BOUNDS: bounds}, 0.5) for piece in pieces if piece.document[0] == "two"}) == 1
    assert _bounds([[Piece(("one", "a"))] * 4], 0.5) == {"a": 0}
    many = [Piece(("one", "a"))] * 400
    assert not validates(many[0], {CLASS_BOUNDS: _bounds([many], 0.1)}, 0.1), "all of a class, and not all hashes are kept"


def test_a_rare_class_is_in_the_validation_that_is_prepared_and_in_the_one_that_is_read_again(tmp_path: Path) -> None:
    rows = [
        {"text": f"row {number}", "label": "rare" if number % 30 == 7 else f"often {number % 2}"} for number in range(600)
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = replace(settings(source, validation_fraction=0.1), task="classification")
    result = prepare(RunContext(config, Folder(str(tmp_path / "runs"))), build_task(config), on_ray=False)
    assert result.manifest.source["labels"] == {"train": [270, 252, 18], "validation": [30, 28, 2]}
    opened = open_source(config.data, str(source), build_task(config).columns)
    (part,) = divide_without_validation(opened, config.data)
    facts, pieces = result.manifest.learned, read_part_items(opened.reader, part)
    chosen = [piece.document[1] for piece in pieces if isinstance(piece, Piece) and validates(piece, facts, 0.1)]
    assert [chosen.count(label) for label in ("often 0", "often 1", "rare")] == [30, 28, 2]
