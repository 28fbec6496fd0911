"""What a run is fed, opened: the plan of its training samples, these, and those that are held out, by source.

feed = open_feed(config, task, prepared)        # of a resumed run also: where it is, and its order until then
loader = Loader(feed.plan, feed.train)
feed.held_out                                             # {"": samples}; of a mixture a name for each source
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.mixture import mixture_entries, wanted_weights
from raystride.pipelines.feed.cache import NodeCache, node_cache
from raystride.pipelines.feed.growth import GrowingOrder, GrownOrder, Growth
from raystride.pipelines.feed.mixture import MAX_PERIOD, Mixture, MixtureSource, in_units, unlike_shares
from raystride.pipelines.feed.plan import Plan, build_order, build_plan
from raystride.pipelines.feed.read_ahead import ReadAhead
from raystride.pipelines.feed.samples import Mixed, Samples, open_samples
from raystride.pipelines.feed.shuffling import Reading, choose_shuffle
from raystride.pipelines.feed.stream import TokenStream
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.generations import read_generation
from raystride.pipelines.prepare.manifest import Manifest
from raystride.pipelines.tasks.task import Task


@dataclass(frozen=True)
class Feed:
    """What a run is fed."""

    plan: Plan
    train: Samples
    held_out: Mapping[str, Samples]
    """The samples that validate, by source; "" where there is but one."""
    shares: Mapping[str, float]
    """How much of what validates is to come from each of these."""
    cache: NodeCache
    """What far shards are read through."""

    def ahead(self, config: Config, rank: int, world: int) -> ReadAhead | None:
        """What has one worker's pieces of far shards fetched; None where no shards are far."""
        if not self.train.far:
            return None
        most = int(config.data.prefetch_mib * 2**20)
        return ReadAhead(self.plan, self.train, self.cache, rank=rank, world=world, most_bytes=most)


def open_feed(
    config: Config,
    task: Task,
    prepared: Folder,
    *,
    past: Mapping[str, Any] | None = None,
    step: int = 0,
    position: int = 0,
    clock: str = "",
    said: Callable[[str], None] = lambda _: None,
) -> Feed:
    """Opens prepared data for a run that goes on from a step and position, where `past` was its order (`to_json`).

    `clock` names those whose steps are the same, as a run's workers. `said` is told where training waits for data that is
    still being prepared, and of what far shards cost. Raises FileNotFoundError where a source's
    preparation is not whole, SettingError for weights that cannot be.
    """
    cache, manifest = node_cache(config, clock, said), open_manifest(config, prepared, past)
    if manifest.growing:
        return _growing(config, task, prepared, manifest, cache, past, step, position, said)
    splits: dict[str, dict[str, Samples]] = {"train": {}, "validation": {}}
    for name, (folder, own) in manifest.by_source(prepared).items():
        for split, samples in splits.items():
            samples[name] = open_samples(config, task, TokenStream(folder, own, split, cache))
    train, held_out = splits["train"], splits["validation"]
    config = replace(config, data=choose_shuffle(config.data, _reading(train.values(), cache), past, said))
    if not manifest.sources:
        plan = build_plan(config, train[""].count, step, position)
        return Feed(plan, train[""], held_out, {"": 1.0}, cache)
    earlier = Mixture.from_json(past) if past else None
    sizes = {name: each.count for name, each in train.items()}
    mixture = build_mixture(config, sizes, earlier, position)
    for note in share_notes(config, sizes, mixture.max_period):
        said(note)
    plan = build_plan(config, 0, step, position, mixture)
    return Feed(plan, Mixed(task, train, mixture), held_out, mixture.shares(), cache)


def _reading(some: Iterable[Samples], cache: NodeCache) -> Reading | None:
    """What is read from far away of an epoch of samples; None where nothing is."""
    far = [samples for samples in some if samples.far]
    if not far:
        return None
    shards = [each for samples in far for each in samples.far]
    piece, size = max(each.largest for each in shards), sum(each.size for each in shards)
    return Reading(size, sum(samples.count for samples in far), piece, cache.most_bytes)


