"""mosaicml-streaming: MDS shards, its own order and cache. Runs in an environment of its own.

python -m benchmarks.peers.far_mosaic write tokens.npy FOLDER CONTEXT SHARD_BYTES
"""

import itertools
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.peers.far_reading import ReadingJob, peer

NAMES = {"torchvision.datasets": ["VisionDataset", "CIFAR10"], "torchvision.transforms.functional": ["to_tensor"]}
"""What `streaming` imports of torchvision, for data sets of images, which nobody reads here."""


def without_torchvision() -> None:
    """Has `streaming` be imported where torchvision, which it needs, is built for another PyTorch than the one for CPUs."""
    with suppress(ImportError, RuntimeError):
        __import__("torchvision")
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("torchvision", "torchvision.transforms", *NAMES):
        sys.modules[name] = module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(dict.fromkeys(NAMES.get(name, ()), object))


def write(tokens: str, folder: str, context: int, shard_bytes: int) -> None:
    """The tokens of a file as a data set of windows."""
    from streaming import MDSWriter

    values = np.load(tokens, mmap_mode="r")
    with MDSWriter(out=folder, columns={"ids": "bytes"}, hashes=["xxh64"], size_limit=shard_bytes) as out:
        for at in range(0, len(values) - context, context):
            out.write({"ids": values[at : at + context].tobytes()})


def batches(job: ReadingJob) -> Any:
    """The batches of all epochs."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    # Blocks of a shuffle as large as the cache likes: with its own, larger ones its shards leave before they are used up.
    samples_of_cache = job.cache_bytes // (2 * job.context)
    data = StreamingDataset(
        remote=job.place, local=f"{job.cache}", shuffle=True, shuffle_algo="py1e", batch_size=job.batch,
        shuffle_block_size=max(1024, samples_of_cache // 8), cache_limit=job.cache_bytes, predownload=8 * job.batch,
        shuffle_seed=job.seed, num_canonical_nodes=1,
    )  # fmt: skip
    for epoch, first, end in job.parts():
        if job.first and epoch == job.first // job.batches:
            data.load_state_dict(
                data.state_dict(0, False) | {"epoch": epoch, "sample_in_epoch": first * job.batch * job.world}
            )
        yield from itertools.islice(DataLoader(data, batch_size=job.batch, num_workers=0), end - first)


if __name__ == "__main__":
    without_torchvision()
    peer(write, batches)
