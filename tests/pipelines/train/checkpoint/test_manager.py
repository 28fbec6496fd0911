"""Checkpoints: everything comes back, on another number of workers too; damage is found; nothing is unpickled."""

import json
import pickletools
import re
import resource
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.transformer import Decoder
from raystride.pipelines.data.feed.loader import Step
from raystride.pipelines.system.errors import Unreadable
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed
from raystride.pipelines.train.checkpoint import index, manager
from raystride.pipelines.train.checkpoint.contents import named_tensors
from raystride.pipelines.train.checkpoint.manager import Checkpoints, ValidCheckpoint
from raystride.pipelines.train.checkpoint.pieces import parameters_sha256
from raystride.pipelines.train.checkpoint.train_state import TrainState
from raystride.pipelines.train.strategies.strategy import Single
from tests.distributed import run_distributed
from tests.errors import refused
from tests.flips import flip
from tests.pipelines.train.checkpoints import SHAPE, fed, open_checkpoints, save, train_model
from tests.privileges import bound_by_permissions
from tests.some import some
from tests.storage import KEYS
from tests.storage import uri as uri_of


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("place", ["local", "memory", "s3"])
def test_everything_comes_back(tmp_path: Path, kind: str, place: str, s3: str) -> None:
    places = {
        "local": str(tmp_path),
        "memory": f"memory://checkpoints{tmp_path}",
        "s3": uri_of(s3, f"checkpoints{tmp_path}"),
    }
    uri = places[place]
    model, optimizer = train_model(0, kind=kind)
    state = TrainState(step=7, position=28, tokens_seen=99, best=1.5, best_step=5, val_loss=1.6, worse_validations=1)
    writer = Checkpoints(Folder.from_uri(uri), "a1", keep=2)
    writer.save(model, optimizer, state, {"run": "r"}, best=True)
    writer.wait_for_save()
    other, other_optimizer = train_model(1, kind=kind)
    reader = open_checkpoints(uri)
    found = reader.find_newest()
    assert found is not None
    reader.load(found, other, other_optimizer)
    assert parameters_sha256(other) == parameters_sha256(model)
    ours, theirs = named_tensors(model, optimizer), named_tensors(other, other_optimizer)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    loaded = found.state
    assert (loaded.step, loaded.position, loaded.tokens_seen, loaded.best) == (7, 28, 99, 1.5)
    loaded.advance(Step(number=7, position=28, samples=4, micro_batches=[], digest=11))
    assert (loaded.parent_step, loaded.parent_position, loaded.position, loaded.fed_digest) == (7, 28, 32, 11)


def test_a_step_that_is_saved_again_keeps_its_place_in_the_chain(tmp_path: Path) -> None:
    model, optimizer = train_model(0)
    first = open_checkpoints(tmp_path)
    state = TrainState(step=4, position=16, parent_step=2, parent_position=8, fed_digest=5)
    first.save(model, optimizer, state, {}, best=False)
    first.save(model, optimizer, state, {}, best=True)  # the validation after it was the best so far
    first.wait_for_save()
    again = open_checkpoints(tmp_path)
    found = again.find_newest()
    assert found is not None
    again.save(model, optimizer, found.state, {}, best=False)  # by an attempt with no step left to do
    again.wait_for_save()
    found = again.find_newest()
    assert found is not None
    link = {key: found.manifest[key] for key in ("parent_step", "positions", "fed")}
    assert link == {"parent_step": 2, "positions": [8, 16], "fed": {"0": f"{5:016x}"}}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_was_fed_is_shared_out_among_the_ranks_of_now(world: int) -> None:
    manifest = {
        "state": {"step": 4, "position": 16},
        "parent_step": 0,
        "positions": [0, 16],
        "fed": {"0": "f" * 16, "1": f"{3:016x}"},
    }
    states = [ValidCheckpoint(4, Folder(""), manifest, rank, world).state for rank in range(world)]
    assert sum(state.fed_digest for state in states) % 2**64 == 2


