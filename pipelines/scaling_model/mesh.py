"""A group of workers that computes each slot together, and what it exchanges for it: pipeline x context x tensor.

Sizes are bytes, of a whole that workers have in parts. B T is a micro-batch's tokens, C the stream's width, of which every
worker has B T / context / tensor; p, t, c are the workers along pipeline, tensor and context.

    bubble     a worker waits (p - 1) / (v m) of what it computes, with m micro-batches and v stages a worker: 1F1B, v = 1
               (Narayanan et al., "PipeDream", 2019), interleaved (Narayanan et al., "Efficient Large-Scale Language
               Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2). Of the whole time 1F1B's is
               (p - 1) / (m + p - 1). Zero bubble: (p - 1) (F + B - W) of a micro-batch's forward F and its backward for
               inputs B and for weights W (Qi et al., "Zero Bubble Pipeline Parallelism", 2024, table 2 for ZB-H1), half of
               it with two stages a worker (ZB-V, section 6). The paper counts no bubble for ZB-V where F, B and W take
               equally long, since there workers begin and end a step one after another; here a step ends for all at once,
               and PyTorch's order of ZB-V, played out, has this bubble
    tensor     per block two all-gathers and two reduce-scatters of the stream forward, the same backward (Korthikanti et
               al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2); the embedding's
               sum, the gather before the head, and of each token three numbers for the loss (Shoeybi et al., 2019,
               section 3)
    pipeline   the stream once forward and once backward over each border between stages
    context    keys and values, round a ring or all at once, or tokens for heads, as much as
               `triton_kernels.attention_context.bytes_sent` says

    mesh = WorkMesh(tensor=8, pipeline=4, layers=60, width=10240)
    mesh.bubble(28, recompute=False)                          # 0.107 of what a worker computes
    mesh.exchanges(tokens=2048, micro_batches=28, recompute=False)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Dimension = Literal["tensor", "context", "pipeline"]
LOSS_BYTES = 12
"""Of a token, for the loss of words in parts; as `triton_kernels.linear_cross_entropy_sharded.bytes_exchanged`."""


@dataclass(frozen=True)
class Exchange:
    """What workers along one dimension of a mesh send each other in a step."""

    along: Dimension
    size: float
    """Bytes: of the whole that a gather, scatter or sum is of, or those that a worker passes on."""
    messages: float
    kind: Literal["gather", "sum", "pass"]
    """`gather`: an all-gather or a reduce-scatter; `pass`: from each worker to another."""
    hidden: bool = False
    """Whether the worker computes something else meanwhile."""


@dataclass(frozen=True, kw_only=True)
class WorkMesh:
    """How many workers compute a slot together, along which dimensions, and what of the network is exchanged."""

    pipeline: int = 1
    """Workers that have the blocks one after another."""
    context: int = 1
    """Workers that share a sample's tokens."""
    tensor: int = 1
    """Workers that share heads, hidden units and words."""
    schedule: Literal["1f1b", "interleaved", "zbv"] = "1f1b"
    """The order of forwards and backwards along the pipeline."""
    stages_per_worker: int = 1
    """Stages of the pipeline that one worker has."""
    context_exchange: Literal["ring", "heads", "keys"] = "ring"
    """What travels between workers that share a sample's tokens."""
    layers: int = 1
    """Blocks of the whole network."""
    width: int = 1
    """Numbers of the stream a token."""
    queries: int = 0
    """Width of all heads' queries."""
    keys: int = 0
    """Width of all heads' keys and values together."""
    words: int = 0
    """Rows of the embedding where that is the head as well, whose gradient the ends of a pipeline add up; else 0."""
    head_blocks: float = 0.0
    """Operations of the head, in blocks."""
    documents: int = 1
    """Samples of a micro-batch, of which workers that share tokens have whole ones where they can."""
    stream_bytes: int = 4
    """Of a number of the stream."""
    product_bytes: int = 4
    """Of a number that a product makes, such as a key."""
    gradient_bytes: int = 4
    """Of a number of a gradient."""

    @property
    def group_workers(self) -> int:
        """Workers that compute a slot together."""
        return self.pipeline * self.context * self.tensor

    @property
    def held(self) -> float:
        """The share of the parameters that a worker has, before any sharding."""
        return 1 / (self.pipeline * self.tensor)

    @property
    def busiest(self) -> float:
        """Operations of the costliest worker, which sets the pace, beside the mean.

        Stages are cut as `strategies.stage_plan.cut_stages` cuts them.
        """
        stages, several = self.pipeline * self.stages_per_worker, self.stages_per_worker
        if self.pipeline == 1:
            return 1.0
        costs = sorted(cost for count in range(1, self.layers + 1) for cost in (count, count + self.head_blocks))
        most = next((cost for cost in costs if self._fits(cost, stages)), costs[-1])
        each = math.floor(most)
        last = max(1, self.layers - each * (stages - 1)) + self.head_blocks
        costliest = max(several * each, (several - 1) * each + last)
        return costliest * self.pipeline / (self.layers + self.head_blocks)

    def _fits(self, most: float, stages: int) -> bool:
        """Whether stages of at most so many blocks' operations hold the network, the last with the head."""
        last = math.floor(most - self.head_blocks + 1e-9)  # as the sum was rounded
        return last >= 1 and math.floor(most) * (stages - 1) + last >= self.layers

    def bubble(self, micro_batches: int, *, recompute: bool) -> float:
        """Time in which a worker of the pipeline has nothing to do, as a multiple of what it computes in a step."""
        wait = float(self.pipeline - 1)
        if self.schedule != "zbv":
            return wait / (self.stages_per_worker * micro_batches)
        forward, for_inputs, for_weights = 1, 1 + recompute, 1
        whole = forward + for_inputs + for_weights
        return wait * (forward + for_inputs - for_weights) / whole / (self.stages_per_worker * micro_batches)

    def exchanges(self, *, tokens: float, micro_batches: int, recompute: bool) -> Iterator[Exchange]:
        """What the busiest worker takes part in during a step whose micro-batches have so many tokens."""
        mine = tokens / self.context
        if self.tensor > 1:
            yield from self._over_tensor(mine, micro_batches, recompute)
        if self.context > 1:
            yield self._over_context(mine, micro_batches, recompute)
        if self.pipeline > 1:
            yield from self._over_pipeline(mine, micro_batches)

    def _over_tensor(self, tokens: float, micro_batches: int, recompute: bool) -> Iterator[Exchange]:
        """Nothing can be computed before they are done."""
        blocks = self.layers / self.pipeline * micro_batches
        # Forward, backward, and once more forward; each gathers the stream twice, and leaves products in parts twice.
        times = 2 * blocks * (3 if recompute else 2)
        numbers = tokens * self.width
        yield Exchange("tensor", times * numbers * self.stream_bytes, times, "gather")
        yield Exchange("tensor", times * numbers * self.product_bytes, times, "gather")
        # At the first end the embedding's sum and its backward, at the last the gather before the head and its backward.
        ends = (3 if self.pipeline > 1 else 5) * micro_batches
        yield Exchange("tensor", ends * numbers * self.stream_bytes, ends, "gather")
        yield Exchange("tensor", tokens * LOSS_BYTES * micro_batches, 2 * micro_batches, "sum")

    def _over_context(self, tokens: float, micro_batches: int, recompute: bool) -> Exchange:
        """As the rank that sends most does, of documents of one length."""
        workers, blocks = self.context, self.layers / self.pipeline * micro_batches
        forwards = 2 if recompute else 1
        keys = tokens * self.keys / self.tensor
        number = self.product_bytes
        if self.context_exchange == "heads":
            size = (2 * self.queries + self.keys) / self.tensor * tokens * (workers - 1) / workers * number
            passes = forwards + 1
            return Exchange("context", blocks * passes * size, blocks * passes * 2 * (workers - 1), "pass")
        # Workers that have whole documents need nobody's keys.
        alone = math.gcd(self.documents, workers)
        if self.context_exchange == "keys":
            needed = workers / alone - 1
            return Exchange("context", blocks * (forwards + 1) * needed * keys * number, blocks * 2 * (workers - 1), "pass")
        hops = workers - alone
        # Half of a part is not needed at the last hop; gradients travel in 4 bytes at least.
        back = max(0.0, hops - 0.5) * number + hops * max(4, number)
        size = keys * (forwards * hops * number + back)
        return Exchange("context", blocks * size, blocks * (forwards + 2) * hops, "pass", hidden=True)

    def _over_pipeline(self, tokens: float, micro_batches: int) -> Iterator[Exchange]:
        """Each border both ways in every micro-batch, and while the pipeline fills and drains."""
        times = 2 * (self.stages_per_worker * micro_batches + self.pipeline - 1)
        part = tokens / self.tensor * self.width * self.stream_bytes
        yield Exchange("pipeline", times * part, times, "pass")
        if self.words and self.schedule != "zbv":
            yield Exchange("pipeline", self.words * self.width / self.tensor * self.gradient_bytes, 1, "pass")
