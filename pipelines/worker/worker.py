"""One worker from its job to its summary: the build lines, in the order in which things depend on each other.

summary = run_worker(job, WorkerInfo(rank=0, world=1), recorder.receive, stopping=lambda: False)
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from raystride.model.dropout import number_dropouts
from raystride.pipelines.config import Config
from raystride.pipelines.config.combinations import SHARDED
from raystride.pipelines.feed.growth import GrowingOrder
from raystride.pipelines.feed.loader import Loader, Requests, validated, validation_batches
from raystride.pipelines.feed.opening import Feed, open_feed, open_manifest
from raystride.pipelines.feed.order import SampleOrder
from raystride.pipelines.feed.samples import Samples
from raystride.pipelines.observers.gpu_monitor import GpuMonitor
from raystride.pipelines.observers.host_monitor import HostMonitor
from raystride.pipelines.observers.kernels import Kernels
from raystride.pipelines.observers.observer import Observer, RunFacts
from raystride.pipelines.observers.ray_metrics import RayMetrics
from raystride.pipelines.observers.stragglers import Stragglers
from raystride.pipelines.observers.throughput import FirstStep, PhaseShares, Throughput
from raystride.pipelines.observers.tracker import Tracker
from raystride.pipelines.plugins import OBSERVERS, load_plugins
from raystride.pipelines.profiling.profile import Profiled
from raystride.pipelines.profiling.stalls import StallWatch
from raystride.pipelines.record.entry import new_entry
from raystride.pipelines.record.sender import Post, Sender
from raystride.pipelines.record.summary import RunSummary
from raystride.pipelines.strategies import build_strategy
from raystride.pipelines.strategies.recompute import as_compiled, recompute
from raystride.pipelines.strategies.spread import parameters_in, spread_of
from raystride.pipelines.strategies.strategy import Strategy
from raystride.pipelines.tasks import Task, build_task
from raystride.pipelines.tokenizers import Tokenizers
from raystride.pipelines.train.adapters import HEADER, begin_adapters, check_base, network_maker, settle_base
from raystride.pipelines.train.attention_choice import choose_attention
from raystride.pipelines.train.base_run import start_with
from raystride.pipelines.train.checkpoint import Checkpoints, Found
from raystride.pipelines.train.fingerprint import parameters_sha256
from raystride.pipelines.train.loop import Ending, Training
from raystride.pipelines.train.optimizer import build_optimizer
from raystride.pipelines.train.precision import Precision, with_precision
from raystride.pipelines.train.products import Choice, choose_products
from raystride.pipelines.train.state import TrainState
from raystride.pipelines.train.step import build_rules
from raystride.pipelines.train.validation import ValidationSums, validation_scores, validation_sums
from raystride.pipelines.worker.group import count_nodes, join_group, leave_group
from raystride.pipelines.worker.job import Job, WorkerInfo
from raystride.triton_kernels.dispatch import use_kernels

WARNING = "warning: "
"""What lines for people begin with that are warnings."""


def run_worker(
    job: Job, worker: WorkerInfo, post: Post, stopping: Callable[[], bool], milestones: dict[str, float] | None = None
) -> RunSummary:
    """Trains this rank's part; returns the summary of the run as this rank knows it. Raises what the training raises.

    `milestones` are the milestones of this worker's start so far, in seconds since 1970.
    """
    job.carried.register()
    load_plugins(job.config.plugins)
    sender = Sender(post, f"rank{worker.rank}")
    observers = build_observers(job, worker, sender, job.milestones | (milestones or {}) | {"torch": time.time()})
    log = partial(_log, sender, worker)
    owns_group = not dist.is_initialized()
    phase = partial(_phase, sender, worker)
    try:
        phase("building the model and its data")
        training = build_training(job, worker, observers, stopping, log)
        log(f"training on {worker.world} worker(s) from step {training.state.step}")
        for metric, signature in training.loader.samples.task.signatures.items():
            log(f"{metric} {signature}")
        facts = _facts(job, worker, training)
        for observer in observers:
            observer.on_start(facts)
        resumed_from = training.state.step or None
        phase("the first step")
        ending, metrics = training.run()
        summary = _summary(job, worker, training, ending, metrics) | {"resumed_from": resumed_from}
        summary |= {"precision": training.rules.precision.kind}
        if job.device == "cpu":
            summary |= {"products": Choice.of_bits(training.header["bits"]).text}
        summary |= {"parameters": facts.parameters, "flops_per_token": facts.flops_per_token}
        if ending is not Ending.STOPPED and (worker.rank == 0 or training.strategy.together):
            _write_sample(job, worker, training)
        for observer in observers:
            observer.on_end(summary)
        if owns_group and dist.is_initialized():
            leave_group(worker.rank)
        return summary
    except BaseException as error:
        for observer in observers:
            observer.on_error(error)
        raise
    finally:
        sender.close()


def build_observers(job: Job, worker: WorkerInfo, sender: Sender, milestones: dict[str, float]) -> list[Observer]:
    """All that has something to watch, in the order in which it is told; `milestones` are those of this worker's start."""
    profile, every_s, speed = job.config.profile, job.config.record.system_every_s, Throughput()
    built: list[Observer] = [speed, PhaseShares(), FirstStep(job.started_at, milestones)]
    if profile.tool != "none":
        built.insert(0, Profiled(profile, job.folder, sender, speed.on_pause))  # first: its own seconds are no training
    if profile.stall_factor:
        built.append(StallWatch(profile.stall_factor, job.folder, sender))
    if worker.world > 1:
        built.append(Stragglers(sender))
    built += [HostMonitor(sender, every_s), GpuMonitor(sender, every_s)]
    if job.config.launch.mode == "ray":
        built.append(RayMetrics())
    built += [Kernels(sender), *(make() for make in OBSERVERS.values())]
    return [*built, Tracker(sender)]  # last: it sends what the others have measured


