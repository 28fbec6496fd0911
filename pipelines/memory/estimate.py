"""How much memory a worker will need, told before anything starts; `benchmarks.memory` lays it beside what is measured.

Held from the first update on, a parameter, by every worker (`single`, `ddp`) or in shards of which each holds its part:

    parameter   4 bytes; 2 under pure_bf16, but fp32 shards
    gradient    4 bytes, from its backward on (`single`) or always, in buckets (`ddp`), with train.exact in one set of them a
                level of the tree, with what the other workers send (`exact.ExactBuckets`)
    optimiser   4 bytes for each of its moments, and for the master copy under pure_bf16 without stochastic rounding

What a forward and backward hold besides is told by `activations`, moment by moment. A component is its own most. The total
is the most at one moment, which may be less than the components' sum: under `single`, gradients come to be while activations
go. `fsdp` (FSDP2) gathers the outer parameters for the whole step and a block's while it computes, and for a moment has them
twice, in the buffer in which they came; a block's gradient is whole until it is summed, and with several micro-batches all
gradients are until the last one. `deepspeed` (ZeRO; Rajbhandari et al., 2020, section 5) spreads what its stage says.

Under adapters (`lora.rank`) all but those is frozen: 4 bytes a parameter, or 2, and nothing beside them. Many at once
(`lora.adapters`) share the base, and each has its own tokens in the one forward and backward of all.

    need = estimate(config, expected(config), workers=2, device="cpu")          # None: not known of this network
    need.total                                                # bytes
"""

from dataclasses import dataclass, replace

from raystride.pipelines.config import Config
from raystride.pipelines.memory.activations import FP32, Arithmetic, Moment, Network, moments
from raystride.pipelines.memory.adapters import adapter_numbers, held_low
from raystride.pipelines.memory.cut import NetworkPart, cut_config, cut_facts, network_parts
from raystride.pipelines.memory.networks import Facts, network_of
from raystride.pipelines.strategies.stage_plan import Schedule
from raystride.pipelines.strategies.tree import roots, visits

FRAMEWORK_BYTES = 400 * 2**20
"""What a process with PyTorch loaded takes before it holds a model, measured on CPUs with PyTorch 2.13."""
HALF = 2


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one worker on its device, each the most that there is of it."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Whatever else a step holds."""
    tensors: float
    """Of all these, the most at one moment."""
    framework: float = FRAMEWORK_BYTES
    host: float = 0.0
    """Bytes in main memory besides, where scaling.offload keeps states there for a GPU."""

    @property
    def total(self) -> float:
        """Bytes on the device at the worst moment, those of the framework included."""
        return self.tensors + self.framework


