"""What the scaling model is told of a trial: the work that its settings mean, and what it measured.

observation = observation_of(candidate.config, result)
"""

import math
import statistics

from raystride.model.shape import DecoderShape, is_tied, key_width, matrices, query_width
from raystride.pipelines.config import Config
from raystride.pipelines.config.combinations import SHARDED
from raystride.pipelines.memory.activations import Arithmetic, Network
from raystride.pipelines.memory.estimate import arithmetic_of
from raystride.pipelines.memory.networks import expected, network_of
from raystride.pipelines.scaling_model.mesh import WorkMesh
from raystride.pipelines.scaling_model.observation import Observation, Strategy, TrialError, Work
from raystride.pipelines.sweep.result import Result

FP32_BYTES, HALF_BYTES = 4, 2
MIB = 2**20


def observation_of(config: Config, result: Result) -> Observation:
    """A measured trial. Raises TrialError where its workers do not fill nodes evenly, or nothing tells its parameters."""
    seconds = statistics.median(result.step_seconds)
    joules = result.figures.get("joules_per_token")
    # In a mesh that is but one of several exchanges, and stages of a pipeline come to it one after another.
    tells_the_wait = config.scaling.strategy not in SHARDED and config.scaling.group == 1
    return Observation(
        work_of(config, result),
        step_seconds=result.step_seconds,
        data_seconds=result.shares.get("data", 0.0) * seconds,
        reduce_seconds=result.shares.get("reduce", 0.0) * seconds if tells_the_wait else None,
        joules_per_token=float(joules) if isinstance(joules, int | float) else None,
    )


def work_of(config: Config, result: Result) -> Work:
    """What each step of the trial computed and sent. Raises TrialError where nothing tells its number of parameters."""
    scaling, train = config.scaling, config.train
    several = result.workers > 1
    strategy: Strategy = scaling.strategy if scaling.strategy != "auto" else "ddp" if several else "single"
    network = network_of(config, expected(config), slots=1, arithmetic=Arithmetic())
    parameters = int(result.figures.get("parameters") or (network.count if network else 0))
    if not parameters:
        raise TrialError(f"task is {config.task!r} and the trial's summary has no parameters: measure it again")
    # Slots are shared out among groups of workers, and where there are stages they are micro-batches.
    share = math.ceil(train.slots / max(1, result.workers // scaling.group))
    together = 1 if scaling.pipeline > 1 else min(share, train.together or share)
    half = train.precision == "pure_bf16" or (strategy == "fsdp" and train.precision in ("bf16", "fp16"))
    return Work(
        device=result.device,
        model=_described(config, parameters),
        parameters=parameters,
        workers=result.workers,
        workers_per_node=min(result.places_per_node, result.workers),
        strategy=strategy,
        slots=train.slots,
        tokens_per_slot=max(1, round(result.tokens_per_step / train.slots)),
        messages=_messages(config, strategy, parameters, network),
        slots_per_micro_batch=together,
        zero=scaling.zero,
        reshard=scaling.reshard,
        shard_workers=scaling.shard_workers,
        precision=train.precision,
        # Gradients are summed in fp32 under every strategy and precision.
        gradient_bytes=FP32_BYTES,
        gather_bytes=HALF_BYTES if half else FP32_BYTES,
        threads=result.threads,
        recompute=train.activation_checkpointing != "none",
        variant=_variant(config, strategy),
        backend="gloo" if result.device == "cpu" else "nccl",
        flops_per_token=result.figures.get("flops_per_token"),
        mesh=_mesh(config, result, together) if scaling.group > 1 else None,
    )


def _mesh(config: Config, result: Result, together: int) -> WorkMesh:
    """How a group of workers computes a slot together."""
    scaling, model, words = config.scaling, config.model, config.tokenizer.vocabulary_size
    means = arithmetic_of(config, "cpu" if result.device == "cpu" else "cuda")
    return WorkMesh(
        pipeline=scaling.pipeline,
        context=scaling.context,
        tensor=scaling.tensor,
        schedule=scaling.schedule,
        stages_per_worker=scaling.stages // scaling.pipeline,
        context_exchange=scaling.context_exchange,
        layers=model.layers,
        width=model.width,
        queries=query_width(model),
        keys=2 * key_width(model),
        words=words if is_tied(model) else 0,
        head_blocks=head_in_blocks(model, words),
        # Of packed documents nobody knows how long they are: one is the most to send.
        documents=1 if config.train.slot_tokens else together * config.train.slot_size,
        stream_bytes=means.stream,
        product_bytes=means.product,
        gradient_bytes=FP32_BYTES,
    )


def head_in_blocks(shape: DecoderShape, words: int) -> float:
    """Operations of the head of a decoder with so many words, in those of a block; as `strategies.stages.cut_stages`."""
    block = 6.0 * matrices(shape) + 12.0 * query_width(shape) * shape.context
    return 6.0 * words * shape.width / block


def _described(config: Config, parameters: int) -> str:
    """The network and how long samples are: what takes equally long a token."""
    model = config.model
    if config.task == "images":
        return f"convolutions {model.channels}, layers {model.hidden}, {parameters:,}"
    kind = f"{model.flavour} {model.layers}x{model.width}, {model.heads} heads, {parameters:,}, context {model.context}"
    return kind if config.task == "language_model" else f"{config.task}, {kind}"


def _messages(config: Config, strategy: Strategy, parameters: int, network: Network | None) -> int:
    """Buckets of gradients, or blocks whose parameters are gathered, and what lies outside of them."""
    if strategy in SHARDED:
        return (len(network.blocks) if network else config.model.layers) + 1
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
