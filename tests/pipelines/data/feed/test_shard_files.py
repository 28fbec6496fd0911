"""A stream reads any sample of any number of shards with few open files, and nothing that is not what was prepared."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.shard_files import MAPPED
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.feed.verification import BesideTraining, file_key
from raystride.pipelines.data.prepare.hash_list import LEAF_BYTES
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.system.storage.folder import Folder
from tests.flips import flip_bit, without_hash_lists
from tests.pipelines.data.feed.far import prepared_text

MAX_MAPPED = 30
SHARDS = 3 * MAX_MAPPED
LENGTH = 16


@pytest.fixture(autouse=True)
def few_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MAPPED, "max_mapped", MAX_MAPPED)


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    return stream_of_shards(tmp_path_factory.mktemp("prepared"), SHARDS)


def stream_of_shards(folder: Path, count: int) -> TokenStream:
    """Shards of one row each, filled with the shard's number, every other one with a mask."""
    folder.mkdir(exist_ok=True)
    shards = []
    for number in range(count):
        starts, ids, mask = np.array([0, LENGTH], "<i8"), np.full(LENGTH, number, "<u2"), np.full(LENGTH, 1, np.uint8)
        content = starts.tobytes() + ids.tobytes() + mask.tobytes()
        (folder / f"{number}.arrow").write_bytes(content)
        shards.append(
            Shard(
                file=f"{number}.arrow", tokens=LENGTH, documents=1, bytes=len(content), sha256="", ids_offset=16,
                mask_offset=16 + ids.nbytes if number % 2 else None, rows_offset=0, rows=1,
            )
        )  # fmt: skip
    manifest = Manifest(
        fingerprint="f", id_type="uint16", vocabulary_size=9, end_id=0, splits={"train": Shards.from_shards(shards)}
    )
    return TokenStream(Folder(str(folder)), manifest, "train", NodeCache(folder, 0))


def _maps(stream: TokenStream) -> int:
    return Path("/proc/self/maps").read_text().count(f"{stream._files._folder}/")


def _open_files(stream: TokenStream) -> int:
    """The stream's own: threads of other tests open files, too."""
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum(link.startswith(f"{stream._files._folder}/") for link in links)


