"""Retention after a new checkpoint: old data, leftovers of dead groups and refused saves; and its cost on a store."""

from pathlib import Path

import pytest

from raystride.pipelines.launch.run_store.resume import newest_step, read_previous_bits
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed
from raystride.pipelines.train.checkpoint import retention
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.checkpoint.retention import prune_checkpoints
from raystride.pipelines.train.checkpoint.train_state import TrainState
from tests.errors import refused
from tests.flips import flip
from tests.pipelines.train.checkpoints import fed, open_checkpoints, save, train_model
from tests.storage import Proxy, uri


def test_old_data_goes_and_manifests_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, best=step == 2)
    with_data = [path.name for path in sorted(tmp_path.glob("step-*")) if (path / "a1").exists()]
    assert with_data == ["step-00000002", "step-00000004", "step-00000005"]
    assert len(list(tmp_path.glob("step-*/MANIFEST.json"))) == 5
    assert (tmp_path / "best").read_text().strip() == "step-00000002"
    assert (tmp_path / "last").read_text().strip() == "step-00000005"
    found = open_checkpoints(tmp_path).find_best()
    assert found is not None
    assert found.step == 2


def test_nothing_goes_before_the_new_one_is_whole(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, attempt="a1", keep=2)
    data = tmp_path / "step-00000002" / "a1" / "rank-0.bin"
    whole = data.read_bytes()
    folder = Folder.from_uri(str(tmp_path))
    with pytest.raises(OSError, match="is not of a2: nothing is removed"):
        prune_checkpoints(folder, "step-00000002", 1, "a2")
    data.write_bytes(whole[:-1])
    with pytest.raises(OSError, match=rf"rank-0\.bin has {len(whole) - 1} bytes and not {len(whole)}: nothing is removed"):
        prune_checkpoints(folder, "step-00000002", 1, "a1")
    assert (tmp_path / "step-00000001" / "a1").exists()
    data.write_bytes(whole)
    prune_checkpoints(folder, "step-00000002", 1, "a1")
    assert not (tmp_path / "step-00000001" / "a1").exists()


