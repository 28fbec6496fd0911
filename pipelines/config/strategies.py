"""Data-parallel strategies: one table, which the settings, their checks, the preflight and the sweep read.

    STRATEGIES["fsdp"].is_sharded                             # True: all workers run equally many micro-batches
    names_with(STRATEGIES, "is_meshed")                       # "`ddp` or `fsdp`"

A further strategy is a row of the table, a name in `StrategyName`, and its class in `raystride.pipelines.train.strategies`.
"""

from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["auto", "single", "ddp", "fsdp", "deepspeed"]


@dataclass(frozen=True)
class StrategyKind:
    """A data-parallel strategy. As `auto` becomes `single` or `ddp`, its conditions are those of both."""

    sentence: str
    """Placement of parameters, gradients and optimiser state, for people."""
    has_several_workers: bool = True
    """Whether it works with more than one worker."""
    is_sharded: bool = False
    """Whether workers have shards and micro-batches communicate, so that all workers must run equally many."""
    is_hybrid: bool = False
    """Whether fewer workers than all can shard a copy (`scaling.shard_workers`)."""
    is_meshed: bool = False
    """Whether a group of workers can compute a slot together."""
    runs_engine: bool = False
    """Whether a library's engine holds parameters and optimiser, without adapters, experts, averages, fp16 or compiling."""
    package: str | None = None
    """Package that it needs, an extra of Raystride."""


STRATEGIES: dict[StrategyName, StrategyKind] = {
    "auto": StrategyKind("`single` for one worker, `ddp` for several", is_meshed=True),
    "single": StrategyKind("one worker", has_several_workers=False),
    "ddp": StrategyKind("every worker holds the whole model", is_meshed=True),
    "fsdp": StrategyKind(
        "parameters, gradients and optimiser state are sharded over the workers (FSDP2)",
        is_sharded=True,
        is_hybrid=True,
        is_meshed=True,
    ),
    "deepspeed": StrategyKind(
        "the same, by ZeRO (Rajbhandari et al., 2020)", is_sharded=True, runs_engine=True, package="deepspeed"
    ),
}
"""By the name in `scaling.strategy`."""
