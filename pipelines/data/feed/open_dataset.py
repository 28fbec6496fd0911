"""Opens the data of a run: the step plan, the training samples, and the validation samples by source.

feed = open_feed(config, task, prepared)        # of a resumed run also its position and past order
loader = Loader(feed.plan, feed.train)
feed.held_out                                             # {"": samples}; for a mixture, one entry per source name
"""

import hashlib
import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raystride.pipelines.config import Config, DataConfig, SettingError, TrainConfig
from raystride.pipelines.config.mixture import mixture_entries, wanted_weights
from raystride.pipelines.data.feed.cache import NodeCache, node_cache
from raystride.pipelines.data.feed.growth import AppendableOrder, StreamingDataset, StreamingOrder
from raystride.pipelines.data.feed.mixture import MAX_PERIOD, Mixture, MixtureSource, distorted_shares, quantize_shares
from raystride.pipelines.data.feed.plan import Plan, build_order, build_plan
from raystride.pipelines.data.feed.read_ahead import ReadAhead
from raystride.pipelines.data.feed.samples import MixedSamples, Samples, open_samples
from raystride.pipelines.data.feed.shuffling import ShardReading, choose_shuffle
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.feed.verification import BesideTraining
from raystride.pipelines.data.prepare.generations import read_generation
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.tasks.task import Task
from raystride.pipelines.system.limits import usable_memory
from raystride.pipelines.system.storage.folder import Folder

MEMORY_SHARE = 1 / 2
"""Share of the memory that local shards may fill."""


@dataclass(frozen=True)
class Feed:
    """Data of a run: plan, training samples and validation samples."""

    plan: Plan
    train: Samples
    held_out: Mapping[str, Samples]
    """Validation samples by source name; "" for a single source."""
    shares: Mapping[str, float]
    """Share of each source in the validation samples."""
    cache: NodeCache
    """Node cache for remote shards."""
    beside: BesideTraining = field(default_factory=BesideTraining)
    """Verifies whole files beside the training; to be started by who trains."""

    def read_ahead(self, data: DataConfig, rank: int, world: int) -> ReadAhead | None:
        """Creates the read-ahead of one worker's remote pieces; None if all shards are local."""
        if not self.train.remote_shards:
            return None
        max_bytes = int(data.prefetch_mib * 2**20)
        return ReadAhead(self.plan, self.train, self.cache, rank=rank, world=world, max_bytes=max_bytes)


def open_feed(
    config: Config,
    task: Task,
    prepared: Folder,
    *,
    past: Mapping[str, Any] | None = None,
    step: int = 0,
    position: int = 0,
    clock: str = "",
    log: Callable[[str], None] = lambda _: None,
    memory: int | None = None,
) -> Feed:
    """Opens prepared data for a run at a step and position; on resume `past` is its order until then (`to_json`).

    `clock` names the readers with the same steps, as a run's workers. `log` gets messages when training waits for data that
    is still being prepared, and on the cost of remote shards. `memory` is that of the smallest node in bytes, by which all
    workers choose the same shuffle; None: this one's. Raises FileNotFoundError if a source's preparation is
    incomplete, SettingError for impossible weights.
    """
    cache, manifest = node_cache(config.data, clock, log), open_manifest(config.data, prepared, past)
    beside = BesideTraining()
    if task.reads_dataset:
        own_samples, own_held_out = (task.open_samples(split) for split in ("train", "validation"))
        own_samples.verify(beside)
        own_held_out.verify(beside)
        plan = build_plan(config, own_samples.num_samples, step, position)
        return Feed(plan, own_samples, {"": own_held_out}, {"": 1.0}, cache, beside)
    if manifest.growing:
        return _open_streaming_feed(config, task, prepared, manifest, cache, beside, past, step, position, log)
    splits: dict[str, dict[str, Samples]] = {"train": {}, "validation": {}}
    streams = []
    for name, (folder, source_manifest) in manifest.by_source(prepared).items():
        for split, samples in splits.items():
            stream = TokenStream(folder, source_manifest, split, cache, beside)
            samples[name] = open_samples(config.train, config.seed, task, stream)
            streams += [stream] if split == "train" else []
    train, held_out = splits["train"], splits["validation"]
    reading = _describe_reading(train.values(), cache) or _describe_local_reading(streams, train.values(), memory)
    config = replace(config, data=choose_shuffle(config.data, reading, past, log))
    if config.data.shuffle == "full" and _exceeds_memory(streams, usable_memory()):
        for stream in streams:
            stream.expect_random_reads()
    if not manifest.sources:
        plan = build_plan(config, train[""].num_samples, step, position)
        return Feed(plan, train[""], held_out, {"": 1.0}, cache, beside)
    past_mixture = Mixture.from_json(past) if past else None
    sizes = {name: source_samples.num_samples for name, source_samples in train.items()}
    mixture = build_mixture(config.train, config.data, config.seed, sizes, past_mixture, position)
    for note in share_notes(config.data, sizes, mixture.max_period):
        log(note)
    plan = build_plan(config, 0, step, position, mixture)
    return Feed(plan, MixedSamples(task, train, mixture), held_out, mixture.shares(), cache, beside)


