"""Settings of the jobs that work with a trained model."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from raystride.pipelines.config.data import SourceKind
from raystride.pipelines.config.run import Answering, AnswerLaunch, Finished, Sample
from raystride.pipelines.config.section import Section, setting
from raystride.pipelines.hub import is_hub_name


@dataclass(frozen=True, kw_only=True)
class TestData(Section):
    """What the run does not know of its data."""

    name: ClassVar[str] = "data"

    test_source: str | None = setting(None)
    """The source of the test set, where the run's settings name none, or another one; in the form of `data.source`."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(Answering):
    """Which run's model, and on what."""

    split: Literal["test", "validation", "train"] = setting("test")
    """Which documents: those of `data.test_source`, or those that the run validated or trained on."""
    data: TestData = TestData()
    """The test set."""
    launch: AnswerLaunch = AnswerLaunch()
    """Where it is answered: little data in this process, much by Ray's workers; `--launch inline` or `ray` says so."""


@dataclass(frozen=True, kw_only=True)
class Predict(Answering):
    """What to answer, and where to."""

    input: str | None = setting(None)
    """Path, glob or URI of text files (a line a question), JSON lines, CSV, Parquet or folders of images, or a Hugging Face
    dataset."""
    output: str | None = setting(None)
    """Folder or URI that the answers go to."""
    text: str | None = setting(None)
    """One question instead, answered on the terminal; for images, the path of one."""
    kind: SourceKind = setting("auto")
    """What the input is; `auto` sees it from its name and its files."""
    encoding: str = setting("utf-8")
    """How the input's text, JSON or CSV is encoded, as Python names it."""
    header: Literal["auto"] | bool | None = setting(None)
    """Whether the first line of a CSV names its columns; None: as the run's `data.header` says."""
    delimiter: str | None = setting(None)
    """What is between the fields of a CSV; None: as the run's `data.delimiter` says."""
    quote: Literal["auto", '"', "none"] | None = setting(None)
    """What quotes the fields of a CSV; None: as the run's `data.quote` says."""
    columns: tuple[str, ...] | None = setting(None)
    """Names for the columns of a CSV; None: as the run's `data.columns` says."""
    column: str | None = setting(None)
    """The column (or JSON key) that holds the questions, where it is not called as in training."""
    format: Literal["parquet", "jsonl"] = setting("parquet")
    """What the answers are written as."""
    sample: Sample = Sample()
    """How a language model continues texts."""
    launch: AnswerLaunch = AnswerLaunch()
    """Where it is answered: little data in this process, much by Ray's workers; `--launch inline` or `ray` says so."""

    def __post_init__(self) -> None:
        """Raises SettingError unless either `text` is given, or `input` and with it `output`."""
        super().__post_init__()
        if (self.text is None) == (self.input is None):
            raise self.error("input", "must name what to answer, or --text one question, not both or neither")
        if self.input is not None and not self.output:
            raise self.error("output", "must name a folder for the answers")


@dataclass(frozen=True, kw_only=True)
class Generate(Finished):
    """What to write, and with which run's model."""

    prompt: tuple[str, ...] | str = setting("")
    """What the text starts with; a list such as '["def ", "class "]' writes several side by side."""
    sample: Sample = Sample()
    """How it is written."""


@dataclass(frozen=True, kw_only=True)
class Export(Finished):
    """Which run's model, and for whom."""

    to: Literal["hugging_face", "mlflow"] = setting("hugging_face")
    """Whose layout: Hugging Face's, of the family that says what the model is (Llama, Qwen 2 and 3, Mistral, SmolLM 3,
    Phi-3, Gemma 2 and 3, GPT-2), in safetensors; or an MLflow model, which is logged to the run as well."""
    folder: str | None = setting(None)
    """Folder or URI to write to; None: `export/` and the layout's name in the run's folder, or `export/adapter`."""
    merge: bool = setting(False)
    """Of a run that trained adapters (`lora.rank`): whether to add them to their base and write a plain model. Else the
    adapter alone is written, in PEFT's layout; MLflow gets a plain model in any case."""
    sample: Sample = Sample()
    """How a language model that MLflow serves continues texts."""
    push: str | None = setting(None)
    """Name on the Hugging Face hub, `org/name`, to which the folder is uploaded with a card made from the run's record. A
    new one is visible to its owner alone. The login is that of `hf auth login`, or HF_TOKEN."""

    def __post_init__(self) -> None:
        """Raises SettingError for a name that is none, or of something that the hub's programs cannot load."""
        super().__post_init__()
        if self.push and (not is_hub_name(self.push) or "@" in self.push):
            raise self.error("push", "must be a name on the hub, `org/name`")
        if self.push and self.to != "hugging_face":
            raise self.error("push", f"must be left out with --to {self.to}: the hub has models of `hugging_face`")


@dataclass(frozen=True, kw_only=True)
class Serve(Finished):
    """Which run's model answers requests, and where."""

    host: str = setting("127.0.0.1")
    """Address to listen at; the default is seen from this machine alone."""
    port: int = setting(0, at_least=0, at_most=65535)
    """Port to listen at; 0: a free one."""
    token: str = setting("")
    """What requests must carry (`Authorization: Bearer ...`); empty: RAYSTRIDE_SERVE_TOKEN, or a new one."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto")
    """Where the model computes; `auto`: on a GPU, if there is one."""
