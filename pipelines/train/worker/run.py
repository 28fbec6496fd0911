"""Runs one worker from its job to its summary, and writes a sample of the finished model.

The sample is a generated text (`sample.txt`), or a classifier's `answers.json`: the step, the labels, the confusion matrix
of the newest validation (true labels in rows), and the first validation documents with their labels and answers:

    {"step": 1200, "labels": ["ham", "spam"], "confusion": [[90, 2], [5, 3]],
     "documents": [{"text": "...", "label": "ham", "answer": "spam", "probability": 0.9}]}

    summary = run_worker(job, WorkerInfo(rank=0, world=1), recorder.receive, stopping=lambda: False)
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raystride.model.shape import idle_weights
from raystride.pipelines.config.schedules import describe_endless_warmup
from raystride.pipelines.data.feed.loader import DevicePlacement, MicroBatch
from raystride.pipelines.data.feed.samples import decode_rows
from raystride.pipelines.data.plugins import OBSERVERS, load_plugins
from raystride.pipelines.data.tasks import Task
from raystride.pipelines.data.tasks.contract import list_missing
from raystride.pipelines.data.tasks.labels import LabelTask
from raystride.pipelines.data.teacher import teacher_flops_per_token
from raystride.pipelines.observability.observers.gpu_monitor import GpuMonitor
from raystride.pipelines.observability.observers.host_monitor import HostMonitor
from raystride.pipelines.observability.observers.kernels import Kernels
from raystride.pipelines.observability.observers.observer import Observer, RunFacts
from raystride.pipelines.observability.observers.ray_metrics import RayMetrics
from raystride.pipelines.observability.observers.stragglers import Stragglers
from raystride.pipelines.observability.observers.throughput import PhaseShares, Throughput, TimeToFirstStep
from raystride.pipelines.observability.observers.tracker import Tracker
from raystride.pipelines.observability.profiling.profile import ProfileObserver
from raystride.pipelines.observability.profiling.stalls import StallWatch
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.sender import Post, Sender
from raystride.pipelines.observability.record.summary import RunSummary
from raystride.pipelines.system.storage.sealed import put_sealed
from raystride.pipelines.train.checkpoint.pieces import parameters_sha256
from raystride.pipelines.train.checkpoint.train_state import evaluated_weights
from raystride.pipelines.train.distributed.process_group import count_nodes, leave_group
from raystride.pipelines.train.loop import Ending, Training
from raystride.pipelines.train.own_model.definition import describe_error
from raystride.pipelines.train.strategies.parameter_layout import count_parameters
from raystride.pipelines.train.strategies.recompute import without_recompilation
from raystride.pipelines.train.validation import evaluation_mode
from raystride.pipelines.train.worker.build import WARNING_PREFIX, build_training
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from raystride.pipelines.train.worker.matmul_backend import MatmulChoice

FLUSH_S = 10.0
"""Seconds that a checkpoint waits for a recorder which does not answer."""
NUM_ANSWERED = 64
"""Number of validation documents, at most, that a classifier answers for its page."""


def write_samples(job: Job, worker: WorkerInfo, training: Training) -> None:
    """Writes the file of the task into the run's folder; workers with shards compute it together."""
    model, task = training.model, training.loader.samples.task
    writes_text = job.config.sample.tokens and task.continues_text
    if not (writes_text or isinstance(task, LabelTask)) or list_missing(task, model):
        return
    with (
        evaluated_weights(training.optimizer),
        evaluation_mode(model),
        torch.no_grad(),
        training.rules.precision.autocast(training.strategy.device),
        without_recompilation(),
    ):
        if isinstance(task, LabelTask):
            _write_answers(job, worker, training, task)
        else:
            _write_text(job, worker, training)
    training.strategy.reset_after_eval()


def _write_text(job: Job, worker: WorkerInfo, training: Training) -> None:
    from raystride.pipelines.data.tasks.text_generation import write_text

    settings, task = job.config.sample, training.loader.samples.task
    text = "".join(write_text(training.model, task, settings))  # type: ignore[arg-type]
    if worker.rank == 0:
        job.folder.put("sample.txt", settings.prompt + text + "\n")


def _write_answers(job: Job, worker: WorkerInfo, training: Training, task: LabelTask) -> None:
    if (counts := training.validate.counts) is None:
        return
    documents = _answer_documents(training, task)
    if worker.rank == 0:
        confusion = counts.astype(int).reshape(len(task.labels), -1).tolist()
        content = {"step": training.state.step, "labels": task.labels, "confusion": confusion, "documents": documents}
        put_sealed(job.folder, "answers.json", content)


def _answer_documents(training: Training, task: LabelTask) -> list[dict[str, Any]]:
    """Returns the first validation documents with label, answer and its probability; an image is an empty text."""
    if type(task).decode is Task.decode:
        return []
    samples, size = next(iter(training.validate.held_out.values())), training.config.train.slot_samples
    placement = DevicePlacement(training.strategy.device, task)
    found: list[dict[str, Any]] = []
    for first in range(0, end := min(samples.num_samples, NUM_ANSWERED), size):
        rows, masks = samples.read_rows(np.arange(first, min(first + size, end)))
        batch = placement.place(MicroBatch(0, *task.collate(rows, masks)))
        answers = task.answer(training.model, batch.inputs)
        for document, answer in zip(decode_rows(task, rows, masks), answers, strict=True):
            text, label = "\n".join(document[:-1]), document[-1]
            found.append({"text": text, "label": label, "answer": answer["label"], "probability": answer["probability"]})
    return found


