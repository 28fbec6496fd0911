"""Estimates a worker's memory before a run starts; `benchmarks.memory` compares it with measurements.

Bytes a parameter, held from the first update on by every worker (`single`, `ddp`) or in shards:

    parameter   4 bytes; 2 under pure_bf16, but fp32 shards
    gradient    4 bytes, from its backward on (`single`) or always, in buckets (`ddp`); with train.exact one set of buckets a
                level of the tree, and those that the other workers send (`exact.ExactBuckets`)
    optimiser   4 bytes for each of its moments, and for the master copy under pure_bf16 without stochastic rounding

`activations` gives the other bytes of a forward and backward, moment by moment. Each component is its own peak. The total is
the peak of the sum; it may be less than the sum of peaks: under `single`, gradients are made while activations are freed.
`fsdp` (FSDP2) gathers the outer parameters for the whole step and a block's while it computes, and holds them twice for a
moment, as they arrive in a buffer. A block's gradient is unsharded until it is reduced; with several micro-batches all
gradients are until the last one. `deepspeed` (ZeRO; Rajbhandari et al., 2020, section 5) shards according to its stage.

With adapters (`lora.rank`) all other parameters are frozen: 4 bytes each, or 2, and no gradients or optimiser state. Several
at once (`lora.adapters`) share the base; each has its own tokens in the common forward and backward.

    need = estimate(config, expected_facts(config), workers=2, device="cpu")    # None: this network is unknown
    need.total                                                # bytes
    count_adapter_parameters(config)                          # parameters of all adapters that the run trains
"""

from dataclasses import dataclass, replace

from raystride.model.shape import ENCODERS, dense_sizes, expert_width, head_size, hidden_width
from raystride.pipelines.config import Config, LoraConfig, ModelConfig, OptimizerConfig, ScalingConfig, TrainConfig
from raystride.pipelines.config.optimizers import OPTIMIZERS
from raystride.pipelines.train.memory.activations import FP32, Arithmetic, Moment, Network, list_moments
from raystride.pipelines.train.memory.cut import NetworkPart, cut_config, cut_facts, network_parts
from raystride.pipelines.train.memory.networks import Facts, decoder_network, describe_network
from raystride.pipelines.train.strategies.mesh.pipeline_plan import Schedule
from raystride.pipelines.train.strategies.reduction_tree import covering_subtrees, plan_visits


@dataclass(frozen=True)
class BlockLinear:
    """A linear layer of a block that can have an adapter."""

    names: tuple[str, ...]
    """Last parts of the names for its selection by `lora.targets`."""
    inputs: int
    outputs: int


def block_linears(shape: ModelConfig) -> list[BlockLinear]:
    """Returns the linear layers of a block, without cross-attention."""
    width, hidden, size = shape.hidden_size, hidden_width(shape), head_size(shape)
    queries, keys = shape.heads * size, (shape.kv_heads or shape.heads) * size
    if shape.experts:
        hidden = shape.shared_experts * expert_width(shape)
    if shape.architecture == "llama":
        attention = [
            BlockLinear(("q", "q_proj"), width, queries),
            BlockLinear(("k", "k_proj"), width, keys),
            BlockLinear(("v", "v_proj"), width, keys),
            BlockLinear(("out", "o_proj"), queries, width),
        ]
        if not hidden:  # the experts themselves have no adapters
            return attention
        return [
            *attention,
            BlockLinear(("gate", "gate_proj"), width, hidden),
            BlockLinear(("up", "up_proj"), width, hidden),
            BlockLinear(("down", "down_proj"), hidden, width),
        ]
    if shape.architecture == "modernbert":
        return [
            BlockLinear(("qkv", "Wqkv"), width, queries + 2 * keys),
            BlockLinear(("out", "Wo"), queries, width),
            BlockLinear(("gate", "Wi"), width, hidden),
            BlockLinear(("up", "Wi"), width, hidden),
            BlockLinear(("down", "Wo"), hidden, width),
        ]
    if shape.architecture == "bert":
        projections = (("q", "query", "q_lin"), ("k", "key", "k_lin"), ("v", "value", "v_lin"))
        return [
            *(BlockLinear(names, width, size) for names, size in zip(projections, (queries, keys, keys), strict=True)),
            BlockLinear(("out", "dense", "out_lin"), queries, width),
            BlockLinear(("up", "dense", "lin1"), width, hidden),
            BlockLinear(("down", "dense", "lin2"), hidden, width),
        ]
    return [
        BlockLinear(("qkv", "c_attn"), width, queries + 2 * keys),
        BlockLinear(("out", "c_proj"), queries, width),
        BlockLinear(("up", "c_fc"), width, hidden),
        BlockLinear(("down", "c_proj"), hidden, width),
    ]


