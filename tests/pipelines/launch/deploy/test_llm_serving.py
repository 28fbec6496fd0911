"""The configuration for Ray Serve LLM that `raystride deploy serve` writes for a run, and the runs that it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from raystride.command import run as run_command
from raystride.pipelines.config import Config, LoraConfig, ModelConfig
from raystride.pipelines.config.deploy import DeployServeConfig
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.launch.deploy.llm_serving import FILE_NAME, render_serving_config
from raystride.pipelines.system.storage.folder import Folder
from tests.deploy.schemas import find_schema_faults, serve_schema
from tests.errors import refused

CONFIG = Config(model=ModelConfig(architecture="llama", layers=2, heads=2, hidden_size=16, context=64))


def test_a_run_is_rendered_as_an_application(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Folder(f"{tmp_path}/runs/mine").put("config.yaml", to_yaml(CONFIG))
    output = tmp_path / "out"
    flags = ["serve", "--run", "mine", "--storage", f"{tmp_path}/runs", "--gpus", "2", "--output", str(output)]
    assert run_command(["deploy", *flags, "--max-replicas", "3", "--accelerator", "H100"]) == 0
    written = yaml.safe_load((output / FILE_NAME).read_text())
    assert not find_schema_faults(serve_schema(), written)
    assert written["http_options"]["host"] == "127.0.0.1"
    (model,) = written["applications"][0]["args"]["llm_configs"]
    assert model["model_loading_config"] == {"model_id": "mine", "model_source": f"{tmp_path}/runs/mine/export/hugging_face"}
    assert model["engine_kwargs"] == {"max_model_len": 64, "tensor_parallel_size": 2}
    assert model["deployment_config"]["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 3}
    assert model["accelerator_type"] == "H100"
    said = capsys.readouterr().out
    assert "export --run mine" in said
    assert "--merge" not in said
    assert f"serve deploy {output}/{FILE_NAME}" in said
    tuned = replace(CONFIG, model=replace(CONFIG.model, init_from="base"), lora=LoraConfig(rank=2))
    Folder(f"{tmp_path}/runs/mine").put("config.yaml", to_yaml(tuned))
    assert run_command(["deploy", *flags, "--overwrite", "true"]) == 0
    assert "--to hugging_face --merge true\n" in capsys.readouterr().out
    assert run_command(["deploy", *flags, "--run", "none"]) == 2
    assert "there is no run" in capsys.readouterr().err


def test_a_place_gives_the_storage_of_the_model() -> None:
    text = render_serving_config(DeployServeConfig(run="mine", place="kubernetes"), CONFIG.task, CONFIG.model)
    (model,) = _load_models(text)
    assert not model["model_loading_config"]["model_source"].startswith(str(Path.cwd()))


def test_the_model_address_has_no_credentials_or_options() -> None:
    storage = "s3://key:secret@bucket/runs?region=eu-west-1&endpoint_override=http://minio:9000"
    (model,) = _load_models(render_serving_config(DeployServeConfig(run="mine", storage=storage), CONFIG.task, CONFIG.model))
    assert model["model_loading_config"]["model_source"] == "s3://bucket/runs/mine/export/hugging_face"


def _load_models(text: str) -> Any:
    return yaml.safe_load(text)["applications"][0]["args"]["llm_configs"]


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("engine_kwargs", "engine_args", ("'engine_args'",)),
        ("port: 8000", "port: 0", ("http_options.port: 0",)),
        ("model_id: mine", "model_name: mine", ("'model_id'", "required")),
        ("build_openai_app", "build", ("import_path: ",)),
    ],
)
def test_a_wrong_field_is_found(old: str, new: str, names: tuple[str, ...]) -> None:
    text = render_serving_config(DeployServeConfig(run="mine"), CONFIG.task, CONFIG.model)
    faults = find_schema_faults(serve_schema(), yaml.safe_load(text.replace(old, new)))
    assert any(all(name in fault for name in names) for fault in faults), faults


def test_models_that_ray_serve_llm_cannot_serve_are_refused() -> None:
    with refused("task", "classification", names=["`mlflow models serve`"]):
        render_serving_config(DeployServeConfig(run="mine"), "classification", CONFIG.model)
    with refused("model.norm", "post", names=["`pre`"]):
        render_serving_config(DeployServeConfig(run="mine"), CONFIG.task, ModelConfig(norm="post"))
    with refused("min_replicas", 4, names=["max_replicas, 1"]):
        DeployServeConfig(run="mine", min_replicas=4)