def _describe_reading(samples_list: Iterable[Samples], cache: NodeCache) -> ShardReading | None:
    """Returns the remote reads of an epoch of samples; None if nothing is remote."""
    remote_samples = [samples for samples in samples_list if samples.remote_shards]
    if not remote_samples:
        return None
    shards = [shard for samples in remote_samples for shard in samples.remote_shards]
    piece, size = max(shard.largest_piece_bytes for shard in shards), sum(shard.total_bytes for shard in shards)
    return ShardReading(size, sum(samples.num_samples for samples in remote_samples), piece, cache.max_bytes)


def _exceeds_memory(streams: Iterable[TokenStream], memory: int) -> bool:
    """Returns whether local shards have more bytes than half of the memory, which may hold them."""
    return sum(stream.local_bytes for stream in streams) > memory * MEMORY_SHARE


def _describe_local_reading(
    streams: Sequence[TokenStream], samples_list: Iterable[Samples], memory: int | None
) -> ShardReading | None:
    """Returns the reads of an epoch from a disk; None if memory holds the shards."""
    memory = usable_memory() if memory is None else memory
    if not _exceeds_memory(streams, memory):
        return None
    size, samples = sum(stream.local_bytes for stream in streams), sum(samples.num_samples for samples in samples_list)
    return ShardReading(size, samples, mmap.PAGESIZE, int(memory * MEMORY_SHARE), is_remote=False)


def open_manifest(data: DataConfig, prepared: Folder, past: Mapping[str, Any] | None = None) -> Manifest:
    """Loads the manifest of prepared data, or of its first generation if training streams generations.

    A resumed run keeps the mode that it began with. Raises FileNotFoundError if there is none yet, ValueError for another
    format.
    """
    in_generations = "generations" in past if past else data.start_after_mib > 0
    first = read_generation(prepared, 0) if in_generations else None
    return replace(first or Manifest.load(prepared), growing=in_generations and bool(first or past))


def _open_streaming_feed(
    config: Config,
    task: Task,
    prepared: Folder,
    first: Manifest,
    cache: NodeCache,
    beside: BesideTraining,
    past: Mapping[str, Any] | None,
    step: int,
    position: int,
    log: Callable[[str], None],
) -> Feed:
    """Opens the data of a run that trains while its data is being prepared."""
    stream, held_out = (TokenStream(prepared, first, split, cache, beside) for split in ("train", "validation"))
    samples = open_samples(config.train, config.seed, task, stream)
    # The final size is unknown, so the shuffle is chosen by the current one.
    data = choose_shuffle(config.data, _describe_reading([samples], cache), past, log)
    config = replace(config, data=data)
    dataset = StreamingDataset(prepared, samples, stream, is_complete="parts" not in first.source)
    known = AppendableOrder.from_json(past) if past else AppendableOrder(build_order(config.data, 1, config.seed))
    order = StreamingOrder(replace(known, complete=False), dataset, log)
    order.is_ready(position + 1)
    plan = build_plan(config, 0, step, position, order)
    return Feed(plan, samples, {"": open_samples(config.train, config.seed, task, held_out)}, {"": 1.0}, cache, beside)


def build_mixture(
    train: TrainConfig, data: DataConfig, seed: int, samples: Mapping[str, int], past: Mixture | None = None, since: int = 0
) -> Mixture:
    """Builds the mixture of sources with these numbers of samples, with the settings' weights from position `since` on.

    Raises SettingError for impossible weights, and for a source that differs from the one of the same name in `past`.
    """
    batch = train.slots * train.slot_samples
    entries, sources = mixture_entries(data), []
    past_orders = {source.name: source.order for source in past.sources} if past else {}
    for name, entry in entries.items():
        max_samples = entry.epochs_at_most * samples[name]
        order = build_order(data, samples[name], _source_seed(seed, name))
        sources.append(MixtureSource(name, order, max_samples if math.isinf(max_samples) else math.floor(max_samples)))
        if (prior := past_orders.get(name, order)) != order:
            raise SettingError(
                f"data.sources.{name} has {order.samples:,} samples in another order than the {prior.samples:,} that this "
                "run had under that name, and what was fed before would not be known any more: give it another name",
                setting=f"data.sources.{name}",
                value=order.samples,
                allowed=prior.samples,
            )
    wanted = [(step * batch, [weights[name] for name in entries]) for step, weights in wanted_weights(data, samples)]
    return Mixture.from_weights(sources, wanted, past, since)


def share_notes(data: DataConfig, samples: Mapping[str, int], max_period: int = MAX_PERIOD) -> list[str]:
    """Returns a note for each set of weights if quantized shares differ from the wanted ones by more than a tenth.

    Raises SettingError for impossible weights.
    """
    notes = []
    for step, weights in wanted_weights(data, samples):
        names, values = list(weights), list(weights.values())
        wrong = distorted_shares(values, quantize_shares(values, max_period))
        if wrong:
            number, target, dealt = max(wrong, key=lambda share: abs(share[2] / share[1] - 1))
            since = f" from step {step} on" if step else ""
            notes.append(
                f"data.sources: {len(wrong)} of {len(names)} sources have another share of the samples{since} than their "
                f"weights say, by more than a tenth: {names[number]} has {dealt:.3g} where {target:.3g} is wanted. Shares "
                "so small cannot be dealt exactly: give such sources more weight, or write several of them as one"
            )
    return notes


def _source_seed(seed: int, name: str) -> int:
    """Derives a source's seed, so that sources of the same size are shuffled differently, independent of their order."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