def select_targets(model: ModelConfig, lora: LoraConfig) -> list[BlockLinear]:
    """Returns the linear layers of a block that get an adapter; a name of only some blocks counts as if all had it."""
    linears = block_linears(model)
    if lora.all_linear:
        return linears
    target_names = {name.rpartition(".")[2] for name in lora.named_layers}
    return [site for site in linears if target_names & set(site.names)]


def count_adapter_parameters(model: ModelConfig, task: str, lora: LoraConfig) -> int:
    """Returns the numbers in A and B of all blocks. A translator has those of encoder and decoder, with double attention.

    The dense layer of an encoder before its head is counted, as it is trained whole. The head is not; its labels are
    unknown.
    """
    rank, find_targets = lora.rank, select_targets(model, lora)
    per_block = sum(rank * (site.inputs + site.outputs) + lora.dora * site.outputs for site in find_targets)
    blocks = model.layers
    if task == "translation":
        blocks = 2 * blocks + (model.encoder_layers or blocks)
    dense = sum(dense_sizes(model)) if model.architecture in ENCODERS else 0
    return per_block * blocks + dense


def low_rank_activation_bytes(model: ModelConfig, lora: LoraConfig, tokens: int) -> float:
    """Returns the bytes that the adapters save for the backward of `tokens` tokens, with the peak of temporary ones."""
    find_targets = select_targets(model, lora)
    widest = max((site.outputs for site in find_targets), default=0)
    return 4.0 * tokens * (model.layers * len(find_targets) * lora.rank + 2 * widest)


FRAMEWORK_BYTES = 400 * 2**20
"""Memory of a process with PyTorch loaded and no model, measured on CPUs with PyTorch 2.13."""
HALF = 2


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one worker on its device; each component at its own peak."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """All other bytes of a step."""
    tensors: float
    """Peak of the sum of these."""
    framework: float = FRAMEWORK_BYTES
    host: float = 0.0
    """Further bytes in main memory, if scaling.offload keeps states there for a GPU."""

    @property
    def total(self) -> float:
        """Peak bytes on the device, those of the framework included."""
        return self.tensors + self.framework


def estimate(config: Config, facts: Facts, *, workers: int, device: str) -> MemoryEstimate | None:
    """Returns the bytes of one of `workers` workers on `device` (`cpu` or `cuda`); None if the network is unknown.

    In a mesh it is the worker that needs most. `facts` are those of preparation, or `networks.expected_facts`.
    """
    groups = workers // config.scaling.group
    parts = network_parts(
        config.scaling, config.model, int(facts.get("vocabulary_size", 0)), -(-config.train.slots // groups)
    )
    estimates = [_estimate_part(config, facts, part, workers=groups, device=device) for part in parts]
    found = max(
        (estimate_of_part for estimate_of_part in estimates if estimate_of_part),
        key=lambda estimate_of_part: estimate_of_part.tensors,
        default=None,
    )
    if found is None or not config.objective.teacher:
        return found
    teacher = _teacher_bytes(config, facts)
    return replace(found, parameters=found.parameters + teacher, tensors=found.tensors + teacher)


def _teacher_bytes(config: Config, facts: Facts) -> float:
    """Returns the bytes of a teacher's weights, of which every worker has all."""
    from raystride.pipelines.data.teacher import teacher_shape

    network = decoder_network(replace(Config(), model=teacher_shape(config.model, config.objective)), facts, 1, Arithmetic())
    return float((HALF if config.train.precision == "pure_bf16" else FP32) * network.num_parameters)


