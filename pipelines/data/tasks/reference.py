"""Reference log-probabilities for the task `preference`: those of the untrained model of `model.init_from`.

They are computed once, during preparation, and stored in every example: training holds no second model, and adapters with
frozen weights have the same reference as full training. Computed in fp32, on a GPU if this process has one, in batches of
similar length.

    reference = Reference(task.build_model, "/models/llama", tokenizer=prepared / "tokenizer")
    reference.log_probabilities([18, 60], task.sequences)     # (2, 2) fp32, of two pairs of 18 and 60 ids
    weights_sha256("/models/llama")                           # 64 hexadecimal digits, without PyTorch
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from raystride.pipelines.config import SettingError
from raystride.pipelines.system.hub import fetch_model
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    import torch

    from raystride.model.preference import PreferenceDecoder

MAX_BATCH_TOKENS = 1 << 14
"""Ids of a batch, including padding; a longer pair is a batch of its own."""
FLOAT, HALF = np.dtype("<f4"), np.dtype("<u2")


class Reference:
    """The reference model in this process."""

    def __init__(
        self, build: "Callable[[], PreferenceDecoder]", place: str, tokenizer: Folder, *, on_gpu: bool = True
    ) -> None:
        """Loads it into a network of `build`; `tokenizer` is that of the data, `on_gpu` allows a GPU if there is one.

        Raises SettingError if the place holds another model, or one with another tokenizer.
        """
        import torch

        from raystride.pipelines.data.pretrained import load_base_weights

        self._device = torch.device("cuda" if on_gpu and torch.cuda.is_available() else "cpu")
        with torch.random.fork_rng(devices=[]):  # training's random numbers must not depend on this
            model = build()
        load_base_weights(model, place, tokenizer, lambda _: None)
        self._model = model.to(self._device).eval()

    def log_probabilities(
        self, sizes: Sequence[int], sequences: "Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]]"
    ) -> np.ndarray:
        """Returns log-probabilities in nats of the chosen and the rejected answer of each pair, (n, 2) fp32.

        `sizes` are padded ids of the pairs; `sequences` returns ids and next ids (2B, T) of the pairs of some numbers.
        """
        import torch

        found = np.zeros((len(sizes), 2), FLOAT)
        order = np.argsort([-size for size in sizes], kind="stable").tolist()
        with torch.inference_mode():
            while order:
                batch = order[: max(1, MAX_BATCH_TOKENS // sizes[order[0]])]
                del order[: len(batch)]
                ids, words = (tensor.to(self._device) for tensor in sequences(batch))
                found[batch] = self._model.log_probabilities(ids, words).view(2, -1).t().float().cpu().numpy()
        return found


def floats_to_ids(values: np.ndarray) -> np.ndarray:
    """Returns numbers in fp32, (k), as 2 k numbers below 2^16, uint32."""
    return np.ascontiguousarray(values, FLOAT).view(HALF).astype(np.uint32)


def ids_to_floats(ids: np.ndarray) -> np.ndarray:
    """Returns the numbers (k) in fp32 of `floats_to_ids`."""
    return np.ascontiguousarray(ids.astype(HALF)).view(FLOAT)


def weights_sha256(place: str) -> str:
    """Returns one hash of a model's config and weights, in a folder or on the hub. Raises SettingError if it has none."""
    try:
        folder = fetch_model(place)
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
    # Settings are compared several times before a training begins, and weights take gigabytes.
    return _cached_sha256(folder, name, (folder.local / name).stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _cached_sha256(folder: Folder, name: str, written: int) -> str:
    return folder.sha256(name)