def run_worker(
    job: Job, worker: WorkerInfo, post: Post, stopping: Callable[[], bool], milestones: dict[str, float] | None = None
) -> RunSummary:
    """Trains this rank's part; returns this rank's summary of the run. Raises the errors of the training.

    `milestones` are the times of this worker's start so far, in seconds since 1970.
    """
    job.plugin_bundle.register()
    load_plugins(job.config.plugins)
    sender = Sender(post, f"rank{worker.rank}")
    observers = build_observers(job, worker, sender, job.milestones | (milestones or {}) | {"torch": time.time()})
    log = partial(_send_log, sender, worker)
    owns_group = not dist.is_initialized()
    send_phase = partial(_send_phase, sender, worker)
    training: Training | None = None
    try:
        send_phase("building the model and its data")
        training = build_training(job, worker, observers, stopping, log)
        observers[-1:-1] = training.loader.samples.task.build_observers()  # before the tracker
        if training.checkpoints and worker.rank == 0:
            training.checkpoints.flush_record = partial(sender.flush, FLUSH_S)
        log(f"training on {worker.world} worker(s) from step {training.state.step}")
        total_steps = int(training.total_steps) if math.isfinite(training.total_steps) else 0
        has_schedule = training.loader.samples.task.learning_rate_factor(0, total_steps) is not None
        if not has_schedule and (message := describe_endless_warmup(job.config.optimizer, training.total_steps)):
            log(WARNING_PREFIX + message)
        for metric, signature in training.loader.samples.task.signatures.items():
            log(f"{metric} {signature}")
        facts = _run_facts(job, worker, training)
        for observer in observers:
            observer.on_start(facts)
        resumed_from = training.state.step or None
        send_phase("the first step")
        ending, metrics = training.run()
        summary = _build_summary(job, worker, training, ending, metrics) | {"resumed_from": resumed_from}
        summary |= {"precision": training.rules.precision.kind}
        if job.device == "cpu":
            summary |= {"products": MatmulChoice.from_bits(training.header["bits"]).description}
        summary |= {"parameters": facts.parameters, "flops_per_token": facts.flops_per_token}
        if idle := idle_weights(job.config.model):
            summary |= {"active_parameters": facts.parameters - idle}
        if ending is not Ending.STOPPED and (worker.rank == 0 or training.strategy.is_collective):
            write_samples(job, worker, training)
        for observer in observers:
            _end_observer(observer, summary, log)
        if owns_group and dist.is_initialized():
            leave_group(worker.rank)
        return summary
    except BaseException as error:
        for observer in observers:
            observer.on_error(error)
        raise
    finally:
        if training:
            training.close()
        sender.close()


def _end_observer(observer: Observer, summary: RunSummary, log: Callable[[str], None]) -> None:
    """Calls `on_end`; an error of it is a warning, as the training has ended and is saved."""
    try:
        observer.on_end(summary)
    except Exception as error:
        name = type(observer).__name__
        log(f"{WARNING_PREFIX}the observer {name} failed in on_end: {describe_error(error)}; the training is complete")


def build_observers(job: Job, worker: WorkerInfo, sender: Sender, milestones: dict[str, float]) -> list[Observer]:
    """Builds the observers in the order of their calls; `milestones` are those of this worker's start."""
    profile, every_s, speed = job.config.profile, job.config.record.system_every_s, Throughput()
    built: list[Observer] = [speed, PhaseShares(), TimeToFirstStep(job.started_at, milestones)]
    if profile.tool != "none":
        # First: its own time must not count as training.
        built.insert(0, ProfileObserver(profile, job.folder, sender, speed.on_pause))
    if profile.stall_factor:
        built.append(StallWatch(profile.stall_factor, job.folder, sender))
    if worker.world > 1:
        built.append(Stragglers(sender))
    built += [HostMonitor(sender, every_s), GpuMonitor(sender, every_s)]
    if job.config.launch.mode == "ray":
        built.append(RayMetrics())
    built += [Kernels(sender), *(make() for make in OBSERVERS.values())]
    return [*built, Tracker(sender)]  # last: it sends the others' measurements


def _run_facts(job: Job, worker: WorkerInfo, training: Training) -> RunFacts:
    """Returns the facts about this worker for the observers."""
    model, samples = training.model, training.loader.samples
    flops, config = samples.task.flops_per_token(model, samples.example), job.config
    # A frozen weight has no gradient: two matrix products instead of three.
    flops = flops * 2 / 3 if flops and config.lora.rank else flops
    if flops and config.objective.teacher:
        flops += teacher_flops_per_token(config.objective, config.model, int(samples.task.facts["vocabulary_size"]))
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
        tokens_per_step=samples.tokens * job.config.train.samples_per_step,
        flops_per_token=flops,
        parameters=count_parameters(model),
        step=training.state.step,
        labels=job.labels,
    )


def _build_summary(
    job: Job, worker: WorkerInfo, training: Training, ending: Ending, metrics: dict[str, float]
) -> RunSummary:
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
        "unit": training.loader.samples.task.unit,
        "metric": job.config.validation.metric,
        "best_step": (state.best_step or None) if training.checkpoints else None,
        "complete": state.step >= training.total_steps or ending is Ending.EARLY,
    }


def _send_log(sender: Sender, worker: WorkerInfo, text: str) -> None:
    if worker.rank:
        return
    if text.startswith(WARNING_PREFIX):
        sender.warn(text.removeprefix(WARNING_PREFIX))
    else:
        sender.put(new_entry("event", {"name": "note", "text": text}))


def _send_phase(sender: Sender, worker: WorkerInfo, text: str) -> None:
    """Sends the current phase of the start; the progress line shows it until the first figures arrive."""
    if not worker.rank:
        sender.put(new_entry("event", {"name": "phase", "text": text}))