def _estimate_part(config: Config, facts: Facts, part: NetworkPart, *, workers: int, device: str) -> MemoryEstimate | None:
    """Estimates a worker with `part` of the network, in one of `workers` groups."""
    is_meshed = config.scaling.group > 1
    if is_meshed:
        config, facts = cut_config(config, part), cut_facts(facts, config.scaling)
    slots = -(-config.train.slots // workers)
    slots_at_once = min(slots, config.train.together or slots)
    arithmetic = arithmetic_for(config.train, config.model, device)
    network = describe_network(config, facts, slots=slots_at_once * config.lora.adapters, arithmetic=arithmetic, part=part)
    if network is None:
        return None
    step_moments = list_moments(network, arithmetic, config.train.activation_checkpointing)
    if part.stages:
        in_flight = _in_flight_bytes(network, part, slots, config.train.activation_checkpointing, config.scaling.schedule)
        step_moments = [replace(moment, activations=moment.activations + in_flight) for moment in step_moments]
    accumulates = slots > slots_at_once
    if config.lora.rank:
        tokens = slots_at_once * config.lora.adapters * config.train.slot_samples * config.model.context
        return _estimate_adapters(config, network, max(moment.activations for moment in step_moments), tokens, workers)
    if config.scaling.strategy == "fsdp":
        accumulates = slots > max(part.num_in_flight) if part.stages else accumulates
        unsharded = UnshardedMemory(config, network, several=accumulates, staged=bool(part.stages))
        return _estimate_fsdp(unsharded, step_moments, workers, device)
    if config.scaling.strategy == "deepspeed":
        return _estimate_deepspeed(config, network, step_moments, workers, device)
    return _estimate_data_parallel(
        config,
        network,
        step_moments,
        workers,
        accumulates=accumulates,
        has_buckets=is_meshed or config.train.exact or workers > 1,
    )


def _in_flight_bytes(
    network: Network, part: NetworkPart, num_micro_batches: int, checkpointing: str, schedule: Schedule
) -> float:
    """Returns the bytes of a pipeline worker's micro-batches besides the one in its backward, and of its receive buffers.

    PyTorch's stages have a buffer for each of a step's `num_micro_batches`: of the stream from the stage before, which is
    the first block's input, and of its gradient from the stage behind. A stage's output is kept until its backward.
    A backward in two halves (zbv) keeps the gradients of the matrix products' outputs for the second.
    """
    block, last = network.blocks[0], len(part.stages) - 1
    bytes_kept, stream = block.bytes_kept(checkpointing), block.input
    extra_bytes = -len(network.blocks) * bytes_kept - network.embedding_saved
    extra_bytes += max(part.stages) * (block.matmul_outputs - stream) * (schedule == "zbv")
    for stage, (blocks, num_held) in enumerate(zip(part.stages, part.num_in_flight, strict=True)):
        receives, sends = stage > 0 or not part.first, stage < last or not part.last
        extra_bytes += num_held * blocks * bytes_kept + (0 if receives else num_held * network.embedding_saved)
        extra_bytes += stream * (receives * (num_micro_batches - num_held) + sends * (num_micro_batches + num_held))
    return extra_bytes


def arithmetic_for(train: TrainConfig, model: ModelConfig, device: str) -> Arithmetic:
    """Returns the bytes per number of a run's activations. `model.kernels auto` counts as PyTorch: what is not proved is."""
    gpu, precision = device == "cuda", train.precision
    stream = HALF if precision == "pure_bf16" else FP32
    # On CPUs bf16 rounds the factors inside of products; every tensor stays fp32.
    matmul = HALF if stream == HALF or precision == "fp16" or (gpu and precision == "bf16") else FP32
    kernels = model.kernels == "triton"
    return Arithmetic(stream=stream, matmul=matmul, kernels=kernels, mask=1 if gpu else matmul)


def _num_optimizer_moments(optimizer: OptimizerConfig, train: TrainConfig, network: Network) -> float:
    """Returns the numbers that the optimiser keeps for a parameter, an average of it included."""
    if network.optimizer_moments is not None:
        return network.optimizer_moments
    return OPTIMIZERS[optimizer.kind].num_moments(optimizer.momentum) + bool(train.ema)


def _estimate_data_parallel(
    config: Config, network: Network, step_moments: list[Moment], workers: int, *, accumulates: bool, has_buckets: bool
) -> MemoryEstimate:
    """Estimates strategies with unsharded gradients; with `has_buckets` they are allocated all the time."""
    num_parameters = network.num_parameters
    is_pure, stochastic = config.train.precision == "pure_bf16", config.train.stochastic_rounding
    parameters = (HALF if is_pure else FP32) * num_parameters
    moments = _num_optimizer_moments(config.optimizer, config.train, network)
    optimizer = FP32 * num_parameters * (moments + (is_pure and not stochastic))
    gradients = float(FP32 * num_parameters)
    if config.train.exact:
        gradients = _exact_gradients(config.train, config.scaling, network, workers)
    # The update widens all parameters of a group before it rounds them; norms of updates need a copy.
    updating = Moment(FP32 * num_parameters * (stochastic + config.train.log_norms), num_parameters)
    gradients_resident = has_buckets or accumulates
    activations = max(
        moment.activations + (FP32 * moment.computing_gradients if gradients_resident else 0)
        for moment in [*step_moments, updating]
    )
    peak = max(
        moment.activations
        + (gradients + FP32 * moment.computing_gradients if gradients_resident else FP32 * moment.ready_gradients)
        for moment in [*step_moments, updating]
    )
    return MemoryEstimate(parameters, gradients, optimizer, activations, parameters + optimizer + peak)


def _estimate_adapters(config: Config, network: Network, activations: float, tokens: int, workers: int) -> MemoryEstimate:
    """Estimates a frozen base, replicated or in shards, with small adapters that every worker trains whole.

    The activations are those of training all weights, an upper bound.
    """
    number_bytes = HALF if config.lora.base_precision == "bf16" else FP32
    base, lora = float(number_bytes * network.num_parameters), config.lora
    trained = count_adapter_parameters(config.model, config.task, lora) * lora.adapters
    if config.scaling.strategy == "fsdp":
        blocks = [block.num_parameters for block in network.blocks]
        # What lies outside of blocks is gathered for the step, a block while the next one comes, each with its buffer.
        activations += number_bytes * (network.num_parameters - sum(blocks) + 4 * max(blocks, default=0))
        base /= config.scaling.shard_workers or workers
    elif number_bytes == HALF:
        activations += FP32 * max(network.sizes)  # a matrix is widened for its product
    activations += low_rank_activation_bytes(config.model, config.lora, tokens)
    gradients = float(FP32 * trained)
    if config.train.exact:
        gradients = _exact_gradients(config.train, config.scaling, replace(network, sizes=[trained]), workers)
    parameters = base + FP32 * trained
    optimizer = FP32 * trained * _num_optimizer_moments(config.optimizer, config.train, network)
    return MemoryEstimate(parameters, gradients, optimizer, activations, parameters + gradients + optimizer + activations)


def _exact_gradients(train: TrainConfig, scaling: ScalingConfig, network: Network, workers: int) -> float:
    """Returns the bytes of `exact.ExactBuckets`: a set of buckets a level of the tree, and two receive buffers."""
    from raystride.pipelines.data.feed.plan import worker_slots  # imports NumPy

    slots = train.slots
    shares = [worker_slots(slots, rank, workers) for rank in range(workers)]
    subtrees = [covering_subtrees(range(slots), slots_of_worker) for slots_of_worker in shares]
    rows = max(1 + max(visit.row for visit in plan_visits(subtree).values()) for subtree in subtrees)
    senders = sum(map(len, subtrees)) - min(map(len, subtrees))
    largest = _largest_bucket(scaling, network)
    return FP32 * rows * network.num_parameters + 2 * largest / workers * senders


def _largest_bucket(scaling: ScalingConfig, network: Network) -> float:
    """Returns the bytes of the largest bucket. As in `reduction.Buckets`, it has adjacent parameters, last first, at least
    one."""
    max_bytes, largest, bucket_bytes = scaling.bucket_mib * 2**20, 0.0, 0.0
    for size in reversed(network.sizes):
        bucket_bytes = size * FP32 + (bucket_bytes if bucket_bytes + size * FP32 <= max_bytes else 0)
        largest = max(largest, bucket_bytes)
    return largest


def _estimate_fsdp(unsharded: "UnshardedMemory", step_moments: list[Moment], workers: int, device: str) -> MemoryEstimate:
    """Estimates FSDP2: fp32 shards of everything, and parameters and gradients that are unsharded for a while."""
    config, network, blocks = unsharded.config, unsharded.network, unsharded.blocks
    shards = config.scaling.shard_workers or workers
    shard = FP32 * network.num_parameters / shards
    optimizer = shard * _num_optimizer_moments(config.optimizer, config.train, network)
    activations = max(moment.activations + unsharded.bytes_at(moment) for moment in step_moments)
    peak = max(
        moment.activations + unsharded.bytes_at(moment) + FP32 * sum(blocks[len(blocks) - moment.num_blocks_done :]) / shards
        for moment in step_moments
    )
    if config.scaling.offload and device == "cuda":
        return MemoryEstimate(0, 0, 0, activations, activations, host=2 * shard + optimizer)
    return MemoryEstimate(shard, shard, optimizer, activations, shard + optimizer + peak)


def _estimate_deepspeed(
    config: Config, network: Network, step_moments: list[Moment], workers: int, device: str
) -> MemoryEstimate:
    """Estimates ZeRO by DeepSpeed: every stage shards one more state; all stages keep a master copy in shards.

    Gradients are made unsharded, in stage 1 all of them, and leave through a bucket that is always allocated. In stage 3
    it holds fp32; its content is copied into one piece and, by gloo, once more, and two blocks are gathered.
    """
    stage, num_parameters = config.scaling.zero, network.num_parameters
    number_bytes = HALF if config.train.precision == "pure_bf16" else FP32
    parameters = number_bytes * num_parameters / (workers if stage == 3 else 1)
    gradients = FP32 * num_parameters / workers
    optimizer = gradients * (_num_optimizer_moments(config.optimizer, config.train, network) + 1)
    block = max(block_memory.num_parameters for block_memory in network.blocks)
    bucket = config.scaling.bucket_mib * 2**20
    if stage == 3:
        unsharded = bucket + 2 * number_bytes * block
        activations = max(
            moment.activations + unsharded + 2 * min(bucket, FP32 * moment.ready_gradients) for moment in step_moments
        )
        peak = max(activations, bucket + gradients + 2 * min(bucket, FP32 * num_parameters))
    else:
        max_ready = bucket + FP32 * block if stage == 2 else FP32 * num_parameters
        activations = (
            max(moment.activations + min(FP32 * moment.ready_gradients, max_ready) for moment in step_moments)
            + bucket * number_bytes / FP32
        )
        peak = activations
    if config.scaling.offload and device == "cuda":
        return MemoryEstimate(parameters, gradients, 0, activations, parameters + gradients + peak, host=optimizer)
    return MemoryEstimate(parameters, gradients, optimizer, activations, parameters + optimizer + peak)


@dataclass(frozen=True)
class UnshardedMemory:
    """Parameters that FSDP2 has gathered at a moment, gradients that are not yet sharded, and buffers of both."""

    config: Config
    network: Network
    several: bool
    """Several micro-batches (of a pipeline: more than are in flight at once): gradients stay unsharded until the last."""
    staged: bool = False
    """Stages of a pipeline: all their parameters are gathered, and gradients unsharded, until the last backward is over."""

    @property
    def blocks(self) -> list[int]:
        """Number of parameters of each block."""
        return [block.num_parameters for block in self.network.blocks]

    def bytes_at(self, moment: Moment) -> float:
        """Returns the unsharded bytes at a moment, with the buffers in which they arrive or leave."""
        blocks, num_parameters, num_blocks_left = (
            self.blocks,
            self.network.num_parameters,
            len(self.network.blocks) - moment.num_blocks_done,
        )
        compute = HALF if self.config.train.precision == "pure_bf16" else FP32
        if self.staged:
            return compute * num_parameters + FP32 * (num_parameters if self.several else moment.ready_gradients)
        reshard = self.config.scaling.reshard
        outer = num_parameters - sum(blocks)
        accumulated = FP32 * num_parameters if self.several else 0
        if moment.phase in ("forward", "loss"):
            # This block's buffer, and the one before it, which is freed when the next has arrived.
            forward = moment.phase == "forward"
            gathered = outer + forward * blocks[-1] if reshard else num_parameters
            return compute * (gathered + sum(blocks[-2:] if forward else blocks[-1:])) + accumulated
        if moment.phase == "embedding":
            return max(2 * compute, compute + FP32, 2 * FP32) * outer + FP32 * sum(blocks[:1])
        # The next block below is gathered ahead of time, and the gradients of the one above are still on their way.
        below, current, above = (
            blocks[: num_blocks_left - 1],
            blocks[num_blocks_left - 1],
            blocks[num_blocks_left : num_blocks_left + 1],
        )
        prefetched = sum(below[-1:] if reshard else below)
        computing = compute * (prefetched + 2 * current) + FP32 * sum(above)
        # Gradients are copied into one buffer in fp32, and gloo makes another copy of it.
        summing = compute * prefetched + 2 * FP32 * current
        if self.several:
            accumulated -= FP32 * sum(blocks[num_blocks_left - 1 :])
        return compute * (outer + self.network.head) + accumulated + max(computing, summing)
