"""Pipeline parallelism: a step's micro-batches go through the stages of a decoder one after another, on one worker each.

The order of forwards and backwards is PyTorch's (`torch.distributed.pipelining`): 1F1B (Narayanan et al., 2019), interleaved
with two stages a worker (Narayanan et al., 2021), and ZBV, which splits the backward in two and leaves next to no bubble (Qi
et al., 2024). Micro-batches are slots. A schedule is handed their numbers alone, and each stage looks its micro-batch up: so
packed documents travel with their offsets, whatever their number. PyTorch's stages exchange tensors of one shape, which
micro-batches need not have: streams travel in buffers for the largest, from which a stage takes its micro-batch's part.

    pipeline = Pipeline(stages, group, schedule="1f1b", ...)
    pipeline.run(batches, forward, accumulating)              # a step's forwards and backwards
    pipeline.hidden(ids)                                      # a forward alone, of any length
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from raystride.pipelines.strategies.feeding import Fed, Feeding
from raystride.pipelines.strategies.stage_plan import Schedule
from raystride.pipelines.strategies.stages import DecoderStage
from raystride.pipelines.strategies.strategy import Forward, Slotted
from raystride.pipelines.strategies.tensor_parallel import TokenShards

Accumulating = Callable[[int, int, bool], AbstractContextManager[None]]
"""(stage, micro-batch, whether it is the stage's last) -> inside, a backward adds its gradients to those of the step."""


class _Stage(PipelineStage):  # type: ignore[misc]
    """A stage whose backwards add up gradients as the strategy has them added."""

    def __init__(self, stage: DecoderStage, accumulating: Accumulating, **arguments: Any) -> None:
        super().__init__(stage, **arguments)
        self._accumulating, self._done = accumulating, 0

    def _added(self, number: int, run: Callable[[], None]) -> None:
        assert self.chunks is not None
        self._done = (self._done + 1) % self.chunks
        with self._accumulating(self.stage_index, number, self._done == 0):
            run()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward of a micro-batch, or that for its input alone."""
        run = super().backward_one_chunk
        if full_backward:
            self._added(bwd_chunk_id, lambda: run(bwd_chunk_id, loss, True, last_backward))
        else:
            run(bwd_chunk_id, loss, False, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The rest of a micro-batch's backward, that for the weights."""
        run = super().backward_weight_one_chunk
        self._added(bwd_chunk_id, lambda: run(bwd_chunk_id, last_backward))


class _StepData:
    """What the stages of this worker look up in a step."""

    def __init__(self, feeding: Feeding, shards: TokenShards | None) -> None:
        self._feeding, self._shards = feeding, shards
        self.batches: Sequence[Slotted] = ()
        self.measured: dict[int, torch.Tensor] = {}
        """Of each micro-batch whose loss was computed here and whose gradients are not yet added up."""
        self.buffer = (0, 0)
        """Rows and places of a buffer in which streams travel; one row where micro-batches differ."""
        self._fed: dict[int, Fed] = {}
        self._forward: Forward | None = None

    def begin(self, batches: Sequence[Slotted], forward: Forward) -> None:
        self.batches, self._forward, self._fed = batches, forward, {}

    def fed(self, number: int) -> Fed:
        if number not in self._fed:
            batch = self.batches[number]
            self._fed[number] = self._feeding(batch.inputs, batch.targets)
        return self._entered(self._fed[number])

    def _entered(self, fed: Fed) -> Fed:
        if self._shards is not None:  # only the first stage splits the stream, and so knows its length
            self._shards.tokens = fed.ids.shape[1]
        return fed

    def shape(self, number: int) -> tuple[int, int]:
        """Rows and places of a micro-batch's stream on this worker, who has a part of its tokens in a tensor group."""
        rows, tokens = self.fed(number).ids.shape
        return rows, tokens if self._shards is None else -(-tokens // self._shards.size)

    def unload(self, buffer: torch.Tensor, number: int) -> torch.Tensor:
        """The stream of a micro-batch, (B, T, C), from the buffer in which it came."""
        rows, places = self.shape(number)
        return buffer.flatten(0, 1)[: rows * places].view(rows, places, -1)

    def load(self, stream: torch.Tensor) -> torch.Tensor:
        """A stream (B, T, C) in a buffer, with zeros behind it. Never a view of it, which `zbv` could not detach."""
        if stream.shape[:2] == self.buffer:
            return stream
        flat = stream.reshape(1, -1, stream.shape[-1])
        return F.pad(flat, (0, 0, 0, self.buffer[1] - flat.shape[1]))

    def inside(self, number: int) -> AbstractContextManager[None]:
        assert self._forward is not None
        return self._forward.inside(self.batches[number])

    def loss(self, number: int, loss_sum: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        assert self._forward is not None
        before = self._forward.measured.clone()
        loss = self._forward.loss(loss_sum, counted)
        self.measured[number] = self._forward.measured - before
        self._forward.measured.copy_(before)
        return loss


class Pipeline:
    """The stages of this worker, and how micro-batches go through all of them."""

    def __init__(
        self,
        stages: Mapping[int, DecoderStage],
        workers: Sequence[int],
        group: dist.ProcessGroup,
        schedule: Schedule,
        *,
        feeding: Feeding,
        shards: TokenShards | None,
        stream: tuple[int, torch.dtype],
        device: torch.device,
        accumulating: Accumulating,
    ) -> None:
        """`stages` by number; `workers[stage]` is who in the group has it; `stream`: the width and the dtype of what one
        stage hands to the next."""
        self.stages, self._workers, self._group, self._schedule = stages, workers, group, schedule
        self._step, self._shards, self._stream, self._device = _StepData(feeding, shards), shards, stream, device
        self._accumulating = accumulating
        self._made: tuple[int, tuple[int, int], Any] | None = None
        """Micro-batches, the shape of a buffer, and the schedule that was made for them."""
        self.measured = self._step.measured
        for stage in stages.values():
            stage.step = self._step

    def run(self, batches: Sequence[Slotted], forward: Forward) -> None:
        """Forwards and backwards of all micro-batches."""
        self._step.begin(batches, forward)
        numbers = torch.arange(len(batches))
        first, last = 0 in self.stages, max(self.stages) == len(self._workers) - 1
        self._schedule_of(batches).step(
            *((numbers,) if first else ()), number=numbers, target=numbers if last else None, return_outputs=False
        )

    def _schedule_of(self, batches: Sequence[Slotted]) -> Any:
        """The schedule of so many micro-batches; it keeps buffers for the largest, or for others up to twice as large.

        All workers of the group have seen the same micro-batches, and make their buffers anew in the same steps.
        """
        shapes = {self._step.shape(number) for number in range(len(batches))}
        largest = max(map(math.prod, shapes))
        wanted = shapes.pop() if len(shapes) == 1 else (1, largest)
        count, (rows, places) = self._made[:2] if self._made else (0, (0, 0))
        fits = (rows, places) == wanted or (rows == 1 and largest <= places <= 2 * largest)
        if self._made is None or count != len(batches) or not fits:
            self._made = (len(batches), wanted, self._make(len(batches), wanted))
        _, self._step.buffer, made = self._made
        return made

    def _make(self, count: int, buffer: tuple[int, int]) -> Any:
        width, dtype = self._stream
        stages: list[Any] = []
        for number, stage in self.stages.items():
            stream = torch.empty(*buffer, width, dtype=dtype, device=self._device, requires_grad=True)
            made = _Stage(
                stage,
                self._accumulating,
                stage_index=number,
                num_stages=len(self._workers),
                device=self._device,
                input_args=torch.zeros(1, dtype=torch.int64) if stage.first else stream,
                output_args=torch.zeros((), device=self._device, requires_grad=True) if stage.last else stream,
                group=self._group,
            )
            stages.append(made)
        rules: dict[str, Any] = {"n_microbatches": count, "loss_fn": lambda loss, _: loss, "scale_grads": False}
        if self._schedule == "1f1b":
            return Schedule1F1B(stages[0], **rules)
        kind = ScheduleInterleaved1F1B if self._schedule == "interleaved" else ScheduleZBVZeroBubble
        return kind(stages, **rules)

    def _empty(self, rows: int, tokens: int) -> torch.Tensor:
        """The stream between two stages."""
        width, dtype = self._stream
        part = tokens if self._shards is None else -(-tokens // self._shards.size)
        return torch.empty(rows, part, width, dtype=dtype, device=self._device)

    def slot(self, number: int) -> int:
        """The slot of a micro-batch of the step that is under way."""
        return self._step.batches[number].slot

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss sum and targets counted of a micro-batch of any shape, without gradients; zeros but behind the last stage."""
        fed = self._step._feeding(inputs[:-1], inputs[-1])
        x = self._through(fed.ids, fed.positions, documents=fed.documents)
        if x is None:
            return torch.zeros((), device=self._device), torch.zeros((), dtype=torch.int64, device=self._device)
        return self._any.decoder.loss(x, fed.targets)

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        caches: Any = None,
        mask: torch.Tensor | None = None,
        documents: Any = None,
    ) -> torch.Tensor:
        """As a decoder's `hidden`, on every worker; without gradients."""
        x = self._through(ids, positions, caches=caches, mask=mask, documents=documents)
        if x is None:
            x = torch.empty(*ids.shape, self._stream[0], dtype=self._stream[1], device=self._device)
        dist.broadcast(x, self._rank_of(len(self._workers) - 1), group=self._group)
        for cache in caches or ():  # those of the other stages' layers hold nothing here, and count all the same
            cache.length = max(each.length for each in caches)
        return x

    def logits(self, logits: Callable[[torch.Tensor], torch.Tensor], words: int, hidden: torch.Tensor) -> torch.Tensor:
        """As a decoder's `logits`, on every worker; without gradients."""
        last = len(self._workers) - 1
        found = logits(hidden) if last in self.stages else hidden.new_empty(*hidden.shape[:-1], words)
        dist.broadcast(found, self._rank_of(last), group=self._group)
        return found

    def _through(self, ids: torch.Tensor, positions: torch.Tensor | None, **beside: Any) -> torch.Tensor | None:
        """The normalised hidden states behind the last stage; None where that is another worker's."""
        if self._shards is not None:
            self._shards.tokens = ids.shape[1]
        own, x = self._group.rank(), self._empty(*ids.shape)
        for number, stage in self.stages.items():
            if number and self._workers[number - 1] != own:
                dist.recv(x, self._rank_of(number - 1), group=self._group)
            x = stage.through(x, ids, positions, **beside)
            if not stage.last and self._workers[number + 1] != own:
                dist.send(x.contiguous(), self._rank_of(number + 1), group=self._group)
                x = self._empty(*ids.shape)
        return x if stage.last else None

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self._workers[stage])

    @property
    def _any(self) -> DecoderStage:
        return next(iter(self.stages.values()))
