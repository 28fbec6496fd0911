"""A group of workers that computes each slot together, and its communication: pipeline x context x tensor.

Sizes are bytes of the whole that the workers share. B T is a micro-batch's tokens, C the stream's width; every worker has
B T / context / tensor of them; p, t, c are the workers along pipeline, tensor and context.

    bubble     a worker waits (p - 1) / (v m) of its compute time, with m micro-batches and v stages a worker: 1F1B, v = 1
               (Narayanan et al., "PipeDream", 2019), interleaved (Narayanan et al., "Efficient Large-Scale Language
               Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2). Of the whole time 1F1B's is
               (p - 1) / (m + p - 1). Zero bubble: (p - 1) (F + B - W) of a micro-batch's forward F and its backward for
               inputs B and for weights W (Qi et al., "Zero Bubble Pipeline Parallelism", 2024, table 2 for ZB-H1), half of
               it with two stages a worker (ZB-V, section 6). The paper counts no bubble for ZB-V if F, B and W take
               equally long, since there workers begin and end a step one after another; here a step ends for all at once,
               and PyTorch's order of ZB-V, simulated, has this bubble
    tensor     per block two all-gathers and two reduce-scatters of the stream forward, the same backward (Korthikanti et
               al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2); the embedding's
               sum, the gather before the head, and of each token three numbers for the loss (Shoeybi et al., 2019,
               section 3)
    pipeline   the stream once forward and once backward over each border between stages
    context    keys and values, round a ring or all at once, or tokens for heads, as many bytes as
               `benchmarks.mesh_traffic.bytes_sent` counts

    mesh = WorkMesh(tensor=8, pipeline=4, layers=60, width=10240)
    mesh.bubble(28, recompute=False)                          # 0.107 of a worker's compute time
    mesh.list_exchanges(tokens=2048, micro_batches=28, recompute=False)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Dimension = Literal["tensor", "context", "pipeline"]
LOSS_BYTES = 12
"""Bytes a token for the loss with a sharded vocabulary; as `benchmarks.mesh_traffic.bytes_exchanged` counts."""


@dataclass(frozen=True)
class Exchange:
    """Communication of a step along one dimension of a mesh."""

    dimension: Dimension
    size: float
    """Bytes: of the whole tensor of a gather, scatter or sum, or those that a worker passes on."""
    messages: float
    kind: Literal["gather", "sum", "pass"]
    """`gather`: an all-gather or a reduce-scatter; `pass`: from each worker to another."""
    is_overlapped: bool = False
    """True if the worker computes meanwhile."""


@dataclass(frozen=True, kw_only=True)
class WorkMesh:
    """Sizes of a group of workers along each dimension, and of the network's parts that they exchange."""

    pipeline: int = 1
    """Workers that have the blocks one after another."""
    context: int = 1
    """Workers that share a sample's tokens."""
    tensor: int = 1
    """Workers that share heads, hidden units and words."""
    schedule: Literal["1f1b", "interleaved", "zbv"] = "1f1b"
    """The order of forwards and backwards along the pipeline."""
    stages_per_worker: int = 1
    """Pipeline stages of one worker."""
    context_exchange: Literal["ring", "heads", "keys"] = "ring"
    """Attention's exchange between workers that share a sample's tokens."""
    layers: int = 1
    """Blocks of the whole network."""
    width: int = 1
    """Numbers of the stream a token."""
    queries: int = 0
    """Width of all heads' queries."""
    keys: int = 0
    """Width of all heads' keys and values together."""
    words: int = 0
    """Rows of a tied embedding, whose gradient the ends of a pipeline add up; 0 if it is not tied."""
    head_blocks: float = 0.0
    """Operations of the head, in units of a block's."""
    documents: int = 1
    """Samples of a micro-batch; workers that share tokens have whole ones if they can."""
    stream_bytes: int = 4
    """Bytes of a number of the residual stream."""
    product_bytes: int = 4
    """Bytes of a number that a matrix product makes, such as a key."""
    gradient_bytes: int = 4
    """Bytes of a number of a gradient."""

    @property
    def group_workers(self) -> int:
        """Workers that compute a slot together."""
        return self.pipeline * self.context * self.tensor

    @property
    def parameter_fraction(self) -> float:
        """Share of the parameters that a worker has, before any sharding."""
        return 1 / (self.pipeline * self.tensor)

    @property
    def imbalance(self) -> float:
        """Operations of the costliest worker, which sets the pace, relative to the mean.

        Stages are cut as `strategies.mesh.pipeline_plan.cut_stages` does.
        """
        stages, stages_here = self.pipeline * self.stages_per_worker, self.stages_per_worker
        if self.pipeline == 1:
            return 1.0
        costs = sorted(cost for count in range(1, self.layers + 1) for cost in (count, count + self.head_blocks))
        max_cost = next((cost for cost in costs if self._fits_stages(cost, stages)), costs[-1])
        blocks_per_stage = math.floor(max_cost)
        last = max(1, self.layers - blocks_per_stage * (stages - 1)) + self.head_blocks
        costliest = max(stages_here * blocks_per_stage, (stages_here - 1) * blocks_per_stage + last)
        return costliest * self.pipeline / (self.layers + self.head_blocks)

    def _fits_stages(self, max_cost: float, stages: int) -> bool:
        """Returns True if stages of at most `max_cost` blocks' operations hold the network, the last with the head."""
        last = math.floor(max_cost - self.head_blocks + 1e-9)  # the sum was rounded
        return last >= 1 and math.floor(max_cost) * (stages - 1) + last >= self.layers

    def bubble(self, micro_batches: int, *, recompute: bool) -> float:
        """Returns the idle time of a worker of the pipeline, as a multiple of its compute time of a step."""
        wait = float(self.pipeline - 1)
        if self.schedule != "zbv":
            return wait / (self.stages_per_worker * micro_batches)
        forward, for_inputs, for_weights = 1, 1 + recompute, 1
        micro_batch = forward + for_inputs + for_weights
        return wait * (forward + for_inputs - for_weights) / micro_batch / (self.stages_per_worker * micro_batches)

    def list_exchanges(self, *, tokens: float, micro_batches: int, recompute: bool) -> Iterator[Exchange]:
        """Yields the exchanges of the busiest worker in a step with micro-batches of `tokens` tokens."""
        own_tokens = tokens / self.context
        if self.tensor > 1:
            yield from self._tensor_exchanges(own_tokens, micro_batches, recompute)
        if self.context > 1:
            yield self._context_exchange(own_tokens, micro_batches, recompute)
        if self.pipeline > 1:
            yield from self._pipeline_exchanges(own_tokens, micro_batches)

    def _tensor_exchanges(self, tokens: float, micro_batches: int, recompute: bool) -> Iterator[Exchange]:
        """Yields exchanges that block computing."""
        blocks = self.layers / self.pipeline * micro_batches
        # Forward, backward, and recomputed forward; each gathers the stream twice, and reduce-scatters products twice.
        num_gathers = 2 * blocks * (3 if recompute else 2)
        numbers = tokens * self.width
        yield Exchange("tensor", num_gathers * numbers * self.stream_bytes, num_gathers, "gather")
        yield Exchange("tensor", num_gathers * numbers * self.product_bytes, num_gathers, "gather")
        # In the first stage the embedding's sum and its backward, in the last the gather before the head and its backward.
        ends = (3 if self.pipeline > 1 else 5) * micro_batches
        yield Exchange("tensor", ends * numbers * self.stream_bytes, ends, "gather")
        yield Exchange("tensor", tokens * LOSS_BYTES * micro_batches, 2 * micro_batches, "sum")

    def _context_exchange(self, tokens: float, micro_batches: int, recompute: bool) -> Exchange:
        """Returns the exchange of the rank that sends most, for documents of equal length."""
        workers, blocks = self.context, self.layers / self.pipeline * micro_batches
        forwards = 2 if recompute else 1
        keys = tokens * self.keys / self.tensor
        number_bytes = self.product_bytes
        if self.context_exchange == "heads":
            size = (2 * self.queries + self.keys) / self.tensor * tokens * (workers - 1) / workers * number_bytes
            passes = forwards + 1
            return Exchange("context", blocks * passes * size, blocks * passes * 2 * (workers - 1), "pass")
        # Workers with whole documents need no other keys.
        num_document_ranks = math.gcd(self.documents, workers)
        if self.context_exchange == "keys":
            needed = workers / num_document_ranks - 1
            return Exchange(
                "context", blocks * (forwards + 1) * needed * keys * number_bytes, blocks * 2 * (workers - 1), "pass"
            )
        hops = workers - num_document_ranks
        # Half of a part is not needed at the last hop; gradients travel in 4 bytes at least.
        backward = max(0.0, hops - 0.5) * number_bytes + hops * max(4, number_bytes)
        size = keys * (forwards * hops * number_bytes + backward)
        return Exchange("context", blocks * size, blocks * (forwards + 2) * hops, "pass", is_overlapped=True)

    def _pipeline_exchanges(self, tokens: float, micro_batches: int) -> Iterator[Exchange]:
        """Yields each border in both directions in every micro-batch, and while the pipeline fills and drains."""
        num_passes = 2 * (self.stages_per_worker * micro_batches + self.pipeline - 1)
        part = tokens / self.tensor * self.width * self.stream_bytes
        yield Exchange("pipeline", num_passes * part, num_passes, "pass")
        if self.words and self.schedule != "zbv":
            yield Exchange("pipeline", self.words * self.width / self.tensor * self.gradient_bytes, 1, "pass")
