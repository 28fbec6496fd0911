"""Settings of the data: the source, the tokenizer, the order of samples."""

from dataclasses import dataclass, field
from datetime import date
from typing import Any, ClassVar, Literal

from raystride.pipelines.config.section import Section, setting

SourceKind = Literal[
    "auto", "python", "text", "lines", "labelled", "folders", "json", "csv", "parquet", "huggingface", "webdataset",
    "registered",
]  # fmt: skip

DELIMITERS = {"auto": "", "comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "pipe": "|"}
"""Names of delimiters for `data.delimiter`."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Source of the documents, validation split, image preprocessing and order of samples."""

    name: ClassVar[str] = "data"

    source: str = setting(
        "python",
        fixed=True,
        also=(
            "dataset dataset_name dataset_path dataset_repo_id train_file train_data train_files "
            "data_path data_dir dataset_dir dataset_config"
        ),
    )
    """Training data: path, glob, URI or name of a dataset. A path, glob or URI of text, JSON lines, CSV, Parquet or image
    files; the name or folder of a Hugging Face dataset; the name of a registered source; or `python`: the source code of
    Python's standard library."""
    sources: dict[str, Any] = field(default_factory=dict, metadata={"fixed": True, "since": "0.3"})
    """Mixture of several sources, by name. `{web: {source: PATH, weight: 0.7}, code: {source: python, weight: 0.3,
    epochs_at_most: 4}}`. An entry also takes any setting of `data` that describes how the source is read. On resume, weights
    may change and sources may be added or removed; the samples fed so far stay the same."""
    weights: str = setting("given", since="0.3", shapes_result=True)
    """Sampling weights of `sources`. `given`: each source's own `weight`. `temperature 0.7`: proportional to the number of
    samples to the power of 0.7; from 0 (all equal) to 1 (by size)."""
    curriculum: tuple[Any, ...] = setting((), since="0.3", shapes_result=True)
    """Schedule of sampling weights by step. `[{from_step: 8000, weights: {web: 0.4, code: 0.6}}]`; a source that is not
    named has weight 0 there. `weights` may be a temperature as well."""
    kind: SourceKind = setting("auto", fixed=True)
    """Format of the source. `auto` detects it by the source's name and files, except `lines` (each line of a text file is a
    document) and `labelled` (each line is a label, a space or tab, and a text). `folders`: one folder of files per class.
    `webdataset`: tar files; members with the same key form a document (`7.jpg` and `7.cls`)."""
    column: str = setting("text", fixed=True, also="dataset_text_field text_column text_column_name text_field input_column")
    """Column or JSON key of the text, in sources with columns. `translation.en` names a nested field."""
    label_column: str = setting("label", fixed=True, also="label_column_name labels_column label_field target_name")
    """Column of the label, for tasks with labels. Values are text, whole numbers or truth values."""
    class_names: bool = setting(False, fixed=True, since="0.3")
    """Replace numeric labels in Parquet files by the names stored in the files. The names are those that `datasets` writes
    (`ClassLabel`). Hugging Face datasets always use them."""
    target_column: str = setting("target", fixed=True, also="completion_column response_column summary_column")
    """Column of the target text, for tasks with targets. For example a translation, an answer or a summary."""
    messages_column: str | None = setting(None, fixed=True, since="0.3")
    """Column of chats, for the task `completion`. A chat is a list of messages (`role`, `content`, `tool_calls`), or its
    JSON. It is written by the tokenizer's chat template, and the loss covers the assistant's messages. None: pairs of
    `column` and `target_column`."""
    tools_column: str | None = setting(None, fixed=True, since="0.3")
    """Column of the tools that a chat's assistant may call. A list of objects as chat templates expect them, or its JSON;
    may be empty in a row."""
    prompt_column: str | None = setting("prompt", fixed=True, since="0.3")
    """Column of the prompt, for tasks on preference pairs. A text, or a list of messages (`role` and `content`). None:
    `chosen` and `rejected` are lists of messages, and the first messages that they share are the prompt."""
    chosen_column: str = setting("chosen", fixed=True, since="0.3")
    """Column of the preferred answer: a text or messages."""
    rejected_column: str = setting("rejected", fixed=True, since="0.3")
    """Column of the rejected answer: a text or messages."""
    image_column: str = setting("image", fixed=True)
    """Column of the image: a file's bytes, its path or a data URI."""
    image_size: tuple[int, int, int] | None = setting(
        None, at_least=1, fixed=True, also="img_size input_size resize crop_size"
    )
    """Channels, height and width of the images, such as `[3, 32, 32]`. Channels are 1 (grey) or 3; images are resized to it.
    None: all images have the same size."""
    image_shorter_side: int | None = setting(None, at_least=1, at_most=8192, fixed=True, since="0.3")
    """Shorter side in pixels to which images are resized with their aspect ratio. Crops of `image_size` are taken from the
    result: from the middle in validation, by `image_crop` in training. None: the whole image is resized to `image_size`."""
    image_crop: Literal["middle", "random", "scaled"] = setting("middle", since="0.3", shapes_result=True)
    """Crop of an image in training. `middle`: the centre. `random`: a random position. `scaled`: a random rectangle of
    `image_scale` of the area and an aspect ratio from 3/4 to 4/3, resized to `image_size`. Random numbers depend on seed,
    epoch and sample."""
    image_padding: int = setting(0, at_least=0, at_most=1024, since="0.3", shapes_result=True)
    """Black pixels by which a random crop may exceed each edge. Used with `image_crop random`."""
    image_scale: tuple[float, float] = setting((0.08, 1.0), above=0, at_most=1, since="0.3", shapes_result=True)
    """Minimum and maximum share of the area that a random rectangle has. Used with `image_crop scaled`."""
    image_flip: float = setting(0.0, at_least=0, at_most=1, since="0.3", shapes_result=True)
    """Probability of a horizontal flip in training. The random numbers depend on seed, epoch and sample."""
    image_mean: tuple[float, ...] = setting((), at_least=0, at_most=1, fixed=True, since="0.3")
    """Mean per channel to subtract from pixels in [0, 1]. The network does this. Empty: 0.5 for each channel."""
    image_std: tuple[float, ...] = setting((), above=0, at_most=10, fixed=True, since="0.3")
    """Standard deviation per channel by which the difference is divided. Empty: 0.5 for each channel."""
    image_root: str | None = setting(None, since="0.2")
    """Further folder below which image paths may lie; paths outside are rejected. Given as a path or URI, in addition to the
    data's own folder. None: only the data's own folder."""
    target_source: str | None = setting(None, fixed=True)
    """Text files with the targets of the lines of `source`, line by line. Both are text files; each pair of lines is a
    document. Other sources (validation, test) then name two files, separated by a comma."""
    encoding: str = setting("utf-8", fixed=True)
    """Encoding of text files, JSON and CSV, by its Python name. A file that is not in UTF-8 is read by a single task."""
    header: Literal["auto"] | bool = setting("auto", fixed=True, since="0.2")
    """Whether the first line of CSV and TSV files names the columns. false: columns have numbers from 0, or the names in
    `columns`. `auto`: true if the first line contains the needed columns; if that is ambiguous, preparation fails and asks
    for this setting."""
    delimiter: str = setting("auto", fixed=True, since="0.2")
    """Delimiter of CSV and TSV files. `comma`, `semicolon`, `tab`, `pipe`, or a character. `auto`: the one that yields the
    needed columns."""
    quote: Literal["auto", '"', "none"] = setting("auto", fixed=True, since="0.3")
    """Quote character of CSV and TSV fields that contain delimiters or line ends. `"`, or `none`: quotes are ordinary text.
    `auto`: `"` in CSV; none between tabs, unless the first rows can be read only with it."""
    columns: tuple[str, ...] = setting((), fixed=True, since="0.2")
    """Column names of CSV and TSV files, in order. For example `[label, title, text]`; they replace the names in the first
    line."""
    split: str = setting("train", fixed=True, also="train_split dataset_split")
    """Split of a Hugging Face dataset, and of files with `train` and another split in their names (`train.jsonl` beside
    `test.jsonl`, folders `train/` and `val/`); `all`: all of these files. A source may name another split after a `#`
    (`--data.test_source imdb#test`, `--data.validation_source FOLDER#validation`)."""
    validation: Literal["hash", "tail", "source"] = setting("hash", fixed=True)
    """Selection of validation documents. `hash`: a fraction, by a hash of each document; of a classifier's documents the
    same of each class, but in a mixture and with `follow`. `tail`: the end of the whole text, also where
    `hash` has one document to choose from, a language model's single text file. `source`: another source."""
    validation_fraction: float = setting(
        0.05,
        above=0,
        below=1,
        fixed=True,
        also="validation_split_percentage val_size val_split test_size validation_split eval_split_size",
    )
    """Fraction of the documents (`hash`) or bytes (`tail`) used for validation."""
    validation_source: str | None = setting(
        None, fixed=True, also="validation_file eval_file eval_dataset val_data val_file valid_file eval_data_path"
    )
    """Validation data if `validation` is `source`."""
    test_source: str | None = setting(None, also="test_file test_dataset test_data")
    """Test data, used neither for training nor for validation. `raystride evaluate` scores the trained model on it."""
    on_error: Literal["raise", "skip"] = setting("raise", fixed=True, also="max_errored_blocks ignore_errors")
    """Handling of unreadable or empty files and of documents that are not UTF-8. `raise`: end with an error. `skip`: skip
    and count them."""
    transforms: tuple[str, ...] = setting(
        (), fixed=True, since="0.3", was="data.steps", renamed="0.3", also="preprocessing map_fn transform preprocess"
    )
    """Functions that transform documents before tokenisation, by import path. For example `my_project.clean`. Each takes an
    Arrow table with the columns that the task reads, and returns one with fewer or other rows. Data is prepared again if
    their code changes."""
    min_characters: int = setting(0, at_least=0, fixed=True, since="0.3", was="data.least_characters", renamed="0.3")
    """Minimum length of a document in characters. Shorter ones are left out and counted. 0: no limit."""
    max_characters: int = setting(0, at_least=0, fixed=True, since="0.3", was="data.most_characters", renamed="0.3")
    """Maximum length of a document in characters. Longer ones are left out. 0: no limit."""
    languages: tuple[str, ...] = setting((), fixed=True, since="0.3")
    """Languages of the documents to keep, such as `[en, de]`. Detected by py3langid (the extra `languages`); documents in
    other languages are left out. Empty: all documents are kept."""
    near_duplicates: float = setting(0.0, at_least=0, at_most=1, fixed=True, since="0.3")
    """Similarity to an earlier document from which a document is left out. It is the share of common sequences of five
    words, such as 0.8 (MinHash by datasketch, the extra `dedup`). 0: all documents are kept."""
    shard_mib: float = setting(32.0, above=0, at_most=4096, fixed=True)
    """Size of the text in one shard, in MiB. Small sources are split finer, so that every worker has work."""
    shuffle: Literal["auto", "full", "blocks", "none"] = setting("full", fixed=True, also="shuffle_buffer shuffle_dataset")
    """Shuffling of an epoch. `full`: a permutation of all samples. `blocks`: a permutation of blocks, then of samples within
    a window of blocks (for slow disks). `none`: as read. `auto`: `full`, or `blocks` if a full shuffle would fetch
    shards repeatedly: from a store into a node's cache, or from a disk if half of a node's memory does not hold them."""
    shuffle_block: int = setting(1024, at_least=1, fixed=True)
    """Number of neighbouring samples in a block of `shuffle blocks`."""
    shuffle_window: int = setting(64, at_least=1, fixed=True)
    """Number of blocks that are mixed at a time, with `shuffle blocks`."""
    shuffle_first_window: int = setting(0, at_least=0, fixed=True, since="0.3")
    """Number of blocks in the first window of a run. Windows then grow by 15 %, at least by one block, up to
    `shuffle_window`: training starts sooner over a slow link. 0: `shuffle_window` from the start; with `auto`, an eighth of
    it."""
    start_after_mib: float = setting(0.0, at_least=0, since="0.3", shapes_result=True)
    """Start training when this many MiB of text are prepared. The rest is prepared meanwhile: the text prepared by then is
    trained on first, then the following text, in portions of this size; every sample occurs once an epoch, as always. 0:
    prepare all first."""
    follow: bool = setting(False, fixed=True, since="0.3")
    """Continue training with files that are added to the source, without an end. Needs `start_after_mib`."""
    prefetch: int = setting(4, at_least=1, at_most=1024, also="dataloader_prefetch_factor prefetch_factor prefetch_batches")
    """Number of steps that the loader prepares ahead of the training loop."""
    read_processes: int = setting(
        1, at_least=1, at_most=1024, since="0.3", also="dataloader_num_workers num_data_workers data_workers"
    )
    """Processes per worker that read and collate the samples of a dataset of your own (`raystride.fit`). None is needed for
    arrays and tables without a `collate` of your own."""
    prefetch_mib: float = setting(1024.0, above=0, since="0.3")
    """MiB of remote shards that a worker prefetches. At most half of `cache_gib`."""
    cache_gib: float = setting(32.0, above=0, also="cache_dir cache_limit")
    """Maximum size of a node's local cache of remote shards, in GiB."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, the encoding is unknown, or a setting lacks another one."""
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
        if self.max_characters and self.max_characters < self.min_characters:
            raise self.error("max_characters", f"must be at least data.min_characters, {self.min_characters}")
        if bad := [name for name in self.transforms if not all(part.isidentifier() for part in f".{name}".split(".")[1:])]:
            raise self.error("transforms", f"must be import paths of functions, as my_project.clean is; not {bad[0]!r}")
        if bad := [name for name in self.transforms if "." not in name]:
            raise self.error("transforms", f"must name the module as well, as my_project.clean does; not {bad[0]!r}")
        if self.target_source and self.kind not in ("auto", "text", "lines"):
            raise self.error("target_source", f"needs text files, while data.kind is {self.kind!r}: use --data.kind lines")

    def _check_images(self) -> None:
        """Raises SettingError if a setting of images lacks another one."""
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
class TokenizerConfig(Section):
    """Tokenizer and chat template."""

    name: ClassVar[str] = "tokenizer"

    kind: Literal["bytes", "characters", "bpe", "file"] = setting("bpe", fixed=True, also="tokenizer_type")
    """Kind of tokenizer. `bytes`: one id per byte. `characters`: one per character. `bpe`: byte-level BPE trained on the
    data. `file`: an existing `tokenizer.json`."""
    vocabulary_size: int = setting(4096, at_least=2, at_most=2**31 - 1, fixed=True, also="vocab_size n_vocab")
    """Maximum vocabulary size of `characters` and `bpe`, special tokens included. The rarest characters become
    `<|unknown|>`."""
    lowercase: bool = setting(False, fixed=True, also="do_lower_case")
    """Lower-case all text for a BPE trained on the data. Its output is lower case, too."""
    file: str | None = setting(None, fixed=True, also="tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_file")
    """Path or URI of `tokenizer.json`, or a model's name on the Hugging Face hub. Names are `org/name` or
    `org/name@revision`. Needed if `kind` is `file`."""
    end_token: str | None = setting(None, fixed=True)
    """Token of the tokenizer file that ends a document. None: that of the files beside it (`tokenizer_config.json`,
    `generation_config.json`, `config.json`), else a common one (`<|endoftext|>`, `</s>`, ...)."""
    chat_template: str = setting("auto", fixed=True, also="chat_format chat_template_path")
    """Chat template for the tasks `completion` and `preference`. It formats prompts and answers. `auto`: the template next
    to `tokenizer.file` if there is one (`chat_template.jinja`, or in `tokenizer_config.json`). A path: a file with a
    template. `none`: prompt and answer are concatenated."""
    date: str = setting("2026-01-01", fixed=True, since="0.4")
    """Day that a chat template gets as today's, as in ISO 8601. It matters only to templates that write the date, such as
    Llama 3.2's. A chat has the same tokens on every day, and an exported model keeps the day."""
    begin: Literal["auto", "none"] = setting("auto", fixed=True, since="0.3")
    """Tokens at the start of a text without a chat template. `auto`: those that the tokenizer of `tokenizer.file` puts
    there, such as `<bos>` (Llama and Gemma have one, GPT-2 and Qwen do not). `none`: no tokens."""
    markers: Literal["text", "special"] = setting("text", fixed=True, since="0.3")
    """Handling of special tokens in a text, such as `<|im_start|>`. For the special tokens of `tokenizer.file`. `text`: as
    ordinary text, so that nobody can forge a turn. `special`: as special tokens, for texts that a chat template has
    formatted already."""
    shared: bool = setting(True, fixed=True)
    """Use one vocabulary for both languages in translation. false: one for each."""
    training_mib: float = setting(64.0, above=0, fixed=True)
    """Size in MiB of the text that trains a BPE. It is spread evenly over the source."""
    trained_on: tuple[str, ...] = setting((), fixed=True, since="0.3")
    """Names of the `data.sources` that train the tokenizer. Empty: all sources at the start of the run."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, or does not work with `kind`."""
        super().__post_init__()
        if self.kind == "file" and not self.file:
            raise self.error("file", "must be given when tokenizer.kind is `file`")
        if self.kind != "file" and self.chat_template not in ("auto", "none"):
            raise self.error(
                "chat_template", "must be `auto` or `none` but with tokenizer.kind `file`, whose tokens it writes"
            )
        try:
            date.fromisoformat(self.date)
        except ValueError as error:
            raise self.error("date", f"must be a day such as 2026-01-01: {error}") from error
        if self.kind != "file" and self.markers != "text":
            raise self.error("markers", f"must be `text` with tokenizer.kind `{self.kind}`: no text has its special tokens")
        if self.kind != "bpe" and self.lowercase:
            raise self.error(
                "lowercase", f"must be false with tokenizer.kind `{self.kind}`: a `bpe` can write in lower case"
            )
        if self.kind == "bpe" and self.vocabulary_size < 257:
            raise self.error("vocabulary_size", "must be at least 257 for bpe: 256 bytes and the end token")
