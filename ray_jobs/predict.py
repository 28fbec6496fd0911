"""Answers questions with a trained model: labels of texts or images, translations, continuations.

    python ray_jobs/predict.py --run NAME --input mails.csv --output answers
    python ray_jobs/predict.py --run NAME --text "free money"

The output is one file a part of the input, in its order. Stopped or killed, the same command goes on where it was.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from raystride.pipelines.config import Answering, Launch, Sample, setting
from raystride.pipelines.config.data import SourceKind
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.files import Folder

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.opening import Chosen


@dataclass(frozen=True, kw_only=True)
class Predict(Answering):
    """What to answer, and where to."""

    input: str | None = setting(None)
    """Path, glob or URI of text files (a line a question), JSON lines, CSV, Parquet or folders of images, or a Hugging Face
    dataset."""
    output: str | None = setting(None)
    """Folder or URI that the answers go to."""
    text: str | None = setting(None)
    """One question instead, answered on the terminal; for images, the path of one."""
    kind: SourceKind = setting("auto")
    """What the input is; `auto` sees it from its name and its files."""
    encoding: str = setting("utf-8")
    """How the input's text, JSON or CSV is encoded, as Python names it."""
    column: str | None = setting(None)
    """The column (or JSON key) that holds the questions, where it is not called as in training."""
    format: Literal["parquet", "jsonl"] = setting("parquet")
    """What the answers are written as."""
    sample: Sample = Sample()
    """How a language model continues texts."""
    launch: Launch = Launch()
    """Where the workers run; `--launch inline` answers in this process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.text is None) == (self.input is None):
            raise self.error("input", "must name what to answer, or --text one question, not both or neither")
        if self.input is not None and not self.output:
            raise self.error("output", "must name a folder for the answers")


def predict(parsed: Parsed[Predict]) -> int:
    """Opens the run and answers; returns the exit code."""
    from raystride.pipelines.launch.exit_codes import guarded

    return guarded(lambda: _predict(parsed.settings))


def _predict(settings: Predict) -> int:
    from raystride.pipelines.evaluate.opening import choose

    storage = Folder.at(settings.storage)
    chosen = choose(storage, settings.run, settings.checkpoint, settings.average)
    if settings.text is not None:
        return _answer_one(settings, chosen, settings.text)
    from raystride.pipelines.cluster.answering import answerers
    from raystride.pipelines.evaluate.prediction import predict

    folder = Folder.at(settings.output or "")
    with answerers(settings, settings.launch) as run_parts:
        predicted = predict(
            chosen,
            settings,
            settings.input or "",
            folder,
            run_parts,
            kind=settings.kind,
            encoding=settings.encoding,
            column=settings.column,
            form=settings.format,
            sample=settings.sample,
        )
    speed = f", {predicted.rate:,.0f} rows/s" if predicted.rate else ", all of them answered before"
    skipped = f", {predicted.skipped:,} skipped (listed in predictions.json)" if predicted.skipped else ""
    print(f"{predicted.rows:,} answers of step {chosen.step} in {len(predicted.files)} files{speed}{skipped}")
    print(f"results  {folder}")
    print("mlflow   not logged there")
    print(f"next     python ray_jobs/evaluate.py --run {settings.run} --storage {storage} --split test")
    return 0


def _answer_one(settings: Predict, chosen: "Chosen", text: str) -> int:
    """Prints the answer to one question, by name."""
    from raystride.pipelines.config import SettingError
    from raystride.pipelines.evaluate.answering import Answerer
    from raystride.pipelines.sources.faults import Fault
    from raystride.pipelines.sources.fields import document

    answerer = Answerer(chosen.with_beams(settings.beams).open(), settings, settings.sample)
    columns = answerer.task.asked
    for piece in document([text], "--text", columns[:1]):
        if isinstance(piece, Fault):
            raise SettingError(f"--text: {piece.reason}")
        try:
            answer = next(answerer.answers(answerer.examples(piece)))
        except ValueError as error:
            raise SettingError(f"--text is {text!r}: it {error}") from error
        for name in [name for name in answer if name != columns[0].name]:
            print(f"{name:<14}{_printed(answer[name])}")
        print()
    print(f"results  {Folder.at(settings.storage) / settings.run}, step {chosen.step}")
    print("mlflow   not logged there")
    print(
        f"next     python ray_jobs/predict.py --run {settings.run} --storage {settings.storage} --input FILES --output DIR"
    )
    return 0


def _printed(value: object) -> str:
    if isinstance(value, list):
        return " ".join(f"{each:.3f}" for each in value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(command(Predict, predict, program="predict.py", description="Answer questions with a trained model."))
