"""Evaluates, predicts with and exports a finished run, on a cluster or in this process.

scored, problem = evaluate_run(settings)                  # an EvaluateConfig
answers = predict_inputs(settings, ["What is the longest river?"])
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config import LoraConfig, SettingError
from raystride.pipelines.config.jobs import ApplyConfig, EvaluateConfig, ExportConfig, PredictConfig, ServeConfig
from raystride.pipelines.config.stored_run import read_settings
from raystride.pipelines.data.plugins import TASKS
from raystride.pipelines.launch.cluster.answering import make_part_runner
from raystride.pipelines.launch.run_store.lease import RunLease, RunLocked, new_attempt
from raystride.pipelines.observability.report.model_card import model_card
from raystride.pipelines.system.hub import push
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.evaluation import EvaluationResult
    from raystride.pipelines.evaluate.load_run import LoadedModel, SelectedRun
    from raystride.pipelines.evaluate.prediction import PredictionResult

Log = Callable[[str], None]
EVALUATION = "evaluation"
"""First word of an evaluation's attempt in a run's lease."""
POLL_S = 0.2
ASK_BY_FUNCTION = "predictions of a model of your own need a function, raystride.predict(run, data, fn=...)"
"""The remedy for questions to a user's own model."""


def _refuse_own_model(chosen: "SelectedRun", remedy: str) -> None:
    """Raises SettingError for a run of a user's own model: only they can read its output."""
    task = chosen.config.task
    if getattr(chosen.script_task or TASKS.get(task), "reads_dataset", False):
        raise SettingError(f"task is {task!r}: {remedy}", setting="task", value=task)


def evaluate_run(settings: EvaluateConfig, log: Log = print) -> "tuple[EvaluationResult, str | None]":
    """Scores the run on the split and stores the scores in its record; returns them, and why its record lacks them, if so.

    Scores of a run that is being trained lie in files of their own and in its journal.

    Raises SettingError, DataError, CannotRun.
    """
    from raystride.pipelines.evaluate.load_run import select_named_run

    storage = Folder.from_uri(settings.storage)
    run = storage / settings.run
    chosen = select_named_run(settings)
    _refuse_own_model(
        chosen,
        "scores of a model of your own on its validation are in the run's summary; on other data "
        "raystride.predict(run, data, fn=...) computes them",
    )
    if settings.data.test_source:
        data = replace(chosen.config.data, test_source=settings.data.test_source)
        chosen = replace(chosen, config=replace(chosen.config, data=data))
    run_parts = make_part_runner(settings, settings.launch)
    from raystride.pipelines.evaluate.evaluation import evaluate
    from raystride.pipelines.evaluate.recording import append_scores, merge_scores

    scored = evaluate(chosen, settings, settings.split, run, run_parts, log=log)
    append_scores(scored, settings.split, run, chosen.step)
    try:
        with _own_for_a_moment(run, log):
            problem = merge_scores(scored, settings.split, run, chosen.config.record, storage)
    except RunLocked as locked:
        problem = f"summary.json and MLflow are left to whoever trains the run; the scores are in {scored.folder} ({locked})"
    return replace(scored, logged=chosen.config.record.mlflow and not problem, last_step=chosen.last_step), problem


def _own_for_a_moment(run: Folder, log: Log) -> RunLease:
    """Owns a run; waits for other evaluations, which need it as briefly. Raises RunLocked while it is trained."""
    while True:
        try:
            return RunLease.acquire(run, f"{EVALUATION}-{new_attempt()}", log)
        except RunLocked as locked:
            if not (locked.owner and locked.owner.attempt.startswith(EVALUATION)):
                raise
            time.sleep(POLL_S)


