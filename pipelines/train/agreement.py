"""What the workers agreed on in the step before, read without waiting for the step that is under way.

Each worker adds its wish to end to the vector that is summed with the gradients, so all see the same sum. On a GPU the sum
of step n is copied to the host in the background and read after step n + 1, when it has long arrived.

    agreement = Agreement(device)
    agreed = agreement.previous(result.measured)              # of the call before; zeros at first
    agreed[STOP] > 0
"""

import torch

from pipelines.train.step import VERDICT


class Agreement:
    """Delays the summed vector by one step."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        # Two buffers take turns: one is being filled while the other is read.
        self._host = [torch.zeros(VERDICT + 1, pin_memory=self._on_gpu) for _ in range(2)]
        self._arrived = [torch.cuda.Event() for _ in range(2)] if self._on_gpu else []
        self._steps = 0

    def previous(self, measured: torch.Tensor) -> list[float]:
        """Takes the summed vector of this step and gives that of the step before."""
        now, before = self._steps % 2, (self._steps + 1) % 2
        self._host[now].copy_(measured, non_blocking=True)
        if self._on_gpu:
            self._arrived[now].record()
            if self._steps:
                self._arrived[before].synchronize()
        self._steps += 1
        return self._host[before].tolist()  # type: ignore[no-any-return]
