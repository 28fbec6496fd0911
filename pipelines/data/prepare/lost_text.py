"""Text that a tokenizer cannot write: counted on a seeded sample of each part, and refused before the work if it is most.

sample = TextSample(task, part.bytes, seed=part.number)
for document in documents: sample.add(document)
found = sample.measure()                                  # {"tokenizer": {"characters": 38_800, "lost": 216, ...}}
refuse_lost_text(config, found)                           # SettingError from half of the characters on
describe_lost_text(sum_lost_text([found, ...]))           # lines from a thousandth on
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from random import Random
from typing import Any
from unicodedata import combining

from raystride.pipelines.config import ModelConfig, SettingError, TokenizerConfig
from raystride.pipelines.data.tasks.task import Document, Task
from raystride.pipelines.data.tokenizers.coverage import keeps_all_text, measure_coverage

LostText = Mapping[str, Mapping[str, Any]]
"""By tokenizer: sampled `characters`, blanks apart, how many of them are `lost`, and `examples`: those lost most often, with
their counts."""

STRETCH = 512
"""Minimum characters of a sampled stretch of text, which ends at a blank if there is one within as many more."""
MIN_STRETCHES, MAX_STRETCHES = 64, 1000
"""Stretches of a part that are sampled: about a sixteenth of its text within these limits, at most some 0.5 MiB, 0.5 s."""
MAX_EXAMPLES, MAX_SHOWN = 32, 6
"""Characters that are stored as examples, and those that are shown."""
WARN_FROM, REFUSE_FROM = 0.001, 0.5
"""Shares of lost characters."""
_BLANK = re.compile(r"\s")


class TextSample:
    """A sample of stretches of a part's texts, all equally likely, for each tokenizer that may lose some of them."""

    def __init__(self, task: Task, part_bytes: int, *, seed: int) -> None:
        self._task, self._random = task, Random(seed)
        self._size = min(MAX_STRETCHES, max(MIN_STRETCHES, part_bytes // (16 * STRETCH)))
        self._stretches: dict[str, list[str]] = {
            name: [] for name in task.tokenizers if name in task.encoders and not keeps_all_text(task.encoders[name])
        }
        self._seen = dict.fromkeys(self._stretches, 0)

    @property
    def is_needed(self) -> bool:
        """Whether a tokenizer may lose text."""
        return bool(self._stretches)

    def add(self, document: Document) -> None:
        """Adds a document, or a piece of a long one."""
        for name in self._stretches:
            with suppress(ValueError):  # a fault, which encoding the document reports
                for text in self._task.texts(document, name):
                    self._add_text(name, text)

    def _add_text(self, name: str, text: str) -> None:
        chosen, start = self._stretches[name], 0
        while start < len(text):
            blank = _BLANK.search(text, start + STRETCH, start + 2 * STRETCH)
            stop = blank.start() if blank else start + 2 * STRETCH
            self._seen[name] += 1
            if len(chosen) < self._size:
                chosen.append(text[start:stop])
            elif (place := int(self._random.random() * self._seen[name])) < self._size:  # algorithm R (Vitter, 1985)
                chosen[place] = text[start:stop]
            start = stop

    def measure(self) -> dict[str, dict[str, Any]]:
        """Returns what the tokenizers lose of the sample, as JSON; nothing about those that keep all text by their form."""
        measured = {name: measure_coverage(self._task.encoders[name], texts) for name, texts in self._stretches.items()}
        return {
            name: {"characters": found.characters, "lost": found.lost.total(), "examples": _most_frequent(found.lost)}
            for name, found in measured.items()
        }

    def measure_or_refuse(self, tokenizer: TokenizerConfig, model: ModelConfig) -> dict[str, dict[str, Any]]:
        """Returns the result of `measure`. Raises SettingError if half of it is lost, or the tokenizer fails."""
        try:
            found = self.measure()
        except Exception as error:  # tokenizers raises the bare class, without an unknown token for instance
            raise tokenizer.error("file", f"must name a tokenizer that can write the data: {error}") from error
        refuse_lost_text(tokenizer, model, found)
        return found


def _most_frequent(lost: Counter[str]) -> dict[str, int]:
    return dict(sorted(lost.items(), key=lambda item: (-item[1], item[0]))[:MAX_EXAMPLES])


def sum_lost_text(parts: Iterable[LostText]) -> dict[str, dict[str, Any]]:
    """Returns the sums over parts."""
    total: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, found in part.items():
            known = total.get(name, {"characters": 0, "lost": 0, "examples": {}})
            total[name] = {key: known[key] + found[key] for key in ("characters", "lost")} | {
                "examples": _most_frequent(Counter(known["examples"]) + Counter(found["examples"]))
            }
    return total


def refuse_lost_text(tokenizer: TokenizerConfig, model: ModelConfig, lost: LostText) -> None:
    """Raises SettingError if a tokenizer loses half of the sampled characters or more."""
    for name, found in lost.items():
        if _share_lost(found) >= REFUSE_FROM:
            setting, value, remedy = _choice(tokenizer, model)
            raise SettingError(
                f"{setting} is {value!r}: its {_describe_loss(name, found)}, which would be lost. {remedy}",
                setting=setting,
                value=value,
            )


def describe_lost_text(lost: LostText) -> list[str]:
    """Returns a warning for each tokenizer that loses a thousandth of the sampled characters or more."""
    return [
        f"warning: the {_describe_loss(name, found)}: they are trained on as nothing or as unknown"
        for name, found in lost.items()
        if _share_lost(found) >= WARN_FROM
    ]


def _share_lost(found: Mapping[str, Any]) -> float:
    return float(found["lost"] / max(1, found["characters"]))


def _describe_loss(name: str, found: Mapping[str, Any]) -> str:
    examples = ", ".join(quote_visibly(character) for character in [*found["examples"]][:MAX_SHOWN])
    counts = f"{found['lost']:,} of {found['characters']:,} sampled characters"
    return (
        f"{name.replace('_', ' ')} cannot write {100 * _share_lost(found):.3g}% of the text ({counts}), such as {examples}"
    )


def quote_visibly(text: str) -> str:
    """Returns the text in quotes, with escapes for characters that are invisible or join the one before."""
    return repr(text) if text.isprintable() and not any(map(combining, text)) else ascii(text)


def _choice(tokenizer: TokenizerConfig, model: ModelConfig) -> tuple[str, Any, str]:
    """Returns the setting that chose the tokenizer, its value, and the remedy."""
    base = model.init_from
    if tokenizer.kind == "characters":
        return "tokenizer.vocabulary_size", tokenizer.vocabulary_size, "Raise it, or use --tokenizer.kind bpe"
    if base and str(tokenizer.file).startswith(base):
        return "model.init_from", base, "Choose a base model whose tokenizer has the data's scripts"
    return (
        "tokenizer.file",
        tokenizer.file,
        "Choose one that has them, or --tokenizer.kind bpe, which is trained on this data",
    )
