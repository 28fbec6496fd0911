"""Generates text from a decoder and its tokenizer, piece by piece, until an end token or a stop string.

for piece in write_text(model, task, SampleConfig(prompt="def ", tokens=100)):
    print(piece, end="", flush=True)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from raystride.model.generate import CausalNetwork, generate
from raystride.model.transformer import Decoder
from raystride.pipelines.config import SampleConfig
from raystride.pipelines.data.tasks.encoder import Encoder
from raystride.pipelines.data.tasks.task import Task

INCOMPLETE = "\ufffd"
CONTEXT_IDS = 8
"""Last ids of a prompt for decoding its first continuation: some tokenizers drop the first space of a text."""


def write_text(model: Decoder | CausalNetwork, task: Task, settings: SampleConfig) -> Iterator[str]:
    """Yields the continuation of the settings' prompt as it comes, without the prompt."""
    for pieces in write_texts(model, task, settings, [settings.prompt]):
        yield pieces[0]


def write_texts(
    model: Decoder | CausalNetwork, task: Task, settings: SampleConfig, prompts: list[str]
) -> Iterator[list[str]]:
    """Continues several prompts side by side; yields the new piece of each, "" for those that have ended."""
    return write_rows(model, task, settings, [task.prompt(prompt).tolist() for prompt in prompts])


def write_rows(
    model: Decoder | CausalNetwork, task: Task, settings: SampleConfig, rows: list[list[int]]
) -> Iterator[list[str]]:
    """Continues prompts given as ids, side by side; yields the new piece of each, "" for those that have ended.

    A prompt without ids starts as a new document does.
    """
    encoder, ends = task.encoders["tokenizer"], frozenset(task.end_ids)
    # In a chat an answer is a text of its own, after a marker.
    lead_ids = [[] if task.writes_chats else row[-CONTEXT_IDS:] for row in rows]
    writers = [_TextWriter(encoder, settings.stop, ends, ids, done=len(ids)) for ids in lead_ids]
    for ids in generate(
        model,
        [row or [encoder.end_id] for row in rows],
        tokens=settings.tokens,
        context=task.config.model.context,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
    ):
        yield [writer.add_token(token) for writer, token in zip(writers, ids, strict=True)]
        if all(writer.ended for writer in writers):
            return
    yield [writer.finish() for writer in writers]


@dataclass
class _TextWriter:
    """Turns the ids of one row into text; holds back incomplete characters and possible beginnings of stop strings."""

    encoder: Encoder
    stop: tuple[str, ...]
    end_ids: frozenset[int]
    ids: list[int] = field(default_factory=list)
    """The last of the prompt, before `done`, and then the new ones."""
    before: int = 0
    """Ids from here to `done` are decoded again for context: some tokenizers give a token's space only after another."""
    done: int = 0
    """Number of ids that are already in the text."""
    held: str = ""
    """Text that may be the beginning of a stop string."""
    ended: bool = False

    def add_token(self, token: int) -> str:
        """Returns the text that became certain with one more id."""
        if self.ended:
            return ""
        if token in self.end_ids:
            return self.finish()
        self.ids.append(token)
        return self._release(self.held + self._decode_new(whole_characters=True))

    def finish(self) -> str:
        """Returns the text held back so far; nothing follows it."""
        if self.ended:
            return ""
        text = self._release(self.held + self._decode_new(whole_characters=False)) + self.held
        self.ended, self.held = True, ""
        return text

    def _decode_new(self, *, whole_characters: bool) -> str:
        known = self.encoder.decode(self.ids[self.before : self.done])
        text = self.encoder.decode(self.ids[self.before :])
        if whole_characters and text.endswith(INCOMPLETE):
            return ""
        self.before, self.done = self.done, len(self.ids)
        return text[len(known) :]

    def _release(self, text: str) -> str:
        """Returns the part of `text` that can be shown; ends the row at a stop string, holds back a possible beginning of
        one."""
        positions = [text.find(stop) for stop in self.stop if stop in text]
        if positions:
            self.ended, self.held = True, ""
            return text[: min(positions)]
        num_held = max((n for stop in self.stop for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - num_held :]
        return text[: len(text) - num_held]
