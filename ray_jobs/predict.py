"""Answers questions with a trained model: labels of texts or images, translations, continuations.

    python ray_jobs/predict.py --run NAME --input mails.csv --output answers
    python ray_jobs/predict.py --run NAME --text "free money"

The output is one file a part of the input, in its order. Stopped or killed, the same command goes on where it was.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["predict", *sys.argv[1:]]))

from raystride.pipelines.commands import pasted
from raystride.pipelines.config.jobs import Predict
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.exit_codes import DONE, guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    about = "Answer questions with a trained model."
    return command(Predict, _predict, arguments, program="raystride predict", description=about)


def _predict(parsed: Parsed[Predict]) -> int:
    settings = parsed.settings
    return guarded(lambda: _answer_files(settings) if settings.text is None else _answer_one(settings, settings.text))


def _answer_files(settings: Predict) -> int:
    from raystride.pipelines.launch.finished import predict_files

    predicted = predict_files(settings)
    speed = f", {predicted.rate:,.0f} rows/s" if predicted.rate else ", all of them answered before"
    skipped = f", {predicted.skipped:,} skipped (listed in _predictions.json)" if predicted.skipped else ""
    print(f"{predicted.rows:,} answers of step {predicted.step} in {len(predicted.files)} files{speed}{skipped}")
    print(f"results  {Folder.at(settings.output or '')}")
    print("mlflow   not logged there")
    print(f"next     {pasted('evaluate', settings.run, str(Folder.at(settings.storage)), '--split validation')}")
    return DONE


def _answer_one(settings: Predict, text: str) -> int:
    """Prints the answer to one question, by name."""
    from raystride.pipelines.launch.finished import answer_questions

    for answer in answer_questions(settings, [text]):
        for name in list(answer)[1:]:  # the first is the question
            print(f"{name:<14}{_printed(answer[name])}")
        print()
    print(f"results  {Folder.at(settings.storage) / settings.run}")
    print("mlflow   not logged there")
    print(f"next     {pasted('predict', settings.run, str(Folder.at(settings.storage)), '--input FILES --output DIR')}")
    return DONE


def _printed(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{label} {share:.3f}" for label, share in value.items())
    return f"{value:.4f}" if isinstance(value, float) else str(value)
