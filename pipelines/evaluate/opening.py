"""A trained model, opened from its run's folder: settings, tokenizer and parameters of one checkpoint.

opened = open_run(storage, "my-run", checkpoint="best")
"".join(write_text(opened.model, opened.encoder, Sample(prompt="def ")))
"""

from dataclasses import dataclass

from model.transformer import Decoder
from pipelines.config import Config
from pipelines.config.parse import from_yaml
from pipelines.config.section import SettingError
from pipelines.files import Folder
from pipelines.tasks import build_task
from pipelines.tasks.task import Encoder
from pipelines.tokenizers import load_tokenizer
from pipelines.train.checkpoint import Checkpoints, Found
from triton_kernels.dispatch import use_kernels, why_no_triton


@dataclass(frozen=True)
class Opened:
    """A model that is ready to use."""

    config: Config
    model: Decoder
    encoder: Encoder
    step: int
    tokenizer: Folder
    """Where the encoder's files lie."""


def open_run(storage: Folder, run: str, checkpoint: str = "best") -> Opened:
    """Opens a run at its `best` or `last` checkpoint. Raises SettingError where there is no such run or no checkpoint."""
    folder = storage / run
    if not folder.exists("config.yaml"):
        others = [name for name in storage.names() if (storage / name).exists("config.yaml")]
        raise SettingError(f"--run {run}: there is no such run in {storage} (there is: {', '.join(others) or 'none'})")
    config = from_yaml(Config, folder.read("config.yaml").decode())
    checkpoints = Checkpoints(folder / "checkpoints", attempt="", keep=1)
    found = checkpoints.at_hint("best") if checkpoint == "best" else None
    found = found or checkpoints.newest()
    if found is None:
        raise SettingError(f"--run {run}: it has no whole checkpoint; train it with checkpoint.every above 0")
    tokenizer = found.folder / found.manifest["attempt"] / "tokenizer"
    encoder = load_tokenizer(tokenizer)
    return Opened(config, _build(config, encoder, checkpoints, found), encoder, found.step, tokenizer)


def _build(config: Config, encoder: Encoder, checkpoints: Checkpoints, found: Found) -> Decoder:
    if not why_no_triton():
        # A run of another machine may have asked for kernels that this one cannot run; what it trained runs anywhere.
        use_kernels(config.model.kernels)
    facts = {"vocabulary_size": encoder.vocabulary_size, "end_id": encoder.end_id}
    model = build_task(config, facts).build_model()
    if not isinstance(model, Decoder):
        raise SettingError(f"task is {config.task!r}: it must be one that trains a decoder, which alone writes text")
    checkpoints.load(found, model)
    return model.eval()