def test_a_save_holds_the_moment_it_was_called(tmp_path: Path) -> None:
    model, optimizer = train_model(0)
    before = parameters_sha256(model)
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(model, optimizer, TrainState(step=1), {}, best=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    checkpoints.wait_for_save()
    found = checkpoints.find_newest()
    assert found is not None
    checkpoints.load(found, model)
    assert parameters_sha256(model) == before


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "no manifest"])
def test_damage_is_found_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    newest = tmp_path / "step-00000002"
    data = newest / "a1" / "rank-0.bin"
    if damage == "flip":
        content = bytearray(data.read_bytes())
        content[100] ^= 1
        data.write_bytes(bytes(content))
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "remove":
        data.unlink()
    elif damage == "manifest":
        (newest / "MANIFEST.json").write_text('{"format": 1, "half')
    else:
        (newest / "MANIFEST.json").unlink()
    said: list[str] = []
    found = open_checkpoints(tmp_path, said).find_newest()
    assert found is not None
    assert found.step == 1
    assert bool(said) is (damage != "no manifest")


@pytest.mark.parametrize("place", ["a1/rank-0.bin", "MANIFEST.json", ""])
def test_what_cannot_be_read_is_not_damaged(tmp_path: Path, place: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    closed = tmp_path / "step-00000002" / place
    closed.chmod(0)
    said: list[str] = []
    with bound_by_permissions(), pytest.raises(Unreadable, match=rf"{closed}.* may be whole"):
        open_checkpoints(tmp_path, said).find_newest()
    assert not said
    closed.chmod(0o700)
    found = open_checkpoints(tmp_path).find_newest()
    assert found is not None
    assert found.step == 2


def test_too_many_open_files_are_no_damage(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoints, limits = open_checkpoints(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path("/dev/null").open() as stream:
        resource.setrlimit(resource.RLIMIT_NOFILE, (stream.fileno(), limits[1]))
        try:
            with pytest.raises(Unreadable, match="Too many open files"):
                checkpoints.find_newest()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _flip(data: Path) -> None:
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(bytes(content))


def test_where_none_is_whole_each_is_named_with_its_fault(tmp_path: Path) -> None:
    assert open_checkpoints(tmp_path).find_newest() is None  # a run that has saved nothing begins
    place = tmp_path / "r" / "checkpoints"
    place.mkdir(parents=True)
    for step in (1, 2, 3):
        save(place, step)
    _flip(place / "step-00000002" / "a1" / "rank-0.bin")
    (place / "step-00000003" / "MANIFEST.json").write_text("[1]")
    faults = [
        "step-00000003: its manifest is no JSON object",
        "step-00000002: a1/rank-0.bin differs",
        "step-00000001: a1/rank-0.bin is missing",
    ]
    with refused("run", "r", names=[*faults, "--launch.start_over true", "--run NAME"]):
        open_checkpoints(place).find_newest()


def test_a_named_checkpoint_is_the_one_or_an_error(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, best=step == 1)
    _flip(tmp_path / "step-00000001" / "a1" / "rank-0.bin")
    checkpoints = open_checkpoints(tmp_path)
    assert checkpoints.find_step(2).step == 2
    with refused("checkpoint", "best", names=["step-00000001", "a1/rank-0.bin differs", "--checkpoint last", "1, 2, 3"]):
        checkpoints.find_best()
    with refused("checkpoint", 4, names=["step-00000004", "MANIFEST.json", "--checkpoint last"]):
        checkpoints.find_step(4)
    save(tmp_path / "unvalidated", 1)
    assert open_checkpoints(tmp_path / "unvalidated").find_best() is None


def _lose_a_state(step: Path) -> None:
    """Has a manifest say that a tensor of the optimiser lies elsewhere, which its hashes do not show."""
    manifest = read_sealed(Folder(str(step)), "MANIFEST.json")
    name = next(name for name in reversed(manifest["tensors"]) if name.startswith("optimizer."))
    manifest["tensors"][name]["chunks"][0]["offset"] = 10**9
    put_sealed(Folder(str(step)), "MANIFEST.json", manifest)


def test_a_load_that_fails_is_that_of_the_one_before(tmp_path: Path) -> None:
    before = save(tmp_path, 1)
    save(tmp_path, 2)
    _lose_a_state(tmp_path / "step-00000002")
    said: list[str] = []
    checkpoints = open_checkpoints(tmp_path, said)
    found = checkpoints.find_newest()
    assert found is not None
    assert found.step == 2
    model, optimizer = train_model(9)
    assert checkpoints.load_newest(found, model, optimizer).step == 1
    assert parameters_sha256(model, optimizer) == parameters_sha256(before)
    (line,) = said
    assert line.startswith("warning: checkpoint step-00000002 cannot be loaded (ValueError: ")
    assert line.endswith("step-00000001 is instead")
    _lose_a_state(tmp_path / "step-00000001")
    with pytest.raises(ValueError, match="offset"):
        checkpoints.load_newest(found, model, optimizer)


def _faulty(rank: int, world: int, folder: str) -> list[Any]:
    model, optimizer = train_model(9)
    checkpoints = Checkpoints(Folder.from_uri(folder), "a2", keep=2, group=dist.new_group(backend="gloo"))
    found = checkpoints.find_newest()
    assert found is not None
    loaded = checkpoints.load_newest(found, model, optimizer)
    with bound_by_permissions() if rank else nullcontext():
        try:
            checkpoints.find_newest()
        except Unreadable as error:
            return [found.step, loaded.step, parameters_sha256(model), str(error)]
    return []


def test_ranks_agree_on_what_one_cannot_load_or_read(tmp_path: Path) -> None:
    before = save(tmp_path, 1)
    save(tmp_path, 2)
    _lose_a_state(tmp_path / "step-00000002")
    (tmp_path / "step-00000002" / "a1" / "tokenizer" / "kind.json").chmod(0)  # the second rank's share
    one, other = run_distributed(_faulty, 2, str(tmp_path))
    assert one == other
    assert one[:3] == [2, 1, parameters_sha256(before)]
    assert "kind.json" in one[3]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("two")
    save(folder, 1)
    save(folder, 2)
    return folder


@given(number=st.integers(0, 2**30))
def test_a_manifest_with_any_bit_turned_is_passed_over(two_checkpoints: Path, number: int) -> None:
    manifest = two_checkpoints / "step-00000002" / "MANIFEST.json"
    whole, said = manifest.read_bytes(), list[str]()
    manifest.write_bytes(flip(whole, number % (8 * len(whole))))
    try:
        found = open_checkpoints(two_checkpoints, said).find_newest()
        assert found is not None
        assert found.step == 1
        assert re.match("warning: checkpoint step-00000002 is passed over: its manifest (does not|is no JSON) ", said[0])
    finally:
        manifest.write_bytes(whole)


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for path in some(path for path in tmp_path.rglob("*") if path.is_file()):
        with pytest.raises(ValueError, match=r".+"):
            list(pickletools.genops(path.read_bytes()))


def test_the_manifest_says_what_was_fed(tmp_path: Path) -> None:
    save(tmp_path, 3)
    manifest = json.loads((tmp_path / "step-00000003" / "MANIFEST.json").read_text())
    assert manifest["fed"] == {"0": f"{3:016x}"}
    assert manifest["parent_step"] == 0
    assert manifest["state"]["position"] == 12
    assert set(manifest["files"]) == {"a1/rank-0.bin", "a1/tokenizer/kind.json"}


def test_a_full_disk_is_an_error_and_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-00000002").write_text("in the way of the folder")
    model, optimizer = train_model(0)
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(model, optimizer, TrainState(step=2), {}, best=False)
    with pytest.raises(Exception, match="step-00000002"):
        checkpoints.wait_for_save()
    (tmp_path / "step-00000002").unlink()
    found = checkpoints.find_newest()
    assert found is not None
    assert found.step == 1


def test_a_refused_save_is_a_warning_and_the_next_one_says_what_both_fed(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(Folder.from_uri(str(tmp_path)), "a1", keep=2, failures=2, log=said.append)
    (tmp_path / "step-00000002").write_text("in the way of the folder")
    (model, optimizer), state = train_model(0), TrainState()
    for digest in (3, 5, 7):
        fed(checkpoints, state, digest, model, optimizer)
    checkpoints.finish()
    assert [line[:62] for line in said] == ["warning: the checkpoint of step 2 could not be written (NotADi"]
    assert checkpoints.list_names() == ["step-00000001", "step-00000003"]
    manifest = json.loads((tmp_path / "step-00000003" / "MANIFEST.json").read_text())
    link = {key: manifest[key] for key in ("parent_step", "positions", "fed")}
    assert link == {"parent_step": 1, "positions": [4, 12], "fed": {"0": f"{5 + 7:016x}"}}


def test_so_many_refused_saves_in_a_row_are_an_error(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(Folder.from_uri(str(tmp_path)), "a1", keep=2, failures=2, log=said.append)
    for step in (1, 3, 4):
        (tmp_path / f"step-{step:08d}").write_text("in the way of the folder")
    (model, optimizer), state = train_model(0), TrainState()
    for _ in range(4):
        fed(checkpoints, state, 1, model, optimizer)
    with pytest.raises(NotADirectoryError, match="step-00000004"):
        checkpoints.wait_for_save()
    assert len(said) == 3


def test_refused_saves_by_the_clock_do_not_end_a_run(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(Folder.from_uri(str(tmp_path)), "a1", keep=2, failures=2, log=said.append)
    (model, optimizer), state = train_model(0), TrainState()
    for step in range(1, 5):
        (tmp_path / f"step-{step:08d}").write_text("in the way of the folder")
        checkpoints.save(model, optimizer, TrainState(step=step), {}, best=False, timed=True)
        checkpoints.wait_for_save()
    assert len(said) == 4
    assert all("the next one tries again" in line for line in said)
    (tmp_path / "step-00000001").unlink()
    fed(checkpoints, state, 1, model, optimizer)
    checkpoints.finish()


def test_a_wait_for_a_save_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "NOTICE_S", 0.01)
    checkpoints = Checkpoints(Folder.from_uri(str(tmp_path)), "a1", keep=2)
    (model, optimizer), told, goes_on = train_model(0), list[tuple[int, float]](), threading.Event()
    checkpoints.verify_data = lambda: bool(goes_on.wait()) and None

    def on_wait(step: int, seconds: float) -> None:
        told.append((step, seconds))
        goes_on.set()

    checkpoints.on_wait = on_wait
    checkpoints.save(model, optimizer, TrainState(step=3), {}, best=False)
    checkpoints.finish()
    assert {step for step, _ in told} == {3}
    assert told[0][1] >= 0.01
    assert told[-1][1] == 0


def test_the_last_save_of_a_run_must_succeed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Folder.from_uri(str(tmp_path)), "a1", keep=2, failures=5, log=[].append)
    (tmp_path / "step-00000001").write_text("in the way of the folder")
    (model, optimizer), state = train_model(0), TrainState()
    fed(checkpoints, state, 1, model, optimizer)
    with pytest.raises(NotADirectoryError, match="step-00000001"):
        checkpoints.finish()
    (tmp_path / "step-00000001").unlink()
    checkpoints.save(model, optimizer, state, {}, best=False)  # the same step once more
    checkpoints.finish()
    assert checkpoints.list_names() == ["step-00000001"]


def _refused_saves(rank: int, world: int, folder: str) -> list[Any]:
    model, optimizer = train_model(0)
    said: list[str] = []
    group = dist.new_group(backend="gloo")
    checkpoints = Checkpoints(Folder.from_uri(folder), "a1", keep=2, failures=2, group=group, log=said.append)
    seen: list[Any] = []
    for step in (1, 2, 3):
        checkpoints.save(model, optimizer, TrainState(step=step), {}, best=False)
        dist.all_reduce(torch.ones(1000))
        try:
            checkpoints.wait_for_save()
        except OSError as error:
            seen.append(type(error).__name__)
        seen.append(checkpoints.has_refused_save)
    return [seen, len(said)]


def test_all_ranks_agree_on_what_one_could_not_write(tmp_path: Path) -> None:
    for step in (1, 3):
        (tmp_path / f"step-{step:08d}" / "a1" / "rank-1.bin" / "in the way").mkdir(parents=True)
    of_first, of_second = run_distributed(_refused_saves, 2, str(tmp_path))
    assert of_first[0] == of_second[0] == [True, False, True]
    assert (of_first[1], of_second[1]) == (2, 0)
    assert [path.parent.name for path in tmp_path.glob("step-*/MANIFEST.json")] == ["step-00000002"]


def test_two_groups_of_an_attempt_share_no_file(tmp_path: Path) -> None:
    model, optimizer = train_model(0)
    groups = [open_checkpoints(tmp_path) for _ in range(2)]
    for group in groups:
        group.fence_older_groups()
        group.save(model, optimizer, TrainState(step=1), {}, best=False)
        group.finish()
    written = {path.parent.name for path in tmp_path.glob("step-*/*/rank-0.bin")}
    assert written == {groups[1].data}  # what the first one wrote went when the second one committed
    found = groups[1].find_newest()
    assert found is not None
    assert found.data.name == groups[1].data != groups[0].data
    groups[0].save(model, optimizer, TrainState(step=2), {}, best=False)
    with pytest.raises(RuntimeError, match="has taken this run over"):
        groups[0].wait_for_save()
    assert groups[1].list_names() == ["step-00000001"]
    assert not (tmp_path / "step-00000002").exists()  # it learned of it before it wrote


def test_a_checkpoint_of_an_earlier_version_is_opened(tmp_path: Path) -> None:
    saved = save(tmp_path, 1)
    folder = Folder(str(tmp_path / "step-00000001"))
    manifest = read_sealed(folder, "MANIFEST.json")
    assert manifest.pop("folder") == "a1"
    folder.put_json("MANIFEST.json", manifest)
    found = open_checkpoints(tmp_path).find_newest()
    assert found is not None
    assert found.data.local == tmp_path / "step-00000001" / "a1"
    other, _ = train_model(9)
    open_checkpoints(tmp_path).load(found, other)
    assert parameters_sha256(other) == parameters_sha256(saved)
    save(tmp_path, 2)
    assert (tmp_path / "step-00000001" / "a1").exists()


def _write(rank: int, world: int, folder: str, most_listed: int) -> str:
    index.MAX_LISTED_RANKS = most_listed
    model, optimizer = train_model(0)
    group = dist.new_group(backend="gloo")
    checkpoints = Checkpoints(Folder.from_uri(folder), "a1", keep=2, group=group)
    checkpoints.save(model, optimizer, TrainState(step=1, fed_digest=rank + 5), {}, best=False)
    # The training goes on beside the save, on its own group.
    for _ in range(50):
        dist.all_reduce(torch.ones(1000))
    checkpoints.wait_for_save()
    return parameters_sha256(model)


def _read(rank: int, world: int, folder: str) -> tuple[str, dict[str, Any]]:
    model, optimizer = train_model(9)
    checkpoints = Checkpoints(Folder.from_uri(folder), "a2", keep=2, group=dist.new_group(backend="gloo"))
    found = checkpoints.find_newest()
    assert found is not None
    checkpoints.load(found, model, optimizer)
    return parameters_sha256(model), found.manifest


@pytest.mark.parametrize(
    ("most_listed", "writers", "readers", "place"),
    [(1, 2, 3, "local"), (256, 3, 1, "local"), (256, 2, 3, "s3"), (1, 3, 1, "s3")],
)
def test_another_number_of_workers_reads_it(
    tmp_path: Path, most_listed: int, writers: int, readers: int, place: str, s3: str
) -> None:
    """By pairs: each value of the three meets all others once."""
    keys = ":".join(KEYS.values())  # in the address, since the workers' environment is older than the server
    uri = str(tmp_path) if place == "local" else uri_of(s3, f"workers{tmp_path}").replace("s3://", f"s3://{keys}@")
    written = run_distributed(_write, writers, uri, most_listed)
    if readers == 1:
        model, _ = Single(torch.device("cpu")).prepare_model(Decoder(SHAPE, 11), lambda m: train_model(9)[1])
        checkpoints = open_checkpoints(uri)
        found = checkpoints.find_newest()
        assert found is not None
        checkpoints.load(found, model)
        assert parameters_sha256(model) == written[0]
        assert found.manifest["fed"] == {str(rank): f"{rank + 5:016x}" for rank in range(writers)}
    else:
        assert {sha256 for sha256, _ in run_distributed(_read, readers, uri)} == set(written)


def test_tied_parameters_count_once_in_the_hash() -> None:
    model = Decoder(SHAPE, 11)
    before = parameters_sha256(model)
    assert before == parameters_sha256(model)
    with torch.no_grad():
        model.embedding.weight[0, 0] += 1e-7
    assert before != parameters_sha256(model)
