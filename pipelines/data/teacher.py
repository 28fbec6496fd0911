"""Checks and loads the teacher of a distillation (`objective.teacher`), by what checks and loads a base (`pretrained`).

The driver reads its description and the headers of its weights, without PyTorch; each worker loads it once. Its vocabulary
must be the run's: the same tokens under the same ids.

    info = check_teacher(config)                              # BaseInfo: "llama, 1,235,814,400 parameters, ..."
    teacher = load_teacher(config, job.prepared / "tokenizer", vocabulary_size=257, log=print)    # a frozen Decoder
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from raystride.model.hugging_face_config import described_type, is_encoder_type, trained_context
from raystride.model.shape import flops_per_token
from raystride.pipelines.config import Config, ModelConfig, ObjectiveConfig, SettingError
from raystride.pipelines.config.base_model import is_run, settings_from_description
from raystride.pipelines.data.pretrained import BaseInfo, check_base, load_base_weights
from raystride.pipelines.data.tokenizers import load_tokenizer
from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder, CharacterEncoder
from raystride.pipelines.data.tokenizers.chat import parse_tokenizer
from raystride.pipelines.data.tokenizers.loading import READY_FILE
from raystride.pipelines.data.tokenizers.training import read_file
from raystride.pipelines.system.hub import fetch_model, is_hub_name, read_description
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    from raystride.model.transformer import Decoder

MAX_NAMED = 4
"""Tokens that an error names."""


def check_teacher(config: Config) -> BaseInfo:
    """Checks a run's teacher before anything is prepared. Raises SettingError if it cannot be one, with the reason."""
    place = str(config.objective.teacher)
    if is_run(place):
        raise _teacher_error(place, "it is a run's folder: name its export, of raystride export --to hugging_face")
    with _errors_of_teacher(place):
        info = check_base(_as_base(config), place)
        if not is_hub_name(place):
            _require_tokenizer(place, Folder(place))
            if config.tokenizer.kind == "file":
                _compare(place, token_ids(read_file(config.tokenizer)), Folder(place))
            elif config.tokenizer.kind == "bytes":
                _compare(place, ByteEncoder.token_ids, Folder(place))
    return info


def teacher_shape(model: ModelConfig, objective: ObjectiveConfig) -> ModelConfig:
    """Returns the network of a run's teacher, for samples as long as the run's.

    Raises SettingError if it is no causal language model that can be read, or was trained on shorter samples.
    """
    place = str(objective.teacher)
    shape, context = _described_shape(place)
    if 0 < context < model.context:
        raise _teacher_error(
            place, f"it was trained on {context:,} tokens at once: lower model.context, {model.context:,}, to that"
        )
    return replace(shape, context=model.context, kernels=model.kernels, attention=model.attention, linear=model.linear)


def _described_shape(place: str) -> tuple[ModelConfig, int]:
    """Returns the network that a `config.json` describes, and the context that it was trained with, 0 if unknown."""
    with _errors_of_teacher(place):
        description = read_description(place)
        plain = Config().flat() | {"model.init_from": place}
        described = settings_from_description(place, description, plain, {"model.init_from", "tokenizer.kind"})
        kind = described_type(description)
        if is_encoder_type(kind):
            raise _teacher_error(place, f"it must be a causal language model, and it is a {kind}, an encoder")
    settings = {name.removeprefix("model."): value for name, value in described.items() if name.startswith("model.")}
    return ModelConfig(**settings), trained_context(description)


def teacher_flops_per_token(objective: ObjectiveConfig, model: ModelConfig, vocabulary_size: int) -> float:
    """Returns the FLOPs of the teacher's forward on a token, a third of those of a training; 0 without a teacher."""
    return flops_per_token(teacher_shape(model, objective), vocabulary_size) / 3 if objective.teacher else 0.0


def load_teacher(
    model: ModelConfig, objective: ObjectiveConfig, tokenizer: Folder, vocabulary_size: int, log: Callable[[str], None]
) -> "Decoder":
    """Returns a run's teacher with its weights, frozen, in fp32 on the CPU; `tokenizer` is that of the run's data.

    Raises SettingError if it cannot be read, or has another vocabulary.
    """
    import torch

    from raystride.model.distillation import freeze
    from raystride.model.transformer import Decoder

    place, shape = str(objective.teacher), teacher_shape(model, objective)
    with torch.random.fork_rng(devices=[]):  # training's random numbers must not depend on this
        teacher = Decoder(shape, vocabulary_size)
    with _errors_of_teacher(place):
        folder = fetch_model(place)
        _require_tokenizer(place, folder)
        encoder = load_tokenizer(tokenizer)
        if isinstance(encoder, ByteEncoder | CharacterEncoder):
            _compare(place, encoder.token_ids, folder)
        else:
            _compare(place, token_ids(tokenizer.read(READY_FILE).decode()), folder)
        load_base_weights(teacher, place, tokenizer, lambda text: log(f"teacher: {text}"))
    freeze(teacher)
    return teacher


def token_ids(content: str) -> dict[str, int]:
    """Returns the ids of the tokens of a `tokenizer.json`, by their text."""
    found: dict[str, int] = parse_tokenizer(content).get_vocab(with_added_tokens=True)
    return found


def _as_base(config: Config) -> Config:
    """Returns the settings of a training that begins with the teacher, by which `check_base` checks it."""
    return replace(Config(), tokenizer=config.tokenizer, model=teacher_shape(config.model, config.objective))


def _require_tokenizer(place: str, folder: Folder) -> None:
    """Raises SettingError for a teacher without a `tokenizer.json`."""
    if not folder.exists(READY_FILE):
        raise _teacher_error(place, f"it has no {READY_FILE}, which says what its ids mean")


def _compare(place: str, ours: Mapping[str, int], folder: Folder) -> None:
    """Raises SettingError unless a teacher's tokenizer has the run's tokens, under the run's ids, and no others."""
    theirs = token_ids(folder.read(READY_FILE).decode())
    if other := sorted(token for token, _ in ours.items() ^ theirs.items()):
        named = ", ".join(map(repr, dict.fromkeys(other[:MAX_NAMED]))) + (", ..." if len(other) > MAX_NAMED else "")
        raise _teacher_error(
            place,
            f"it has another vocabulary than the run: {named}. Train with its own, --tokenizer.kind file "
            f"--tokenizer.file {folder / READY_FILE}",
        )


@contextmanager
def _errors_of_teacher(place: str) -> Iterator[None]:
    """Inside, errors about a base are raised as those of the teacher."""
    try:
        yield
    except SettingError as error:
        text = str(error).replace("model.init_from", "objective.teacher")
        raise SettingError(text, setting="objective.teacher", value=place) from error
    except FileNotFoundError:
        raise _teacher_error(place, "there is no config.json in it, nor a model of the hub") from None
    except ValueError as error:
        raise _teacher_error(place, str(error)) from error


def _teacher_error(place: str, what: str) -> SettingError:
    return SettingError(f"objective.teacher is {place!r}: {what}", setting="objective.teacher", value=place)
