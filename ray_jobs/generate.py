"""Writes text with a trained model, to the terminal as it comes.

python ray_jobs/generate.py --run NAME --prompt "def main():" --sample.tokens 200
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["generate", *sys.argv[1:]]))

from raystride.pipelines.commands import pasted
from raystride.pipelines.config.jobs import Generate
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.exit_codes import DONE, guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    about = "Write text with a trained model."
    return command(Generate, _generate, arguments, program="raystride generate", description=about)


def _generate(parsed: Parsed[Generate]) -> int:
    return guarded(lambda: _write(parsed.settings))


def _write(settings: Generate) -> int:
    from raystride.pipelines.evaluate.opening import open_run

    storage = Folder.at(settings.storage)
    opened = open_run(storage, settings.run, settings.checkpoint, settings.average)
    from raystride.pipelines.evaluate.writing import write_texts

    prompts = [settings.prompt] if isinstance(settings.prompt, str) else list(settings.prompt)
    texts = [""] * len(prompts)
    print(prompts[0], end="", flush=True)
    for pieces in write_texts(opened.decoder, opened.task, settings.sample, prompts):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        print(pieces[0], end="", flush=True)
    for prompt, text in zip(prompts[1:], texts[1:], strict=True):
        print(f"\n{'─' * 40}\n{prompt}{text}", end="")
    print(f"\n\nresults  {storage / settings.run}, step {opened.step}")
    print(f"mlflow   {pasted('ui', storage=str(storage))}")
    steps = f"--train.steps {2 * max(1, opened.step)}"
    print(f"next     {pasted('train', settings.run, str(storage), steps)}   # trains it further")
    return DONE
