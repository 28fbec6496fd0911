"""Jobs on a finished run in this process: which files are answered and scored, which questions refused, what is exported."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.model.hugging_face import hf_names
from raystride.model.lora import attach_adapters, iterate_adapters, start_adapters
from raystride.model.transformer import Decoder
from raystride.pipelines.config import (
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    SampleConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
    jobs,
)
from raystride.pipelines.config.jobs import EvaluateConfig, ExportConfig, PredictConfig, ServeConfig
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.config.run import PredictorLaunchConfig
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.evaluate.load_run import LoadedModel
from raystride.pipelines.launch.finished import (
    EVALUATION,
    _merge_adapters,
    evaluate_run,
    export_for_serving,
    export_run,
    predict_files,
    predict_inputs,
    writes_adapter,
)
from raystride.pipelines.launch.run_store.lease import RunLease
from raystride.pipelines.observability.record.journal import list_segments, read_entries
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.errors import refused
from tests.processes import make_job
from tests.tiny import tiny
from tests.waiting import wait_until

INLINE = PredictorLaunchConfig(mode="inline")


def write(path: Path, texts: list[str]) -> Path:
    """Texts with a label that alternates, as JSON lines."""
    rows = [{"text": text, "label": "spam" if number % 2 else "ham"} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(config: Config, path: Path, run: str) -> None:
    """Trains a run of this name, as the driver would have it trained."""
    job = make_job(config, path, run)
    job.folder.put("config.yaml", to_yaml(job.config))
    build_training(job, WorkerInfo(), [], lambda: False, lambda _: None).run()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Runs of two steps: `labels`, which knows a test set, and `writes`, a language model that others can load."""
    path = tmp_path_factory.mktemp("finished")
    source = write(path / "rows.jsonl", [f"text number {number}" for number in range(40)])
    data = DataConfig(source=str(source), kind="json", validation_fraction=0.2)
    base = tiny(
        source,
        data=data,
        model=ModelConfig(layers=1, heads=2, hidden_size=8, context=16),
        train=TrainConfig(steps=2, slots=2, slot_size=2, log_every=1),
        validation=ValidationConfig(every=0),
    )
    labels = replace(base, task="classification", tokenizer=TokenizerConfig(kind="characters"))
    tested = replace(data, test_source=str(write(path / "test.jsonl", ["one", "two", "three"])))
    train(replace(labels, data=tested), path, "labels")
    train(replace(base, model=replace(base.model, architecture="llama")), path, "writes")
    return str(path)


def test_questions_are_answered_in_order_with_probabilities_by_name(storage: str) -> None:
    settings = PredictConfig(run="labels", storage=storage, text="x", device="cpu")
    found = predict_inputs(settings, ["number one", ("number two",), "text"])
    assert 0 < found.step <= found.last_step
    assert [answer["text"] for answer in found] == ["number one", "number two", "text"]
    for answer in found:
        assert answer["probabilities"].keys() == {"ham", "spam"}
        assert answer["label"] == max(answer["probabilities"], key=answer["probabilities"].get)
    assert predict_inputs(settings, []) == []


@pytest.mark.parametrize("question", ["", ("",), 7])
def test_a_question_that_is_none_is_named(storage: str, question: Any) -> None:
    settings = PredictConfig(run="labels", storage=storage, text="x", device="cpu")
    with refused("question", question):
        predict_inputs(settings, ["number one", question])


def test_a_file_is_answered_into_a_folder_by_a_run_of_a_step(storage: str, tmp_path: Path) -> None:
    source = tmp_path / "asked.csv"
    source.write_text("one;first\ntwo;second\n")
    settings = PredictConfig(
        run="labels",
        storage=storage,
        input=str(source),
        output=str(tmp_path / "answers"),
        columns=("question", "more"),
        delimiter=";",
        header=False,
        column="question",
        format="jsonl",
        launch=INLINE,
        device="cpu",
    )
    found = predict_files(settings, lambda _: None)
    assert (found.rows, found.step, found.files) == (2, 2, ["00000.jsonl"])
    rows = [json.loads(line) for line in (tmp_path / "answers/00000.jsonl").read_text().splitlines()]
    assert [(row["question"], row["more"]) for row in rows] == [("one", "first"), ("two", "second")]
    assert {row["prediction"] for row in rows} <= {"ham", "spam"}


