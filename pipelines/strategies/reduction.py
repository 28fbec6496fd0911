"""Buckets: flat buffers in which gradients lie and are summed over the workers while the backward still runs.

PyTorch's DDP rebuilds its buckets after the first iteration in the order in which gradients arrived; a resumed run then sums
in other chunks than the run it continues, and from three workers up its bits differ. These buckets depend on the parameters
alone: last parameter first, cut at a fixed size, always started in the same order. A run that is resumed on the same number
of workers therefore ends with the same bits.

Every parameter's `grad` is a view into its bucket, so nothing is copied before or after the all-reduce. The last bucket has
a few more numbers at its end, for what the workers must agree on in each step.

    buckets = Buckets(model.parameters(), bucket_bytes=25 << 20, extra=4)
    buckets.clear()
    buckets.before(slot, measured, last=True); loss.backward(); buckets.after(last=True)
    measured = buckets.finish(measured)

How the workers' buckets become one sum is `_send` and `_receive`, which `exact` does in another way.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


class Buckets:
    """Sums gradients, in fp32, over the workers of `group`, the default one if None. Parameters must share a device.

    Buffers are as long as `multiple_of` divides.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        bucket_bytes: int,
        extra: int,
        multiple_of: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = group
        trained = [p for p in parameters if p.requires_grad]
        # A backward comes to the last parameters first, so their bucket is full first and leaves while the rest computes.
        self.groups = _cut(list(reversed(trained)), bucket_bytes)
        self.extra = extra
        self.sizes = [sum(p.numel() for p in bucket) for bucket in self.groups]
        """Numbers that are gradients, a bucket."""
        self.flat: list[torch.Tensor] = []
        """One buffer a bucket; in the last, `extra` numbers follow the gradients."""
        self._waiting: list[int] = []
        self._sent = 0
        self._works: list[dist.Work] = []
        self._armed = False
        for number, (bucket, size) in enumerate(zip(self.groups, self.sizes, strict=True)):
            size += extra if number == len(self.groups) - 1 else 0
            size += -size % multiple_of
            self.flat.append(torch.zeros(size, device=bucket[0].device))
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._arrived(number))
        for parameter, view in self.views(self.flat):
            parameter.grad = view

    def views(self, flat: list[torch.Tensor]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Every parameter with its place in buffers like these."""
        found = []
        for group, size, buffer in zip(self.groups, self.sizes, flat, strict=True):
            parts = buffer[:size].split([p.numel() for p in group])
            found += [(parameter, part.view_as(parameter)) for parameter, part in zip(group, parts, strict=True)]
        return found

    def tail(self, flat: list[torch.Tensor]) -> torch.Tensor:
        """The numbers besides gradients at the end of buffers like these."""
        return flat[-1][self.sizes[-1] : self.sizes[-1] + self.extra]

    def clear(self) -> None:
        """Zeroes all gradients for a new step."""
        for flat in self.flat:
            # Zeroed and not dropped: every `grad` must stay a view into its bucket.
            flat.zero_()

    def before(self, slot: int, measured: torch.Tensor, *, last: bool) -> None:
        """Is told that a micro-batch from `slot` on will add its gradients; from the `last` on, full buckets are sent."""
        if last:
            self.tail(self.flat).copy_(measured)
            self._arm()

    def after(self, *, last: bool) -> None:
        """Is told that a micro-batch has added its gradients; here nothing follows from it."""

    def _arm(self) -> None:
        """From here on a bucket is sent as soon as the gradients of all its parameters have arrived."""
        self._waiting = [len(group) for group in self.groups]
        self._sent, self._works = 0, []
        self._armed = True

    def finish(self, measured: torch.Tensor) -> torch.Tensor:
        """Sends what is left (parameters without a gradient, a worker without a micro-batch) and waits for all sums.

        Returns the sum of every worker's `measured`, a view (extra,) into the last bucket.
        """
        if not self._armed:
            self.before(0, measured, last=True)
        # Nothing more will arrive: what has no gradient by now goes as zeros.
        self._waiting = [0] * len(self.flat)
        self._send_ready()
        self._receive()
        self._armed = False
        return self.tail(self.flat)

    def gradients(self) -> list[torch.Tensor]:
        """A flat fp32 vector of gradients a bucket, without the numbers that stand behind them."""
        return [flat[:size] for flat, size in zip(self.flat, self.sizes, strict=True)]

    def _arrived(self, number: int) -> None:
        # Hooks run in every micro-batch, and only the last one's gradients are complete.
        if self._armed:
            self._waiting[number] -= 1
            self._send_ready()

    def _send_ready(self) -> None:
        """Sends in bucket order, never past one that waits: every rank must start the same next one."""
        while self._sent < len(self.flat) and self._waiting[self._sent] == 0:
            self._send(self._sent)
            self._sent += 1

    def _send(self, number: int) -> None:
        """Starts the sum of a bucket over the workers."""
        self._works.append(dist.all_reduce(self.flat[number], group=self._group, async_op=True))

    def _receive(self) -> None:
        """Waits until all buckets hold their sums."""
        for work in self._works:
            work.wait()


def _cut(parameters: list[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbouring parameters in groups of at most `most_bytes` of fp32 gradients, one parameter at least."""
    groups: list[list[nn.Parameter]] = [[]]
    held = 0
    for parameter in parameters:
        size = 4 * parameter.numel()
        if groups[-1] and held + size > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(parameter)
        held += size
    return groups
