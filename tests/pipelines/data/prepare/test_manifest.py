"""A manifest is read as it was written, with listed shards or with a file of columns, and any shard alone."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raystride
from raystride.pipelines.data.prepare.manifest import (
    COLUMNS,
    MAX_LISTED,
    Manifest,
    Shard,
    Shards,
    concatenate_shards,
    load_finished_manifest,
)
from raystride.pipelines.system.storage import sealed as seals
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, put_sealed_beside
from raystride.pipelines.system.writer import WrittenByNewer
from tests.flips import flip
from tests.some import some

offsets = st.integers(0, 2**40)
drawn_shards = st.builds(
    Shard,
    file=st.text("abc/0123", min_size=1, max_size=20),
    tokens=offsets,
    documents=offsets,
    bytes=offsets,
    sha256=st.text("0123456789abcdef", max_size=64),
    ids_offset=offsets,
    mask_offset=offsets | st.none(),
    rows_offset=offsets | st.none(),
    rows=offsets,
)


def manifest(**splits: list[Shard]) -> Manifest:
    """Returns a manifest of these shards."""
    known = {name: Shards.from_shards(shards) for name, shards in splits.items()}
    return Manifest(fingerprint="f", id_type="uint16", vocabulary_size=9, end_id=0, splits=known)


def many(split: str, count: int) -> list[Shard]:
    """Returns this many different shards."""
    return [
        Shard(
            file=f"{split}/{n}.arrow", tokens=n, documents=1, bytes=2 * n, sha256=f"{n:064x}", ids_offset=8,
            mask_offset=n if n % 3 else None, rows=n % 7, top_hash=f"{n + 1:032x}" if n % 2 else "",
        )
        for n in range(count)
    ]  # fmt: skip


@given(st.lists(drawn_shards, max_size=8))
def test_columns_give_back_every_shard(shards: list[Shard]) -> None:
    kept = Shards.from_shards(shards)
    assert list(kept) == shards
    assert kept == Shards.from_shards(shards)
    assert kept.column("tokens").tolist() == [shard.tokens for shard in shards]
    assert list(kept[1:]) == shards[1:]
    assert list(concatenate_shards(kept, kept[:3])) == shards + shards[:3]


@pytest.mark.parametrize("place", ["local", "remote"])
@pytest.mark.parametrize("count", [3, MAX_LISTED + 5])
def test_a_saved_manifest_is_loaded(place: str, count: int, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path) if place == "local" else f"memory://bucket/{tmp_path.name}")
    saved = manifest(train=many("train", count), validation=many("validation", 2), test=[])
    saved.save(folder)
    assert folder.exists(COLUMNS) == (count > MAX_LISTED)
    loaded = Manifest.load(folder)
    assert loaded == saved
    assert [len(loaded.splits[name]) for name in ("train", "validation", "test")] == [count, 2, 0]
    assert loaded.tokens("train") == sum(range(count))
    more = concatenate_shards(
        concatenate_shards(loaded.splits["train"], saved.splits["validation"]), loaded.splits["validation"]
    )
    assert list(more) == [*many("train", count), *many("validation", 2), *many("validation", 2)]


def test_opening_a_million_shards_reads_no_shard(tmp_path: Path) -> None:
    """Their columns are mapped: a split's tokens are one column, the rest stays on disk."""
    count, folder = 1_000_000, Folder(str(tmp_path))
    numbers = {name: np.arange(count) for name in ("tokens", "documents", "bytes", "ids_offset", "rows_offset", "rows")}
    texts = {"file": np.array([b"train/x.arrow"] * count), "sha256": np.array([b"0" * 64] * count)}
    texts["top_hash"] = np.array([b"1" * 32] * count)
    train = Shards(texts | numbers | {"mask_offset": np.full(count, -1)})
    Manifest(fingerprint="f", id_type="uint16", vocabulary_size=9, end_id=0, splits={"train": train}).save(folder)
    loaded = Manifest.load(folder)
    for name in ("tokens", "file", "sha256"):
        assert not loaded.splits["train"].raw_column(name).flags.owndata
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 100e6
    assert loaded.splits["train"][123_456].tokens == 123_456
    assert loaded.splits["train"][-1].mask_offset is None


