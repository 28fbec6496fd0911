"""Opening a run's data: its plan, the validation samples, and a mixture with per-source seeds and limits."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raystride.pipelines.config import Config, DataConfig, TrainConfig
from raystride.pipelines.data.feed import open_dataset
from raystride.pipelines.data.feed.mixture import Mixture
from raystride.pipelines.data.feed.open_dataset import (
    Feed,
    _describe_reading,
    _source_seed,
    build_mixture,
    open_feed,
    open_manifest,
)
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.samples import MixedSamples
from raystride.pipelines.data.feed.shuffling import ShardReading
from raystride.pipelines.data.prepare.generations import GENERATIONS_FOLDER
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused
from tests.pipelines.data.feed.far import far_folder, prepared_text
from tests.tiny import tiny, write_text


def test_a_sources_seed_follows_from_the_runs_and_its_name_alone_and_stays() -> None:
    """As sha256sum has it: a resumed run goes through its sources as it did."""
    assert [_source_seed(0, "web"), _source_seed(1, "web"), _source_seed(0, "code")] == [
        0x550ECDF065EDA3,
        0xBAEDB2211FB298,
        0x75AFE70CA15E2E,
    ]


def config_of(sources: dict[str, Any], **data: Any) -> Config:
    """Config of a run with four samples per step on these sources."""
    entries = {name: {"source": name} | content for name, content in sources.items()}
    return Config(train=TrainConfig(slots=2, slot_size=2), data=DataConfig(sources=entries, shuffle="full", **data))


def _mixture(config: Config, *arguments: Any) -> Mixture:
    return build_mixture(config.train, config.data, config.seed, *arguments)


def test_a_mixtures_sources_have_their_orders_ends_and_weights() -> None:
    mixture = _mixture(config_of({"web": {"weight": 3, "epochs_at_most": 1.55}, "code": {}}), {"web": 10, "code": 7})
    web, code = mixture.sources
    assert (web.name, web.order, web.max_samples) == ("web", Order(10, _source_seed(0, "web"), "full", *orders_rest()), 15)
    assert (code.name, code.order.samples, code.order.seed, code.max_samples) == (
        "code",
        7,
        _source_seed(0, "code"),
        math.inf,
    )
    assert mixture.counts(16).tolist() == [12, 4]


def orders_rest() -> tuple[int, int, int]:
    """Blocks and windows of the default settings."""
    data = DataConfig()
    return data.shuffle_block, data.shuffle_window, data.shuffle_first_window


def test_weights_of_a_curriculum_hold_from_its_steps_first_sample() -> None:
    curriculum = ({"from_step": 4, "weights": {"web": 0, "code": 1}},)
    mixture = _mixture(config_of({"web": {}, "code": {"weight": 0}}, curriculum=curriculum), {"web": 100, "code": 100})
    assert [mixture.counts(position).tolist() for position in (16, 17, 20)] == [[16, 0], [16, 1], [16, 4]]


def test_a_resumed_mixture_keeps_what_was_fed_and_refuses_another_source_under_a_name() -> None:
    config, samples = config_of({"web": {}, "code": {}}), {"web": 100, "code": 100}
    past = _mixture(config, samples)
    after = _mixture(config_of({"web": {"weight": 0}, "code": {}}), samples, past, 10)
    assert [after.counts(position).tolist() for position in (10, 14)] == [[5, 5], [5, 9]]
    with refused("data.sources.web", 99) as raised:
        _mixture(config, samples | {"web": 99}, past, 10)
    assert raised.value.allowed == 100
    _mixture(config_of({"web": {}, "code": {}, "more": {}}), samples | {"more": 5}, past, 10)


def test_what_is_read_of_far_shards_is_all_of_them_by_the_largest_piece(tmp_path: Path) -> None:
    folder, manifest, task = prepared_text(tmp_path, 30_000)
    config = task.config
    near, far = (open_feed(config, task, place) for place in (folder, far_folder(Path(str(folder.local)))))
    assert _describe_reading([near.train], near.cache) is None
    shards = manifest.splits["train"]
    found = _describe_reading([near.train, far.train, far.train], far.cache)
    (only,) = far.train.remote_shards
    assert found == ShardReading(
        2 * only.total_bytes, 2 * far.train.num_samples, only.largest_piece_bytes, far.cache.max_bytes
    )
    assert 2 * manifest.tokens("train") <= only.total_bytes <= sum(shard.bytes for shard in shards)
    ahead = replace(config, data=replace(config.data, prefetch_mib=7 * only.largest_piece_bytes / 2**20))
    reading = far.read_ahead(ahead.data, 0, 1)
    assert reading is not None
    assert reading._max_pieces == 7
    assert near.read_ahead(ahead.data, 0, 1) is None


@pytest.mark.parametrize(("shuffle", "is_larger", "is_random"), [("full", 1, 1), ("full", 0, 0), ("blocks", 1, 0)])
def test_no_more_is_read_of_data_larger_than_memory_than_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: Any, is_larger: int, is_random: int
) -> None:
    """Read-ahead made a batch of 33 kB one of 434 MB."""
    folder, manifest, task = prepared_text(tmp_path, 30_000)
    size = int(manifest.splits["train"].column("bytes").sum())
    monkeypatch.setattr(open_dataset, "usable_memory", lambda: 2 * size - 1 if is_larger else 2 * size)
    config = replace(task.config, data=replace(task.config.data, shuffle=shuffle))
    feed = open_feed(config, task, folder)
    feed.train.read_rows(np.array([0]))
    (shard,) = (part for part in Path("/proc/self/smaps").read_text().split("VmFlags:")[:-1] if f"{folder}/train" in part)
    flags = Path("/proc/self/smaps").read_text().partition(shard)[2].partition("\n")[0].split()
    assert ("rr" in flags) == is_random


def test_auto_is_blocks_where_memory_does_not_hold_local_shards(tmp_path: Path) -> None:
    folder, manifest, task = prepared_text(tmp_path, 300_000)
    size = int(manifest.splits["train"].column("bytes").sum())
    config = replace(task.config, data=replace(task.config.data, shuffle="auto"))
    lines = list[str]()
    assert open_feed(config, task, folder, memory=2 * size).plan.order.shuffle == "full"  # type: ignore[union-attr]
    found = open_feed(config, task, folder, memory=size // 4, log=lines.append).plan.order
    assert found.shuffle == "blocks"  # type: ignore[union-attr]
    assert "half of the memory holds" in lines[0]
    past = open_feed(config, task, folder, memory=2 * size).plan.order.to_json()
    kept = open_feed(config, task, folder, memory=size // 4, past=past).plan.order
    assert kept.shuffle == "full"  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Storage of the prepared data."""
    return Folder.from_uri(str(tmp_path_factory.mktemp("storage")))