def test_scores_of_the_test_set_that_the_run_or_the_job_names_are_kept(storage: str, tmp_path: Path) -> None:
    settings = EvaluateConfig(run="labels", storage=storage, launch=INLINE, device="cpu")
    scored, problem = evaluate_run(settings, lambda _: None)
    assert (scored.samples, scored.logged, problem) == (3, False, None)
    run = Folder(storage) / "labels"
    assert run.read_json("summary.json")["metrics"]["test_accuracy"] == scored.metrics["accuracy"]
    other = write(tmp_path / "other.jsonl", [f"text {number}" for number in range(5)])
    again, _ = evaluate_run(replace(settings, data=jobs.TestDataConfig(test_source=str(other))), lambda _: None)
    assert again.samples == 5
    validated, _ = evaluate_run(replace(settings, split="validation"), lambda _: None)
    assert 0 < validated.samples < 40


def test_scores_of_a_run_that_is_being_trained_are_left_to_its_driver(storage: str) -> None:
    settings, run = EvaluateConfig(run="labels", storage=storage, launch=INLINE), Folder(storage) / "labels"
    with RunLease.acquire(run, "a9"):
        before = {name: run.sha256(name) for name in ("summary.json", "metrics.jsonl", "owner.json")}
        scored, problem = evaluate_run(settings, lambda _: None)
        assert {name: run.sha256(name) for name in before} == before
    assert problem
    assert "left to whoever trains the run" in problem
    assert Path(scored.folder.uri, "metrics.json").exists()
    told = [entry for entry in read_entries(run) if entry["sender"] == "evaluation" and entry["kind"] == "metrics"][-1]
    assert told["values"]["test_accuracy"] == scored.metrics["accuracy"]


def test_evaluations_at_once_wait_for_each_other(storage: str) -> None:
    settings, run = EvaluateConfig(run="labels", storage=storage, launch=INLINE), Folder(storage) / "labels"
    other = RunLease.acquire(run, f"{EVALUATION}-a9")
    problems: list[str | None] = []
    thread = threading.Thread(target=lambda: problems.append(evaluate_run(settings, lambda _: None)[1]))
    before = len(list_segments(run))
    thread.start()
    wait_until(lambda: len(list_segments(run)) > before, "the scores in the journal")
    other.release()
    thread.join()
    assert problems == [None]


def test_an_export_lies_in_its_place_or_where_it_is_wanted(storage: str, tmp_path: Path) -> None:
    folder, opened = export_run(ExportConfig(run="writes", storage=storage))
    assert folder.uri == f"{storage}/writes/export/hugging_face"
    assert {"config.json", "model.safetensors"} <= set(folder.names())
    assert (opened.step, opened.config.lora.rank) == (2, 0)
    elsewhere, _ = export_run(ExportConfig(run="writes", storage=storage, folder=str(tmp_path / "out")))
    assert elsewhere.uri == str(tmp_path / "out")
    assert (tmp_path / "out/config.json").read_bytes() == folder.read("config.json")
    served, _ = export_for_serving(ServeConfig(run="writes", storage=storage))
    assert served.uri == f"{storage}/writes/export/served"
    with refused("merge", True):
        export_run(ExportConfig(run="writes", storage=storage, merge=True))


@pytest.mark.parametrize(
    ("rank", "to", "merge", "adapter"),
    [
        (1, "hugging_face", False, True),
        (0, "hugging_face", False, False),
        (1, "hugging_face", True, False),
        (1, "mlflow", False, False),
    ],
)
def test_an_adapter_alone_is_written_for_hugging_face_unless_it_is_merged(
    rank: int, to: Any, merge: bool, adapter: bool
) -> None:
    config = Config(lora=LoraConfig(rank=rank), model=ModelConfig(init_from="/base" if rank else None))
    assert writes_adapter(ExportConfig(run="r", to=to, merge=merge, sample=SampleConfig()), config.lora) is adapter


def test_what_is_served_or_merged_is_one_plain_network(tmp_path: Path) -> None:
    shape = ModelConfig(architecture="llama", layers=1, heads=2, hidden_size=8, context=16)
    network: Any = Decoder(shape, 11)
    lora = LoraConfig(rank=2)
    attach_adapters(network, lora, hf_names(network))
    start_adapters(network, lora, 0)
    for *_, adapter in iterate_adapters(network):
        torch.nn.init.normal_(adapter.b)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        before = network.hidden(ids)
        assert list(iterate_adapters(network))
        config = Config(lora=lora, model=replace(shape, init_from="/base"))
        _merge_adapters(LoadedModel(config, build_task(config), network, 0, Folder(str(tmp_path))))
        assert not list(iterate_adapters(network))
        torch.testing.assert_close(network.hidden(ids), before)
