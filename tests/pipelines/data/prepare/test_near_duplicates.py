"""Near-duplicates are the same for any division of the source, on one process or many, and after an interruption.

Documents of another source that are also in training are counted by their hashes, also long after the preparation.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config, DataConfig, SettingError, TrainConfig
from raystride.pipelines.data.prepare import document_hashes, near_duplicates
from raystride.pipelines.data.prepare.document_hashes import (
    FILE,
    DocumentHashes,
    Shared,
    hash_document,
    merge_hashes,
    part_hashes_name,
    put_hashes,
    read_hashes,
)
from raystride.pipelines.data.prepare.near_duplicates import (
    MAX_INDEXED,
    NUM_HASHES,
    SIGNATURES_FOLDER,
    Bands,
    _select_duplicates,
    describe_memory_need,
    group_bands_locally,
    minhash_signature,
    read_duplicates,
)
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.progress import CountMeter, load_stages
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed_beside
from tests.flips import flip_bit
from tests.pipelines.conftest import documents, prepared
from tests.pipelines.conftest import settings as settings_of
from tests.tiny import tiny


def _texts(count: int) -> list[str]:
    """Every third text is an earlier one with a word changed."""
    draw, found = random.Random(1), list[str]()
    for number in range(count):
        words = [f"w{draw.randrange(5000)}" for _ in range(draw.randint(60, 90))]
        if number % 3 == 2:
            words = found[draw.randrange(0, number, 3)].split()
            words[-1] = "changed"
        found.append(" ".join(words))
    return found


def _prepare(
    folder: Path, texts: list[str], storage: str, on_ray: bool = False, lines: list[str] | None = None, **data: Any
) -> Any:
    path = folder / "texts.jsonl"
    if not path.exists():  # a file that is written anew is another source
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = settings_of(path, **{"near_duplicates": 0.8, "validation_fraction": 0.2} | data)
    return prepared(config, folder / storage, on_ray=on_ray, log=(lambda _: None) if lines is None else lines.append)


def _kept_texts(result: Any) -> list[str]:
    return sorted(documents(result, "train") + documents(result, "validation"))


def test_later_ones_are_left_out_however_the_source_is_cut(tmp_path: Path) -> None:
    texts = _texts(300)
    wanted = sorted(text for number, text in enumerate(texts) if number % 3 != 2)
    for number, size in enumerate((32.0, 0.01)):
        result = _prepare(tmp_path, texts, str(number), shard_mib=size)
        assert _kept_texts(result) == wanted
        assert result.manifest.source["dropped"] == {"near-duplicates": 100}
        assert not (result.folder / "signatures").names(), "only an interrupted preparation needs them"


def test_equal_texts_are_duplicates_at_any_threshold(tmp_path: Path) -> None:
    texts = _texts(6)
    result = _prepare(tmp_path, [*texts, texts[0], texts[4]], "equal", near_duplicates=1.0)
    assert _kept_texts(result) == sorted(texts)


def _chain(changes: list[tuple[int, int]]) -> list[list[int]]:
    """Documents of four pieces, each with one piece of the one before changed."""
    found = [[0, 1, 2, 3]]
    for place, piece in changes:
        found.append([piece if number == place else known for number, known in enumerate(found[-1])])
    return found


@given(
    st.one_of(
        st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=40),
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=30).map(_chain),
    ),
    st.sampled_from([0.3, 0.5, 0.8, 0.95, 1.0]),
    st.integers(1, 7),
)
@settings(deadline=None, max_examples=60)
def test_grouped_bands_drop_the_same_documents_as_the_index(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[list[int]], threshold: float, size: int
) -> None:
    """Signatures of a few pieces, so that many share some, and some are similar through a third one."""
    draw = np.random.default_rng(0).integers(0, 2**32, (7, NUM_HASHES), np.uint32)
    edges = [np.linspace(0, NUM_HASHES, len(chosen) + 1).astype(int) for chosen in pieces]
    signatures = np.stack(
        [
            np.concatenate([draw[piece, low:high] for piece, low, high in zip(chosen, edge[:-1], edge[1:], strict=True)])
            for chosen, edge in zip(pieces, edges, strict=True)
        ]
    )
    folder, signed = Folder(str(tmp_path_factory.mktemp("signed"))), []
    for number, first in enumerate(range(0, len(signatures), size)):
        (folder / SIGNATURES_FOLDER).put(f"{number:05d}.u4", signatures[first : first + size].tobytes())
        signed.append((number, first))
    parts = ((number, signatures[first : first + size]) for number, first in signed)
    collisions = group_bands_locally(folder, signed, Bands.for_threshold(threshold))
    assert _select_duplicates(collisions, folder, signed, threshold, CountMeter(len(signatures), "documents")) == _by_index(
        parts, threshold
    )


def _by_index(parts: Iterator[tuple[int, np.ndarray]], threshold: float) -> dict[int, list[int]]:
    """The first version's way: each document is searched for in datasketch's index of kept ones."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=min(threshold, MAX_INDEXED), num_perm=NUM_HASHES, weights=(0.1, 0.9))
    kept: list[np.ndarray] = []
    found: dict[int, list[int]] = {}
    for number, signatures in parts:
        for row, values in enumerate(signatures):
            own = MinHash(num_perm=NUM_HASHES, seed=1, scheme="affine32", hashvalues=values)
            if any(float((kept[other] == values).mean()) >= threshold for other in index.query(own)):
                found.setdefault(number, []).append(row)
            else:
                index.insert(len(kept), own, check_duplication=False)
                kept.append(values)
    return found


