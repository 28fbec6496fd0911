"""A function on several processes of a gloo group, its results by rank. The function must be a top-level one.

Processes are forked from a server that has PyTorch loaded, which saves each of them two seconds.

    assert run_distributed(body, 2, argument) == [result_of_rank_0, result_of_rank_1]
"""

import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fork_server import CONTEXT

LIMIT_S = 540.0


def run_distributed(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Runs function(rank, world, *arguments) in `world` new processes. Fails with the first traceback where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_process, args=(rank, world, folder, function, arguments), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_S)
            failed = sorted(Path(folder).glob("error-*"))
            assert not failed, failed[0].read_text()
            assert process.exitcode == 0, f"a process ended with {process.exitcode}"
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(world)]


def _process(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children, which end with it
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=240)
        )
        torch.save(function(rank, world, *arguments), Path(folder) / str(rank))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
        raise
