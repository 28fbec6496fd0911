"""A function on several processes of a gloo group, its results by rank. The function must be a top-level one.

assert run_distributed(body, 2, argument) == [result_of_rank_0, result_of_rank_1]
"""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_distributed(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Runs function(rank, world, *arguments) in `world` new processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (world, folder, function, arguments), world, join=True)
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(world)]


def _process(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    torch.save(function(rank, world, *arguments), Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()
