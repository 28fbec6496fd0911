"""Per-worker part of a network in a mesh, as settings for the memory estimate.

With tensor parallelism a worker has some heads, hidden units and words, and between attention and feed-forward some tokens.
With context parallelism it has some tokens throughout. With a pipeline it has the blocks of its stages, and keeps their
saved tensors for every micro-batch in flight.

    for part in network_parts(config, 50257, slots=8):        # one for each worker of a pipeline
        alone = cut_config(config, part)                      # its settings, as if there were no mesh
        part.num_in_flight                                    # of each of its stages, of eight micro-batches a step
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from raystride.model.shape import head_size, hidden_width
from raystride.pipelines.config import Config, ModelConfig
from raystride.pipelines.config.run import ScalingConfig
from raystride.pipelines.train.strategies.mesh.pipeline_plan import (
    assign_stages,
    max_micro_batches_in_flight,
    split_into_stages,
)


@dataclass(frozen=True)
class NetworkPart:
    """One worker's part of a network."""

    tensor: int = 1
    """Workers that share heads, hidden units and words, and the tokens between attention and feed-forward."""
    context: int = 1
    """Workers that share the tokens of a sequence."""
    expert: int = 1
    """Workers that share each block's experts, and the samples of a slot."""
    stages: tuple[int, ...] = ()
    """Number of blocks of each of its stages; empty without a pipeline."""
    first: bool = True
    """It has the layers before the first block ..."""
    last: bool = True
    """... and those after the last."""
    num_in_flight: tuple[int, ...] = ()
    """Maximum of micro-batches that each stage keeps."""


def network_parts(scaling: ScalingConfig, model: ModelConfig, vocab_size: int, slots: int) -> Iterator[NetworkPart]:
    """Yields the part of each worker of a pipeline, for `slots` slots a step in a group; without a pipeline one for all."""
    whole = NetworkPart(scaling.tensor, scaling.context, scaling.expert)
    if scaling.pipeline == 1:
        yield whole
        return
    blocks = [len(stage_blocks) for stage_blocks in split_into_stages(model, vocab_size, scaling.stages)]
    workers = assign_stages(scaling.stages, scaling.pipeline, scaling.schedule)
    for worker in range(scaling.pipeline):
        own_stages = [stage for stage, owner in enumerate(workers) if owner == worker]
        yield replace(
            whole,
            stages=tuple(blocks[stage] for stage in own_stages),
            first=0 in own_stages,
            last=scaling.stages - 1 in own_stages,
            num_in_flight=tuple(max_micro_batches_in_flight(scaling.schedule, worker, scaling.pipeline, slots)),
        )


def cut_config(config: Config, part: NetworkPart) -> Config:
    """Returns the settings of a worker's part of a model without a mesh; its workers are the groups."""
    shape, scaling = config.model, config.scaling
    tensor = part.tensor
    own_model = replace(
        shape,
        layers=sum(part.stages) or shape.layers,
        heads=shape.heads // tensor,
        kv_heads=(shape.kv_heads or shape.heads) // tensor,
        head_size=head_size(shape),
        ffn_size=-(-hidden_width(shape) // tensor),
        # At least as many as a token has: with fewer the estimate is somewhat high.
        experts=max(shape.experts // part.expert, shape.experts_per_token) if shape.experts else 0,
        window_layers=(),  # without effect on memory
        nope_layers=(),
    )
    without_mesh = replace(scaling, tensor=1, pipeline=1, context=1, expert=1, workers="auto")
    train = replace(config.train, micro_batch_slots=1) if part.stages else config.train
    return replace(config, model=own_model, scaling=without_mesh, train=train)


def cut_facts(facts: Mapping[str, Any], scaling: ScalingConfig) -> Mapping[str, Any]:
    """Returns the facts of preparation with the worker's part of the vocabulary."""
    vocab_size = {name: -(-int(facts[name]) // scaling.tensor) for name in facts if name.endswith("vocabulary_size")}
    return {**facts, **vocab_size}
