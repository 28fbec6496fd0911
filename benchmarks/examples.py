"""Prepared folders of random examples as long as their task allows, for benchmarks that care about sizes alone.

folder = prepare_examples(config, tmp_path, count=64)     # of config.task, not language modelling
Manifest.load(folder).facts                               # {"vocabulary_size": 4096, "labels": [...], ...}
"""

from pathlib import Path
from typing import Any

import numpy as np

from raystride.pipelines.config import Config
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.system.storage.folder import Folder

LABELS = [str(number) for number in range(10)]
IMAGE = (3, 32, 32)


def prepare_examples(config: Config, folder: Path, count: int) -> Folder:
    """So many examples for training and as many for validation, all alike."""
    words, context, draw = config.tokenizer.vocabulary_size, config.model.context, np.random.default_rng(0)
    heads, length, learned = {
        "classification": (draw.integers(len(LABELS), size=count), context, {"labels": LABELS, "shares": [0.1] * 10}),
        "translation": (np.full(count, context), 2 * context - 1, _of_targets(config)),
        "preference": (np.full(count, context + 1), 3 + 2 * (context + 1), {}),  # without a reference
        "images": (draw.integers(len(LABELS), size=count), int(np.prod(IMAGE)), {"labels": LABELS, "image": list(IMAGE)}),
    }[config.task]
    rest = draw.integers(1, 256 if config.task == "images" else words, (count, length))
    rows = np.concatenate((heads[:, None], rest), 1).astype("<u2")
    if config.task == "preference":
        rows[:, 1:4] = context + 1, 1, 0
    splits: dict[str, Shards] = {}
    for split in ("train", "validation"):
        (folder / split).mkdir(parents=True)
        starts = np.arange(count + 1, dtype="<i8") * rows.shape[1]
        (folder / split / "00000.arrow").write_bytes(starts.tobytes() + rows.tobytes())
        shard = Shard(
            file=f"{split}/00000.arrow",
            tokens=rows.size,
            documents=count,
            bytes=starts.nbytes + rows.nbytes,
            sha256="",
            ids_offset=starts.nbytes,
            rows_offset=0,
            rows=count,
        )
        splits[split] = Shards.from_shards([shard])
    place = Folder.from_uri(str(folder))
    facts: dict[str, Any] = {"vocabulary_size": words, "end_id": 0, "tokenizers": [], "learned": learned}
    Manifest(fingerprint="random", id_type="uint16", splits=splits, **facts).save(place)
    return place


def _of_targets(config: Config) -> dict[str, int]:
    words = config.tokenizer.vocabulary_size
    return {} if config.tokenizer.shared else {"target_vocabulary_size": words, "target_end_id": 0}