def test_the_cost_of_comparing_many_documents_is_logged_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = _texts(90)
    few = _prepare(tmp_path, texts, "few", shard_mib=0.01)
    monkeypatch.setattr(near_duplicates, "REPORT_ABOVE", 50)
    lines: list[str] = []
    many = _prepare(tmp_path, texts, "many", lines=lines, shard_mib=0.01)
    assert _kept_texts(many) == _kept_texts(few)
    assert many.manifest.splits == few.manifest.splits
    (said,) = [number for number, line in enumerate(lines) if "are grouped" in line]
    assert "14 bands of each of 90 documents" in lines[said]
    assert re.match("data: [345][0-9] of 90 documents share a band with another one", lines[said + 1])


def test_ten_million_documents_have_a_figure_before_they_are_compared() -> None:
    line = describe_memory_need(10_000_000, Bands(14, 9))
    assert "14 bands of each of 10,000,000 documents are grouped, 3.4 GB in all" in line
    assert "up to 30.3 GB" in line


@pytest.mark.long
@pytest.mark.parametrize("most", [10**6, pytest.param(50, marks=pytest.mark.weekly)], ids=["few", "many"])
def test_ray_leaves_out_the_same(most: int, tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = _texts(300)
    monkeypatch.setattr(near_duplicates, "MAX_GROUPED_LOCALLY", most)
    local, distributed = (_prepare(tmp_path, texts, name, name == "ray", shard_mib=0.02) for name in ("here", "ray"))
    assert _kept_texts(local) == _kept_texts(distributed)
    assert local.manifest.splits == distributed.manifest.splits


@pytest.mark.parametrize("damaged", [False, True])
def test_an_interrupted_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool) -> None:
    """And signs again what is not as it was written: other signatures would leave out other documents."""
    texts, signed = _texts(90), list[int]()
    whole = _prepare(tmp_path, texts, "whole", shard_mib=0.01)
    sign: Callable[..., float] = near_duplicates.sign_part

    def stops(job: Any, part: Any) -> float:
        if len(signed) == 2:
            raise KeyboardInterrupt
        signed.append(part.number)
        return sign(job, part)

    monkeypatch.setattr(near_duplicates, "sign_part", stops)
    with pytest.raises(KeyboardInterrupt):
        _prepare(tmp_path, texts, "stopped", shard_mib=0.01)
    again: list[int] = []
    broken = {signed.pop()} if damaged else set()
    for number in broken:
        flip_bit(next(tmp_path.rglob(f"{number:05d}.u4")), 7)

    def signs(job: Any, part: Any) -> float:
        again.append(part.number)
        return sign(job, part)

    monkeypatch.setattr(near_duplicates, "sign_part", signs)
    result = _prepare(tmp_path, texts, "stopped", shard_mib=0.01)
    seconds = load_stages(result.folder)["seconds"]
    assert min(seconds[name] for name in ("sign", "compare", "read", "tokenise")) > 0
    assert not set(again) & set(signed)
    assert broken <= set(again)
    assert again
    assert result.manifest.splits == whole.manifest.splits