def predict_files(settings: PredictConfig, log: Log = print) -> "PredictionResult":
    """Predicts on the file `settings.input` and writes files below `settings.output`.

    Raises SettingError if there is no such run, or the folder holds predictions of another input; DataError for the input;
    CannotRun if there is no cluster.
    """
    from raystride.pipelines.evaluate.load_run import select_named_run

    chosen = select_named_run(settings)
    _refuse_own_model(chosen, ASK_BY_FUNCTION)
    from raystride.pipelines.evaluate.prediction import InputData, predict

    table = {
        key: value for key in ("header", "delimiter", "quote", "columns") if (value := getattr(settings, key)) is not None
    }
    predicted = predict(
        chosen,
        settings,
        InputData(
            source=settings.input or "",
            kind=settings.kind,
            encoding=settings.encoding,
            column=settings.column,
            table=table,
        ),
        Folder.from_uri(settings.output or ""),
        make_part_runner(settings, settings.launch),
        form=settings.format,
        sample=settings.sample,
        log=log,
    )
    return replace(predicted, step=chosen.step, last_step=chosen.last_step)


class Answers(list[dict[str, Any]]):
    """A list of answers, in order, that knows the checkpoint which gave them."""

    def __init__(self, rows: Iterable[dict[str, Any]], step: int, last_step: int) -> None:
        super().__init__(rows)
        self.step, self.last_step = step, last_step
        """Steps of the checkpoint, and of the run's newest one."""


def predict_inputs(settings: PredictConfig, inputs: Sequence[Any], log: Log = lambda _: None) -> Answers:
    """Predicts on inputs in this process, in order; an input of several columns is a tuple. `log` hears the step used.

    Raises SettingError if there is no such run or device, or the task cannot read an input.
    """
    from raystride.pipelines.evaluate.load_run import open_cached, select_named_run

    chosen = select_named_run(settings)
    _refuse_own_model(chosen, ASK_BY_FUNCTION)
    log(chosen.step_text)
    # Imported only after the run was found.
    from raystride.pipelines.data.sources.faults import Fault
    from raystride.pipelines.data.sources.fields import read_document
    from raystride.pipelines.data.sources.image_files import ANY_FILE
    from raystride.pipelines.evaluate.answering import Predictor
    from raystride.pipelines.evaluate.parts import name_probabilities

    predictor = Predictor(open_cached(chosen.with_beams(settings.beams)), settings, settings.sample)
    columns = predictor.task.asked

    def examples() -> Iterator[Any]:
        for question in inputs:
            values = list(question) if isinstance(question, tuple) else [question]
            piece = next(
                iter(read_document(values, "the question", columns[: len(values)], ANY_FILE)),
                Fault("the question", "is empty"),
            )
            if isinstance(piece, Fault):
                raise SettingError(f"the question {question!r} {piece.reason}", setting="question", value=question)
            yield from predictor.build_examples(piece)

    try:
        rows = [name_probabilities(predictor.task, answer) for answer in predictor.predict_examples(examples())]
        return Answers(rows, chosen.step, chosen.last_step)
    except ValueError as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(f"a question cannot be answered: it {error}") from error


def apply_function(
    settings: ApplyConfig, function: Callable[..., Any], data: Any, collate: Callable[..., Any] | None, log: Log = print
) -> "Answers | PredictionResult":
    """Applies a function to the run's model and batches of a dataset; returns a row per sample, or writes them to files.

    Raises SettingError if there is no such run or the function returns something else, DataError, CannotRun.
    """
    from raystride.pipelines.evaluate.load_run import select_named_run

    storage = Folder.from_uri(settings.storage)
    chosen = select_named_run(settings)
    from raystride.pipelines.evaluate.apply_own_model import ApplyJob, cut_dataset
    from raystride.pipelines.evaluate.prediction import predict_all
    from raystride.pipelines.train.own_model.streams import is_stream, store_stream

    data = store_stream(data, storage) if is_stream(data) else data
    folder = Folder.from_uri(settings.output) if settings.output else None
    job = ApplyJob(chosen=chosen, settings=settings, function=function, data=data, collate=collate, folder=folder)
    run_parts, parts = make_part_runner(settings, settings.launch), cut_dataset(job.dataset, settings.batch)
    if folder is not None:
        return replace(predict_all(job, parts, job.origin, run_parts, log), step=chosen.step, last_step=chosen.last_step)
    results = run_parts(job, parts) if parts else {}
    return Answers((row for part in parts for row in results[part.number]), chosen.step, chosen.last_step)