def test_numbers_of_any_size_come_back_as_they_were(tmp_path: Path) -> None:
    most = [1, 127, 128, 2**15, 2**31 - 1, 2**31, 2**40]
    shards = [replace(each, tokens=number, mask_offset=None) for number in most for each in many("train", MAX_LISTED // 5)]
    saved = manifest(train=shards, test=[])
    saved.save(Folder(str(tmp_path)))
    loaded = Manifest.load(Folder(str(tmp_path)))
    assert loaded == saved
    assert loaded.tokens("train") == sum(most) * (MAX_LISTED // 5)
    again = replace(loaded, splits=loaded.splits | {"validation": Shards.from_shards(many("validation", 2))})
    again.save(Folder(str(tmp_path)))  # what is packed already, beside what is not
    assert Manifest.load(Folder(str(tmp_path))) == again


def test_a_manifest_with_any_bit_turned_is_refused_and_its_seal_may_have_one(tmp_path: Path) -> None:
    folder, saved = Folder(str(tmp_path)), manifest(train=many("train", 2))
    saved.save(folder)
    file, seal = tmp_path / "manifest.json", tmp_path / "manifest.json.sha256"
    whole, sealed = file.read_bytes(), seal.read_bytes()
    line = f"{folder.sha256('manifest.json')}  manifest.json\n"
    assert sealed.decode() == f"{line}{line}# writer: {raystride.__version__}\n", "as sha256sum has it"
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", seal.name], cwd=tmp_path, check=True)
    for bit in some(range(0, 8 * len(whole), 37)):  # each bit of a byte, along the file
        file.write_bytes(flip(whole, bit))
        with pytest.raises(SealBroken, match=r"manifest\.json does not match .* beside it: remove both to prepare it again"):
            Manifest.load(folder)
    assert load_finished_manifest(folder) is None
    file.write_bytes(whole)
    for bit in some(range(0, 8 * len(sealed), 11)):
        seal.write_bytes(flip(sealed, bit))
        assert Manifest.load(folder).splits == saved.splits
    seal.unlink()
    assert Manifest.load(folder) == saved, "one of 0.3"


def test_a_key_of_a_newer_version_is_refused_by_name_and_passes_at_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, saved = Folder(str(tmp_path)), manifest(train=many("train", 2))
    saved.save(folder)
    content = json.loads(folder.read("manifest.json"))
    put_sealed_beside(folder, "manifest.json", content | {"packing": "new"})
    with pytest.raises(ValueError, match="has packing, which no version has written: prepare it again"):
        Manifest.load(folder)
    assert load_finished_manifest(folder) is None
    monkeypatch.setattr(seals, "__version__", "9.8.7")
    put_sealed_beside(folder, "manifest.json", content | {"packing": ""})
    assert Manifest.load(folder) == saved
    shard = content["splits"]["train"][0] | {"crc": "77"}
    for key, newer in (("packing", {"packing": "new"}), ("crc", {"splits": {"train": [shard]}})):
        put_sealed_beside(folder, "manifest.json", content | newer)
        named = rf"manifest\.json was written by Raystride 9\.8\.7, and this is {raystride.__version__}, which .* {key} \("
        for read in (Manifest.load, load_finished_manifest):  # not to be prepared again in its place
            with pytest.raises(WrittenByNewer, match=named):
                read(folder)


def test_columns_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    """Format 2: hashes as digits, all numbers of eight bytes."""
    saved, folder = manifest(train=many("train", MAX_LISTED + 5)), Folder(str(tmp_path))
    saved.save(folder)
    content, offset, places = folder.read_json("manifest.json"), 0, {}
    columns = {name: saved.splits["train"].raw_column(name) for name in content["columns"]["places"]}
    for name, column in columns.items():
        places[name], offset = [offset, column.dtype.str], offset + column.nbytes
    folder.put(COLUMNS, b"".join(column.tobytes() for column in columns.values()))
    folder.put_json("manifest.json", content | {"format": 2, "columns": {"bytes": offset, "places": places}})
    folder.remove("manifest.json.sha256")
    assert columns["sha256"].dtype.str == "|S64"
    assert Manifest.load(folder) == saved


def test_columns_that_were_cut_are_refused(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    manifest(train=many("train", MAX_LISTED + 1)).save(folder)
    content = folder.read(COLUMNS)
    folder.put(COLUMNS, content[: len(content) // 2])
    with pytest.raises(ValueError, match="prepare it again"):
        Manifest.load(folder)


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_columns_with_a_flipped_bit_are_refused(place: str, tmp_path: Path) -> None:
    """Offsets, counts and the hashes that verify pieces come from here."""
    folder = Folder(str(tmp_path)) if place == "disk" else Folder.from_uri(f"memory://bits-{tmp_path.name}")
    manifest(train=many("train", MAX_LISTED + 1)).save(folder)
    assert Manifest.load(folder).tokens("train")
    content = bytearray(folder.read(COLUMNS))
    (offset, value_type) = folder.read_json("manifest.json")["columns"]["places"]["tokens"]
    content[offset + np.dtype(value_type).itemsize * 7] ^= 1
    folder.put(COLUMNS, bytes(content))
    with pytest.raises(ValueError, match=r"shards\.arrow has another SHA-256 than .*manifest\.json says"):
        Manifest.load(folder)
