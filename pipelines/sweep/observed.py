"""What the scaling model is told of a trial: the work that its settings mean, and what it measured.

observation = observation_of(candidate.config, result)
"""

import math
import statistics

from model.shape import count_parameters, flops_per_token
from pipelines.config import Config
from pipelines.config.combinations import SHARDED
from pipelines.sweep.observation import Observation, Strategy, Work
from pipelines.sweep.result import Result

FP32_BYTES, HALF_BYTES = 4, 2
MIB = 2**20


def observation_of(config: Config, result: Result) -> Observation:
    """A measured trial. Raises TrialError where its workers do not fill nodes evenly, which the model does not describe."""
    seconds = statistics.median(result.step_seconds)
    joules = result.figures.get("joules_per_token")
    return Observation(
        work_of(config, result),
        step_seconds=result.step_seconds,
        data_seconds=result.shares.get("data", 0.0) * seconds,
        reduce_seconds=None if config.scaling.strategy in SHARDED else result.shares.get("reduce", 0.0) * seconds,
        joules_per_token=float(joules) if isinstance(joules, int | float) else None,
    )


def work_of(config: Config, result: Result) -> Work:
    """What each step of the trial computed and sent."""
    scaling, train, model = config.scaling, config.train, config.model
    strategy: Strategy = scaling.strategy if scaling.strategy != "auto" else "ddp" if result.workers > 1 else "single"
    parameters = count_parameters(model, config.tokenizer.vocabulary_size)
    share = math.ceil(train.slots / result.workers)
    half = train.precision == "pure_bf16" or (strategy == "fsdp" and train.precision in ("bf16", "fp16"))
    return Work(
        device=result.device,
        model=f"{model.flavour} {model.layers}x{model.width}, {model.heads} heads, {parameters:,}, context {model.context}",
        parameters=parameters,
        workers=result.workers,
        workers_per_node=min(result.places_per_node, result.workers),
        strategy=strategy,
        slots=train.slots,
        tokens_per_slot=train.slot_size * model.context,
        messages=_messages(config, strategy, parameters),
        slots_per_micro_batch=min(share, train.together or share),
        zero=scaling.zero,
        reshard=scaling.reshard,
        shard_workers=scaling.shard_workers,
        precision=train.precision,
        gradient_bytes=FP32_BYTES,
        gather_bytes=HALF_BYTES if half else FP32_BYTES,
        threads=result.threads,
        recompute=train.activation_checkpointing != "none",
        variant=_variant(config, strategy),
        backend="gloo" if result.device == "cpu" else "nccl",
        flops_per_token=flops_per_token(model, config.tokenizer.vocabulary_size),
    )


def _messages(config: Config, strategy: Strategy, parameters: int) -> int:
    """Buckets of gradients, or blocks whose parameters are gathered, and what lies outside of them."""
    if strategy in SHARDED:
        return config.model.layers + 1
    return max(1, math.ceil(parameters * FP32_BYTES / (config.scaling.bucket_mib * MIB)))


def _variant(config: Config, strategy: Strategy) -> str:
    """What else changes how fast a worker computes.

    Sharding does, besides what it sends: hooks around every block, and copies of what was gathered. Fitted apart, trials of
    a small model on CPUs that were held back were 7 % off in the median, and 11 % together.
    """
    train, model = config.train, config.model
    words = {
        strategy: strategy in SHARDED,
        f"compiled {train.compile}": train.compile != "none",
        "exact": train.exact,
        "not deterministic": not train.deterministic,
        "dropout": model.dropout > 0,
        f"kernels {model.kernels}": model.kernels != "auto",
        f"linear {model.linear}": model.linear != "auto",
    }
    return ", ".join(word for word, true in words.items() if true)