def test_all_shards_are_read_with_few_open(stream: TokenStream) -> None:
    for start in range(0, stream.tokens - 2 * LENGTH, LENGTH):  # a window over the border of two
        ids, _ = stream.read_windows(np.array([start + LENGTH // 2]), LENGTH)
        assert ids[0].tolist() == [start // LENGTH] * (LENGTH // 2) + [start // LENGTH + 1] * (LENGTH // 2)
        assert _open_files(stream) <= MAX_MAPPED
    assert _maps(stream) <= MAX_MAPPED


def test_rows_stay_readable_after_their_shard_is_let_go(stream: TokenStream) -> None:
    first, _ = stream.read_rows(np.array([0]))
    ids, masks = stream.read_rows(np.arange(SHARDS))
    assert [row.tolist() for row in ids] == [[number] * LENGTH for number in range(SHARDS)]
    assert masks is not None
    assert all(mask.all() for mask in masks)
    assert first[0].tolist() == [0] * LENGTH
    firsts, lengths = stream.read_heads()
    assert firsts.tolist() == list(range(SHARDS))
    assert set(lengths.tolist()) == {LENGTH}
    with pytest.raises(IndexError, match="beyond"):
        stream.read_rows(np.array([SHARDS]))


def test_the_shard_that_was_asked_for_the_longest_ago_is_let_go(stream: TokenStream) -> None:
    stream.read_rows(np.arange(MAX_MAPPED + 1))
    stream.read_rows(np.array([1, MAX_MAPPED + 1]))
    mapped = [number for owner, number in MAPPED._mapped if owner == stream._files._stream]  # type: ignore[attr-defined]
    assert mapped == [*range(3, MAX_MAPPED + 1), 1, MAX_MAPPED + 1]


def test_samples_of_a_step_are_read_in_the_order_of_the_disk(stream: TokenStream, monkeypatch: pytest.MonkeyPatch) -> None:
    read, order, files = list[int](), np.random.default_rng(0).permutation(SHARDS - 1), stream._files
    read_ids = files.read_ids
    monkeypatch.setattr(files, "read_ids", lambda shard, *given: (read.append(shard), read_ids(shard, *given))[1])
    ids, masks = stream.read_rows(order)
    assert read == sorted(read)
    assert [row[0] for row in ids] == order.tolist()
    assert masks is not None
    read.clear()
    windows, masks = stream.read_windows(order * LENGTH + LENGTH // 2, LENGTH)
    assert read == sorted(read)
    assert windows[:, 0].tolist() == order.tolist()
    assert windows[:, -1].tolist() == (order + 1).tolist()


def test_the_streams_of_a_mixture_share_the_maps_of_a_process(tmp_path: Path) -> None:
    streams = [stream_of_shards(tmp_path / f"{number}", 20) for number in range(3)]
    for stream in streams:
        stream.read_rows(np.arange(20))
    assert [_maps(stream) for stream in streams] == [0, 10, 20]
    left, folder = len(MAPPED._mapped), str(streams[2]._files._folder)  # type: ignore[attr-defined]
    del streams[2], stream
    gc.collect()
    assert len(MAPPED._mapped) == left - 20
    assert folder not in Path("/proc/self/maps").read_text()


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from tests.pipelines.data.feed.test_shard_files import MAPPED, stream_of_shards
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))
streams = [stream_of_shards(Path(sys.argv[1]) / f"{number}", 40) for number in range(40)]
for stream in [*streams, *streams]:
    assert stream.read_rows(np.arange(40))[0][39].tolist() == [39] * 16
print(resource.getrlimit(resource.RLIMIT_NOFILE))
MAPPED._mapped.clear()
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError:
    pass
stream.read_rows(np.arange(20))
"""


def test_forty_sources_of_forty_shards_need_no_more_open_files_than_there_may_be(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == "(256, 256)\n", done.stderr
    assert "too many open files (256 are allowed a process): raise the limit with `ulimit -n`" in done.stderr


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Real shards of several leaves, on a node that knows nothing of them."""
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "cache"))
    folder, _, _ = prepared_text(tmp_path, 300_000)
    return folder


def _open(folder: Folder, beside: BesideTraining | None = None, split: str = "train") -> TokenStream:
    return TokenStream(folder, Manifest.load(folder), split, NodeCache(Path("/none"), 0), beside)


def _read_all(stream: TokenStream) -> int:
    """Reads every row; the bytes that were hashed for it."""
    before = stream._files.hashed_bytes  # type: ignore[attr-defined]
    stream.read_rows(np.arange(stream.examples))
    return int(stream._files.hashed_bytes) - int(before)  # type: ignore[attr-defined]


def _shard_bytes(folder: Folder) -> int:
    return int(Manifest.load(folder).splits["train"].column("bytes").sum())


def test_a_wrong_leaf_is_refused_where_it_is_read_and_no_other(prepared: Folder) -> None:
    shard = Manifest.load(prepared).splits["train"][1]
    assert shard.bytes > 2 * LEAF_BYTES
    flip_bit(Path(f"{prepared}/{shard.file}"), LEAF_BYTES + 100)
    rest = _open(prepared)
    row_before = Manifest.load(prepared).splits["train"][0].rows
    rest.read_rows(np.arange(row_before))  # the shard before it
    rest.read_windows(np.array([0]), 64)
    text = f"{prepared}/{shard.file}: bytes 65,536 to 131,072 are not what was prepared"
    with pytest.raises(DataError, match=re.escape(text)) as raised:
        _read_all(rest)
    assert f"remove {prepared}, which is then prepared anew" in str(raised.value)
    assert raised.value.file == f"{prepared}/{shard.file}"
    with pytest.raises(DataError):  # nor is it remembered as read
        _read_all(_open(prepared))


def test_a_node_hashes_what_it_reads_once(prepared: Folder, tmp_path: Path) -> None:
    first, total = _open(prepared), _shard_bytes(prepared)
    first.read_rows(np.array([0]))
    assert 0 < first._files.hashed_bytes < 3 * LEAF_BYTES  # type: ignore[attr-defined]
    # Another worker of the node, while this one has the shard mapped.
    code = (
        "import sys; from pathlib import Path; from tests.pipelines.data.feed.test_shard_files import _open, _read_all; "
        "from raystride.pipelines.system.storage.folder import Folder; print(_read_all(_open(Folder(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, str(prepared)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert total - 3 * LEAF_BYTES < int(done.stdout) < total, "but not what this one had verified"
    assert _read_all(first) == 0
    assert _read_all(_open(prepared)) == 0
    changed = Manifest.load(prepared).splits["train"][1]
    os.utime(f"{prepared}/{changed.file}")
    assert 0 < _read_all(_open(prepared)) <= changed.bytes
    other = Path(f"{prepared}/{changed.file}")
    other.rename(tmp_path / "kept")
    other.write_bytes((tmp_path / "kept").read_bytes())  # another inode
    os.utime(other, ns=((tmp_path / "kept").stat().st_mtime_ns,) * 2)
    assert 0 < _read_all(_open(prepared)) <= changed.bytes


def test_a_node_without_a_private_folder_verifies_too(
    prepared: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "file"))
    (tmp_path / "file-verified").touch()
    stream = _open(prepared)
    assert _read_all(stream) > 0
    MAPPED._mapped.clear()
    assert _read_all(stream) == 0, "what was unmapped since is known"
    assert _read_all(_open(prepared)) > 0


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_shards_without_lists_are_verified_as_a_whole(prepared: Folder, damaged: bool) -> None:
    without_hash_lists(prepared)
    shard = Manifest.load(prepared).splits["train"][-1]
    if damaged:
        flip_bit(Path(f"{prepared}/{shard.file}"), shard.bytes // 2)
    beside = BesideTraining()
    stream = _open(prepared, beside)
    assert _read_all(stream) == 0, "reading does not wait"
    if damaged:
        with pytest.raises(DataError, match=re.escape(f"{shard.file}: bytes 0 to {shard.bytes:,} are not")):
            beside.finish()
        with pytest.raises(DataError):
            beside.raise_error()
        with pytest.raises(DataError):
            _read_all(_open(prepared))
        return
    beside.finish()
    assert beside.hashed_bytes == _shard_bytes(prepared)
    assert _read_all(_open(prepared)) == 0


def test_shards_that_are_read_from_end_to_end_are_verified_beside(prepared: Folder) -> None:
    shard = Manifest.load(prepared).splits["train"][0]
    flip_bit(Path(f"{prepared}/{shard.file}"), LEAF_BYTES + 1)
    beside = BesideTraining()
    stream = _open(prepared, beside)
    stream.read_heads()
    assert stream._files.hashed_bytes == 0  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="bytes 65,536 to 131,072 are not"):
        beside.finish()
    with pytest.raises(DataError, match="bytes 65,536 to 131,072 are not"):
        _open(prepared).read_heads()


def test_a_lost_or_wrong_list_of_hashes_is_no_damage_of_the_shard(prepared: Folder) -> None:
    first, second = (Path(f"{prepared}/{shard.file}") for shard in Manifest.load(prepared).splits["train"][:2])
    first.with_suffix(".hashes").unlink()
    flip_bit(second.with_suffix(".hashes"), 3)
    assert _read_all(_open(prepared)) >= first.stat().st_size + second.stat().st_size
    assert _read_all(_open(prepared)) == 0


def test_a_shard_of_another_size_is_refused(prepared: Folder) -> None:
    shard = Manifest.load(prepared).splits["train"][0]
    os.truncate(f"{prepared}/{shard.file}", shard.bytes - 8)
    with pytest.raises(DataError, match=re.escape(f"bytes {shard.bytes - 8:,} to {shard.bytes:,} are not")):
        _open(prepared).read_rows(np.array([0]))


def test_a_mark_is_of_one_file_at_one_time() -> None:
    """Path, size, time of change, inode and hash, each changed alone."""
    base: dict[str, Any] = {"path": "/a", "st_size": 1, "st_mtime_ns": 2, "st_ino": 3, "content_hash": "h"}

    def key(**changes: Any) -> int:
        given = base | changes
        return file_key(given.pop("path"), content_hash=given.pop("content_hash"), status=SimpleNamespace(**given))  # type: ignore[arg-type]

    keys = [key(), *(key(**{name: 9}) for name in base)]
    assert len(set(keys)) == len(base) + 1
    assert key(path=Path("/a")) == keys[0] != 0
