"""Runs on a mixture that are killed, resized and changed: the same bits, and every source's samples once an epoch."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from raystride.pipelines.config import Config, DataConfig, SettingError, TrainConfig
from raystride.pipelines.data.feed.mixture import Mixture
from raystride.pipelines.launch.console.screen import SilentScreen
from raystride.pipelines.launch.train_job import train
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.audit import audit
from raystride.pipelines.train.checkpoint.layout import MANIFEST
from raystride.pipelines.train.worker.job import Job
from tests.faults.moments import Blow, Group, finish, short_job
from tests.faults.schedules import draw_schedule, run_schedule
from tests.tiny import tiny, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts of three sources."""
    path = tmp_path_factory.mktemp("mixtures")
    write_text(path, 4_000)
    (path / "sums.txt").write_text("".join(f"{i}+{i}={2 * i}\n" for i in range(120)))
    (path / "code.txt").write_text("".join(f"def f{i}(): return {i * 31 % 97}\n" for i in range(90)))
    return path


def _data(folder: Path, weights: dict[str, float], **changes: Any) -> DataConfig:
    sources = {"text": folder / "text.txt", "sums": folder / "sums.txt", "code": folder / "code.txt"}
    entries = {name: {"source": str(sources[name]), "weight": weight} for name, weight in weights.items()}
    return DataConfig(sources=entries, kind="text", validation="tail", validation_fraction=0.1, **changes)


def test_killed_and_resized_a_run_on_a_mixture_has_the_same_bits(folder: Path) -> None:
    data = _data(folder, {"text": 0.5, "sums": 0.3, "code": 0.2}, curriculum=({"from_step": 10, "weights": {"sums": 1.0}},))
    data.sources["code"]["epochs_at_most"] = 0.2
    calm = finish(short_job(folder / "text.txt", folder, "calm", data=data), 1, folder)
    job = short_job(folder / "text.txt", folder, "killed", data=data)
    Group(job, 3, folder, Blow("backward", 7, 1)).codes()
    after = finish(job, 2, folder)
    assert after["resumed_from"] == 4
    same = ("parameters_sha256", "steps", "samples_seen", "tokens_seen", "val_loss", "train_loss", "metrics")
    assert {key: after[key] for key in same} == {key: calm[key] for key in same}
    assert {"val_loss/text", "val_loss/sums", "val_loss/code"} <= after["metrics"].keys()
    found = audit(job.folder / "checkpoints")
    assert found.samples == sum(count for count, _ in found.by_source.values()) == calm["samples_seen"]
    count, samples = found.by_source["code"]
    assert count == int(0.2 * samples), "it has given what it may"


def _run(config: Config, storage: Path) -> dict[str, Any]:
    return dict(train(replace(config, run="changed", storage=str(storage)), Folder.from_uri(str(storage)), SilentScreen()))


@pytest.mark.long
def test_weights_change_and_sources_come_and_go_on_resume(folder: Path, tmp_path: Path) -> None:
    config = tiny(folder / "text.txt", data=_data(folder, {"text": 0.75, "sums": 0.25}))
    config = replace(config, launch=replace(config.launch, mode="inline"))
    config = replace(config, tokenizer=replace(config.tokenizer, kind="bpe", vocabulary_size=270))
    longer = replace(config.train, steps=24)
    assert _run(config, tmp_path)["status"] == "finished"
    then = replace(config, train=longer, data=_data(folder, {"sums": 0.5, "code": 0.5}))
    summary = _run(then, tmp_path)
    assert (summary["status"], summary["resumed_from"], summary["samples_seen"]) == ("finished", 6, 192)
    checkpoints = Folder.from_uri(str(tmp_path)) / "changed" / "checkpoints"
    found = audit(checkpoints)
    assert {name: count for name, (count, _) in found.by_source.items()} == {"text": 36, "sums": 12 + 72, "code": 72}
    before, after = (checkpoints.read_json(f"step-{step:08d}/{MANIFEST}") for step in (6, 24))
    assert before["order"]["sources"][0]["order"] == after["order"]["sources"][0]["order"]
    assert "epochs by source: text" in str(found)
    other = _data(folder, {"text": 0.75, "sums": 0.25})
    other.sources["text"]["source"] = str(folder / "code.txt")
    with pytest.raises(SettingError, match=r"the data of data\.sources\.text: fingerprint"):
        _run(replace(config, train=replace(longer, steps=30), data=other), tmp_path)
    again = _run(replace(config, train=replace(longer, steps=30)), tmp_path)
    assert again["status"] == "finished", "the text comes back where it was"
    assert audit(checkpoints).by_source["text"][0] == 36 + 36


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.weekly) for each in (1, 2))])
def test_drawn_kills_resizes_weights_and_sources_lose_and_repeat_no_sample(folder: Path, seed: int) -> None:
    draw, steps = Random(seed), 40

    def job() -> Job:
        names = draw.sample(["text", "sums", "code"], draw.randint(1, 3))
        data = _data(folder, {name: draw.uniform(0.1, 1) for name in names})
        train = TrainConfig(steps=steps, slots=7, slot_size=2, exact=True)
        return short_job(folder / "text.txt", folder, f"drawn-{seed}", data=data, train=train)

    schedule = [replace(attempt, job=job()) for attempt in draw_schedule(seed, steps)]
    outcome = run_schedule(job(), schedule, folder)
    assert outcome.summary["steps"] == steps
    checkpoints = job().folder / "checkpoints"
    found = audit(checkpoints)
    assert found.samples == steps * 14 == sum(count for count, _ in found.by_source.values())
    mixture = Mixture.from_json(checkpoints.read_json(f"step-{steps:08d}/{MANIFEST}")["order"])
    ends = [*(phase.first for phase in mixture.phases[1:]), found.samples]
    for number, source in enumerate(mixture.sources):
        shares = [(each.first, each.units[number] / sum(each.units)) for each in mixture.phases]
        due = sum((end - first) * share for (first, share), end in zip(shares, ends, strict=True))
        assert abs(found.by_source[source.name][0] - due) < 2 * len(ends), (source.name, schedule)
