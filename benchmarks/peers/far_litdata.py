"""LitData: its chunks, order and cache. Runs in an environment of its own.

python -m benchmarks.peers.far_litdata write tokens.npy FOLDER CONTEXT SHARD_BYTES
"""

import itertools
import os
from typing import Any

import numpy as np

from benchmarks.peers.far_reading import ReadingJob, peer


class Windows:
    """Gives the windows of a part of the tokens."""

    def __init__(self, tokens: str, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __call__(self, bounds: tuple[int, int]) -> Any:
        """The windows between two tokens."""
        import torch

        values = np.load(self.tokens, mmap_mode="r")
        for at in range(bounds[0], bounds[1], self.context):
            yield torch.from_numpy(np.array(values[at : at + self.context]))


def write(tokens: str, folder: str, context: int, shard_bytes: int) -> None:
    """The tokens of a file as a data set of windows."""
    from litdata import optimize

    count = len(np.load(tokens, mmap_mode="r")) // context * context
    optimize(fn=Windows(tokens, context), inputs=[(0, count)], output_dir=folder, chunk_bytes=shard_bytes, num_workers=1)


def batches(job: ReadingJob) -> Any:
    """The batches of all epochs."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # its second one refuses plain HTTP, whatever is set
    # Its first client of S3 is boto3's, which takes these as arguments.
    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
    options |= {name.lower(): os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    data = StreamingDataset(
        job.place, cache_dir=job.cache, shuffle=True, seed=job.seed, max_cache_size=job.cache_bytes,
        storage_options=options,
    )  # fmt: skip
    for _ in range(job.epochs):
        yield from itertools.islice(StreamingDataLoader(data, batch_size=job.batch, num_workers=1), job.batches)


if __name__ == "__main__":
    peer(write, batches)
