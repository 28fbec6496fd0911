"""A training in the caller's process leaves the process as it was: its own draws and products are not another's."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import raystride


def _read_process() -> dict[str, Any]:
    return {
        "draws": (random.random(), np.random.rand(), float(torch.rand(()))),
        "threads": torch.get_num_threads(),
        "products": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _seed() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def test_generators_threads_and_products_are_the_callers_afterwards(tmp_path: Path) -> None:
    model, data = torch.nn.Linear(2, 1), {"x": np.ones((9, 2), np.float32)}
    threads, products = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_num_threads(2)
        torch.backends.cudnn.allow_tf32 = True
        _seed()
        wanted = _read_process()
        _seed()
        raystride.fit(
            model,
            data,
            lambda model, batch: model(batch["x"]).mean(),
            settings={"launch": "inline", "record.mlflow": False, "train.steps": 2, "train.batch": 4, "scaling.threads": 1},
            storage=tmp_path,
        )
        assert _read_process() == wanted
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32 = products
