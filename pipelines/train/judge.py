"""Looks at every step on its device, without waiting for it: is it one that should change the parameters?

judge = Judge(device, spike=6.0, window=100)
verdict = judge(loss, norm, scale=None)                   # fp32 scalar: FINE, NOT_FINITE, SPIKE or OVERFLOW
"""

import torch

from pipelines.train.precision import LEAST_SCALE

FINE, NOT_FINITE, SPIKE, OVERFLOW = range(4)
"""Verdicts: a good step; a loss or gradient that is no finite number; a loss far above the mean; an overflow that a smaller
loss scale will cure. After all but the first, parameters stay as they were."""


class Judge:
    """Finds steps whose loss or gradient is not finite, and losses far above their running mean.

    Mean and variance of the loss run exponentially over `window` steps, good ones alone; before so many there is no spike.
    """

    def __init__(self, device: torch.device, spike: float = 0.0, window: int = 100, seen: list[float] | None = None) -> None:
        """`seen`: what `read` returned in an earlier attempt."""
        self._spike, self._window = spike, window
        self._mean, self._variance, self._steps = torch.tensor(seen or [0.0, 0.0, 0.0], device=device).unbind()

    def __call__(self, loss: torch.Tensor, norm: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The verdict on a step with this mean loss and gradient norm (scalars); `scale`: the loss scale if there is one."""
        finite = torch.isfinite(loss + norm)
        verdict = torch.where(finite, FINE, NOT_FINITE).float()
        if scale is not None:
            curable = torch.isfinite(loss) & ~torch.isfinite(norm) & (scale > LEAST_SCALE)
            verdict = torch.where(curable, OVERFLOW, verdict)
        return self._look_for_spike(loss, verdict) if self._spike else verdict

    def _look_for_spike(self, loss: torch.Tensor, verdict: torch.Tensor) -> torch.Tensor:
        above = loss - self._mean
        far = (self._steps >= self._window) & (above > self._spike * self._variance.sqrt())
        verdict = torch.where(far & (verdict == FINE), SPIKE, verdict)
        good = verdict == FINE
        # West (1979): an exponential mean, which is the plain one until the window is full.
        weight = torch.where(good, 1 / (self._steps + 1).clamp(max=self._window), 0.0)
        above = torch.where(good, above, 0.0)
        self._mean += weight * above
        self._variance += weight * ((1 - weight) * above**2 - self._variance)
        self._steps += good
        return verdict

    def read(self) -> list[float]:
        """Mean, variance and the number of good steps; waits for the device."""
        return [float(self._mean), float(self._variance), float(self._steps)]