def build_training(
    job: Job, worker: WorkerInfo, observers: list[Observer], stopping: Callable[[], bool], log: Callable[[str], None]
) -> Training:
    """Everything that a training needs, at the position of the newest checkpoint."""
    world, rank = worker.world, worker.rank
    device = _use_device(job, worker)
    config = replace(job.config, train=with_precision(job.config.train, device))
    use_kernels(config.model.kernels)
    manifest = open_manifest(config, job.prepared)
    task = build_task(config, manifest.facts, Tokenizers(job.prepared, build_task(config).tokenizers))
    strategy = job.strategy or build_strategy(config, device=device, rank=rank, world=world)
    strategy.device = device
    torch.manual_seed(config.seed)
    precision = Precision(config.train.precision)
    precision.use_products()
    if shortfall := precision.shortfall(device):
        log(shortfall)
    network = model = strategy.build(network_maker(task, config, job.prepared / "tokenizer", log))
    if config.masks_by_place:
        number_dropouts(model)
    checkpoints = _checkpoints(job, worker, task, log)
    found = checkpoints.newest()
    if config.lora.rank:
        begin_adapters(model, config, found, checkpoints)
    elif config.model.init_from and not found:  # a run that is resumed needs that folder no more
        start_with(model, config.model.init_from, task, job.prepared / "tokenizer", log)
    base = settle_base(model) if config.lora.rank and spread_of(model) is None else ""
    precision.convert(model, sharded=strategy.sharded)
    make_optimizer = partial(build_optimizer, config.optimizer, stochastic=config.train.stochastic_rounding)
    model, optimizer = strategy.prepare(recompute(model, config.train), make_optimizer)
    if config.lora.rank:
        base = base or settle_base(model)  # a network in parts can be asked for its whole once it is spread
        check_base(found, base, config)
    if found:
        checkpoints.load(found, model, optimizer)
        log(f"resumed from step {found.step}")
    state = found.state if found else TrainState()

    past, tell = found.manifest.get("order") if found else None, lambda text: log(WARNING + text)
    since = {"step": state.step, "position": state.position}
    feed = open_feed(config, task, job.prepared, past=past, **since, clock=f"{job.folder} {job.attempt}", said=tell)
    choice = _choose_products(job, config, worker, network, feed.train, found, log)
    loader = _loader(config, worker, strategy, feed, state)
    bits = choice.bits | choose_attention(config, device=device, found=found, rank=rank, world=world, log=log)
    made = {"run": job.run, "bits": bits, "data": manifest.fingerprint} | ({HEADER: {"base": base}} if base else {})
    return Training(
        config=config,
        strategy=strategy,
        model=model,
        optimizer=optimizer,
        loader=loader,
        state=state,
        rules=build_rules(config, feed.train, state, device),
        validate=_validation(config, strategy, model, precision, feed),
        checkpoints=checkpoints if config.checkpoint.every else None,
        header=made | job.facts,
        watchers=observers,
        stopping=stopping,
        log=log,
    )