def open_manifest(config: Config, prepared: Folder, past: Mapping[str, Any] | None = None) -> Manifest:
    """The manifest of prepared data; of what is trained on in generations, that of the first one.

    A run that goes on keeps to what it began with, in generations or as a whole. Raises FileNotFoundError where there is
    none yet, ValueError for another format.
    """
    in_generations = "generations" in past if past else config.data.start_after_mib > 0
    first = read_generation(prepared, 0) if in_generations else None
    return replace(first or Manifest.load(prepared), growing=in_generations and bool(first or past))


def _growing(
    config: Config,
    task: Task,
    prepared: Folder,
    first: Manifest,
    cache: NodeCache,
    past: Mapping[str, Any] | None,
    step: int,
    position: int,
    said: Callable[[str], None],
) -> Feed:
    """What is fed to a run while its data is being prepared."""
    stream, held_out = (TokenStream(prepared, first, split, cache) for split in ("train", "validation"))
    samples = open_samples(config, task, stream)
    # How much there will be is not known yet: it is chosen by what there is.
    data = choose_shuffle(config.data, _reading([samples], cache), past, said)
    config = replace(config, data=data)
    growth = Growth(prepared, samples, stream, whole="parts" not in first.source)
    known = GrownOrder.from_json(past) if past else GrownOrder(build_order(config, 1))
    order = GrowingOrder(replace(known, complete=False), growth, said)
    order.ready(position + 1)
    plan = build_plan(config, 0, step, position, order)
    return Feed(plan, samples, {"": open_samples(config, task, held_out)}, {"": 1.0}, cache)


def build_mixture(config: Config, samples: Mapping[str, int], past: Mixture | None = None, since: int = 0) -> Mixture:
    """The mixture of sources of so many samples, as the settings want it from position `since` on.

    Raises SettingError for weights that cannot be, and for a source that is another one than `past` had under its name.
    """
    batch = config.train.slots * config.train.slot_samples
    entries, sources = mixture_entries(config.data), []
    had = {each.name: each.order for each in past.sources} if past else {}
    for name, entry in entries.items():
        most = entry.epochs_at_most * samples[name]
        order = build_order(config, samples[name], _seed(config.seed, name))
        sources.append(MixtureSource(name, order, most if math.isinf(most) else math.floor(most)))
        if (before := had.get(name, order)) != order:
            raise SettingError(
                f"data.sources.{name} has {order.samples:,} samples in another order than the {before.samples:,} that this "
                "run had under that name, and what was fed before would not be known any more: give it another name",
                setting=f"data.sources.{name}",
                value=order.samples,
                allowed=before.samples,
            )
    wanted = [(step * batch, [weights[name] for name in entries]) for step, weights in wanted_weights(config.data, samples)]
    return Mixture.planned(sources, wanted, past, since)


def share_notes(config: Config, samples: Mapping[str, int], max_period: int = MAX_PERIOD) -> list[str]:
    """A line for each set of weights whose sources are dealt other shares than is wanted, by more than a tenth.

    Raises SettingError for weights that cannot be.
    """
    notes = []
    for step, weights in wanted_weights(config.data, samples):
        names, values = list(weights), list(weights.values())
        unlike = unlike_shares(values, in_units(values, max_period))
        if unlike:
            number, wanted, dealt = max(unlike, key=lambda each: abs(each[2] / each[1] - 1))
            since = f" from step {step} on" if step else ""
            notes.append(
                f"data.sources: {len(unlike)} of {len(names)} sources have another share of the samples{since} than their "
                f"weights say, by more than a tenth: {names[number]} has {dealt:.3g} where {wanted:.3g} is wanted. Shares "
                "so small cannot be dealt exactly: give such sources more weight, or write several of them as one"
            )
    return notes


def _seed(seed: int, name: str) -> int:
    """A source's own seed: sources of one size are not to be gone through alike, whatever their number and order."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
