"""Generates text with a trained model, streamed to the terminal.

python ray_jobs/generate.py --run NAME --prompt "def main():" --sample.tokens 200
"""

from collections.abc import Sequence

from raystride.pipelines.config.jobs import GenerateConfig
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.launch.console.exit_codes import DONE
from raystride.pipelines.system.commands import shell_command
from raystride.pipelines.system.storage.folder import Folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    about = "Write text with a trained model."
    return command(GenerateConfig, _run_job, arguments, program="raystride generate", description=about)


def _run_job(parsed: Parsed[GenerateConfig]) -> int:
    settings = parsed.settings
    from raystride.pipelines.evaluate.load_run import select_named_run

    storage = Folder.from_uri(settings.storage)
    opened = select_named_run(settings).open()
    from raystride.pipelines.data.tasks.text_generation import write_texts

    prompts = [settings.prompt] if isinstance(settings.prompt, str) else list(settings.prompt)
    texts = [""] * len(prompts)
    print(prompts[0], end="", flush=True)
    for pieces in write_texts(opened.writer, opened.task, settings.sample, prompts):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        print(pieces[0], end="", flush=True)
    for prompt, text in zip(prompts[1:], texts[1:], strict=True):
        print(f"\n{'─' * 40}\n{prompt}{text}", end="")
    print(f"\n\nresults  {storage / settings.run}, {opened.step_text}")
    print(f"mlflow   {shell_command('ui', storage=str(storage))}")
    steps = f"--train.steps {2 * max(1, opened.step)}"
    print(f"next     {shell_command('train', settings.run, str(storage), steps)}   # trains it further")
    return DONE
