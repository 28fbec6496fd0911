"""Two workers by Ray Train as its documentation shows it, up to the first optimiser step: the peer of `benchmarks.startup`.

The model and the batches are those of `plain_loop`. The last line printed is JSON: when each part of the start was reached,
in seconds since 1970.

    python -m benchmarks.peers.stock_trainer TOKENS VOCABULARY STORAGE           # on a local cluster of its own
    ray job submit ... -- python -m benchmarks.peers.stock_trainer TOKENS VOCABULARY STORAGE     # on that one
"""

import json
import os
import sys
import time
from typing import Any

import psutil


def train_function(config: dict[str, Any]) -> dict[str, float]:
    """What each worker runs: one step. Returns when each part was reached."""
    reached = {"worker": time.time()}
    import numpy as np
    import ray.train.torch
    import torch

    from benchmarks.peers.plain_loop import GPT, get_batch, make_optimizer

    reached["torch"] = time.time()
    tokens = np.memmap(config["tokens"], dtype=np.uint16, mode="r")
    model = ray.train.torch.prepare_model(GPT(config["vocabulary"]))
    optimizer = make_optimizer(model)
    reached["build"] = time.time()
    loss = model(*get_batch(tokens))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    reached["first_step"] = time.time()
    return reached


def main(tokens: str, vocabulary: int, storage: str) -> None:
    """Joins the cluster that the job was submitted to, or starts a local one; trains, prints the times."""
    reached = {"process": psutil.Process().create_time(), "driver": time.time()}
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    if "RAY_ADDRESS" in os.environ:  # as a submitted job has it
        ray.init()
    else:
        ray.init(address="local", include_dashboard=False)
    reached["cluster"] = time.time()
    trainer = TorchTrainer(
        train_function,
        train_loop_config={"tokens": tokens, "vocabulary": vocabulary},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage),
    )
    print(json.dumps(reached | trainer.fit().return_value))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
