"""What each worker of a mesh has of a network, in the words of the estimate of memory.

With tensor parallelism a worker has some heads, hidden units and words, and between attention and feed-forward some tokens;
with context parallelism some tokens throughout; with a pipeline the blocks of its stages, whose saved tensors it keeps for
every micro-batch that is on its way.

    for part in network_parts(config, words=50257):                # one for each worker of a pipeline
        alone = cut_config(config, part)                      # its settings, as if there were no mesh
        part.held(8)                                          # of its stages, of eight micro-batches a step
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from raystride.model.shape import head_size, hidden_width
from raystride.pipelines.config import Config
from raystride.pipelines.config.run import Scaling
from raystride.pipelines.strategies.stage_plan import cut_stages, micro_batches_held, stage_workers


@dataclass(frozen=True)
class NetworkPart:
    """A worker's part of a network."""

    tensor: int = 1
    """Workers that share heads, hidden units and words, and the tokens between attention and feed-forward."""
    context: int = 1
    """Workers that share all tokens."""
    stages: tuple[int, ...] = ()
    """The number of blocks of each stage here; empty: there is no pipeline."""
    first: bool = True
    """It has what comes before the first block ..."""
    last: bool = True
    """... and what comes behind the last."""
    on_their_way: tuple[int, ...] = ()
    """Micro-batches that each stage keeps, at most."""


def network_parts(config: Config, words: int, slots: int) -> Iterator[NetworkPart]:
    """The parts of the workers of a pipeline, for so many slots a step in a group; without one that of any worker."""
    scaling = config.scaling
    whole = NetworkPart(scaling.tensor, scaling.context)
    if scaling.pipeline == 1:
        yield whole
        return
    blocks = [len(each) for each in cut_stages(config.model, words, scaling.stages)]
    workers = stage_workers(scaling.stages, scaling.pipeline, scaling.schedule)
    for worker in range(scaling.pipeline):
        own = [stage for stage, each in enumerate(workers) if each == worker]
        yield replace(
            whole,
            stages=tuple(blocks[stage] for stage in own),
            first=0 in own,
            last=scaling.stages - 1 in own,
            on_their_way=tuple(micro_batches_held(scaling.schedule, worker, scaling.pipeline, slots)),
        )


def cut_config(config: Config, part: NetworkPart) -> Config:
    """The settings of a worker's part of a model, without a mesh; its workers are the groups."""
    shape, scaling = config.model, config.scaling
    tensor = part.tensor
    own = replace(
        shape,
        layers=sum(part.stages) or shape.layers,
        heads=shape.heads // tensor,
        kv_heads=(shape.kv_heads or shape.heads) // tensor,
        head_size=head_size(shape),
        feed_forward=-(-hidden_width(shape) // tensor),
        window_layers=(),  # which ones matters to nothing that is held
        unrotated_layers=(),
    )
    alone = replace(scaling, tensor=1, pipeline=1, context=1, workers="auto")
    train = replace(config.train, micro_batch_slots=1) if part.stages else config.train
    return replace(config, model=own, scaling=alone, train=train)


def cut_facts(facts: Mapping[str, Any], scaling: Scaling) -> Mapping[str, Any]:
    """What preparation learned, with a worker's part of the words."""
    words = {name: -(-int(facts[name]) // scaling.tensor) for name in facts if name.endswith("vocabulary_size")}
    return {**facts, **words}
