"""Gradient buckets: flat buffers that are all-reduced while the backward still runs.

PyTorch's DDP rebuilds its buckets after the first iteration in the order in which gradients arrived; a resumed run then sums
in other chunks than the run it continues, and its bits differ from three workers up. These buckets depend on the parameters
alone: last parameter first, cut at a fixed size, always started in the same order. So a run resumed on the same number of
workers ends with the same bits.

Every parameter's `grad` is a view into its bucket, so nothing is copied before or after the all-reduce. The last bucket has
a few extra numbers at its end, for the values that the workers must agree on in each step.

    buckets = Buckets(model.parameters(), bucket_bytes=25 << 20, extra=4)
    buckets.begin_step()
    buckets.begin_micro_batch(slot, measured, last=True); loss.backward(); buckets.end_micro_batch(last=True)
    measured = buckets.finish_reduction(measured)

`_reduce_bucket` and `_wait_for_sums` implement the sum over workers; `exact` overrides them.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


class Buckets:
    """Sums gradients, in fp32, over the workers of `group`, the default one if None. Parameters must share a device.

    Buffer lengths are multiples of `multiple_of`. With `skips_absent` a parameter that no worker's step has used has no
    gradient afterwards: flags of the used ones follow the extra numbers.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        bucket_bytes: int,
        extra: int,
        multiple_of: int = 1,
        group: dist.ProcessGroup | None = None,
        skips_absent: bool = False,
    ) -> None:
        self._group = group
        trained = [p for p in parameters if p.requires_grad]
        self._is_used = [False] * len(trained) if skips_absent else []
        """Whether this worker's step has used each parameter, in the order of the buckets."""
        self._absent: list[tuple[nn.Parameter, torch.Tensor]] = []
        """Parameters whose gradient was dropped, with its place."""
        # A backward reaches the last parameters first, so their bucket is full first and is sent while the rest computes.
        self.groups = _group_parameters(list(reversed(trained)), bucket_bytes)
        self.extra = extra
        self.sizes = [sum(p.numel() for p in bucket) for bucket in self.groups]
        """Number of gradient elements of each bucket."""
        self.flat: list[torch.Tensor] = []
        """One buffer per bucket; in the last, `extra` numbers follow the gradients."""
        self._num_missing: list[int] = []
        self._num_sent = 0
        self._works: list[dist.Work] = []
        self._is_sending = False
        index = 0
        for number, (bucket, size) in enumerate(zip(self.groups, self.sizes, strict=True)):
            size += extra + len(self._is_used) if number == len(self.groups) - 1 else 0
            size += -size % multiple_of
            self.flat.append(torch.zeros(size, device=bucket[0].device))
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number, index=index: self._on_gradient_ready(number, index)
                )
                index += 1
        for parameter, view in self.parameter_views(self.flat):
            parameter.grad = view

    def parameter_views(self, flat: list[torch.Tensor]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Returns every parameter with its view into buffers like these."""
        found = []
        for group, size, buffer in zip(self.groups, self.sizes, flat, strict=True):
            parts = buffer[:size].split([p.numel() for p in group])
            found += [(parameter, part.view_as(parameter)) for parameter, part in zip(group, parts, strict=True)]
        return found

    def extra_values(self, flat: list[torch.Tensor]) -> torch.Tensor:
        """Returns the `extra` numbers after the gradients in buffers like these."""
        return flat[-1][self.sizes[-1] : self.sizes[-1] + self.extra]

    def _flags(self, flat: list[torch.Tensor]) -> torch.Tensor:
        """Returns the flags after the extra numbers in buffers like these."""
        start = self.sizes[-1] + self.extra
        return flat[-1][start : start + len(self._is_used)]

    def begin_step(self) -> None:
        """Zeroes all gradients for a new step."""
        self._restore_absent()
        for flat in self.flat:
            # Zeroed and not dropped: every `grad` must stay a view into its bucket.
            flat.zero_()

    def _restore_absent(self) -> None:
        for parameter, view in self._absent:
            parameter.grad = view
        self._absent = []
        self._is_used = [False] * len(self._is_used)

    def begin_micro_batch(self, slot: int, measured: torch.Tensor, *, last: bool) -> None:
        """Announces gradients of a micro-batch from `slot` on; from the `last` one on, full buckets are sent."""
        if last:
            self.extra_values(self.flat).copy_(measured)
            self._start_sending()

    def end_micro_batch(self, *, last: bool) -> None:
        """Does nothing here; called after a micro-batch has added its gradients."""

    def _start_sending(self) -> None:
        """Makes each bucket be sent as soon as the gradients of all its parameters have arrived."""
        self._num_missing = [len(group) for group in self.groups]
        self._num_sent, self._works = 0, []
        self._is_sending = True

    def finish_reduction(self, measured: torch.Tensor) -> torch.Tensor:
        """Sends the remaining buckets (parameters without a gradient, a worker without a micro-batch) and waits for all
        sums.

        Returns the sum of all workers' `measured`, a view (extra,) into the last bucket.
        """
        if not self._is_sending:
            self.begin_micro_batch(0, measured, last=True)
        # Nothing more will arrive: missing gradients are sent as zeros.
        self._num_missing = [0] * len(self.flat)
        self._reduce_ready_buckets()
        self._wait_for_sums()
        self._is_sending = False
        if not all(self._is_used):  # else every parameter has a gradient, and the device need not be asked
            used = self._flags(self.flat).tolist()
            self._absent = [place for place, count in zip(self.parameter_views(self.flat), used, strict=True) if not count]
            for parameter, _ in self._absent:
                parameter.grad = None
        return self.extra_values(self.flat)

    def current_buffers(self) -> list[torch.Tensor]:
        """Returns the buffers that the last micro-batch has added to."""
        return self.flat

    def local_gradients(self) -> list[torch.Tensor]:
        """Returns a flat fp32 vector of gradients per bucket, without the extra numbers."""
        return [flat[:size] for flat, size in zip(self.flat, self.sizes, strict=True)]

    def _on_gradient_ready(self, number: int, index: int) -> None:
        if self._is_used:
            self._is_used[index] = True
        # Hooks run in every micro-batch, but gradients are complete only in the last one.
        if self._is_sending:
            self._num_missing[number] -= 1
            self._reduce_ready_buckets()

    def _reduce_ready_buckets(self) -> None:
        """Sends full buckets in order, never skipping one that waits: every rank must start the same next one."""
        while self._num_sent < len(self.flat) and self._num_missing[self._num_sent] == 0:
            if self._is_used and self._num_sent == len(self.flat) - 1:
                flags = self._flags(self.current_buffers())
                flags += flags.new_tensor(self._is_used)
            self._reduce_bucket(self._num_sent)
            self._num_sent += 1

    def _reduce_bucket(self, number: int) -> None:
        """Starts the all-reduce of a bucket."""
        self._works.append(dist.all_reduce(self.flat[number], group=self._group, async_op=True))

    def _wait_for_sums(self) -> None:
        """Waits until all buckets hold their sums."""
        for work in self._works:
            work.wait()


def _group_parameters(parameters: list[nn.Parameter], max_bytes: int) -> list[list[nn.Parameter]]:
    """Groups neighbouring parameters with at most `max_bytes` of fp32 gradients, at least one parameter each."""
    groups: list[list[nn.Parameter]] = [[]]
    group_bytes = 0
    for parameter in parameters:
        size = 4 * parameter.numel()
        if groups[-1] and group_bytes + size > max_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(parameter)
        group_bytes += size
    return groups
