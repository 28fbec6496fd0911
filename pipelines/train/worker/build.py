"""Builds the parts of a training in the order of their dependencies: device, task, model, data, loop.

The device comes with threads, memory, determinism and the process group of several workers.

    device = set_up_device(job, WorkerInfo(rank=0, world=2))  # torch.device("cuda", 0), in a group of two
    training = build_training(job, WorkerInfo(rank=0, world=1), observers, stopping=lambda: False, log=print)
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from raystride.model.distillation import Distillation
from raystride.model.dropout import RowKeys, number_dropouts
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, DataConfig, ModelConfig, ObjectiveConfig, ScalingConfig, TrainConfig
from raystride.pipelines.config.train import parse_branch
from raystride.pipelines.data.feed.growth import StreamingOrder
from raystride.pipelines.data.feed.loader import Loader, Requests
from raystride.pipelines.data.feed.open_dataset import Feed, open_feed, open_manifest
from raystride.pipelines.data.feed.order import SampleOrder
from raystride.pipelines.data.feed.samples import Samples, decode_rows
from raystride.pipelines.data.tasks import Task, build_task
from raystride.pipelines.data.tasks.contract import check_network, use_loss_of
from raystride.pipelines.data.tasks.task import Document
from raystride.pipelines.data.teacher import load_teacher
from raystride.pipelines.data.tokenizers import Tokenizers
from raystride.pipelines.observability.observers.observer import Observer
from raystride.pipelines.system.heap import keep_freed_memory
from raystride.pipelines.system.limits import usable_memory
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import BRANCHED_FROM, content_sha256, newest_manifest
from raystride.pipelines.train.checkpoint.manager import Checkpoints, ValidCheckpoint
from raystride.pipelines.train.checkpoint.pieces import network_sha256
from raystride.pipelines.train.checkpoint.train_state import TrainState, Updater
from raystride.pipelines.train.distributed.process_group import join_group
from raystride.pipelines.train.loop import Training
from raystride.pipelines.train.lora.base import HEADER, check_base, finalize_base, init_adapters, network_factory
from raystride.pipelines.train.lora.init_from_run import init_weights, with_base_ids
from raystride.pipelines.train.optimizer import Average, build_optimizer
from raystride.pipelines.train.precision import Precision, resolve_precision
from raystride.pipelines.train.randomness import DrawNotice
from raystride.pipelines.train.step import build_step_rules
from raystride.pipelines.train.strategies import build_strategy
from raystride.pipelines.train.strategies.parameter_layout import layout_of
from raystride.pipelines.train.strategies.recompute import recompute
from raystride.pipelines.train.strategies.strategy import Strategy
from raystride.pipelines.train.validation import Validation
from raystride.pipelines.train.worker.attention_backend import choose_attention
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from raystride.pipelines.train.worker.kernel_choice import choose_kernels
from raystride.pipelines.train.worker.matmul_backend import MatmulChoice, choose_matmul_backends
from raystride.triton_kernels.dispatch import use_kernels


def set_up_device(job: Job, worker: WorkerInfo) -> torch.device:
    """Sets threads, memory, determinism and device of this process, and joins the process group of several workers."""
    if job.device == "cuda":
        if job.config.train.deterministic:
            # CPU code is deterministic by itself, and this call imports the compiler, which takes 1.5 s.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            # The default would fill every fresh tensor with NaN, which only finds bugs and costs a pass over memory.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        device = torch.device("cuda", worker.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(job.threads)
        keep_freed_memory()
    if not dist.is_initialized() and (worker.world > 1 or job.config.scaling.kind.is_sharded):
        backend = "cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo"
        join_group(backend, worker.rank, worker.world)
    return device


WARNING_PREFIX = "warning: "
"""Prefix of log lines that are warnings."""
NUM_HELD_OUT_SEEN = 200
"""Number of validation samples of each source that the task gets to see before the training."""


def _smallest_memory(worker: WorkerInfo) -> int:
    """Returns the memory of the worker with the least, in bytes."""
    memory = torch.tensor(usable_memory())
    if worker.world > 1:
        dist.all_reduce(memory, op=dist.ReduceOp.MIN)
    return int(memory)


def build_training(
    job: Job, worker: WorkerInfo, observers: list[Observer], stopping: Callable[[], bool], log: Callable[[str], None]
) -> Training:
    """Builds the training, at the position of the newest checkpoint."""
    device = set_up_device(job, worker)
    config = replace(job.config, train=resolve_precision(job.config.train, device))
    use_kernels(config.model.kernels)
    manifest = open_manifest(config.data, job.prepared)
    task = build_task(config, manifest.facts, Tokenizers(job.prepared, build_task(config).tokenizers))
    strategy = job.strategy or build_strategy(config, device=device, rank=worker.rank, world=worker.world)
    strategy.device = device
    torch.manual_seed(config.seed)
    built = _build_model(job, config, worker, task, strategy, log)
    found, state = built.found, built.state

    past = found.manifest.get("order") if found else None
    since = {"step": state.step, "position": state.position}
    clock = f"{job.folder} {job.attempt}"
    feed = open_feed(
        config,
        built.task,
        job.prepared,
        past=past,
        **since,
        clock=clock,
        log=lambda text: log(WARNING_PREFIX + text),
        memory=_smallest_memory(worker) if config.data.shuffle == "auto" else None,
    )
    if message := built.task.see_held_out(_read_held_out_documents(built.task, feed)):
        log(message)
    if worker.rank == 0:
        facts = dict(built.task.facts) | {"tokenizers": list(built.task.tokenizers)}
        built.checkpoints.extra["facts.json"] = json.dumps(facts).encode()
    chosen_before = _read_choices(job, found)
    choice = _choose_matmul_backends(
        job, config.train, config.scaling, worker, built.network, feed.train, chosen_before, log
    )
    loader = _build_loader(config.train, config.data, worker, strategy, feed, state)
    feed.beside.start()  # after the loader has forked its readers
    built.checkpoints.verify_data = feed.beside.finish
    kernels = choose_kernels(config, chosen_before, device=device, world=worker.world, storage=job.folder.parent, log=log)
    bits = choice.bits | kernels
    bits |= choose_attention(
        config.model, config.train, chosen_before, device=device, rank=worker.rank, world=worker.world, log=log
    )
    header = {"run": job.run, "bits": bits, "data": manifest.fingerprint}
    facts = job.facts | ({"bits": job.facts["bits"] | kernels} if kernels and "bits" in job.facts else {})
    return Training(
        config=config,
        strategy=strategy,
        model=built.model,
        optimizer=built.optimizer,
        loader=loader,
        state=state,
        rules=build_step_rules(
            config, feed.train, state, device, built.rows, DrawNotice(log), getattr(built.network, "routing", None)
        ),
        validate=Validation(config, strategy, built.model, built.precision, feed.train.task, feed.held_out, feed.shares),
        checkpoints=built.checkpoints if config.checkpoint.every else None,
        header=header | built.facts | facts,
        watchers=observers,
        stopping=stopping,
        permit=job.permit,
        log=log,
    )


class _BuiltModel(NamedTuple):
    """A model with its optimizer, at the newest checkpoint."""

    task: Task
    network: torch.nn.Module
    """The model before the strategy has wrapped it."""
    model: torch.nn.Module
    optimizer: Updater
    precision: Precision
    checkpoints: Checkpoints
    found: ValidCheckpoint | None
    state: TrainState
    facts: dict[str, Any]
    """What checkpoints say about it: the frozen base's hash, the rule for absent gradients, dropout's masks by slot."""
    rows: RowKeys | None
    """Sets the keys of dropout by row."""


def _build_model(
    job: Job, config: Config, worker: WorkerInfo, task: Task, strategy: Strategy, log: Callable[[str], None]
) -> _BuiltModel:
    """Builds the model and its optimizer, and loads the newest checkpoint or the initial weights into them."""
    precision = Precision(config.train.precision)
    precision.set_matmul_precision()
    if shortfall := precision.describe_shortfall(strategy.device):
        log(shortfall)
    network = model = strategy.build_network(network_factory(task, config, job.prepared / "tokenizer", log))
    use_loss_of(task, model)
    whole = config.scaling.pipeline == 1  # a stage has a part of the methods
    if whole and (message := check_network(task, network)):
        log(WARNING_PREFIX + message)  # rank 0 alone is heard
    if config.masks_by_place:
        number_dropouts(model)
    checkpoints = _build_checkpoints(job, worker, task, log)
    found, parent = checkpoints.find_newest(), None
    if found is None and config.train.branch_from:
        parent, found = _open_parent(job.folder.parent, config.train.branch_from, checkpoints)
    rows = _make_row_keys(config, task, network, found)
    task = with_base_ids(task, config.model.init_from, found)
    if config.lora.rank:
        init_adapters(model, config.lora, config.seed, found, parent or checkpoints)
    elif config.model.init_from and not found:  # a resumed run no longer needs that folder
        init_weights(model, config.model.init_from, task, job.prepared / "tokenizer", log)
    base = finalize_base(model) if config.lora.rank and layout_of(model) is None else ""
    precision.convert_model(model, sharded=strategy.sharded)
    teacher = _attach_teacher(
        config.model, config.objective, network, precision, strategy.device, job.prepared / "tokenizer", found, log
    )
    rule = config.optimizer.absent_gradients
    if is_own := hasattr(network, "users_module"):
        rule = (found.manifest.get("absent_gradients", "zero") if found else "skip") if rule == "auto" else rule
        strategy.skips_absent = rule == "skip"

    def make_optimizer(prepared: torch.nn.Module) -> Updater:
        own = task.build_optimizer(prepared)
        average = Average(config.train.ema, config.validation.weights != "trained") if config.train.ema else None
        stochastic = config.train.stochastic_rounding
        return own or build_optimizer(config.optimizer, prepared, stochastic=stochastic, average=average)

    model, optimizer = strategy.prepare_model(recompute(model, config.train), make_optimizer)
    if config.lora.rank:
        base = base or finalize_base(model)  # a split network has its full parameters only after `prepare_model`
        check_base(found, base, config.model)
    branch: dict[str, Any] | None
    if found and parent:
        state, branch = _load_parent(parent, found, model, optimizer)
    elif found:
        found = checkpoints.load_newest(found, model, optimizer)
        log(f"resumed from step {found.step}")
        state, branch = found.state, found.manifest.get(BRANCHED_FROM)
    else:
        state, branch = TrainState(), None
    facts: dict[str, Any] = ({HEADER: {"base": base}} if base else {}) | ({"absent_gradients": rule} if is_own else {})
    facts |= {"dropout_masks": "slot"} if rows else {}
    facts |= {BRANCHED_FROM: branch} if branch else {}
    facts |= {TEACHER: teacher} if teacher else {}
    return _BuiltModel(task, network, model, optimizer, precision, checkpoints, found, state, facts, rows)


TEACHER = "teacher_sha256"
"""Key of a checkpoint's manifest with the hash of the teacher's weights."""


def _attach_teacher(
    model: ModelConfig,
    objective: ObjectiveConfig,
    network: torch.nn.Module,
    precision: Precision,
    device: torch.device,
    tokenizer: Folder,
    found: ValidCheckpoint | None,
    log: Callable[[str], None],
) -> str:
    """Loads the teacher of `objective.teacher` beside a network, and returns the hash of its weights; "" without one.

    Raises SettingError if it is another than before, or cannot teach this run.
    """
    if not objective.teacher:
        return ""
    assert isinstance(network, Decoder), "the settings say so"
    teacher = load_teacher(model, objective, tokenizer, network.vocabulary_size, log)
    digest = network_sha256(teacher)
    before = found.manifest.get(TEACHER, digest) if found else digest
    if before != digest:
        raise objective.error(
            "teacher",
            f"must have the weights that taught this run (SHA-256 {before[:12]} before, {digest[:12]} now): put them back, "
            "or start another run, --run NAME",
        )
    precision.convert_model(teacher, sharded=False)
    rules = {"kd_ratio": objective.kd_ratio, "temperature": objective.temperature}
    network.distillation = Distillation(teacher.to(device), objective.divergence, **rules)
    return digest


def _open_parent(storage: Folder, branch_from: str, own: Checkpoints) -> tuple[Checkpoints, ValidCheckpoint]:
    """Returns the checkpoints of the run that a branch begins at, and that of its step, verified. Collective.

    Raises SettingError if it is not complete, and Unreadable.
    """
    run, step = parse_branch(branch_from)
    assert step is not None, "the driver has chosen it"
    parent = Checkpoints(storage / run / "checkpoints", attempt="", keep=1, group=own.group, log=own.log)
    return parent, parent.find_step(step, "train.branch_from")


def _load_parent(
    parent: Checkpoints, found: ValidCheckpoint, model: torch.nn.Module, optimizer: Updater
) -> tuple[TrainState, dict[str, Any]]:
    """Loads the checkpoint that a branch begins at; returns the state there, and what manifests say of it."""
    parent.load(found, model, optimizer)
    state, run = found.state, parent.folder.parent.name
    state.forget_best()
    if parent.rank == 0:
        parent.log(f"begins at step {found.step} of run {run}")
    return state, {"run": run, "step": found.step, "manifest_sha256": content_sha256(found.manifest)}


def _make_row_keys(config: Config, task: Task, network: torch.nn.Module, found: ValidCheckpoint | None) -> RowKeys | None:
    """Returns what makes dropout's masks by row.

    None without dropout, with another `train.dropout_masks`, for a network whose rows are not samples, in a pipeline (whose
    micro-batches are slots), and for a run that did not begin so.
    """
    drops = config.train.dropout_masks == "slot" and (config.model.dropout or config.lora.dropout)
    ours = type(network).__module__.startswith("raystride.model.") and config.scaling.pipeline == 1
    joined_rows = config.train.packing == "documents" and not task.window
    began_otherwise = found is not None and found.manifest.get("dropout_masks") != "slot"
    return RowKeys(network) if drops and ours and not joined_rows and not began_otherwise else None


def _build_checkpoints(job: Job, worker: WorkerInfo, task: Task, log: Callable[[str], None]) -> Checkpoints:
    # A separate group: on the training's group, a concurrent save hung or ended the process.
    group = dist.new_group(backend="gloo") if worker.world > 1 else None
    extra: dict[str, bytes] = {}
    if worker.rank == 0:  # files needed to use the model: its tokenizers, and later the task's facts
        for tokenizer in task.tokenizers:
            folder = job.prepared / tokenizer
            extra |= {f"{tokenizer}/{name}": folder.read(name) for name in folder.names()}
    settings = job.config.checkpoint
    rules = {"keep": settings.keep, "failures": settings.failures}
    checkpoints = Checkpoints(
        job.folder / "checkpoints",
        job.attempt,
        **rules,
        group=group,
        log=log,
        extra=extra,
        term=job.term,
        permit=job.permit,
    )
    if settings.every:
        checkpoints.fence_older_groups()
    return checkpoints


def _read_choices(job: Job, found: ValidCheckpoint | None) -> Mapping[str, Any] | None:
    """Returns choices and device of the run's checkpoint, or of the run that it repeats; None if there is neither."""
    if found:
        return dict(found.manifest.get("bits", {})) | {"device": found.manifest.get("device")}
    manifest = newest_manifest(job.folder.parent / job.config.repeat) if job.config.repeat else {}
    return dict(manifest["bits"]) | {"device": manifest.get("device")} if "bits" in manifest else None


