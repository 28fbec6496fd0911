"""Starting a run's name again: what may differ and what may not, and when there is nothing left to do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import (
    Config,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    RecordConfig,
    ResumeConfig,
    ScalingConfig,
    SettingError,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.config.stored_run import read_settings
from raystride.pipelines.data.prepare.fingerprint import Identity
from raystride.pipelines.launch.cluster.resources import Allocation
from raystride.pipelines.launch.run_store.resume import (
    CHANGED_AT,
    PreviousAttempt,
    accept_bits,
    describe_bit_dependencies,
    describe_completion,
    newest_step,
    read_previous_attempt,
    refuse_changes,
    refuse_edits,
    refuse_less,
    write_settings,
)
from raystride.pipelines.observability.record.summary import put_summary
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken
from tests.errors import refused
from tests.flips import flip
from tests.some import some
from tests.tiny import tiny

CONFIG = tiny(Path("text.txt"))


def _earlier(config: Config = CONFIG, **summary: Any) -> PreviousAttempt:
    """An attempt that came to its end after 6 steps, unless `summary` says otherwise."""
    return PreviousAttempt(
        config, "f" * 64, {"status": "finished", "complete": True, "steps": 6, "ending": "done"} | summary
    )


def _train(**changes: Any) -> Config:
    return replace(CONFIG, train=replace(CONFIG.train, **changes))


def _completion(previous: PreviousAttempt, config: Config) -> str | None:
    return describe_completion(previous, config.train, config.validation)


def _refuse_less(previous: PreviousAttempt, config: Config, saved: int | None) -> None:
    refuse_less(previous, config.train, config.run, saved)


def test_every_fixed_setting_that_changed_is_shown() -> None:
    now = replace(CONFIG, seed=3, model=replace(CONFIG.model, hidden_size=32), data=replace(CONFIG.data, shuffle="none"))
    lines = ("seed: 0 before, 3 now", "model.hidden_size: 16 before, 32 now", "data.shuffle: 'full' before, 'none' now")
    with pytest.raises(SettingError) as refusal:
        refuse_changes(_earlier(), now)
    said = str(refusal.value)
    assert not [line for line in lines if line not in said]
    assert refusal.value.allowed == {"seed": 0, "model.hidden_size": 16, "data.shuffle": "full"}
    assert len(said.splitlines()) == 4
    assert "--run" in said.splitlines()[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"scaling": ScalingConfig(workers=2, strategy="ddp", threads=3)},
        {"launch": LaunchConfig(mode="inline", max_restarts=3)},
        {"record": RecordConfig(experiment="another")},
        {"train": TrainConfig(steps=600, slots=4, slot_size=2, hours=2.0, micro_batch_slots=1)},
        {"optimizer": OptimizerConfig(learning_rate=0.5)},
        {"run": "name", "storage": "elsewhere"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_free_settings_may_change(changes: dict[str, Any]) -> None:
    refuse_changes(_earlier(), replace(CONFIG, **changes))


ENVIRONMENT: Any = {"cpu": "EPYC", "gpus": [{"name": "H100"}], "versions": {"torch": "2.13.0", "triton": "3.7.1"}}


def _bits(share: Allocation | None = None, **versions: str) -> dict[str, Any]:
    found = ENVIRONMENT | {"versions": ENVIRONMENT["versions"] | versions}
    return describe_bit_dependencies(CONFIG, found, share or Allocation(2, "cpu", 1))


REFUSED = ResumeConfig()


def test_an_exact_run_goes_on_where_bits_are_the_same(tmp_path: Path) -> None:
    checkpoints = Folder(str(tmp_path))
    assert accept_bits(checkpoints, _bits(), REFUSED) == _bits(), "nothing is there yet"
    (checkpoints / "step-00000002").put_json("MANIFEST.json", {"step": 2, "bits": _bits(torch="2.12.0")})
    (checkpoints / "step-00000004").put_json("MANIFEST.json", {"step": 4, "bits": _bits()})
    (checkpoints / "step-00000006").put("MANIFEST.json", "{half")
    accept_bits(checkpoints, _bits(), REFUSED)
    accept_bits(checkpoints, _bits(Allocation(3, "cpu", 1)), REFUSED)  # workers may come and go
    accept_bits(checkpoints, _bits(triton="3.6.0"), REFUSED)  # which CPUs do not use
    accept_bits(checkpoints, _bits(torch="2.13.0+cpu"), REFUSED)  # as it was stored until 0.4, without its build


def test_an_exact_run_goes_on_with_other_bits_if_they_are_accepted_and_keeps_from_where(tmp_path: Path) -> None:
    checkpoints, accepted = Folder(str(tmp_path)), ResumeConfig(accept="bits")
    (checkpoints / "step-00000002").put_json("MANIFEST.json", {"step": 2, "bits": _bits()})
    newer = accept_bits(checkpoints, _bits(torch="2.14.0"), accepted)
    assert newer == _bits(torch="2.14.0") | {CHANGED_AT: [2]}
    (checkpoints / "step-00000004").put_json("MANIFEST.json", {"step": 4, "bits": newer})
    assert accept_bits(checkpoints, _bits(torch="2.14.0"), REFUSED)[CHANGED_AT] == [2], "kept without asking again"
    assert accept_bits(checkpoints, _bits(torch="2.14.0"), accepted)[CHANGED_AT] == [2]
    assert accept_bits(checkpoints, _bits(torch="2.15.0"), accepted)[CHANGED_AT] == [2, 4]
    with refused("train.exact", True, names=["--resume.accept bits"]):
        accept_bits(checkpoints, _bits(torch="2.14.1+cu132"), REFUSED)


@pytest.mark.parametrize(
    ("now", "before"),
    [
        (_bits(torch="2.14.0"), {"torch": "2.13.0"}),
        (_bits(Allocation(2, "cpu", 2)), {"threads a worker": 1}),
        (_bits(Allocation(1, "cuda", 4)), {"device": "cpu", "device name": "EPYC"}),
    ],
    ids=["torch", "threads", "device"],
)
def test_an_exact_run_says_why_its_bits_would_change(tmp_path: Path, now: dict[str, Any], before: dict[str, Any]) -> None:
    checkpoints = Folder(str(tmp_path))
    (checkpoints / "step-00000002").put_json("MANIFEST.json", {"step": 2, "bits": _bits()})
    lines = [f"\n  {key}: {value} before, {now[key]} now" for key, value in before.items()]
    with refused("train.exact", True, names=["step-00000002", "--run NAME", *lines]) as refusal:
        accept_bits(checkpoints, now, REFUSED)
    assert before.items() <= refusal.value.allowed.items()


def test_other_data_behind_the_same_settings_is_refused() -> None:
    refuse_changes(_earlier(), CONFIG, Identity("f" * 64))
    with refused("data", "e" * 64, names=["f" * 12, "e" * 12]) as refusal:
        refuse_changes(_earlier(), CONFIG, Identity("e" * 64))
    assert refusal.value.allowed == {"data": "f" * 64}


def test_a_run_that_left_no_fingerprint_takes_any_data() -> None:
    refuse_changes(replace(_earlier(), data=None), CONFIG, Identity("e" * 64))


def test_what_is_written_is_what_the_next_attempt_reads(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "run"))
    assert read_previous_attempt(folder) is None
    config = replace(
        CONFIG, data=DataConfig(source="text.txt"), model=ModelConfig(dropout=0.25), scaling=ScalingConfig(workers=3)
    )
    write_settings(folder, "a1", config, {"data": "d1"})
    assert read_previous_attempt(folder) == PreviousAttempt(config, "d1", None)
    write_settings(folder, "a2", replace(config, scaling=ScalingConfig(workers=1)), {"data": "d1"})
    found = read_previous_attempt(folder)
    assert found
    assert found.config.scaling.workers == 1
    assert read_previous_attempt(folder / "attempts" / "a1") == PreviousAttempt(config, "d1", None)


@pytest.mark.parametrize("content", ["train: {steps: [", "train: 7", "train: {steps: -1}"])
def test_damaged_settings_are_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    folder = Folder(str(tmp_path / "run"))
    folder.put("config.yaml", content)
    with pytest.raises(SettingError, match=r"(?s)run/config\.yaml .*--run"):
        read_previous_attempt(folder)


def test_a_run_is_complete_when_its_steps_are_done() -> None:
    assert _completion(_earlier(), CONFIG) == "6 steps"
    assert _completion(_earlier(), _train(steps=4)) == "6 steps"
    assert _completion(_earlier(), _train(steps=7)) is None
    assert _completion(_earlier(), _train(hours=1.0)) == "6 steps"


def test_epochs_end_a_run_as_well() -> None:
    once = _train(steps=0, epochs=1.0)
    assert _completion(_earlier(once), once) == "6 steps"
    assert _completion(_earlier(once), _train(steps=0, epochs=0.5)) == "6 steps"
    assert _completion(_earlier(once), _train(steps=0, epochs=2.0)) is None
    assert _completion(_earlier(once), _train(steps=100, epochs=1.0)) == "6 steps"
    assert _completion(_earlier(once), _train(steps=100, epochs=2.0)) is None
    assert _completion(_earlier(once), _train(steps=100)) is None
    assert _completion(_earlier(), once) is None


def test_a_run_that_its_steps_ended_within_its_epochs_can_go_on() -> None:
    both = _train(steps=6, epochs=3.0)
    assert _completion(_earlier(both), both) == "6 steps"
    assert _completion(_earlier(both), _train(steps=100, epochs=3.0)) is None
    assert _completion(_earlier(both), _train(steps=0, epochs=3.0)) is None
    more = _train(steps=7, epochs=3.0)  # its epochs ended it, after 6 of 7 steps
    assert _completion(_earlier(more), _train(steps=100, epochs=3.0)) == "6 steps"


def test_a_run_whose_patience_ended_goes_on_under_another_validation() -> None:
    early = {"ending": "stopped_early"}
    assert _completion(_earlier(**early), _train(steps=1000)) == "6 steps, stopped early"
    other = replace(_train(steps=1000), validation=replace(CONFIG.validation, patience=9))
    assert _completion(_earlier(**early), other) is None
    assert _completion(_earlier(**early), replace(CONFIG, validation=ValidationConfig(every=2, patience=1))) is None


@pytest.mark.parametrize("summary", [{"status": "stopped"}, {"status": "failed"}, {"complete": False}, {"complete": None}])
def test_a_run_that_did_not_come_to_its_end_is_not_complete(summary: dict[str, Any]) -> None:
    assert _completion(_earlier(**summary), CONFIG) is None


def test_a_run_without_a_summary_is_not_complete() -> None:
    assert _completion(PreviousAttempt(CONFIG, None, None), CONFIG) is None


def test_an_attempt_that_was_killed_does_not_pass_for_the_one_before_it(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "run"))
    once, twice = _train(steps=0, epochs=1.0), _train(steps=0, epochs=2.0)
    write_settings(folder, "a1", once, {})
    folder.put_json("summary.json", _earlier().summary)
    write_settings(folder, "a2", twice, {})  # and then it is killed
    found = read_previous_attempt(folder)
    assert found
    assert _completion(found, twice) is None


def test_a_run_that_is_past_its_end_is_refused(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert newest_step(folder) is None
    folder.put("checkpoints/step-00000174/MANIFEST.json", "{}")
    folder.put("checkpoints/step-00000200/data.bin", "never committed")
    assert newest_step(folder) == 174
    killed = PreviousAttempt(CONFIG, None, None)
    _refuse_less(killed, _train(steps=174), 174)
    _refuse_less(killed, _train(steps=0, epochs=2), 174)
    _refuse_less(killed, _train(steps=90), None)
    with refused("train.steps", 90, names=["174"]):
        _refuse_less(killed, _train(steps=90), 174)


def test_less_than_a_complete_run_has_is_refused() -> None:
    """It would be returned for a start that asks for another length."""
    _refuse_less(_earlier(), _train(steps=6), 6)
    with refused("train.steps", 4, names=["6"]):
        _refuse_less(_earlier(), _train(steps=4), 6)
    with refused("train.steps", 4, names=["6"]):
        _refuse_less(_earlier(), _train(steps=4), None)  # checkpoint.every is 0
    once = _train(steps=0, epochs=1.0)
    _refuse_less(_earlier(once), once, 6)
    _refuse_less(_earlier(once), _train(steps=0, epochs=2.0), 6)
    _refuse_less(_earlier(once, complete=False), _train(steps=0, epochs=0.5), 6)
    with refused("train.epochs", 0.5, names=["at least 1,"]):
        _refuse_less(_earlier(once), _train(steps=0, epochs=0.5), 6)


def test_places_are_compared_and_not_their_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    before = replace(CONFIG, data=replace(CONFIG.data, source="../small/"))
    now = replace(CONFIG, data=replace(CONFIG.data, source=str(tmp_path / "small")))
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    refuse_changes(_earlier(before), now)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=r"data\.source"):
        refuse_changes(_earlier(before), now)
    refuse_changes(_earlier(before), now, has_same_data=lambda: True)


def _written(tmp_path: Path) -> Folder:
    folder = Folder(str(tmp_path / "run"))
    write_settings(folder, "a1", CONFIG, {"data": "d0"})
    write_settings(folder, "a2", CONFIG, {"data": "d1", "sources": {}})
    return folder


def test_an_edited_file_is_taken_only_by_name_and_says_what_it_changes(tmp_path: Path) -> None:
    folder, said = _written(tmp_path), list[str]()
    whole = folder.read("config.yaml").decode()
    folder.put("config.yaml", "# a comment of mine\n" + whole)
    refuse_edits(previous_attempt(folder), CONFIG.resume, said.append)  # the same settings
    rate = CONFIG.optimizer.learning_rate
    folder.put("config.yaml", whole.replace(f"learning_rate: {rate}", "learning_rate: 0.5"))
    change = f"optimizer.learning_rate: {rate} before, 0.5 now"
    with refused("resume.edited", False, names=["config.yaml", change, "--resume.edited true"]):
        refuse_edits(previous_attempt(folder), CONFIG.resume, said.append)
    with refused("run", "run", names=["config.yaml", change, "--resume.edited true", "attempts/a2/config.yaml"]):
        read_settings(folder)
    refuse_edits(previous_attempt(folder), ResumeConfig(edited=True), said.append)
    assert change in said[0]
    assert previous_attempt(folder).config == CONFIG  # with which others are compared
    write_settings(folder, "a3", replace(CONFIG, resume=ResumeConfig(edited=True)), {"data": "d1"})
    assert not read_settings(folder).resume.edited


def test_a_start_that_was_cut_between_the_two_files_is_no_edit(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    before = folder.read("config.yaml")
    write_settings(folder, "a3", replace(CONFIG, scaling=ScalingConfig(workers=3)), {"data": "d1"})
    folder.put("config.yaml", before)
    assert read_settings(folder).scaling.workers == CONFIG.scaling.workers


def test_any_bit_that_is_turned_is_refused_by_the_file_s_name_or_changes_nothing(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    for name in ("config.yaml", "environment.json"):
        whole = folder.read(name)
        for bit in some(range(0, 8 * len(whole), 3989 if name == "config.yaml" else 13)):
            folder.put(name, flip(whole, bit))
            found = _previous_or_refusal(folder)
            if isinstance(found, str):
                assert name in found
                continue
            assert (found.config, found.data) == (CONFIG, "d1")
            assert not found.edits or name == "config.yaml"
        folder.put(name, whole)


def test_of_the_environment_the_newest_whole_copy_counts(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    for name in ("environment.json", "attempts/a2/environment.json", "attempts/a1/environment.json"):
        folder.put(name, folder.read(name).replace(b'"data"', b'"date"'))
        if name != "attempts/a1/environment.json":
            assert previous_attempt(folder).data == ("d1" if name == "environment.json" else "d0")
    with refused("run", "run", names=["environment.json does not match its own SHA-256", "--run"]):
        previous_attempt(folder)


def test_a_run_that_0_3_goes_on_with_is_believed_as_one_of_0_3(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    (folder / "attempts" / "a3").put("config.yaml", to_yaml(replace(CONFIG, scaling=ScalingConfig(workers=3))))
    folder.put("config.yaml", (folder / "attempts" / "a3").read("config.yaml"))
    for place in (folder / "attempts" / "a3", folder):
        place.put_json("environment.json", {"data": "d3"})
    found = previous_attempt(folder)
    assert (found.config.scaling.workers, found.data, found.edits) == (3, "d3", [])


def test_a_run_whose_settings_are_gone_is_no_new_run(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    folder.remove("config.yaml")
    for read in (read_previous_attempt, read_settings):
        with refused("run", "run", names=["copy", "attempts/a2/config.yaml"]):
            read(folder)


def test_a_damaged_summary_does_not_let_a_run_train_on(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    put_summary(folder, {"status": "finished", "complete": True, "steps": 12, "ending": "stopped_early"})
    folder.put("summary.json", folder.read("summary.json").replace(b"true", b"null"))
    with pytest.raises(SealBroken, match=r"summary\.json does not match its own SHA-256: remove it"):
        read_previous_attempt(folder)


def _previous_or_refusal(folder: Folder) -> PreviousAttempt | str:
    try:
        return previous_attempt(folder)
    except SettingError as error:
        return str(error)


def previous_attempt(folder: Folder) -> PreviousAttempt:
    """The newest attempt of a run that has one."""
    found = read_previous_attempt(folder)
    assert found
    return found


FREE_BITS: dict[str, Any] = {"train.precision": "bf16", "train.stochastic_rounding": True, "model.linear": "onednn"}
FREE_BITS |= {"model.kernels": "torch", "scaling.bucket_mib": 3.0}
KEEPS_BITS = {
    **dict.fromkeys(("steps", "epochs", "hours", "batch", "log_every", "log_norms"), "another length, or another record"),
    **dict.fromkeys(("clip_norm", "dropout_masks"), "another result, which a notice names at a resume"),
    "micro_batch_slots": "0 or 1 under train.exact, each slot by itself",
    "activation_checkpointing": "the same forward once more",
    "compile": "`none` under train.exact",
    "deterministic": "true under train.exact",
    "family": "names an architecture for people",
    "attention": "our own kernel under train.exact",
}


def test_every_free_setting_of_training_and_model_is_a_condition_of_the_bits_or_keeps_them() -> None:
    fixed = CONFIG.fixed_settings()
    free = {key for key in CONFIG.flat() if key.startswith(("train.", "model.")) and key not in fixed}
    assert {key.partition(".")[2] for key in free} == KEEPS_BITS.keys() | {
        key.partition(".")[2] for key in FREE_BITS if not key.startswith("scaling.")
    }
    before = _bits()
    for key, value in FREE_BITS.items():
        section, _, name = key.partition(".")
        low = {"precision": "pure_bf16"} if name == "stochastic_rounding" else {}
        other = replace(CONFIG, **{section: replace(getattr(CONFIG, section), **low, **{name: value})})
        found = describe_bit_dependencies(other, ENVIRONMENT, Allocation(2, "cpu", 1))
        assert found[key] != before[key]


def test_every_condition_of_the_bits_alone_refuses_an_exact_run(tmp_path: Path) -> None:
    checkpoints, before = Folder(str(tmp_path)), _bits(Allocation(1, "cuda", 4))
    (checkpoints / "step-00000002").put_json("MANIFEST.json", {"step": 2, "bits": before})
    for key in some(before):
        with refused("train.exact", True, names=[key]) as refusal:
            accept_bits(checkpoints, before | {key: "another"}, REFUSED)
        assert refusal.value.allowed == {key: before[key]}
