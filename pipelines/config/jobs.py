"""Settings of the jobs that work with a trained model."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from raystride.pipelines.config.data import SourceKind
from raystride.pipelines.config.run import FinishedRunConfig, PredictorConfig, PredictorLaunchConfig, SampleConfig
from raystride.pipelines.config.section import Section, setting
from raystride.pipelines.system.hub import is_hub_name

PredictionFormat = Literal["parquet", "jsonl", "csv"]
"""The formats of predictions, which are also the endings of their files."""


@dataclass(frozen=True, kw_only=True)
class TestDataConfig(Section):
    """Test data, if a run's settings have none."""

    name: ClassVar[str] = "data"

    test_source: str | None = setting(None)
    """Source of the test set, in the form of `data.source`. None: the run's `data.test_source`."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(PredictorConfig):
    """Run to evaluate, and the data."""

    split: Literal["test", "validation", "train"] = setting("test")
    """Documents to evaluate on. `test`: those of `data.test_source`. `validation`, `train`: those of the run."""
    data: TestDataConfig = TestDataConfig()
    """Test set."""
    launch: PredictorLaunchConfig = PredictorLaunchConfig()
    """Start of the workers: little data in this process, more by Ray."""


@dataclass(frozen=True, kw_only=True)
class PredictConfig(PredictorConfig):
    """Inputs of inference, and the output."""

    input: str | None = setting(None)
    """Path, glob, URI or Hugging Face dataset of the inputs. Files are text (one input per line), JSON lines, CSV, Parquet
    or folders of images."""
    output: str | None = setting(None)
    """Folder or URI for the predictions."""
    text: str | None = setting(None)
    """A single input, with the prediction printed to the terminal. For images, the path of one. Used instead of `input`."""
    kind: SourceKind = setting("auto")
    """Format of the input. `auto` detects it by its name and files."""
    encoding: str = setting("utf-8")
    """Encoding of text, JSON and CSV input, by its Python name."""
    header: Literal["auto"] | bool | None = setting(None)
    """Whether the first line of a CSV names its columns. None: the run's `data.header`."""
    delimiter: str | None = setting(None)
    """Delimiter of a CSV. None: the run's `data.delimiter`."""
    quote: Literal["auto", '"', "none"] | None = setting(None)
    """Quote character of a CSV. None: the run's `data.quote`."""
    columns: tuple[str, ...] | None = setting(None)
    """Column names of a CSV. None: the run's `data.columns`."""
    column: str | None = setting(None)
    """Column or JSON key of the inputs, if its name differs from training. None: as in training."""
    format: PredictionFormat = setting("parquet")
    """File format of the predictions. `csv`: in UTF-8 with a header in each file, lists and objects as JSON."""
    sample: SampleConfig = SampleConfig()
    """Text generation by a language model."""
    launch: PredictorLaunchConfig = PredictorLaunchConfig()
    """Start of the workers: little data in this process, more by Ray."""

    def __post_init__(self) -> None:
        """Raises SettingError unless either `text` is given, or `input` and with it `output`."""
        super().__post_init__()
        if (self.text is None) == (self.input is None):
            raise self.error("input", "must name what to answer, or --text one question, not both or neither")
        if self.input is not None and not self.output:
            raise self.error("output", "must name a folder for the answers")


@dataclass(frozen=True, kw_only=True)
class ApplyConfig(PredictorConfig):
    """Output of a function that is applied to a dataset (`raystride.predict` with `fn`)."""

    output: str | None = setting(None)
    """Folder or URI for the rows, as Parquet. None: they are returned."""
    launch: PredictorLaunchConfig = PredictorLaunchConfig()
    """Start of the workers: little data in this process, more by Ray."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(FinishedRunConfig):
    """Prompt and run of the model that generates text."""

    prompt: tuple[str, ...] | str = setting("")
    """Prompt of the generated text. A list such as '["def ", "class "]' generates several texts in one batch."""
    sample: SampleConfig = SampleConfig()
    """Sampling."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig(FinishedRunConfig):
    """Run to export, and the format."""

    to: Literal["auto", "hugging_face", "mlflow", "state_dict", "torch_export", "onnx"] = setting("auto")
    """Format of the export. `auto`: `hugging_face`, or `state_dict` for a model of your own. `hugging_face`: safetensors in
    the layout of the family that describes the model (Llama, Qwen 2 and 3, Mistral, SmolLM 3, Phi-3, Gemma 2 and 3,
    Mixtral, Qwen3-MoE, OLMoE, GPT-2; classifiers: BERT, RoBERTa, DistilBERT, ModernBERT). `mlflow`: an MLflow model,
    also logged to the run. `state_dict`: model.safetensors and state_dict.pt, of any network. For models of your own
    (`raystride.fit`) also `torch_export` and `onnx` (a program that needs none of your code), and `hugging_face` where
    the module has `save_pretrained`."""
    folder: str | None = setting(None)
    """Folder or URI to write to. None: `export/` and the name of the format in the run's folder, or `export/adapter`."""
    merge: bool = setting(False)
    """Merge the adapters into their base and write a plain model. For runs with adapters (`lora.rank`). false: only the
    adapter is written, in PEFT's layout. MLflow always gets a plain model."""
    sample: SampleConfig = SampleConfig()
    """Text generation by a language model served with MLflow."""
    push: str | None = setting(None)
    """Name on the Hugging Face hub, `org/name`, to upload the folder to. A model card made from the run's record is
    included. A new repository is private. The login is that of `hf auth login`, or HF_TOKEN."""

    def __post_init__(self) -> None:
        """Raises SettingError for a name that is none, or of something that the hub's programs cannot load."""
        super().__post_init__()
        if self.push and (not is_hub_name(self.push) or "@" in self.push):
            raise self.error("push", "must be a name on the hub, `org/name`")
        if self.push and self.to not in ("auto", "hugging_face"):
            raise self.error("push", f"must be left out with --to {self.to}: the hub has models of `hugging_face`")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(FinishedRunConfig):
    """Run to serve, and the address."""

    host: str = setting("127.0.0.1")
    """Address to listen on. The default accepts connections from this machine only."""
    port: int = setting(0, at_least=0, at_most=65535)
    """Port to listen on. 0: a free port."""
    token: str = setting("")
    """Bearer token that requests must carry (`Authorization: Bearer ...`). Empty: RAYSTRIDE_SERVE_TOKEN, or a new one."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto")
    """Device of the model. `auto`: a GPU if there is one."""
