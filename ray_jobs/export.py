"""Writes a trained model as a folder that other programs load: `transformers.AutoModelForCausalLM` and `AutoTokenizer`.

python ray_jobs/export.py --run NAME --to hugging_face
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pipelines.config import Finished, setting  # noqa: E402
from pipelines.config.parse import Parsed, command  # noqa: E402
from pipelines.files import Folder  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Export(Finished):
    """Which run's model, and for whom."""

    to: Literal["hugging_face"] = setting("hugging_face")
    """Whose layout: that of Hugging Face's Llama, Qwen2, Qwen3 or GPT-2, in safetensors."""
    folder: str | None = setting(None)
    """Folder or URI to write to; None: `export/hugging_face` in the run's folder."""


def export(parsed: Parsed[Export]) -> int:
    """Opens the run and writes the folder; returns the exit code. Raises SettingError where there is nothing to open."""
    from pipelines.evaluate.export import export_hugging_face
    from pipelines.evaluate.opening import open_run

    settings = parsed.settings
    storage = Folder.at(settings.storage)
    run = storage / settings.run
    opened = open_run(storage, settings.run, settings.checkpoint, settings.average)
    target = Folder.at(settings.folder) if settings.folder else run / "export" / settings.to
    folder = export_hugging_face(opened, target)
    print(f"{opened.config.model.flavour} of step {opened.step}: {', '.join(folder.names())}")
    print(f"results  {folder}")
    print(f"mlflow   python -m pipelines.record.ui --storage {storage}")
    print(f'next     transformers.AutoModelForCausalLM.from_pretrained("{folder}"), or --model.init_from {folder}')
    return 0


if __name__ == "__main__":
    sys.exit(command(Export, export, program="export.py", description="Write a trained model for other programs."))