def open_run_feed(config: Config, storage: Folder, **changes: Any) -> Feed:
    """Prepares the data and opens the feed of a run."""
    folder = prepare(RunContext(config, storage, log=lambda _: None), build_task(config), on_ray=False).folder
    task = build_task(config, open_manifest(config.data, folder).facts)
    return open_feed(config, task, folder, **changes)


def test_one_source_has_a_plan_of_its_samples_from_where_it_goes_on(tmp_path: Path, storage: Folder) -> None:
    config = tiny(write_text(tmp_path), train=TrainConfig(steps=6, slots=4, slot_size=2, epochs=3))
    feed = open_run_feed(config, storage, step=5, position=37)
    plan = feed.plan
    assert (plan.slots, plan.slot_size, plan.epochs, plan.first_step, plan.first_position) == (4, 2, 3, 5, 37)
    assert plan.end == 3 * feed.train.num_samples
    assert (list(feed.held_out), feed.shares) == ([""], {"": 1.0})
    assert feed.train.num_samples > 5 * feed.held_out[""].num_samples > 0, "a tenth validates"
    start = open_run_feed(config, storage).plan
    assert (start.first_step, start.first_position) == (0, 0)


def test_a_mixture_has_what_validates_and_its_share_by_source(tmp_path: Path, storage: Folder) -> None:
    (tmp_path / "b").mkdir()
    sources = {"a": write_text(tmp_path), "b": write_text(tmp_path / "b", 5_000)}
    data = DataConfig(
        sources={
            name: {"source": str(path), "kind": "text", "weight": 1 + 2 * (name == "b")} for name, path in sources.items()
        },
        validation="tail",
        validation_fraction=0.1,
    )
    config = replace(tiny(tmp_path / "text.txt"), data=data)
    feed = open_run_feed(config, storage)
    assert isinstance(feed.train, MixedSamples)
    assert feed.shares == {"a": 0.25, "b": 0.75}
    assert feed.held_out["a"].num_samples > 2 * feed.held_out["b"].num_samples > 0
    assert feed.plan.order.num_positions(1) == math.inf
    again = open_run_feed(config, storage, past=feed.plan.order.to_json(), step=2, position=16)
    assert (again.plan.first_step, again.plan.first_position) == (2, 16)


def test_generations_are_read_if_a_run_began_with_them_or_is_to_begin(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path))
    folder = prepare(
        RunContext(config, Folder.from_uri(str(tmp_path / "storage")), log=lambda _: None), build_task(config), on_ray=False
    ).folder
    beside = replace(config, data=replace(config.data, start_after_mib=1.0))
    whole = open_manifest(config.data, folder)
    assert not whole.growing
    assert not open_manifest(beside.data, folder).growing, "there is no generation, since it was prepared as a whole"
    open_manifest(config.data, folder).save(folder / GENERATIONS_FOLDER / "000000")
    assert open_manifest(beside.data, folder).growing
    assert not open_manifest(config.data, folder).growing
    assert open_manifest(config.data, folder, {"generations": []}).growing
    assert not open_manifest(beside.data, folder, {"shuffle": "full"}).growing
