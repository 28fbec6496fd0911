"""Ours: the computed order, pieces fetched ahead of it, and a cache that lets go of what is needed last."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers.far_reading import ReadingJob, read, reading_job
from raystride.pipelines.config import Config, DataConfig, ModelConfig, TrainConfig
from raystride.pipelines.data.feed.loader import Loader
from raystride.pipelines.data.feed.open_dataset import open_feed
from raystride.pipelines.data.prepare.manifest import Manifest, Shards
from raystride.pipelines.data.prepare.shards import ShardWriter
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder


def write(folder: Path, tokens: np.ndarray, shards: int) -> None:
    """The tokens, (n) uint16, as a prepared folder of so many shards."""
    import pyarrow as pa

    place, splits = Folder(str(folder)), {"train": [], "validation": []}  # type: ignore[var-annotated]
    for number, part in enumerate([*np.array_split(tokens, shards), tokens[:1000]]):
        split = "train" if number < shards else "validation"
        writer = ShardWriter(pa.uint16(), place)
        columns = {"document": [0], "begins": [True], "ends": [True]}
        ids = pa.LargeListArray.from_arrays(pa.array([0, len(part)], pa.int64()), pa.array(part))
        masks = pa.nulls(1, pa.large_list(pa.uint8()))
        writer.add(pa.table(columns | {"ids": ids, "loss_mask": masks}))
        splits[split].append(writer.finish(f"{split}/{number:05d}.arrow"))
    known = {name: Shards.from_shards(each) for name, each in splits.items()}
    facts = {"vocabulary_size": 2**16, "end_id": 0, "tokenizers": []}
    Manifest(fingerprint="far", id_type="uint16", splits=known, **facts).save(place)  # type: ignore[arg-type]


def config_of(job: ReadingJob) -> Config:
    """The settings of a training that reads so."""
    config = Config(seed=job.seed, model=ModelConfig(context=job.context))
    data = DataConfig(shuffle=job.shuffle, cache_gib=job.cache_bytes / 2**30)  # type: ignore[arg-type]
    return replace(
        config, data=data, train=TrainConfig(slots=job.world, slot_size=job.batch, epochs=float(job.last // job.batches))
    )


def main() -> None:
    """Reads as the command line says."""
    job = reading_job()
    torch.set_num_threads(1)  # as a worker of two on two cores has
    config, prepared = config_of(job), Folder(job.place)
    task = build_task(config, {"vocabulary_size": 2**16, "end_id": 0})
    feed = open_feed(config, task, prepared, clock="run", log=print if job.rank == 0 else lambda _: None)
    read_ahead = feed.read_ahead(config.data, job.rank, job.world)
    loader = Loader(feed.plan, feed.train, job.rank, job.world, read_ahead=read_ahead)
    read(job, loader.steps(job.first, job.last))


if __name__ == "__main__":
    main()
