"""The jobs on a finished run: scores, answers and exports, on a cluster or in this process.

scored, problem = evaluate_run(settings)                  # config.jobs.Evaluate
answers = answer_questions(settings, ["What is the longest river?"])
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raystride.pipelines.cluster.answering import answerers
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.jobs import Evaluate, Export, Predict, Serve
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.files import Folder
from raystride.pipelines.hub import push
from raystride.pipelines.launch.owner import read_owner
from raystride.pipelines.report.model_card import model_card

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.evaluation import Scored
    from raystride.pipelines.evaluate.opening import Opened
    from raystride.pipelines.evaluate.prediction import Predicted

Echo = Callable[[str], None]


def evaluate_run(settings: Evaluate, echo: Echo = print) -> "tuple[Scored, str | None]":
    """Scores the run on the split and keeps the scores in its record; also why MLflow lacks them, if it does.

    Raises SettingError, DataError, CannotRun.
    """
    from raystride.pipelines.evaluate.opening import choose

    storage = Folder.at(settings.storage)
    run = storage / settings.run
    owner = read_owner(run)
    if owner and owner.alive:
        raise SettingError(
            f"--run {settings.run} is being trained by process {owner.pid} on {owner.host}: wait for its end",
            setting="run",
            value=settings.run,
        )
    chosen = choose(storage, settings.run, settings.checkpoint, settings.average)
    if settings.data.test_source:
        data = replace(chosen.config.data, test_source=settings.data.test_source)
        chosen = replace(chosen, config=replace(chosen.config, data=data))
    run_parts = answerers(settings, settings.launch)
    from raystride.pipelines.evaluate.evaluation import evaluate
    from raystride.pipelines.evaluate.recording import keep_scores

    scored = evaluate(chosen, settings, settings.split, run, run_parts, echo=echo)
    problem = keep_scores(scored, settings.split, run, chosen.step, chosen.config.record, storage)
    return replace(scored, logged=chosen.config.record.mlflow and not problem), problem


def predict_files(settings: Predict, echo: Echo = print) -> "Predicted":
    """Answers `settings.input` into files below `settings.output`.

    Raises SettingError where there is no such run, or the folder holds answers made of something else; DataError for the
    input, CannotRun where there is no cluster.
    """
    from raystride.pipelines.evaluate.opening import choose

    chosen = choose(Folder.at(settings.storage), settings.run, settings.checkpoint, settings.average)
    from raystride.pipelines.evaluate.prediction import predict

    predicted = predict(
        chosen,
        settings,
        settings.input or "",
        Folder.at(settings.output or ""),
        answerers(settings, settings.launch),
        kind=settings.kind,
        encoding=settings.encoding,
        column=settings.column,
        table={
            key: value
            for key in ("header", "delimiter", "quote", "columns")
            if (value := getattr(settings, key)) is not None
        },
        form=settings.format,
        sample=settings.sample,
        echo=echo,
    )
    return replace(predicted, step=chosen.step)


def answer_questions(settings: Predict, questions: Sequence[Any]) -> list[dict[str, Any]]:
    """Answers questions in this process, in order; one of several columns is a tuple.

    Raises SettingError where there is no such run or device, or a question is none that its task can read.
    """
    from raystride.pipelines.evaluate.opening import choose

    chosen = choose(Folder.at(settings.storage), settings.run, settings.checkpoint, settings.average)
    # Now that there is something to answer with.
    from raystride.pipelines.evaluate.answering import Answerer
    from raystride.pipelines.evaluate.parts import named_probabilities
    from raystride.pipelines.sources.faults import Fault
    from raystride.pipelines.sources.fields import document
    from raystride.pipelines.sources.image_files import ANYWHERE

    answerer = Answerer(chosen.with_beams(settings.beams).open(), settings, settings.sample)
    columns = answerer.task.asked

    def examples() -> Iterator[Any]:
        for question in questions:
            values = list(question) if isinstance(question, tuple) else [question]
            piece = next(
                document(values, "the question", columns[: len(values)], ANYWHERE), Fault("the question", "is empty")
            )
            if isinstance(piece, Fault):
                raise SettingError(f"the question {question!r} {piece.reason}", setting="question", value=question)
            yield from answerer.examples(piece)

    try:
        return [named_probabilities(answerer.task, answer) for answer in answerer.answers(examples())]
    except ValueError as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(f"a question cannot be answered: it {error}") from error


def export_run(settings: Export) -> "tuple[Folder, Opened]":
    """Writes the run's model in the layout that is asked for; the folder, and what was opened.

    Raises SettingError where there is no such run or checkpoint, or the layout cannot say what the model is.
    """
    from raystride.pipelines.evaluate.opening import choose

    storage = Folder.at(settings.storage)
    chosen = choose(storage, settings.run, settings.checkpoint, settings.average)
    if settings.merge and not chosen.config.lora.rank:
        message = f"merge is True: it must be false, since run {settings.run} trained no adapters (lora.rank is 0)"
        raise SettingError(message, setting="merge", value=True)
    opened = chosen.open()
    adapter = writes_adapter(settings, opened.config)
    name = "adapter" if adapter else settings.to
    target = Folder.at(settings.folder) if settings.folder else storage / settings.run / "export" / name
    if adapter:
        from raystride.pipelines.evaluate.export import export_adapter

        return export_adapter(opened, target), opened
    _merge(opened)
    if settings.to == "mlflow":
        from raystride.pipelines.evaluate.mlflow_model import write_mlflow_model

        return write_mlflow_model(opened, target, settings.sample), opened
    from raystride.pipelines.evaluate.export import export_hugging_face

    return export_hugging_face(opened, target), opened


def writes_adapter(settings: Export, config: Config) -> bool:
    """Whether an export of a run of these settings is an adapter without its base."""
    return config.lora.rank > 0 and settings.to == "hugging_face" and not settings.merge


def export_to_serve(settings: Serve) -> "tuple[Folder, Opened]":
    """Writes the run's model, its adapters merged, for a server of this machine; the folder, and what was opened.

    Raises SettingError as `export_run` does.
    """
    from raystride.pipelines.evaluate.export import export_hugging_face
    from raystride.pipelines.evaluate.opening import open_run

    storage = Folder.at(settings.storage)
    opened = open_run(storage, settings.run, settings.checkpoint, settings.average)
    _merge(opened)
    # A place of its own: what `export` wrote may be the base of other adapters, which know it by its hash.
    return export_hugging_face(opened, storage / settings.run / "export" / "served"), opened


def _merge(opened: "Opened") -> None:
    """Adds the adapters of a run that trained some to its base."""
    if opened.config.lora.rank:
        from raystride.model.lora import merge

        merge(opened.model)


def push_run(settings: Export, folder: Folder, step: int) -> str:
    """Uploads what was exported into a folder, with the card of its run; the address of the model. Raises SettingError."""
    from raystride.pipelines.evaluate.export import OF_ADAPTER, OF_MODEL

    name, run = settings.push or "", Folder.at(settings.storage) / settings.run
    adapter = writes_adapter(settings, from_yaml(Config, run.read("config.yaml").decode()))
    try:
        return push(folder, OF_ADAPTER if adapter else OF_MODEL, name, model_card(run, name, step, adapter=adapter))
    except ValueError as error:
        raise SettingError(f"--push {name}: {error}", setting="push", value=name) from error