@pytest.mark.parametrize("on_store", [False, True], ids=["disk", "store"])
@pytest.mark.parametrize("read_back", [retention.MAX_READ_BACK, 0], ids=["whole", "ends"])
def test_nothing_goes_while_the_storage_does_not_have_what_was_written(
    tmp_path: Path, on_store: bool, read_back: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_READ_BACK", read_back)
    folder = Folder.from_uri(uri(request.getfixturevalue("s3"), f"pruned{tmp_path}") if on_store else str(tmp_path))
    model, optimizer = train_model(0)
    checkpoints = Checkpoints(folder, "a1", keep=2)
    for step in (1, 2):
        checkpoints.save(model, optimizer, TrainState(step=step), {}, best=False)
    checkpoints.finish()
    name = "step-00000002/a1/rank-0.bin"
    whole = folder.read(name)
    for bit in (5, 8 * len(whole) - 3):
        folder.put(name, flip(whole, bit))
        with pytest.raises(OSError, match=r"rank-0\.bin.* is not as it was written: nothing is removed"):
            prune_checkpoints(folder, "step-00000002", 1, "a1")
        assert folder.exists("step-00000001/a1/rank-0.bin")
    folder.put(name, whole)
    prune_checkpoints(folder, "step-00000002", 1, "a1")
    assert not folder.exists("step-00000001/a1/rank-0.bin")


def test_the_best_one_is_what_the_newest_manifest_says(tmp_path: Path) -> None:
    """The file `best` is for people, and for 0.3."""
    checkpoints, (model, optimizer) = Checkpoints(Folder(str(tmp_path)), "a1", keep=3), train_model(0)
    for step, best in ((1, 1), (2, 2), (3, 2)):
        checkpoints.save(model, optimizer, TrainState(step=step, best=0.5, best_step=best), {}, best=step == best)
    checkpoints.finish()
    for hint in (b"step-00000003\n", b"step-00000001\n", b"step-0000000\xb2", None):
        if hint:
            (tmp_path / "best").write_bytes(hint)
        else:
            (tmp_path / "best").unlink()
            (tmp_path / "best").mkdir()
        found = open_checkpoints(tmp_path).find_best()
        assert found
        assert found.step == 2
    prune_checkpoints(Folder(str(tmp_path)), "step-00000003", 1, "a1")
    assert (tmp_path / "step-00000002" / "a1").exists()


@pytest.mark.parametrize("hint", ["last", "best"])
def test_a_best_that_could_not_be_named_is_named_at_the_next_commit(tmp_path: Path, hint: str) -> None:
    checkpoints, (model, optimizer) = Checkpoints(Folder(str(tmp_path)), "a1", keep=1), train_model(0)
    (tmp_path / hint).mkdir()
    for step in (1, 2, 3):
        if step == 3:
            (tmp_path / hint).rmdir()
        checkpoints.save(model, optimizer, TrainState(step=step, best_step=1), {}, best=step == 1)
        checkpoints.wait_for_save()
    assert [retention.read_hint(checkpoints.folder, name) for name in ("last", "best")] == ["step-00000003", "step-00000001"]
    assert [step for step in (1, 2, 3) if (tmp_path / f"step-0000000{step}" / "a1").exists()] == [1, 3]


def test_a_damaged_checkpoint_is_none_of_those_that_are_kept(tmp_path: Path) -> None:
    """The newest of two is damaged, and training goes on from the one before to a step beyond it."""
    for number, damage in enumerate(("manifest", "size", "missing")):
        place = tmp_path / damage
        for step in (1, 2):
            save(place, step)
        if damage == "manifest":
            (place / "step-00000002" / "MANIFEST.json").write_text("{torn")
        elif damage == "size":
            (place / "step-00000002" / "a1" / "rank-0.bin").write_bytes(b"short")
        else:
            (place / "step-00000002" / "a1" / "rank-0.bin").unlink()
        save(place, 3)
        assert [found.step for found in open_checkpoints(place).find_whole()] == [3, 1], (number, damage)
        save(place, 4)
        assert [found.step for found in open_checkpoints(place).find_whole()] == [4, 3]
        assert not (place / "step-00000002" / "a1").exists()


def test_the_file_best_of_a_checkpoint_that_was_gone_back_behind_names_none(tmp_path: Path) -> None:
    """The newest manifest says that nothing was validated, and is later than what the file names."""
    checkpoints, (model, optimizer) = Checkpoints(Folder(str(tmp_path)), "a1", keep=3), train_model(0)
    for step, best in ((1, 0), (2, 2)):
        checkpoints.save(model, optimizer, TrainState(step=step, best_step=best), {}, best=bool(best))
    checkpoints.finish()
    (tmp_path / "step-00000002" / "MANIFEST.json").write_text("{torn")
    with refused("checkpoint", "best", names=["step-00000002"]):  # the file is later than any whole manifest
        open_checkpoints(tmp_path).find_best()
    checkpoints.save(model, optimizer, TrainState(step=3), {}, best=False)
    checkpoints.finish()
    assert open_checkpoints(tmp_path).find_best() is None


def test_steps_of_nine_digits_are_newer_than_those_of_eight(tmp_path: Path) -> None:
    """As text, step-100000000 stands before step-99999999."""
    last = 99_999_999
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for step in (last - 1, last, last + 1, last + 2):
        save(checkpoints, step)
    with_data = {path.name for path in checkpoints.glob("step-*") if (path / "a1").exists()}
    assert with_data == {"step-100000000", "step-100000001"}
    found = open_checkpoints(checkpoints).find_newest()
    assert found is not None
    assert found.step == newest_step(Folder.from_uri(str(tmp_path))) == last + 2
    assert open_checkpoints(checkpoints).list_names()[0] == "step-99999998"
    for number, name in enumerate(("step-99999999", "step-100000001")):
        folder = Folder(str(checkpoints / name))
        put_sealed(folder, "MANIFEST.json", read_sealed(folder, "MANIFEST.json") | {"bits": {"made": number}})
    assert read_previous_bits(Folder.from_uri(str(checkpoints))) == ("step-100000001", {"made": 1})


def test_what_a_dead_attempt_left_behind_goes(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-00000002" / "dead").mkdir(parents=True)
    (tmp_path / "step-00000002" / "dead" / "rank-0.bin").write_bytes(b"half")
    save(tmp_path, 3, attempt="a2")
    assert not (tmp_path / "step-00000002").exists()


def test_what_a_refused_save_left_behind_goes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Folder.from_uri(str(tmp_path)), "a1", keep=2, failures=2, log=[].append)
    (tmp_path / "step-00000001" / "MANIFEST.json").mkdir(parents=True)  # in the way of the commit
    (model, optimizer), state = train_model(0), TrainState()
    fed(checkpoints, state, 1, model, optimizer)
    checkpoints.wait_for_save()
    assert (tmp_path / "step-00000001" / "a1" / "rank-0.bin").exists()
    assert checkpoints.find_newest() is None
    fed(checkpoints, state, 1, model, optimizer)
    checkpoints.finish()
    assert not (tmp_path / "step-00000001" / "a1").exists()


def test_requests_do_not_grow_with_the_checkpoints_of_a_run(s3: str, tmp_path: Path) -> None:
    asked = []
    with Proxy(s3) as proxy:
        for earlier in (2, 12):
            folder = Folder.from_uri(proxy.uri(f"many-{earlier}{tmp_path}"))
            for step in range(1, earlier + 1):
                folder.put_json(f"step-{step:08d}/MANIFEST.json", {"attempt": "a0"})
            model, optimizer = train_model(0)
            checkpoints = Checkpoints(folder, "a1", keep=2)
            proxy.requests.clear()
            checkpoints.save(model, optimizer, TrainState(step=100), {}, best=False)
            checkpoints.finish()
            saved = proxy.requests.total()
            assert checkpoints.find_newest() is not None
            asked.append((saved, proxy.requests.total()))
    assert asked[0] == asked[1]
