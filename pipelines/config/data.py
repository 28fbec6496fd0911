"""Settings of what is read and how it becomes samples: the source, the tokenizer, the order."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from raystride.pipelines.config.section import Section, setting

SourceKind = Literal[
    "auto", "python", "text", "lines", "labelled", "folders", "json", "csv", "parquet", "huggingface", "webdataset",
    "registered",
]  # fmt: skip

DELIMITERS = {"auto": "", "comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "pipe": "|"}
"""What `data.delimiter` may be called."""


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Where documents come from, which of them validate, and how prepared samples are fed."""

    name: ClassVar[str] = "data"

    source: str = setting("python", fixed=True)
    """What to train on: `python` (the standard library's own source), a path, glob or URI of text, JSON lines, CSV, Parquet
    or image files, the name or folder of a Hugging Face dataset, or the name of a registered source."""
    sources: dict[str, Any] = field(default_factory=dict, metadata={"fixed": True, "since": "0.3"})
    """Several sources by name, of which samples are mixed: `{web: {source: PATH, weight: 0.7}, code: {source: python,
    weight: 0.3, epochs_at_most: 4}}`. Beside these an entry takes any setting of `data` that says what is read. On resume
    weights may change, and sources may come and go; what was fed stays as it was."""
    weights: str = setting("given", since="0.3")
    """The sources' weights: `given` (each source's own `weight`), or `temperature 0.7`: sizes in samples to that power, from
    0 (all alike) to 1 (by size)."""
    curriculum: tuple[Any, ...] = setting((), since="0.3")
    """Other weights from steps on: `[{from_step: 8000, weights: {web: 0.4, code: 0.6}}]`; a source that is not named has
    none there. `weights` may be a temperature as well."""
    kind: SourceKind = setting("auto", fixed=True)
    """What the source is; `auto` sees it from its name and its files, except `lines` (each line of a text file is a
    document) and `labelled` (a line is a label, a blank or tab, and a text). `folders`: a folder of files for each class.
    `webdataset`: tar files, whose members of one key are a document (`7.jpg` and `7.cls`)."""
    column: str = setting("text", fixed=True)
    """The column (or JSON key) that holds the text, in sources that have columns; `translation.en` is a field of one."""
    label_column: str = setting("label", fixed=True)
    """The column that holds the label, for tasks that read one: text, whole numbers or truth values."""
    class_names: bool = setting(False, fixed=True, since="0.3")
    """Whether labels that are numbers in Parquet files get the names that the files have for them, as `datasets` writes
    them (`ClassLabel`). In Hugging Face data sets they do in any case."""
    target_column: str = setting("target", fixed=True)
    """The column that holds what the text becomes, for tasks that read one: its translation, an answer, a summary."""
    messages_column: str | None = setting(None, fixed=True, since="0.3")
    """For the task `completion`, the column that holds a chat: a list of messages (`role`, `content`, `tool_calls`), or its
    JSON. The tokenizer's template writes it, and what the assistant says is learned. None: pairs of `column` and
    `target_column`."""
    tools_column: str | None = setting(None, fixed=True, since="0.3")
    """The column that holds the tools that a chat's assistant may call: a list of objects, as templates know them, or its
    JSON; a row may have none."""
    prompt_column: str | None = setting("prompt", fixed=True, since="0.3")
    """For tasks on pairs of answers, the column that holds what both answer: a text, or a list of messages (`role` and
    `content`). None: `chosen` and `rejected` are lists of messages, and the first ones that they share are the prompt."""
    chosen_column: str = setting("chosen", fixed=True, since="0.3")
    """The column that holds the answer that is preferred: a text, or messages."""
    rejected_column: str = setting("rejected", fixed=True, since="0.3")
    """The column that holds the other answer: a text, or messages."""
    image_column: str = setting("image", fixed=True)
    """The column that holds the image, for tasks that read one: a file's bytes, its path or a data URI."""
    image_size: tuple[int, int, int] | None = setting(None, at_least=1, fixed=True)
    """Channels (1: grey, or 3), height and width to which images are brought, `[3, 32, 32]` for instance; None: all images
    have one size."""
    image_shorter_side: int | None = setting(None, at_least=1, at_most=8192, fixed=True, since="0.3")
    """Pixels of the shorter side to which images are scaled, their aspect kept, of which crops of `image_size` are fed: the
    middle in validation, as `image_crop` says in training. None: all of an image is brought to `image_size`."""
    image_crop: Literal["middle", "random", "scaled"] = setting("middle", since="0.3")
    """What is fed of an image in training: the middle, a place that is drawn, or a drawn rectangle of `image_scale` of the
    area and an aspect from 3/4 to 4/3, scaled to `image_size`. Drawn from seed, epoch and sample."""
    image_padding: int = setting(0, at_least=0, at_most=1024, since="0.3")
    """Black pixels that a place may have beyond each edge, under `image_crop random`."""
    image_scale: tuple[float, float] = setting((0.08, 1.0), above=0, at_most=1, since="0.3")
    """The least and the largest share of the area that a rectangle has, under `image_crop scaled`."""
    image_flip: float = setting(0.0, at_least=0, at_most=1, since="0.3")
    """How probably left and right are exchanged in training, drawn from seed, epoch and sample."""
    image_mean: tuple[float, ...] = setting((), at_least=0, at_most=1, fixed=True, since="0.3")
    """What is subtracted from pixels in [0, 1], a number a channel; the network does it. Empty: 0.5 of each."""
    image_std: tuple[float, ...] = setting((), above=0, at_most=10, fixed=True, since="0.3")
    """What the difference is divided by, a number a channel. Empty: 0.5."""
    image_root: str | None = setting(None, since="0.2")
    """Another folder or URI below which images lie that data names by their paths; None: below that of the data alone. From
    elsewhere no row has a file read, whoever wrote it."""
    target_source: str | None = setting(None, fixed=True)
    """Text files whose lines belong to those of `source`, which are text files too: each pair of lines is a document. Other
    sources then name two files with a comma between."""
    encoding: str = setting("utf-8", fixed=True)
    """How text files, JSON and CSV are encoded, as Python names it; other than UTF-8, a file is read by one task."""
    header: Literal["auto"] | bool = setting("auto", fixed=True, since="0.2")
    """Whether the first line of CSV and TSV files names the columns; without one, columns have numbers from 0, or the names
    in `columns`. `auto`: it does where the columns that are asked for are in it; where that cannot be told, it is asked."""
    delimiter: str = setting("auto", fixed=True, since="0.2")
    """What is between the fields of CSV and TSV files: `comma`, `semicolon`, `tab`, `pipe`, or a character. `auto`: the one
    with which the columns are found."""
    quote: Literal["auto", '"', "none"] = setting("auto", fixed=True, since="0.3")
    """What begins and ends a field of CSV and TSV files that holds delimiters or line ends: `"`, or `none`, with which all
    quotes are text. `auto`: `"` in CSV; between tabs none, unless the first rows can only be read with it."""
    columns: tuple[str, ...] = setting((), fixed=True, since="0.2")
    """Names for the columns of CSV and TSV files, in order: `[label, title, text]`; in place of the first line's names."""
    split: str = setting("train", fixed=True)
    """The split of a Hugging Face dataset; a source may name another after a `#` (`--data.test_source imdb#test`)."""
    validation: Literal["hash", "tail", "source"] = setting("hash", fixed=True)
    """Which documents validate: a fraction by a hash of each, the tail of the whole text, or a source of their own."""
    validation_fraction: float = setting(0.05, above=0, below=1, fixed=True)
    """The share of documents (`hash`) or of bytes (`tail`) that validates."""
    validation_source: str | None = setting(None, fixed=True)
    """The source that validates when `validation` is `source`."""
    test_source: str | None = setting(None)
    """A source that is neither trained on nor validates: evaluation scores the finished model on it."""
    on_error: Literal["raise", "skip"] = setting("raise", fixed=True)
    """At an unreadable or empty file, or a document that is not UTF-8: end with an error, or skip and count it."""
    steps: tuple[str, ...] = setting((), fixed=True, since="0.3")
    """Functions by their import paths (`my_project.clean`) through which documents go before they are tokenised: from an
    Arrow table with the columns that the task reads to one with fewer rows, or others. Prepared again when their code
    changes."""
    least_characters: int = setting(0, at_least=0, fixed=True, since="0.3")
    """Characters that a document has at least; shorter ones are left out, and counted."""
    most_characters: int = setting(0, at_least=0, fixed=True, since="0.3")
    """Characters that a document has at most; longer ones are left out. 0: any number."""
    languages: tuple[str, ...] = setting((), fixed=True, since="0.3")
    """Languages (`[en, de]`) that documents are in, as py3langid tells them (the extra `languages`); others are left out."""
    near_duplicates: float = setting(0.0, at_least=0, at_most=1, fixed=True, since="0.3")
    """Share of words in a row that a document may have in common with an earlier one, 0.8 for instance; with as many or more
    it is left out (MinHash by datasketch, the extra `dedup`). 0: all documents stay."""
    shard_mib: float = setting(32.0, above=0, at_most=4096, fixed=True)
    """Text that one shard is made from, in MiB; small sources are cut finer, so that every worker has work."""
    shuffle: Literal["auto", "full", "blocks", "none"] = setting("full", fixed=True)
    """Order of an epoch: a permutation of all samples, of blocks and then inside a window (for slow disks), or as read.
    `auto`: full, but where shards lie far away and a node's cache would have them fetched again and again, blocks."""
    shuffle_block: int = setting(1024, at_least=1, fixed=True)
    """Neighbouring samples that stay together when `shuffle` is `blocks`."""
    shuffle_window: int = setting(64, at_least=1, fixed=True)
    """Blocks whose samples are mixed with each other when `shuffle` is `blocks`."""
    shuffle_first_window: int = setting(0, at_least=0, fixed=True, since="0.3")
    """Blocks that are mixed at the start of a run, and then a seventh more in each window until they are `shuffle_window`:
    over a slow link training waits for less. 0: as many from the start, but with `auto` an eighth."""
    start_after_mib: float = setting(0.0, at_least=0, since="0.3")
    """MiB of text that are prepared before training begins, while the rest follows; 0: all. What is prepared by then is gone
    through first, then what came next, in steps of so many MiB; each sample once an epoch, as always."""
    follow: bool = setting(False, fixed=True, since="0.3")
    """Whether training goes on with files that are added to the source, for ever; needs `start_after_mib`."""
    prefetch: int = setting(4, at_least=1, at_most=1024)
    """Steps that the loader keeps ready ahead of the loop."""
    prefetch_mib: float = setting(1024.0, above=0, since="0.3")
    """MiB of remote shards that a worker has fetched before it reads them, at most half of `cache_gib`."""
    cache_gib: float = setting(32.0, above=0)
    """Bound of the node-local cache that remote shards are read through, in GiB."""

    def __post_init__(self) -> None:
        """Raises SettingError where a field is out of range, the encoding is unknown, or a setting lacks another one."""
        super().__post_init__()
        if not self.source:
            raise self.error("source", "must name what to train on, for instance `python` or a path")
        if self.image_size and self.image_size[0] not in (1, 3):
            raise self.error("image_size", "must have 1 channel or 3")
        self._check_images()
        if self.validation == "source" and not self.validation_source:
            raise self.error("validation_source", "must be given when data.validation is `source`")
        try:
            "text".encode(self.encoding)
        except (LookupError, UnicodeError):
            raise self.error("encoding", "must name an encoding of text, utf-8 or latin-1 for instance") from None
        if self.delimiter not in DELIMITERS and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise self.error("delimiter", f"must be one of {', '.join(DELIMITERS)}, or one character that is no quote")
        if len(set(self.columns)) < len(self.columns):
            raise self.error("columns", "must be names that differ from each other")
        if self.tools_column and not self.messages_column:
            raise self.error("tools_column", "needs data.messages_column, which names the chats that use the tools")
        if self.most_characters and self.most_characters < self.least_characters:
            raise self.error("most_characters", f"must be at least data.least_characters, {self.least_characters}")
        if bad := [name for name in self.steps if not all(part.isidentifier() for part in f".{name}".split(".")[1:])]:
            raise self.error("steps", f"must be import paths of functions, as my_project.clean is; not {bad[0]!r}")
        if bad := [name for name in self.steps if "." not in name]:
            raise self.error("steps", f"must name the module as well, as my_project.clean does; not {bad[0]!r}")
        if self.target_source and self.kind not in ("auto", "text", "lines"):
            raise self.error("target_source", f"needs text files, while data.kind is {self.kind!r}: use --data.kind lines")

    def _check_images(self) -> None:
        """Raises SettingError where a setting of images lacks another one."""
        side, size = self.image_shorter_side, self.image_size
        if side and (not size or side < max(size[1:])):
            raise self.error("image_shorter_side", f"needs data.image_size, of at most so many pixels; it is {size}")
        if self.image_crop == "random" and not (side or self.image_padding):
            raise self.error("image_crop", "needs data.image_padding or data.image_shorter_side, else there is one place")
        if self.image_padding and self.image_crop != "random":
            raise self.error("image_padding", f"needs data.image_crop random; it is {self.image_crop!r}")
        if self.image_scale[0] > self.image_scale[1]:
            raise self.error("image_scale", "must have the smaller share first")
        if len(self.image_mean) != len(self.image_std):
            raise self.error("image_std", f"must have as many numbers as data.image_mean, which is {self.image_mean}")
        if self.image_mean and len(self.image_mean) != (size[0] if size else len(self.image_mean)):
            raise self.error("image_mean", f"must have a number for each channel of data.image_size, which is {size}")


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Section):
    """How text becomes ids."""

    name: ClassVar[str] = "tokenizer"

    kind: Literal["bytes", "characters", "bpe", "file"] = setting("bpe", fixed=True)
    """One id a byte, one a character, byte-level BPE trained on the data, or a ready `tokenizer.json`."""
    vocabulary_size: int = setting(4096, at_least=2, at_most=2**31 - 1, fixed=True)
    """Most ids that `characters` and `bpe` may use, special tokens included; the rarest characters become `<|unknown|>`."""
    lowercase: bool = setting(False, fixed=True)
    """Whether a BPE trained on the data reads all text in lower case; what it writes is lower case, too."""
    file: str | None = setting(None, fixed=True)
    """Path or URI of the `tokenizer.json` when `kind` is `file`, or a model's name on the hub, `org/name@revision`."""
    end_token: str | None = setting(None, fixed=True)
    """The token of that file which ends a document; None looks for a usual one (`<|endoftext|>`, `</s>`, ...)."""
    chat_template: str = setting("auto", fixed=True)
    """How the tasks `completion` and `preference` write prompts and answers as a chat: `auto`, by the template beside
    `tokenizer.file`, if there is one (`chat_template.jinja` or in `tokenizer_config.json`); a file with one; `none`, one
    after the other."""
    shared: bool = setting(True, fixed=True)
    """In translation, one vocabulary for both languages; else each has its own."""
    training_mib: float = setting(64.0, above=0, fixed=True)
    """Text, in MiB and spread evenly over the source, on which a BPE is trained."""
    trained_on: tuple[str, ...] = setting((), fixed=True, since="0.3")
    """Of `data.sources`, those whose texts a tokenizer is made from; none named: all that a run begins with."""

    def __post_init__(self) -> None:
        """Raises SettingError where a field is out of range, or does not go with `kind`."""
        super().__post_init__()
        if self.kind == "file" and not self.file:
            raise self.error("file", "must be given when tokenizer.kind is `file`")
        if self.kind != "file" and self.chat_template not in ("auto", "none"):
            raise self.error(
                "chat_template", "must be `auto` or `none` but with tokenizer.kind `file`, whose tokens it writes"
            )
        if self.kind != "bpe" and self.lowercase:
            raise self.error(
                "lowercase", f"must be false with tokenizer.kind `{self.kind}`: a `bpe` can write in lower case"
            )
        if self.kind == "bpe" and self.vocabulary_size < 257:
            raise self.error("vocabulary_size", "must be at least 257 for bpe: 256 bytes and the end token")