def test_a_second_search_in_one_process_is_read_as_it_is(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    for found in ({"0": [1], "1": [0, 2]}, {"0": [1, 3]}, {"1": [7, 8, 9]}):
        put_sealed_beside(folder, near_duplicates.DUPLICATES_FILE, found)
        assert {str(part): sorted(rows) for part in (0, 1) if (rows := read_duplicates(folder, part))} == found


@given(st.lists(st.sampled_from(["a", "B", "c", "d"]), min_size=1, max_size=30), st.sampled_from([" ", "\n", "\t  "]))
@settings(deadline=None, max_examples=30)
def test_case_and_blanks_make_no_difference(words: list[str], blank: str) -> None:
    assert (minhash_signature(" ".join(words)) == minhash_signature(blank.join(words).upper())).all()


def test_an_estimate_is_near_the_true_similarity() -> None:
    words = [f"w{number}" for number in range(400)]
    one, other = (
        minhash_signature(" ".join(words)),
        minhash_signature(" ".join([*words[:300], *(f"v{number}" for number in range(100))])),
    )
    shared = 296 / (2 * 396 - 296)
    assert abs(float((one == other).mean()) - shared) < 0.15


def test_sources_without_all_documents_are_refused() -> None:
    with pytest.raises(SettingError, match=r"data.start_after_mib .*data.near_duplicates"):
        Config(data=DataConfig(near_duplicates=0.8, start_after_mib=1.0), train=TrainConfig(steps=1))


def _prepare_with_lines(config: Config) -> tuple[Folder, list[str]]:
    lines: list[str] = []
    context = RunContext(config, Folder(config.storage), log=lines.append)
    return prepare(context, build_task(config), on_ray=False).folder, lines


def _lines(tmp_path: Path, **data: object) -> Config:
    texts = [f"document {i} " * 20 for i in range(100)]
    (tmp_path / "a.txt").write_text("\n".join(texts[:80]))
    (tmp_path / "b.txt").write_text("\n".join(texts[70:]))
    return tiny(
        tmp_path / "a.txt",
        storage=str(tmp_path / "runs"),
        data=DataConfig(source=str(tmp_path / "a.txt"), kind="lines", **data),
    )  # type: ignore[arg-type]


def test_documents_of_validation_that_are_in_training_are_said(tmp_path: Path) -> None:
    config = _lines(tmp_path, validation="source", validation_source=str(tmp_path / "b.txt"))
    folder, lines = _prepare_with_lines(config)
    assert f"data: 10 of 30 documents of {tmp_path / 'b.txt'} are also in training" in lines
    assert any("also in training" in line for line in _prepare_with_lines(config)[1]), "it is found prepared"
    known = read_hashes(folder)
    assert known is not None
    assert len(known.hashes) == 80
    assert not (folder / document_hashes.PARTS).names()
    (tmp_path / "b.txt").write_text("\n".join(f"another {i}" for i in range(30)))
    assert not [line for line in _prepare_with_lines(config)[1] if "also in training" in line]


def test_documents_are_the_same_by_their_beginning_whatever_their_pieces(tmp_path: Path) -> None:
    long = "word " * 500_000
    (tmp_path / "d").mkdir()
    for name, text in (("a", long), ("b", "other " * 9000), ("c", long + "more")):
        (tmp_path / f"d/{name}.txt").write_text(text)
    folder, _ = _prepare_with_lines(
        tiny(
            tmp_path / "d",
            storage=str(tmp_path / "runs"),
            data=DataConfig(source=str(tmp_path / "d"), shard_mib=0.1, validation="tail"),
        )
    )
    known = read_hashes(folder)
    assert known is not None
    assert {hash_document(long[:4096]), hash_document(("other " * 9000)[:4096])} == set(known.hashes.tolist())


def test_of_many_documents_a_sample_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_hashes, "MAX_HASHES", 1100)
    folder, hashes = Folder(str(tmp_path)), np.array([hash_document(str(i)) for i in range(10_000)], np.uint64)
    put_hashes(folder, part_hashes_name(0), hashes[:4000], hashes[:0])
    put_hashes(folder, part_hashes_name(1), hashes[4000:8000], hashes[7000:])
    found = merge_hashes(folder, [0, 1])
    assert found is not None
    known, validation = found
    assert 900 < len(known.hashes) <= 1100
    assert known.step == 8
    counted = known.count_shared(validation)
    assert 300 < counted.documents < 450
    assert abs(counted.shared / counted.documents - 1 / 3) < 0.1
    assert np.array_equal(read_hashes(folder).hashes, known.hashes)  # type: ignore[union-attr]


def test_what_an_earlier_version_prepared_says_nothing(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert read_hashes(folder) is None
    put_hashes(folder, part_hashes_name(0), np.zeros(1, np.uint64), np.zeros(0, np.uint64))
    assert merge_hashes(folder, [0, 1]) is None
    assert merge_hashes(folder, [0]) is not None
    folder.put(FILE, b"12345678")
    assert read_hashes(folder) is None
    assert DocumentHashes(np.zeros(1, np.uint64), 1).count_shared(np.zeros(3, np.uint64)) == Shared(3, 3)