def export_run(settings: ExportConfig) -> "tuple[Folder, LoadedModel]":
    """Writes the run's model in the requested format; returns the folder and the opened run.

    Raises SettingError if there is no such run or checkpoint, or the format cannot represent the model.
    """
    from raystride.pipelines.evaluate.load_run import select_named_run

    storage = Folder.from_uri(settings.storage)
    chosen = select_named_run(settings)
    if settings.merge and not chosen.config.lora.rank:
        message = f"merge is True: it must be false, since run {settings.run} trained no adapters (lora.rank is 0)"
        raise SettingError(message, setting="merge", value=True)
    opened = chosen.open()
    is_own = opened.task.reads_dataset
    if settings.to == "auto":
        settings = replace(settings, to="state_dict" if is_own else "hugging_face")
    adapter = writes_adapter(settings, opened.config.lora)
    name = "adapter" if adapter else settings.to
    target = Folder.from_uri(settings.folder) if settings.folder else storage / settings.run / "export" / name
    if is_own or settings.to == "state_dict":
        from raystride.pipelines.evaluate.export_own_model import export_own_model

        return export_own_model(opened, settings.to, target), opened
    if settings.to not in ("hugging_face", "mlflow"):
        message = f"to is {settings.to!r}: it must be hugging_face, mlflow or state_dict for the task {opened.config.task}"
        raise SettingError(message, setting="to", value=settings.to)
    if adapter:
        from raystride.pipelines.evaluate.export import export_adapter

        return export_adapter(opened, target), opened
    _merge_adapters(opened)
    if settings.to == "mlflow":
        from raystride.pipelines.evaluate.mlflow_model import write_mlflow_model

        return write_mlflow_model(opened, target, settings.sample), opened
    from raystride.pipelines.evaluate.export import export_hugging_face

    return export_hugging_face(opened, target), opened


def writes_adapter(settings: ExportConfig, lora: LoraConfig) -> bool:
    """Returns whether an export of a run with these settings is an adapter without its base."""
    return lora.rank > 0 and settings.to in ("auto", "hugging_face") and not settings.merge


def export_for_serving(settings: ServeConfig) -> "tuple[Folder, LoadedModel]":
    """Writes the run's model, with merged adapters, for a server on this machine; returns the folder and the opened run.

    Raises SettingError as `export_run` does.
    """
    from raystride.pipelines.evaluate.export import export_hugging_face
    from raystride.pipelines.evaluate.load_run import select_named_run

    storage = Folder.from_uri(settings.storage)
    opened = select_named_run(settings).open()
    _ = opened.decoder  # raises for other networks
    _merge_adapters(opened)
    # A separate folder: the output of `export` may be the base of other adapters, which identify it by its hash.
    return export_hugging_face(opened, storage / settings.run / "export" / "served"), opened


def _merge_adapters(opened: "LoadedModel") -> None:
    """Merges the adapters, if any, into the base."""
    if opened.config.lora.rank:
        from raystride.model.lora import merge_adapters

        merge_adapters(opened.model)


def push_run(settings: ExportConfig, folder: Folder, step: int) -> str:
    """Uploads an exported folder with a model card; returns the address of the model. Raises SettingError."""
    from raystride.pipelines.evaluate.export import ADAPTER_FILES, MODEL_FILES

    name, run = settings.push or "", Folder.from_uri(settings.storage) / settings.run
    adapter = writes_adapter(settings, read_settings(run).lora)
    try:
        return push(folder, ADAPTER_FILES if adapter else MODEL_FILES, name, model_card(run, name, step, adapter=adapter))
    except ValueError as error:
        raise SettingError(f"--push {name}: {error}", setting="push", value=name) from error
