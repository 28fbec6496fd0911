"""The network that the costliest worker of a mesh has, as settings of a smaller one, so that the estimate can count it.

With tensor parallelism a worker has some heads, hidden units and words of the same width; with context parallelism some
tokens; with a pipeline some blocks, whose saved tensors it keeps for every micro-batch that is on its way. Norms and the
stream are counted whole under tensor parallelism, of whose tokens a worker has a part: activations are told too high there.

    alone = cut_config(config)                                # one worker's part, as if there were no mesh
    micro_batches_held(config.scaling, slots=8)               # 2, of a pipeline of two stages
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raystride.model.shape import head_size, hidden_width
from raystride.pipelines.config import Config
from raystride.pipelines.config.run import Scaling


def cut_config(config: Config) -> Config:
    """The settings of one worker's part of a model, without a mesh; its workers are the groups."""
    shape, scaling = config.model, config.scaling
    tensor = scaling.tensor
    part = replace(
        shape,
        layers=blocks_held(shape.layers, scaling),
        heads=shape.heads // tensor,
        kv_heads=(shape.kv_heads or shape.heads) // tensor,
        head_size=head_size(shape),
        feed_forward=-(-hidden_width(shape) // tensor),
        context=shape.context // scaling.context,
    )
    alone = replace(scaling, tensor=1, pipeline=1, context=1, workers="auto")
    train = replace(config.train, micro_batch_slots=1) if scaling.pipeline > 1 else config.train
    return replace(config, model=part, scaling=alone, train=train)


def cut_facts(facts: Mapping[str, Any], scaling: Scaling) -> Mapping[str, Any]:
    """What preparation learned, with a worker's part of the words."""
    words = {name: -(-int(facts[name]) // scaling.tensor) for name in facts if name.endswith("vocabulary_size")}
    return {**facts, **words}


def blocks_held(layers: int, scaling: Scaling) -> int:
    """Blocks of the worker that has most; with one stage a worker, some more than the last, which has the head."""
    if scaling.pipeline == 1:
        return layers
    return -(-layers // scaling.stages) * (scaling.stages // scaling.pipeline)


def micro_batches_held(scaling: Scaling, slots: int) -> float:
    """Micro-batches whose saved tensors the first worker keeps at once, in multiples of all its blocks'.

    1F1B: one a stage (Narayanan et al., 2019). With two stages a worker those of the second begin later: 1 + 1 / 2 of that
    (Narayanan et al., 2021, section 2.2); there and back, as many as 1F1B (Qi et al., 2024, section 6).
    """
    most = scaling.pipeline * (1.5 if scaling.schedule == "interleaved" and scaling.pipeline > 1 else 1.0)
    return min(float(slots), most)
