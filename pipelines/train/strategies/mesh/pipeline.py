"""Pipeline parallelism: a step's micro-batches pass the stages of a decoder in turn, which lie on different workers.

A stage has neighbouring blocks, the first also the embedding, the last the norm and head. The order of forwards and
backwards is PyTorch's (`torch.distributed.pipelining`): 1F1B (Narayanan et al., 2019), interleaved with two stages a worker
(Narayanan et al., 2021), and ZBV, which splits the backward in two and leaves almost no bubble (Qi et al., 2024).
Micro-batches are slots. A schedule receives only their numbers, and each stage looks up its micro-batch, so packed documents
keep their offsets, whatever their number. PyTorch's stages exchange tensors of one shape, but micro-batches may differ:
streams (B, T, C) travel in buffers of the largest size, and a stage takes its micro-batch's part.

    pipeline = Pipeline({0: DecoderStage(model, range(0, 6), first=True, last=False)}, workers, group, schedule="1f1b", ...)
    pipeline.run_micro_batches(batches, forward)              # a step's forwards and backwards
    pipeline.hidden(ids)                                      # a forward alone, of any length
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from raystride.model.block import build_rotation
from raystride.model.transformer import Decoder
from raystride.pipelines.train.strategies.mesh.context import ContextSharder, LocalTokens
from raystride.pipelines.train.strategies.mesh.pipeline_plan import Schedule
from raystride.pipelines.train.strategies.mesh.tensor import TokenShards
from raystride.pipelines.train.strategies.strategy import Forward, MicroBatchLike


class StepData(Protocol):
    """Lookup of a step's micro-batches by stages; see `pipeline`."""

    def local_tokens(self, number: int) -> LocalTokens: ...
    def micro_batch_context(self, number: int) -> AbstractContextManager[None]: ...
    def loss(self, number: int, loss_sum: torch.Tensor, counted: torch.Tensor) -> torch.Tensor: ...
    def unpack_stream(self, buffer: torch.Tensor, number: int) -> torch.Tensor: ...
    def pack_stream(self, stream: torch.Tensor) -> torch.Tensor: ...


