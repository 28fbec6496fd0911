"""Translates a trial for the scaling model: the work of its settings, and its measurements.

observation = build_observation(candidate.config, result)
"""

import math
import statistics

from raystride.model.shape import DecoderShape, block_matrix_weights, is_tied, key_width, query_width
from raystride.pipelines.config import Config, ModelConfig, ScalingConfig, TrainConfig
from raystride.pipelines.config.strategies import STRATEGIES
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.scaling_model.mesh import WorkMesh
from raystride.pipelines.sweep.scaling_model.observation import Observation, Strategy, TrialError, Work
from raystride.pipelines.train.memory.activations import Arithmetic, Network
from raystride.pipelines.train.memory.estimate import arithmetic_for
from raystride.pipelines.train.memory.networks import describe_network, expected_facts

FP32_BYTES, HALF_BYTES = 4, 2
MIB = 2**20


def build_observation(config: Config, result: Result) -> Observation:
    """Returns a measured trial. Raises TrialError if its workers do not fill nodes evenly, or its parameters are unknown."""
    seconds = statistics.median(result.step_seconds)
    joules = result.figures.get("joules_per_token")
    # In a mesh it is only one of several exchanges, and stages of a pipeline reach it one after another.
    has_reduce_wait = not config.scaling.kind.is_sharded and config.scaling.group == 1
    return Observation(
        build_work(config, result),
        step_seconds=result.step_seconds,
        data_seconds=result.shares.get("data", 0.0) * seconds,
        reduce_seconds=result.shares.get("reduce", 0.0) * seconds if has_reduce_wait else None,
        joules_per_token=float(joules) if isinstance(joules, int | float) else None,
    )


def build_work(config: Config, result: Result) -> Work:
    """Returns the work and communication of a trial's step. Raises TrialError if its number of parameters is unknown."""
    scaling, train = config.scaling, config.train
    is_distributed = result.workers > 1
    strategy: Strategy = scaling.strategy if scaling.strategy != "auto" else "ddp" if is_distributed else "single"
    network = describe_network(config, expected_facts(config), slots=1, arithmetic=Arithmetic())
    parameters = int(result.figures.get("parameters") or (network.num_parameters if network else 0))
    if not parameters:
        raise TrialError(f"task is {config.task!r} and the trial's summary has no parameters: measure it again")
    # Slots are divided among groups of workers; with pipeline stages they are micro-batches.
    share = math.ceil(train.slots / max(1, result.workers // scaling.group))
    slots_at_once = 1 if scaling.pipeline > 1 else min(share, train.together or share)
    half = train.precision == "pure_bf16" or (strategy == "fsdp" and train.precision in ("bf16", "fp16"))
    return Work(
        device=result.device,
        model=_model_name(config.model, config.task, parameters),
        parameters=parameters,
        workers=result.workers,
        workers_per_node=min(result.places_per_node, result.workers),
        strategy=strategy,
        slots=train.slots,
        tokens_per_slot=max(1, round(result.tokens_per_step / train.slots)),
        messages=_count_messages(config.model, config.scaling, strategy, parameters, network),
        slots_per_micro_batch=slots_at_once,
        zero=scaling.zero,
        reshard=scaling.reshard,
        shard_workers=scaling.shard_workers,
        precision=train.precision,
        # Gradients are summed in fp32 under every strategy and precision.
        gradient_bytes=FP32_BYTES,
        gather_bytes=HALF_BYTES if half else FP32_BYTES,
        threads=result.threads,
        recompute=train.activation_checkpointing != "none",
        variant=_describe_variant(config.train, config.model, strategy),
        backend="gloo" if result.device == "cpu" else "nccl",
        flops_per_token=result.figures.get("flops_per_token"),
        mesh=_build_mesh(config, result, slots_at_once) if scaling.group > 1 else None,
    )


def _build_mesh(config: Config, result: Result, slots_at_once: int) -> WorkMesh:
    """Returns the mesh of a group of workers that computes a slot together."""
    scaling, model, words = config.scaling, config.model, config.tokenizer.vocabulary_size
    arithmetic = arithmetic_for(config.train, config.model, "cpu" if result.device == "cpu" else "cuda")
    return WorkMesh(
        pipeline=scaling.pipeline,
        context=scaling.context,
        tensor=scaling.tensor,
        schedule=scaling.schedule,
        stages_per_worker=scaling.stages // scaling.pipeline,
        context_exchange=scaling.context_exchange,
        layers=model.layers,
        width=model.hidden_size,
        queries=query_width(model),
        keys=2 * key_width(model),
        words=words if is_tied(model) else 0,
        head_blocks=head_in_blocks(model, words),
        # The lengths of packed documents are unknown: one document is the most to send.
        documents=1 if config.train.slot_tokens else slots_at_once * config.train.slot_size,
        stream_bytes=arithmetic.stream,
        product_bytes=arithmetic.matmul,
        gradient_bytes=FP32_BYTES,
    )


def head_in_blocks(shape: DecoderShape, words: int) -> float:
    """Returns the operations of the head of a decoder with `words` words, in a block's.

    As in `strategies.mesh.pipeline_plan.cut_stages`.
    """
    block = 6.0 * block_matrix_weights(shape) + 12.0 * query_width(shape) * shape.context
    return 6.0 * words * shape.hidden_size / block


def _model_name(model: ModelConfig, task: str, parameters: int) -> str:
    """Returns the network and the length of samples: they fix the time a token."""
    if task == "images":
        return f"convolutions {model.channels}, layers {model.hidden}, {parameters:,}"
    size = f"{model.layers}x{model.hidden_size}, {model.heads} heads, {parameters:,}, context {model.context}"
    kind = f"{model.architecture} {size}"
    return kind if task == "language_model" else f"{task}, {kind}"


def _count_messages(
    model: ModelConfig, scaling: ScalingConfig, strategy: Strategy, parameters: int, network: Network | None
) -> int:
    """Returns the buckets of gradients, or the blocks with gathered parameters and one for the layers around them."""
    if STRATEGIES[strategy].is_sharded:
        return (len(network.blocks) if network else model.layers) + 1
    return max(1, math.ceil(parameters * FP32_BYTES / (scaling.bucket_mib * MIB)))


def _describe_variant(train: TrainConfig, model: ModelConfig, strategy: Strategy) -> str:
    """Returns the other choices that change how fast a worker computes.

    Sharding does so beyond its communication: hooks around every block, and copies of gathered parameters. With separate
    fits, held-out trials of a small model on CPUs were 7 % off in the median, and 11 % with a common one.
    """
    words = {
        strategy: STRATEGIES[strategy].is_sharded,
        f"compiled {train.compile}": train.compile != "none",
        "exact": train.exact,
        "not deterministic": not train.deterministic,
        "dropout": model.dropout > 0,
        f"kernels {model.kernels}": model.kernels != "auto",
        f"linear {model.linear}": model.linear != "auto",
    }
    return ", ".join(word for word, is_set in words.items() if is_set)
