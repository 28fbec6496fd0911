"""Examples and bundles as samples: found by number across shards, and fed once per epoch."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from raystride.pipelines.config import Config, DataConfig, TrainConfig
from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.loader import Loader, num_validation_samples, validation_batches
from raystride.pipelines.data.feed.mixture import Mixture, MixtureSource, split_samples
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.plan import Plan, build_plan
from raystride.pipelines.data.feed.samples import (
    BundledExamples,
    Examples,
    MixedSamples,
    Samples,
    count_windows,
    open_samples,
)
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.one_source import PreparedData
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.data.tasks.task import Inputs, Rows
from raystride.pipelines.system.storage.folder import Folder
from tests.tiny import tiny

LINES = [f"{number}:" + "x" * (number * 37 % 50) for number in range(30_000)]


class Lines(LanguageModel):
    """Each document is a sample, padded with -1 behind its end."""

    @property
    def window(self) -> None:
        return

    def collate(self, rows: Rows, masks: Rows | None) -> tuple[Inputs, torch.Tensor]:
        tensors = [torch.from_numpy(row.astype(np.int64)) for row in rows]
        batch = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=-1)
        return (batch,), torch.tensor([1 if masks is None or mask.any() else -100 for mask in masks or rows])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    folder = tmp_path_factory.mktemp("samples")
    (folder / "lines.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in LINES))
    config = _config(folder / "lines.jsonl")
    result = prepare(
        RunContext(config, Folder.from_uri(str(folder)), log=lambda _: None), LanguageModel(config), on_ray=False
    )
    assert len(result.manifest.splits["train"]) > 1
    return result


def _config(path: Path, **train: int) -> Config:
    data = DataConfig(source=str(path), validation="tail", validation_fraction=0.1)
    return tiny(path, data=data, train=replace(TrainConfig(steps=6, slots=4, slot_size=2, epochs=1), **train))


def _samples(prepared: PreparedData, config: Config, split: str = "train") -> Samples:
    stream = TokenStream(prepared.folder, prepared.manifest, split, NodeCache(Path("/none"), 0))
    return open_samples(config.train, config.seed, Lines(config, prepared.manifest.facts), stream)


def _texts(inputs: Inputs) -> list[str]:
    return [bytes(row[(row >= 0) & (row < 256)].to(torch.uint8).tolist()).decode() for row in inputs[0]]


def test_an_example_is_found_by_its_number(prepared: PreparedData) -> None:
    samples = _samples(prepared, _config(Path("x")))
    assert isinstance(samples, Examples)
    numbers = np.array([0, 1, 9_999, samples.num_samples - 1, 12_345])
    inputs, _ = samples.batch(numbers)
    assert _texts(inputs) == [LINES[number] for number in numbers]
    assert samples.tokens == pytest.approx(np.mean([len(line) + 1 for line in LINES[: samples.num_samples]]))
    with pytest.raises(IndexError, match="beyond"):
        samples.batch(np.array([samples.num_samples]))


@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 18, 32, 33, 34, 1000])
def test_windows_are_counted_up_to_the_last_that_is_full(tokens: int) -> None:
    task = LanguageModel(_config(Path("x")))
    assert (task.window.length, task.window.stride) == (17, 16)
    assert count_windows(task, tokens) == len([first for first in range(0, tokens, 16) if first + 17 <= tokens])


@pytest.mark.parametrize("world", [1, 3])
def test_bundles_are_fed_once_an_epoch_and_hold_what_they_may(prepared: PreparedData, world: int) -> None:
    config = _config(Path("x"), slot_tokens=4000)
    samples = _samples(prepared, config)
    assert isinstance(samples, BundledExamples)
    assert samples.bundles.padding < 0.02
    fed: Counter[str] = Counter()
    for rank in range(world):
        loader = Loader(
            build_plan(config, samples.num_samples), samples, rank, world, micro_batch_slots=config.train.together
        )
        for step in loader.steps(0, 10**9):
            for batch in step.micro_batches:
                assert batch.inputs[0].numel() <= 4000
                fed.update(_texts(batch.inputs))
    assert fed == Counter(LINES[: int(samples.examples * samples.num_samples + 0.5)])


def test_an_empty_micro_batch_has_real_shapes_and_no_target(prepared: PreparedData) -> None:
    for config in (_config(Path("x")), _config(Path("x"), slot_tokens=4000)):
        inputs, targets = _samples(prepared, config).empty_batch(3)
        assert len(inputs[0]) == 3
        assert (targets == -100).all()


def test_a_source_validates_by_its_share_and_one_without_by_one_sample(prepared: PreparedData) -> None:
    samples = _samples(prepared, _config(Path("x")), "validation")
    assert [num_validation_samples(samples, 100, share) for share in (1.0, 0.301, 0.0)] == [100, 31, 1]
    assert num_validation_samples(samples, 0, 0.0) == num_validation_samples(samples, 10**9) == samples.num_samples
    bundles = _samples(prepared, _config(Path("x"), slot_tokens=2000), "validation")
    assert 1 < num_validation_samples(bundles, 1000) < num_validation_samples(bundles, 0)


def test_validation_takes_bundles_spread_over_the_split(prepared: PreparedData) -> None:
    samples = _samples(prepared, _config(Path("x"), slot_tokens=2000), "validation")
    batches = list(validation_batches(samples, num_samples=3, size=1, rank=0, world=1, device=torch.device("cpu")))
    assert [batch.slot for batch in batches] == [0, 1, 2]
    lengths = [batch.inputs[0].shape[1] for batch in batches]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2]


@pytest.mark.parametrize("slot_tokens", [0, 4000], ids=["examples", "bundles"])
def test_samples_of_a_mixture_come_in_the_order_in_which_they_are_asked_for(
    prepared: PreparedData, slot_tokens: int
) -> None:
    config = _config(Path("x"), slot_tokens=slot_tokens)
    sources = {name: _samples(prepared, config, split) for name, split in (("a", "train"), ("b", "validation"))}
    orders = [MixtureSource(name, Order(each.num_samples, number)) for number, (name, each) in enumerate(sources.items())]
    mixture = Mixture.from_weights(orders, [(0, (0.6, 0.4))])
    mixed, asked = MixedSamples(sources["a"].task, sources, mixture), mixture.sample_ids_at(np.arange(40, dtype=np.int64))
    alone = [
        text
        for source, number in zip(*split_samples(asked), strict=True)
        for text in _texts(list(sources.values())[source].batch(np.array([number]))[0])
    ]
    assert _texts(mixed.batch(asked)[0]) == alone
    taken = split_samples(asked)[0]
    tokens = {f"tokens_seen/{name}": (taken == place).sum() * sources[name].tokens for place, name in enumerate("ab")}
    assert mixed.tokens_by_source(40) == pytest.approx(tokens)
    assert sources["a"].tokens_by_source(40) == {}


class Drawn(Lines):
    """The first number of a row is what was drawn for it, in thousandths."""

    draws = 1

    def collate_drawn(self, rows: Rows, masks: Rows | None, draws: np.ndarray) -> tuple[Inputs, torch.Tensor]:
        drawn = [np.array([int(1000 * draw[0]), *row]) for row, draw in zip(rows, draws, strict=True)]
        return self.collate(drawn, masks)


def test_what_is_drawn_for_a_sample_of_a_mixture_is_its_own_however_many_workers_read_it(prepared: PreparedData) -> None:
    config = _config(Path("x"))
    task = Drawn(config, prepared.manifest.facts)
    sources = {
        name: Examples(task, TokenStream(prepared.folder, prepared.manifest, split, NodeCache(Path("/none"), 0)))
        for name, split in (("a", "train"), ("b", "validation"))
    }
    orders = [MixtureSource(name, Order(each.num_samples, number)) for number, (name, each) in enumerate(sources.items())]
    mixture = Mixture.from_weights(orders, [(0, (0.5, 0.5))])
    plan, mixed = Plan(mixture, slots=6, slot_size=2), MixedSamples(task, sources, mixture)

    def fed(world: int, group: int) -> dict[int, tuple[int, str]]:
        found = {}
        for rank in range(world):
            for batch in Loader(plan, mixed, rank, world, micro_batch_slots=group).read_step(3).micro_batches:
                rows = batch.inputs[0]
                for place, row in enumerate(rows, batch.slot * plan.slot_size):
                    (text,) = _texts((row[None, 1:],))
                    found[place] = int(row[0]), text
        return found

    alone = fed(6, 1)
    assert len(set(alone.values())) == len(alone) == 12
    assert fed(1, 6) == fed(2, 3) == fed(3, 2) == alone