class DecoderStage(nn.Module):
    """Neighbouring blocks of a decoder, with the embedding if it is the first stage and the norm and head if it is the
    last."""

    def __init__(self, model: Decoder, blocks: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.blocks = nn.ModuleList(model.blocks[number] for number in blocks)
        self.ends = nn.ModuleDict(_end_modules(model, first=first, last=last))
        # The decoder contains these modules; as a child it would add all other modules, too.
        self._numbers, self._decoder = blocks, (model,)
        self.step: StepData | None = None
        """Lookup of the current step's micro-batches."""

    @property
    def decoder(self) -> Decoder:
        """The network of this stage."""
        return self._decoder[0]

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Maps the stream before this stage (unused by the first) to the stream behind it, or to the last stage's loss.

        Both streams are in buffers, as they travel. `number` (1,) is that of a micro-batch of the current step.
        """
        step, index = self.step, int(number)
        assert step is not None
        local_tokens = step.local_tokens(index)
        if not self.first:
            x = step.unpack_stream(x, index)
        with step.micro_batch_context(index):
            x = self.forward_blocks(x, local_tokens.ids, local_tokens.positions, documents=local_tokens.documents)
            result = self.decoder.loss(x, local_tokens.targets) if self.last else None
        return step.pack_stream(x) if result is None else step.loss(index, *result)

    def forward_blocks(
        self, x: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor | None = None, **block_inputs: Any
    ) -> torch.Tensor:
        """Maps streams of ids (B, T), with optional inputs of blocks: caches, mask, documents."""
        model = self.decoder
        caches, mask, documents = (block_inputs.get(name) for name in ("caches", "mask", "documents"))
        if self.first:
            x = model.embed(ids, positions, documents)
        rotation = build_rotation(ids, model.shape, positions)
        for number, block in zip(self._numbers, self.blocks, strict=True):
            x = block(x, rotation, caches[number] if caches else None, mask, None, documents)
        return model.norm(x) if self.last else x  # type: ignore[no-any-return]


def _end_modules(model: Decoder, *, first: bool, last: bool) -> dict[str, nn.Module]:
    """Returns the modules of the first and last stages; a tied embedding belongs to both."""
    modules: dict[str, nn.Module | None] = {}
    if first:
        modules |= {"embedding": model.embedding, "positions": model.positions}
    if last:
        modules |= {"norm": model.norm, "head": model.embedding if model.head is None else model.head}
    return {name: module for name, module in modules.items() if module is not None}


AccumulateContext = Callable[[int, int, bool], AbstractContextManager[None]]
"""(stage, micro-batch, is the stage's last) -> context in which a backward adds its gradients to those of the step."""


class _Stage(PipelineStage):  # type: ignore[misc]
    """A pipeline stage with backwards that accumulate gradients through the strategy."""

    def __init__(self, stage: DecoderStage, accumulate: AccumulateContext, **arguments: Any) -> None:
        super().__init__(stage, **arguments)
        self._accumulate, self._num_done = accumulate, 0

    def _run_accumulating(self, number: int, backward: Callable[[], None]) -> None:
        assert self.chunks is not None
        self._num_done = (self._num_done + 1) % self.chunks
        with self._accumulate(self.stage_index, number, self._num_done == 0):
            backward()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs the backward of a micro-batch, or only that of its input."""
        backward = super().backward_one_chunk
        if full_backward:
            self._run_accumulating(bwd_chunk_id, lambda: backward(bwd_chunk_id, loss, True, last_backward))
        else:
            backward(bwd_chunk_id, loss, False, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the rest of a micro-batch's backward, that of the weights."""
        backward = super().backward_weight_one_chunk
        self._run_accumulating(bwd_chunk_id, lambda: backward(bwd_chunk_id, last_backward))


class _StepData:
    """The micro-batches of a step, looked up by this worker's stages."""

    def __init__(self, sharder: ContextSharder, shards: TokenShards | None) -> None:
        self._sharder, self._shards = sharder, shards
        self.batches: Sequence[MicroBatchLike] = ()
        self.measured: dict[int, torch.Tensor] = {}
        """Measured values of each micro-batch with a local loss and gradients not yet added."""
        self.buffer = (0, 0)
        """Rows and tokens of a stream buffer; one row if micro-batches differ."""
        self._local_tokens: dict[int, LocalTokens] = {}
        self._forward: Forward | None = None

    def begin_step(self, batches: Sequence[MicroBatchLike], forward: Forward) -> None:
        self.batches, self._forward, self._local_tokens = batches, forward, {}

    def local_tokens(self, number: int) -> LocalTokens:
        if number not in self._local_tokens:
            batch = self.batches[number]
            self._local_tokens[number] = self._sharder(batch.inputs, batch.targets)
        return self._set_stream_length(self._local_tokens[number])

    def _set_stream_length(self, local_tokens: LocalTokens) -> LocalTokens:
        if self._shards is not None:  # only the first stage splits the stream and knows its length
            self._shards.tokens = local_tokens.ids.shape[1]
        return local_tokens

    def shape(self, number: int) -> tuple[int, int]:
        """Returns rows and tokens of a micro-batch's stream on this worker, which has a part of the tokens in a tensor
        group."""
        rows, tokens = self.local_tokens(number).ids.shape
        return rows, tokens if self._shards is None else -(-tokens // self._shards.size)

    def unpack_stream(self, buffer: torch.Tensor, number: int) -> torch.Tensor:
        """Returns the stream of a micro-batch, (B, T, C), from its buffer."""
        rows, places = self.shape(number)
        return buffer.flatten(0, 1)[: rows * places].view(rows, places, -1)

    def pack_stream(self, stream: torch.Tensor) -> torch.Tensor:
        """Packs a stream (B, T, C) into a zero-padded buffer. Never a view of it: `zbv` could not detach one."""
        if stream.shape[:2] == self.buffer:
            return stream
        flat = stream.reshape(1, -1, stream.shape[-1])
        return F.pad(flat, (0, 0, 0, self.buffer[1] - flat.shape[1]))

    def micro_batch_context(self, number: int) -> AbstractContextManager[None]:
        assert self._forward is not None
        return self._forward.micro_batch_context(self.batches[number])

    def loss(self, number: int, loss_sum: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        assert self._forward is not None
        before = self._forward.measured.clone()
        loss = self._forward.loss(loss_sum, counted)
        self.measured[number] = self._forward.measured - before
        self._forward.measured.copy_(before)
        return loss


class Pipeline:
    """This worker's stages and the schedule that runs micro-batches through all stages."""

    def __init__(
        self,
        stages: Mapping[int, DecoderStage],
        workers: Sequence[int],
        group: dist.ProcessGroup,
        schedule: Schedule,
        *,
        sharder: ContextSharder,
        shards: TokenShards | None,
        stream: tuple[int, torch.dtype],
        device: torch.device,
        accumulate: AccumulateContext,
    ) -> None:
        """`stages` by number; `workers[stage]` is the index in `group` of the stage's worker; `stream`: width and dtype of
        the activations between stages."""
        self.stages, self._workers, self._group, self._schedule = stages, workers, group, schedule
        self._step, self._shards, self._stream, self._device = _StepData(sharder, shards), shards, stream, device
        self._accumulate = accumulate
        self._built: tuple[int, tuple[int, int], Any] | None = None
        """Number of micro-batches and buffer shape of a schedule, and the schedule."""
        self.measured = self._step.measured
        for stage in stages.values():
            stage.step = self._step

    def run_micro_batches(self, batches: Sequence[MicroBatchLike], forward: Forward) -> None:
        """Runs forwards and backwards of all micro-batches."""
        self._step.begin_step(batches, forward)
        numbers = torch.arange(len(batches))
        first, last = 0 in self.stages, max(self.stages) == len(self._workers) - 1
        self._schedule_for(batches).step(
            *((numbers,) if first else ()), number=numbers, target=numbers if last else None, return_outputs=False
        )

    def _schedule_for(self, batches: Sequence[MicroBatchLike]) -> Any:
        """Returns the schedule for these micro-batches; it keeps buffers for the largest, or for others up to twice as
        large.

        All workers of the group see the same micro-batches, and rebuild their buffers in the same steps.
        """
        shapes = {self._step.shape(number) for number in range(len(batches))}
        largest = max(map(math.prod, shapes))
        needed_shape = shapes.pop() if len(shapes) == 1 else (1, largest)
        count, (rows, places) = self._built[:2] if self._built else (0, (0, 0))
        fits = (rows, places) == needed_shape or (rows == 1 and largest <= places <= 2 * largest)
        if self._built is None or count != len(batches) or not fits:
            self._built = (len(batches), needed_shape, self._build_schedule(len(batches), needed_shape))
        _, self._step.buffer, made = self._built
        return made

    def _build_schedule(self, count: int, buffer: tuple[int, int]) -> Any:
        width, dtype = self._stream
        stages: list[Any] = []
        for number, stage in self.stages.items():
            stream = torch.empty(*buffer, width, dtype=dtype, device=self._device, requires_grad=True)
            made = _Stage(
                stage,
                self._accumulate,
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

    def _empty_stream(self, rows: int, tokens: int) -> torch.Tensor:
        """Returns an uninitialised stream between two stages."""
        width, dtype = self._stream
        part = tokens if self._shards is None else -(-tokens // self._shards.size)
        return torch.empty(rows, part, width, dtype=dtype, device=self._device)

    def slot(self, number: int) -> int:
        """Returns the slot of a micro-batch of the current step."""
        return self._step.batches[number].slot

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns loss sum and number of targets of a micro-batch of any shape, without gradients; zeros before the last
        stage."""
        local_tokens = self._step._sharder(inputs[:-1], inputs[-1])
        x = self._forward_stages(local_tokens.ids, local_tokens.positions, documents=local_tokens.documents)
        if x is None:
            return torch.zeros((), device=self._device), torch.zeros((), dtype=torch.int64, device=self._device)
        return self._any_stage.decoder.loss(x, local_tokens.targets)

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        caches: Any = None,
        mask: torch.Tensor | None = None,
        documents: Any = None,
    ) -> torch.Tensor:
        """Computes a decoder's `hidden`, on every worker; without gradients."""
        x = self._forward_stages(ids, positions, caches=caches, mask=mask, documents=documents)
        if x is None:
            x = torch.empty(*ids.shape, self._stream[0], dtype=self._stream[1], device=self._device)
        dist.broadcast(x, self._global_rank(len(self._workers) - 1), group=self._group)
        for cache in caches or ():  # caches of other stages' layers are empty here, but their length counts
            cache.length = max(other_cache.length for other_cache in caches)
        return x

    def logits(self, logits: Callable[[torch.Tensor], torch.Tensor], words: int, hidden: torch.Tensor) -> torch.Tensor:
        """Computes a decoder's `logits`, on every worker; without gradients."""
        last = len(self._workers) - 1
        found = logits(hidden) if last in self.stages else hidden.new_empty(*hidden.shape[:-1], words)
        dist.broadcast(found, self._global_rank(last), group=self._group)
        return found

    def _forward_stages(self, ids: torch.Tensor, positions: torch.Tensor | None, **block_inputs: Any) -> torch.Tensor | None:
        """Returns the normalised hidden states behind the last stage; None if it is on another worker."""
        if self._shards is not None:
            self._shards.tokens = ids.shape[1]
        own_rank, x = self._group.rank(), self._empty_stream(*ids.shape)
        for number, stage in self.stages.items():
            if number and self._workers[number - 1] != own_rank:
                dist.recv(x, self._global_rank(number - 1), group=self._group)
            x = stage.forward_blocks(x, ids, positions, **block_inputs)
            if not stage.last and self._workers[number + 1] != own_rank:
                dist.send(x.contiguous(), self._global_rank(number + 1), group=self._group)
                x = self._empty_stream(*ids.shape)
        return x if stage.last else None

    def _global_rank(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self._workers[stage])

    @property
    def _any_stage(self) -> DecoderStage:
        return next(iter(self.stages.values()))