def estimate(config: Config, facts: Facts, *, workers: int, device: str) -> MemoryEstimate | None:
    """Bytes of a worker, one of `workers` that compute on `device` (`cpu` or `cuda`); None where the network is not known.

    Of the workers of a mesh that which needs most. `facts` are what preparation learned, or `networks.expected`.
    """
    groups = workers // config.scaling.group
    parts = network_parts(config, int(facts.get("vocabulary_size", 0)), -(-config.train.slots // groups))
    found = [_of_part(config, facts, part, workers=groups, device=device) for part in parts]
    return max((each for each in found if each), key=lambda each: each.tensors, default=None)


def _of_part(config: Config, facts: Facts, part: NetworkPart, *, workers: int, device: str) -> MemoryEstimate | None:
    """The estimate for a worker with a part of the network, in one of so many groups of workers."""
    meshed = config.scaling.group > 1
    if meshed:
        config, facts = cut_config(config, part), cut_facts(facts, config.scaling)
    slots = -(-config.train.slots // workers)
    together = min(slots, config.train.together or slots)
    means = arithmetic_of(config, device)
    network = network_of(config, facts, slots=together * config.lora.adapters, arithmetic=means, part=part)
    if network is None:
        return None
    held = moments(network, means, config.train.activation_checkpointing)
    if part.stages:
        more = _on_their_way(network, part, slots, config.train.activation_checkpointing, config.scaling.schedule)
        held = [replace(each, activations=each.activations + more) for each in held]
    several = slots > together
    if config.lora.rank:
        tokens = together * config.lora.adapters * config.train.slot_samples * config.model.context
        return _adapters(config, network, max(each.activations for each in held), tokens, workers)
    if config.scaling.strategy == "fsdp":
        several = slots > max(part.on_their_way) if part.stages else several
        whole = Whole(config, network, several=several, staged=bool(part.stages))
        return _fsdp(whole, held, workers, device)
    if config.scaling.strategy == "deepspeed":
        return _deepspeed(config, network, held, workers, device)
    return _whole(config, network, held, workers, several=several, buckets=meshed or config.train.exact or workers > 1)


def _on_their_way(network: Network, part: NetworkPart, count: int, checkpointing: str, schedule: Schedule) -> float:
    """Bytes that a worker of a pipeline keeps of other micro-batches than the one whose backward runs, and for receiving.

    PyTorch's stages have a buffer for each of a step's `count` micro-batches, of the stream from the stage before, in which
    the first block finds its input, and of its gradient from the stage behind. What a stage gives is kept till its backward.
    A backward in two halves (zbv) keeps the gradients of what products have given for the second.
    """
    block, last = network.blocks[0], len(part.stages) - 1
    kept, stream = block.kept(checkpointing), block.input
    more = -len(network.blocks) * kept - network.front
    more += max(part.stages) * (block.products - stream) * (schedule == "zbv")
    for stage, (blocks, held) in enumerate(zip(part.stages, part.on_their_way, strict=True)):
        before, behind = stage > 0 or not part.first, stage < last or not part.last
        more += held * blocks * kept + (0 if before else held * network.front)
        more += stream * (before * (count - held) + behind * (count + held))
    return more


def arithmetic_of(config: Config, device: str) -> Arithmetic:
    """What a run's activations are made of."""
    gpu, precision = device == "cuda", config.train.precision
    stream = HALF if precision == "pure_bf16" else FP32
    # On CPUs bf16 rounds the factors inside of products; every tensor stays fp32.
    product = HALF if stream == HALF or precision == "fp16" or (gpu and precision == "bf16") else FP32
    kernels = config.model.kernels == "triton" or (gpu and config.model.kernels == "auto")
    return Arithmetic(stream=stream, product=product, kernels=kernels, mask=1 if gpu else product)


def _moments_of(config: Config) -> int:
    """Numbers that the optimiser remembers of a parameter."""
    return 2 if config.optimizer.kind == "adamw" else 1 if config.optimizer.momentum else 0


def _whole(
    config: Config, network: Network, held: list[Moment], workers: int, *, several: bool, buckets: bool
) -> MemoryEstimate:
    """The estimate for strategies under which a worker's gradients lie whole; in `buckets`, they are there all the time."""
    count = network.count
    pure, stochastic = config.train.precision == "pure_bf16", config.train.stochastic_rounding
    parameters = (HALF if pure else FP32) * count
    optimizer = FP32 * count * (_moments_of(config) + (pure and not stochastic))
    gradients = float(FP32 * count)
    if config.train.exact:
        gradients = _exact_gradients(config, network, workers)
    # The update widens all parameters of a group before it rounds them.
    updating = Moment(FP32 * count if stochastic else 0, count)
    there = buckets or several
    activations = max(each.activations + (FP32 * each.making if there else 0) for each in [*held, updating])
    most = max(
        each.activations + (gradients + FP32 * each.making if there else FP32 * each.arisen) for each in [*held, updating]
    )
    return MemoryEstimate(parameters, gradients, optimizer, activations, parameters + optimizer + most)


def _adapters(config: Config, network: Network, activations: float, tokens: int, workers: int) -> MemoryEstimate:
    """A frozen base, whole or in shards, and small adapters that every worker trains whole.

    The activations are those of a training of all weights: the most that they can be.
    """
    number = HALF if config.lora.base_precision == "bf16" else FP32
    base, trained = float(number * network.count), adapter_numbers(config) * config.lora.adapters
    if config.scaling.strategy == "fsdp":
        blocks = [block.numbers for block in network.blocks]
        # What lies outside of blocks is gathered for the step, a block while the next one comes, each with its buffer.
        activations += number * (network.count - sum(blocks) + 4 * max(blocks, default=0))
        base /= config.scaling.shard_workers or workers
    elif number == HALF:
        activations += FP32 * max(network.sizes)  # a matrix is widened for its product
    activations += held_low(config, tokens)
    gradients = float(FP32 * trained)
    if config.train.exact:
        gradients = _exact_gradients(config, replace(network, sizes=[trained]), workers)
    parameters, optimizer = base + FP32 * trained, FP32 * trained * _moments_of(config)
    return MemoryEstimate(parameters, gradients, optimizer, activations, parameters + gradients + optimizer + activations)


def _exact_gradients(config: Config, network: Network, workers: int) -> float:
    """Bytes of `exact.ExactBuckets`: a set of buckets a level of the tree, and where two buckets of the others arrive."""
    from raystride.pipelines.feed.plan import share  # which imports NumPy

    slots = config.train.slots
    shares = [share(slots, rank, workers) for rank in range(workers)]
    subtrees = [roots(range(slots), each) for each in shares]
    rows = max(1 + max(visit.row for visit in visits(each).values()) for each in subtrees)
    senders = sum(map(len, subtrees)) - min(map(len, subtrees))
    largest = _largest_bucket(config, network)
    return FP32 * rows * network.count + 2 * largest / workers * senders


def _largest_bucket(config: Config, network: Network) -> float:
    """Bytes, cut as `reduction.Buckets` does: neighbouring parameters, last first, one at least."""
    most, largest, held = config.scaling.bucket_mib * 2**20, 0.0, 0.0
    for size in reversed(network.sizes):
        held = size * FP32 + (held if held + size * FP32 <= most else 0)
        largest = max(largest, held)
    return largest


def _fsdp(whole: "Whole", held: list[Moment], workers: int, device: str) -> MemoryEstimate:
    """FSDP2: fp32 shards of everything, and what is whole of it for a while."""
    config, network, blocks = whole.config, whole.network, whole.blocks
    shards = config.scaling.shard_workers or workers
    shard = FP32 * network.count / shards
    optimizer = shard * _moments_of(config)
    activations = max(each.activations + whole.bytes_at(each) for each in held)
    most = max(
        each.activations + whole.bytes_at(each) + FP32 * sum(blocks[len(blocks) - each.done :]) / shards for each in held
    )
    if config.scaling.offload and device == "cuda":
        return MemoryEstimate(0, 0, 0, activations, activations, host=2 * shard + optimizer)
    return MemoryEstimate(shard, shard, optimizer, activations, shard + optimizer + most)


def _deepspeed(config: Config, network: Network, held: list[Moment], workers: int, device: str) -> MemoryEstimate:
    """ZeRO by DeepSpeed: every stage spreads one more thing; a master copy is kept in shards by all of them.

    Gradients come to be whole, in stage 1 all of them, and leave through a bucket that is there all the time. In stage 3 it
    holds fp32; what is in it is copied into one piece and, by gloo, once more, and two blocks are gathered.
    """
    stage, count = config.scaling.zero, network.count
    number = HALF if config.train.precision == "pure_bf16" else FP32
    parameters = number * count / (workers if stage == 3 else 1)
    gradients = FP32 * count / workers
    optimizer = gradients * (_moments_of(config) + 1)
    block = max(each.numbers for each in network.blocks)
    bucket = config.scaling.bucket_mib * 2**20
    if stage == 3:
        whole = bucket + 2 * number * block
        activations = max(each.activations + whole + 2 * min(bucket, FP32 * each.arisen) for each in held)
        most = max(activations, bucket + gradients + 2 * min(bucket, FP32 * count))
    else:
        most_arisen = bucket + FP32 * block if stage == 2 else FP32 * count
        activations = max(each.activations + min(FP32 * each.arisen, most_arisen) for each in held) + bucket * number / FP32
        most = activations
    if config.scaling.offload and device == "cuda":
        return MemoryEstimate(parameters, gradients, 0, activations, parameters + gradients + most, host=optimizer)
    return MemoryEstimate(parameters, gradients, optimizer, activations, parameters + optimizer + most)


@dataclass(frozen=True)
class Whole:
    """Parameters that FSDP2 has gathered at a moment, gradients that are not yet in shards, and buffers of both."""

    config: Config
    network: Network
    several: bool
    """Several micro-batches (of a pipeline: more than are on their way at once): gradients stay whole until the last."""
    staged: bool = False
    """Stages of a pipeline: all they have is gathered, and gradients are whole, until the last backward is over."""

    @property
    def blocks(self) -> list[int]:
        """The number of parameters of each block."""
        return [block.numbers for block in self.network.blocks]

    def bytes_at(self, moment: Moment) -> float:
        """Bytes that lie whole, with the buffers in which they came or go."""
        blocks, count, left = self.blocks, self.network.count, len(self.network.blocks) - moment.done
        compute = HALF if self.config.train.precision == "pure_bf16" else FP32
        if self.staged:
            return compute * count + FP32 * (count if self.several else moment.arisen)
        reshard = self.config.scaling.reshard
        outer = count - sum(blocks)
        waiting = FP32 * count if self.several else 0
        if moment.place in ("forward", "loss"):
            # This block's buffer, and the one before it, which is freed when the next has come.
            forward = moment.place == "forward"
            gathered = outer + forward * blocks[-1] if reshard else count
            return compute * (gathered + sum(blocks[-2:] if forward else blocks[-1:])) + waiting
        if moment.place == "embedding":
            return max(2 * compute, compute + FP32, 2 * FP32) * outer + FP32 * blocks[0]
        # The next block below is gathered ahead of time, and the gradients of the one above are still on their way.
        below, this, above = blocks[: left - 1], blocks[left - 1], blocks[left : left + 1]
        ahead = sum(below[-1:] if reshard else below)
        computing = compute * (ahead + 2 * this) + FP32 * sum(above)
        # Gradients are copied into one buffer in fp32, of which gloo makes another copy.
        summing = compute * ahead + 2 * FP32 * this
        if self.several:
            waiting -= FP32 * sum(blocks[left - 1 :])
        return compute * (outer + self.network.head) + waiting + max(computing, summing)