def _choose_matmul_backends(
    job: Job,
    train: TrainConfig,
    scaling: ScalingConfig,
    worker: WorkerInfo,
    model: torch.nn.Module,
    samples: Samples,
    chosen_before: Mapping[str, Any] | None,
    log: Callable[[str], None],
) -> MatmulChoice:
    """Chooses the matmul backend on CPUs that is fastest for this worker's micro-batches."""
    if job.device != "cpu" or scaling.group > 1:  # workers of a mesh have different shapes but must choose the same
        return MatmulChoice()
    slots = train.together or -(-train.slots // worker.world)
    rows = round(samples.tokens * train.slot_samples * slots)
    return choose_matmul_backends(
        train,
        model,
        rows,
        chosen_before=chosen_before,
        facts=job.facts,
        storage=job.folder.parent,
        rank=worker.rank,
        world=worker.world,
        log=log,
    )


def _make_agreement(worker: WorkerInfo, order: SampleOrder) -> Callable[[Requests], tuple[float, Requests]] | None:
    """Returns the workers' agreement on the data that all can read, None if the data is complete."""
    if worker.world == 1 or not isinstance(order, StreamingOrder):
        return None
    return partial(order.agree_on_readable, group=dist.new_group(backend="gloo"))


def _build_loader(
    train: TrainConfig, data: DataConfig, worker: WorkerInfo, strategy: Strategy, feed: Feed, state: TrainState
) -> Loader:
    """Builds the loader of this worker's micro-batches, from the state's position."""
    return Loader(
        plan=feed.plan,
        samples=feed.train,
        rank=strategy.rank,
        world=strategy.world,
        micro_batch_slots=train.together,
        equal_micro_batches=strategy.needs_equal_micro_batches,
        every_slot=strategy.is_slot_per_micro_batch,
        counts_samples=strategy.is_group_leader,
        left_out=frozenset((skipped.step, skipped.slot) for skipped in state.left_out),
        prefetch=data.prefetch,
        agree_on_requests=_make_agreement(worker, feed.plan.order),
        device=strategy.device,
        read_ahead=feed.read_ahead(data, strategy.rank, strategy.world),
        beside=feed.beside,
    )


def _read_held_out_documents(task: Task, feed: Feed) -> Iterator[Document]:
    """Yields the first validation documents of each source."""
    for samples in feed.held_out.values():
        yield from decode_rows(task, *samples.read_rows(np.arange(min(samples.num_samples, NUM_HELD_OUT_SEEN))))
