"""Text from a decoder and its tokenizer, piece by piece, ended by an end token or a stop string.

for piece in write_text(model, task, Sample(prompt="def ", tokens=100)):
    print(piece, end="", flush=True)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from raystride.model.generate import generate
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Sample
from raystride.pipelines.tasks.task import Encoder, Task

INCOMPLETE = "\ufffd"


def write_text(model: Decoder, task: Task, settings: Sample) -> Iterator[str]:
    """Yields the continuation of the settings' prompt as it comes, without the prompt."""
    for pieces in write_texts(model, task, settings, [settings.prompt]):
        yield pieces[0]


def write_texts(model: Decoder, task: Task, settings: Sample, prompts: list[str]) -> Iterator[list[str]]:
    """Continues several prompts side by side; yields the new piece of each, "" for those that have ended."""
    return write_rows(model, task, settings, [task.prompt(prompt).tolist() for prompt in prompts])


def write_rows(model: Decoder, task: Task, settings: Sample, rows: list[list[int]]) -> Iterator[list[str]]:
    """Continues prompts that are ids already, side by side; yields the new piece of each, "" for those that have ended.

    A prompt without ids starts as a new document does.
    """
    encoder = task.encoders["tokenizer"]
    writers = [_Writer(encoder, settings.stop) for _ in rows]
    for ids in generate(
        model,
        [row or [encoder.end_id] for row in rows],
        tokens=settings.tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
    ):
        yield [writer.take(token) for writer, token in zip(writers, ids, strict=True)]
        if all(writer.ended for writer in writers):
            return
    yield [writer.rest() for writer in writers]


@dataclass
class _Writer:
    """Turns the ids of one row into text, holding back what may still change: half characters and half stop strings."""

    encoder: Encoder
    stop: tuple[str, ...]
    ids: list[int] = field(default_factory=list)
    before: int = 0
    """Ids from here to `done` are decoded again for context: some tokenizers give a token's space only after another."""
    done: int = 0
    """Ids before this are in the text already."""
    held: str = ""
    """Text that may be the beginning of a stop string."""
    ended: bool = False

    def take(self, token: int) -> str:
        """The text that became certain with one more id."""
        if self.ended:
            return ""
        if token == self.encoder.end_id:
            return self.rest()
        self.ids.append(token)
        return self._certain(self.held + self._decoded(whole_characters=True))

    def rest(self) -> str:
        """The text held back so far; nothing follows it."""
        if self.ended:
            return ""
        text = self._certain(self.held + self._decoded(whole_characters=False)) + self.held
        self.ended, self.held = True, ""
        return text

    def _decoded(self, *, whole_characters: bool) -> str:
        known = self.encoder.decode(self.ids[self.before : self.done])
        text = self.encoder.decode(self.ids[self.before :])
        if whole_characters and text.endswith(INCOMPLETE):
            return ""
        self.before, self.done = self.done, len(self.ids)
        return text[len(known) :]

    def _certain(self, text: str) -> str:
        """The part of `text` that can be shown; ends the row at a stop string, holds back what may become one."""
        places = [text.find(stop) for stop in self.stop if stop in text]
        if places:
            self.ended, self.held = True, ""
            return text[: min(places)]
        keep = max((n for stop in self.stop for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]
