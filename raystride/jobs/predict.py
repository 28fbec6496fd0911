"""Runs inference with a trained model: labels of texts or images, translations, continuations.

    python ray_jobs/predict.py --run NAME --input mails.csv --output answers
    python ray_jobs/predict.py --run NAME --text "free money"

The output is one file per part of the input, in its order. After a stop or a kill, the same command resumes.
"""

from collections.abc import Sequence

from raystride.pipelines.config.jobs import PredictConfig
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.launch.console.exit_codes import DONE
from raystride.pipelines.observability.report.run_figures import step_text
from raystride.pipelines.system.commands import shell_command
from raystride.pipelines.system.storage.folder import Folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    about = "Answer questions with a trained model."
    return command(PredictConfig, _run_job, arguments, program="raystride predict", description=about)


def _run_job(parsed: Parsed[PredictConfig]) -> int:
    settings = parsed.settings
    return _answer_files(settings) if settings.text is None else _answer_one(settings, settings.text)


def _answer_files(settings: PredictConfig) -> int:
    from raystride.pipelines.launch.finished import predict_files

    predicted = predict_files(settings)
    speed = f", {predicted.rate:,.0f} rows/s" if predicted.rate else ", all of them answered before"
    skipped = f", {predicted.skipped:,} skipped (listed in _predictions.json)" if predicted.skipped else ""
    step = step_text(predicted.step, predicted.last_step)
    print(f"{predicted.rows:,} answers of {step} in {len(predicted.files)} files{speed}{skipped}")
    print(f"results  {Folder.from_uri(settings.output or '')}")
    print("mlflow   not logged there")
    print(
        f"next     {shell_command('evaluate', settings.run, str(Folder.from_uri(settings.storage)), '--split validation')}"
    )
    return DONE


def _answer_one(settings: PredictConfig, text: str) -> int:
    """Prints the prediction for one input, field by field."""
    from raystride.pipelines.launch.finished import predict_inputs

    steps = list[str]()
    for answer in predict_inputs(settings, [text], steps.append):
        for name in list(answer)[1:]:  # the first is the input
            print(f"{name:<14}{_format_value(answer[name])}")
        print()
    storage = Folder.from_uri(settings.storage)
    print(f"results  {storage / settings.run}, {steps[0]}")
    print("mlflow   not logged there")
    print(f"next     {shell_command('predict', settings.run, str(storage), '--input FILES --output DIR')}")
    return DONE


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{label} {share:.3f}" for label, share in value.items())
    return f"{value:.4f}" if isinstance(value, float) else str(value)
