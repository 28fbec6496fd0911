"""Writes a trained model for other programs: `transformers.AutoModelForCausalLM` and `AutoTokenizer`, or MLflow's server.

python ray_jobs/export.py --run NAME --to hugging_face
python ray_jobs/export.py --run NAME --to mlflow
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from raystride.pipelines.config import Finished, Sample, setting
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.files import Folder

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.opening import Opened


@dataclass(frozen=True, kw_only=True)
class Export(Finished):
    """Which run's model, and for whom."""

    to: Literal["hugging_face", "mlflow"] = setting("hugging_face")
    """Whose layout: that of Hugging Face's Llama, Qwen2, Qwen3 or GPT-2, in safetensors; or an MLflow model, which is logged
    to the run as well."""
    folder: str | None = setting(None)
    """Folder or URI to write to; None: `export/` and the layout's name in the run's folder."""
    sample: Sample = Sample()
    """How a language model that MLflow serves continues texts."""


def export(parsed: Parsed[Export]) -> int:
    """Opens the run and writes the folder; returns the exit code. Raises SettingError where there is nothing to open."""
    from raystride.pipelines.evaluate.opening import open_run

    settings = parsed.settings
    storage = Folder.at(settings.storage)
    opened = open_run(storage, settings.run, settings.checkpoint, settings.average)
    target = Folder.at(settings.folder) if settings.folder else storage / settings.run / "export" / settings.to
    if settings.to == "mlflow":
        return _to_mlflow(settings, opened, storage, target)
    from raystride.pipelines.evaluate.export import export_hugging_face

    folder = export_hugging_face(opened, target)
    print(f"{opened.config.model.flavour} of step {opened.step}: {', '.join(folder.names())}")
    print(f"results  {folder}")
    print(f"mlflow   python -m raystride.pipelines.record.ui --storage {storage}")
    print(f'next     transformers.AutoModelForCausalLM.from_pretrained("{folder}"), or --model.init_from {folder}')
    return 0


def _to_mlflow(settings: Export, opened: "Opened", storage: Folder, target: Folder) -> int:
    from raystride.pipelines.evaluate.mlflow_model import log_mlflow_model, write_mlflow_model
    from raystride.pipelines.evaluate.recording import reopen

    folder = write_mlflow_model(opened, target, settings.sample)
    print(f"{opened.config.task} of step {opened.step}: {', '.join(folder.names())}")
    logged = "not logged there"
    if reopened := reopen(storage / settings.run, opened.config.record, storage):
        try:
            logged = log_mlflow_model(opened, reopened, settings.sample)
        except Exception as error:  # MLflow, its database and its server raise whatever they like
            print(f"MLflow at {reopened.log.public_uri} does not have it: {error}", file=sys.stderr)
    print(f"results  {folder}")
    print(f"mlflow   {logged}")
    print(f"next     mlflow models serve -m {folder} --env-manager local")
    return 0


if __name__ == "__main__":
    sys.exit(command(Export, export, program="export.py", description="Write a trained model for other programs."))
