"""What the model of `model.init_from` says to answers before it is trained: the reference of the task `preference`.

It is computed once, while data is being prepared, and lies in every example: training holds no second model, and what is
trained beside frozen weights (adapters) has the same reference as what is trained whole. In fp32, on a GPU where this
process has one, in batches of like length.

    reference = Reference(task.build_model, "/models/llama", tokenizer=prepared / "tokenizer")
    reference.log_probabilities([18, 60], task.sequences)     # (2, 2) fp32, of two pairs of so many ids
    weights_sha256("/models/llama")                           # 64 hexadecimal digits, without PyTorch
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from raystride.pipelines.config import SettingError
from raystride.pipelines.files import Folder
from raystride.pipelines.hub import fetched

if TYPE_CHECKING:
    import torch

    from raystride.model.preference import PreferenceDecoder

TOKENS = 1 << 14
"""Ids of a batch, padding included; a pair that is longer by itself is a batch of its own."""
FLOAT, HALF = np.dtype("<f4"), np.dtype("<u2")


class Reference:
    """The base model in this process."""

    def __init__(
        self, build: "Callable[[], PreferenceDecoder]", place: str, tokenizer: Folder, *, on_gpu: bool = True
    ) -> None:
        """Loads it into a network that `build` makes; `tokenizer` is that of the data, `on_gpu`: where there is one.

        Raises SettingError where the place holds another model, or one of another tokenizer.
        """
        import torch

        from raystride.pipelines.pretrained import start_from

        self._device = torch.device("cuda" if on_gpu and torch.cuda.is_available() else "cpu")
        with torch.random.fork_rng(devices=[]):  # what training draws is not to follow from whether this was needed
            model = build()
        start_from(model, place, tokenizer, lambda _: None)
        self._model = model.to(self._device).eval()

    def log_probabilities(
        self, sizes: Sequence[int], sequences: "Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]]"
    ) -> np.ndarray:
        """Log-probabilities in nats of the chosen and the rejected answer of each pair, (n, 2) fp32, from pairs' padded ids
        and what gives ids and words (2B, T) of the pairs of some numbers."""
        import torch

        found = np.zeros((len(sizes), 2), FLOAT)
        order = np.argsort([-size for size in sizes], kind="stable").tolist()
        with torch.inference_mode():
            while order:
                some = order[: max(1, TOKENS // sizes[order[0]])]
                del order[: len(some)]
                ids, words = (each.to(self._device) for each in sequences(some))
                found[some] = self._model.log_probabilities(ids, words).view(2, -1).t().float().cpu().numpy()
        return found


def as_ids(values: np.ndarray) -> np.ndarray:
    """Numbers in fp32, (k), as 2 k numbers below 2^16, uint32."""
    return np.ascontiguousarray(values, FLOAT).view(HALF).astype(np.uint32)


def from_ids(ids: np.ndarray) -> np.ndarray:
    """The numbers (k) in fp32 that `as_ids` made."""
    return np.ascontiguousarray(ids.astype(HALF)).view(FLOAT)


def weights_sha256(place: str) -> str:
    """One hash of a model's description and weights, in a folder or on the hub. Raises SettingError where it has none."""
    try:
        folder = fetched(place)
    except ValueError as error:
        raise SettingError(f"model.init_from is {place!r}: {error}", setting="model.init_from", value=place) from error
    weights = [name for name in folder.names() if name.endswith(".safetensors")]
    if not weights or not folder.exists("config.json"):
        raise SettingError(
            f"model.init_from is {place!r}: it must have a config.json and weights in safetensors, which are the "
            "reference, and a run that goes on needs as well; of a run of ours take `raystride export --to hugging_face`",
            setting="model.init_from",
            value=place,
        )
    hashes = [[name, _file_sha256(folder, name)] for name in ("config.json", *weights)]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def _file_sha256(folder: Folder, name: str) -> str:
    if not folder.local:
        return folder.sha256(name)
    # Settings are compared several times before a training begins, and weights have gigabytes.
    return _kept_sha256(folder, name, (folder.local / name).stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _kept_sha256(folder: Folder, name: str, written: int) -> str:
    return folder.sha256(name)