def _agreement(worker: WorkerInfo, order: SampleOrder) -> Callable[[Requests], tuple[float, Requests]] | None:
    """How workers find out what all of them can read of data that is still being prepared."""
    if worker.world == 1 or not isinstance(order, GrowingOrder):
        return None
    return partial(order.common, group=dist.new_group(backend="gloo"))


def _loader(config: Config, worker: WorkerInfo, strategy: Strategy, feed: Feed, state: TrainState) -> Loader:
    """What reads this worker's micro-batches from a position on."""
    return Loader(
        plan=feed.plan,
        samples=feed.train,
        rank=strategy.rank,
        world=strategy.world,
        micro_batch_slots=config.train.together,
        equal_micro_batches=strategy.equal_micro_batches,
        every_slot=strategy.every_slot,
        fed=strategy.leads,
        left_out=frozenset((each.step, each.slot) for each in state.left_out),
        prefetch=config.data.prefetch,
        agree=_agreement(worker, feed.plan.order),
        device=strategy.device,
        ahead=feed.ahead(config, strategy.rank, strategy.world),
    )


def _choose_products(
    job: Job,
    config: Config,
    worker: WorkerInfo,
    model: torch.nn.Module,
    samples: Samples,
    found: Found | None,
    log: Callable[[str], None],
) -> Choice:
    """Has the linear products of a model on CPUs go the way that is best for this worker's micro-batches."""
    if job.device != "cpu" or config.scaling.group > 1:  # workers of a mesh have other shapes, and must choose alike
        return Choice()
    train = config.train
    slots = train.together or -(-train.slots // worker.world)
    rows = round(samples.tokens * train.slot_samples * slots)
    return choose_products(train, model, rows, found=found, facts=job.facts, rank=worker.rank, world=worker.world, log=log)


def _use_device(job: Job, worker: WorkerInfo) -> torch.device:
    """Sets threads, determinism and device of this process, and joins the process group where there are several workers."""
    if job.device == "cuda":
        if job.config.train.deterministic:
            # What runs on CPUs is deterministic by itself, and this call imports the compiler, which takes 1.5 s.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            # The default would fill every fresh tensor with NaN, which only finds bugs and costs a pass over memory.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        device = torch.device("cuda", worker.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(job.threads)
    if not dist.is_initialized() and (worker.world > 1 or job.config.scaling.strategy in SHARDED):
        backend = "cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo"
        join_group(backend, worker.rank, worker.world)
    return device


def _checkpoints(job: Job, worker: WorkerInfo, task: Task, log: Callable[[str], None]) -> Checkpoints:
    # Not the training's own group, on which a save beside the training hung, or ended the process.
    group = dist.new_group(backend="gloo") if worker.world > 1 else None
    extra: dict[str, bytes] = {}
    if worker.rank == 0:  # what it takes to use the model: its tokenizers, and what the task knows of the data
        for tokenizer in task.tokenizers:
            folder = job.prepared / tokenizer
            extra |= {f"{tokenizer}/{name}": folder.read(name) for name in folder.names()}
        extra["facts.json"] = json.dumps(dict(task.facts) | {"tokenizers": list(task.tokenizers)}).encode()
    settings = job.config.checkpoint
    rules = {"keep": settings.keep, "failures": settings.failures}
    checkpoints = Checkpoints(
        job.folder / "checkpoints", job.attempt, **rules, group=group, log=log, extra=extra, term=job.term
    )
    if settings.every:
        checkpoints.claim()
    return checkpoints


def _validation(
    config: Config, strategy: Strategy, model: torch.nn.Module, precision: Precision, feed: Feed
) -> Callable[[], dict[str, float]]:
    """Measures the validation samples in batches of a slot's size, which surely fits in memory; of a mixture by source."""
    size = config.train.slot_samples

    def measure() -> dict[str, float]:
        sums: dict[str, ValidationSums] = {}
        for name, samples in feed.held_out.items():
            batches = validation_batches(
                samples,
                wanted=(wanted := validated(samples, config.validation.samples, feed.shares.get(name, 0.0))),
                size=size,
                rank=strategy.rank,
                world=strategy.world,
                device=strategy.device,
                equal_micro_batches=strategy.equal_micro_batches,
            )
            sums[name] = validation_sums(strategy, model, precision, samples.task, batches, -(-wanted // size))
        return validation_scores(feed.train.task, sums)

    return measure


def _facts(job: Job, worker: WorkerInfo, training: Training) -> RunFacts:
    """What observers are told of this worker."""
    model, samples = training.model, training.loader.samples
    flops = samples.task.flops_per_token(model, samples.example)
    return RunFacts(
        run=job.run,
        attempt=job.attempt,
        rank=worker.rank,
        world=worker.world,
        local_rank=worker.local_rank,
        node=worker.node,
        nodes=count_nodes(worker.node, worker.world, training.strategy.device),
        device=torch.cuda.get_device_name() if job.device == "cuda" else "cpu",
        precision=training.rules.precision.peak_rate,
        tokens_per_step=samples.tokens * job.config.train.batch,
        # A frozen weight has no gradient of its own: two products instead of three.
        flops_per_token=flops * 2 / 3 if flops and job.config.lora.rank else flops,
        parameters=parameters_in(model),
        step=training.state.step,
    )


def _summary(job: Job, worker: WorkerInfo, training: Training, ending: Ending, metrics: dict[str, float]) -> RunSummary:
    state = training.state
    return {
        "ending": str(ending),
        "steps": state.step,
        "samples_seen": state.position,
        "tokens_seen": state.tokens_seen,
        "train_loss": state.train_loss,
        "val_loss": state.val_loss,
        "metrics": metrics,
        "parameters_sha256": parameters_sha256(training.model, training.optimizer),
        "workers": worker.world,
        "complete": state.step >= training.total_steps or ending is Ending.EARLY,
    }


def _write_sample(job: Job, worker: WorkerInfo, training: Training) -> None:
    """Writes what the trained model says after the prompt into the run's folder; workers with shards compute it together."""
    from raystride.model.transformer import Decoder
    from raystride.pipelines.evaluate.writing import write_text

    settings, model = job.config.sample, training.model
    if not settings.tokens or not isinstance(model, Decoder):
        return
    with training.rules.precision.autocast(training.strategy.device), as_compiled():
        text = "".join(write_text(model, training.loader.samples.task, settings))
    training.strategy.settle()
    if worker.rank == 0:
        job.folder.put("sample.txt", settings.prompt + text + "\n")


def _log(sender: Sender, worker: WorkerInfo, text: str) -> None:
    if worker.rank:
        return
    if text.startswith(WARNING):
        sender.warn(text.removeprefix(WARNING))
    else:
        sender.put(new_entry("event", {"name": "note", "text": text}))


def _phase(sender: Sender, worker: WorkerInfo, text: str) -> None:
    """Says what a start is at, which the progress line shows until the first figures come."""
    if not worker.rank:
        sender.put(new_entry("event", {"name": "phase", "text": text}))
