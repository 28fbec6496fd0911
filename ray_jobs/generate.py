"""Writes text with a trained model, to the terminal as it comes.

python ray_jobs/generate.py --run NAME --prompt "def main():" --sample.tokens 200
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from raystride.pipelines.config import Finished, Sample, setting
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.files import Folder


@dataclass(frozen=True, kw_only=True)
class Generate(Finished):
    """What to write, and with which run's model."""

    prompt: tuple[str, ...] | str = setting("")
    """What the text starts with; a list such as '["def ", "class "]' writes several side by side."""
    sample: Sample = Sample()
    """How it is written."""


def write(parsed: Parsed[Generate]) -> int:
    """Opens the run and writes; returns the exit code. Raises SettingError where there is nothing to open."""
    from raystride.pipelines.evaluate.opening import open_run
    from raystride.pipelines.evaluate.writing import write_texts

    settings = parsed.settings
    storage = Folder.at(settings.storage)
    opened = open_run(storage, settings.run, settings.checkpoint, settings.average)
    prompts = [settings.prompt] if isinstance(settings.prompt, str) else list(settings.prompt)
    texts = [""] * len(prompts)
    print(prompts[0], end="", flush=True)
    for pieces in write_texts(opened.decoder, opened.task, settings.sample, prompts):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        print(pieces[0], end="", flush=True)
    for prompt, text in zip(prompts[1:], texts[1:], strict=True):
        print(f"\n{'─' * 40}\n{prompt}{text}", end="")
    print(f"\n\nresults  {storage / settings.run}, step {opened.step}")
    print(f"mlflow   python -m raystride.pipelines.record.ui --storage {storage}")
    print(f"next     python ray_jobs/train.py --run {settings.run} --storage {storage} with more train.steps")
    return 0


if __name__ == "__main__":
    sys.exit(command(Generate, write, program="generate.py", description="Write text with a trained model."))
