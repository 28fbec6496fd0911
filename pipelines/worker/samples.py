"""Writes what shows a finished training's model: a generated text (`sample.txt`), or a classifier's `answers.json`.

write_samples(job, worker, training)       # on all workers where they compute together, else on the first

`answers.json` holds the step, the labels, the confusion matrix of the newest validation (true labels in rows), and the
first validation documents with their labels and answers:

    {"step": 1200, "labels": ["ham", "spam"], "confusion": [[90, 2], [5, 3]],
     "documents": [{"text": "...", "label": "ham", "answer": "spam", "probability": 0.9}]}
"""

from typing import Any

import numpy as np
import torch

from raystride.pipelines.feed.loader import DevicePlacement, MicroBatch
from raystride.pipelines.feed.samples import decode_rows
from raystride.pipelines.strategies.recompute import without_recompilation
from raystride.pipelines.tasks import Task
from raystride.pipelines.tasks.contract import list_missing
from raystride.pipelines.tasks.labels import LabelTask
from raystride.pipelines.train.loop import Training
from raystride.pipelines.worker.job import Job, WorkerInfo

NUM_ANSWERED = 64
"""Number of validation documents, at most, that a classifier answers for its page."""


def write_samples(job: Job, worker: WorkerInfo, training: Training) -> None:
    """Writes the file of the task into the run's folder; workers with shards compute it together."""
    model, task = training.model, training.loader.samples.task
    writes_text = job.config.sample.tokens and task.continues_text
    if not (writes_text or isinstance(task, LabelTask)) or list_missing(task, model):
        return
    was_training = model.training
    model.eval()
    with torch.no_grad(), training.rules.precision.autocast(training.strategy.device), without_recompilation():
        if isinstance(task, LabelTask):
            _write_answers(job, worker, training, task)
        else:
            _write_text(job, worker, training)
    training.strategy.reset_after_eval()
    model.train(was_training)


def _write_text(job: Job, worker: WorkerInfo, training: Training) -> None:
    from raystride.pipelines.evaluate.writing import write_text

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
        job.folder.put_json("answers.json", content)


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
