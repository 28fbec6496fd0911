"""Buckets: flat buffers in which gradients lie and are summed over the workers while the backward still runs.

PyTorch's DDP rebuilds its buckets after the first iteration in the order in which gradients arrived; a resumed run then sums
in other chunks than the run it continues, and from three workers up its bits differ. These buckets depend on the parameters
alone: last parameter first, cut at a fixed size, always started in the same order. A run that is resumed on the same number
of workers therefore ends with the same bits.

Every parameter's `grad` is a view into its bucket, so nothing is copied before or after the all-reduce. The last bucket has
a few more numbers at its end, for what the workers must agree on in each step.

    buckets = Buckets(model.parameters(), bucket_bytes=25 << 20, extra=4)
    buckets.clear(); loss.backward(); buckets.arm(measured); loss.backward(); measured = buckets.finish(measured)
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


class Buckets:
    """Sums gradients over the workers of the default process group. Parameters must share device and type."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, bucket_bytes: int, extra: int) -> None:
        trained = [p for p in parameters if p.requires_grad]
        groups = _cut(list(reversed(trained)), bucket_bytes)
        self.extra = extra
        self.flat: list[torch.Tensor] = []
        """One buffer a bucket; the last has `extra` numbers more than its gradients."""
        self._members = [len(group) for group in groups]
        self._waiting: list[int] = []
        self._works: list[dist.Work | None] = []
        self._armed = False
        for number, group in enumerate(groups):
            size = sum(p.numel() for p in group) + (extra if number == len(groups) - 1 else 0)
            flat = torch.zeros(size, dtype=group[0].dtype, device=group[0].device)
            self.flat.append(flat)
            offset = 0
            for parameter in group:
                parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
                offset += parameter.numel()
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._arrived(number))

    def clear(self) -> None:
        """Zeroes all gradients for a new step."""
        for flat in self.flat:
            flat.zero_()

    def arm(self, measured: torch.Tensor) -> None:
        """From here on a bucket is sent as soon as the gradients of all its parameters have arrived."""
        self.flat[-1][-self.extra :] = measured
        self._waiting = list(self._members)
        self._works = []
        self._armed = True

    def finish(self, measured: torch.Tensor) -> torch.Tensor:
        """Sends what is left (parameters without a gradient, a worker without a micro-batch) and waits for all sums."""
        if not self._armed:
            self.arm(measured)
        self._waiting = [0] * len(self.flat)
        self._send_ready()
        for work in self._works:
            if work is not None:
                work.wait()
        self._armed = False
        return self.flat[-1][-self.extra :]

    def gradients(self) -> list[torch.Tensor]:
        """The buckets without the extra numbers."""
        return [*self.flat[:-1], self.flat[-1][: -self.extra]]

    def _arrived(self, number: int) -> None:
        if self._armed:
            self._waiting[number] -= 1
            self._send_ready()

    def _send_ready(self) -> None:
        """Starts all-reduces in bucket order, never past one that waits: every rank must start the same next one."""
        while len(self._works) < len(self.flat) and self._waiting[len(self._works)] == 0:
            self._works.append(dist.all_reduce(self.flat[len(self._works)], async_op=True))


def _cut(parameters: list[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbouring parameters in groups of at most `most_bytes`, one parameter at least."""
    groups: list[list[nn.Parameter]] = [[]]
    held = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if groups[-1] and held + size > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(parameter)
        held += size
    return groups
