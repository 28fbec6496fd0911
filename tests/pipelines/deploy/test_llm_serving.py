"""What Ray Serve LLM is given of a run: its model's export, lengths and GPUs; and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from raystride.pipelines.config import Config, Lora, Model
from raystride.pipelines.config.deploy import DeployServe
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.deploy.driver import run_deploy
from raystride.pipelines.deploy.llm_serving import FILE, look_at_serving, rendered_serving
from raystride.pipelines.files import Folder
from tests.errors import refused, rejected

CONFIG = Config(model=Model(flavour="llama", layers=2, heads=2, width=16, context=64))


def test_a_run_becomes_an_application(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Folder(f"{tmp_path}/runs/mine").put("config.yaml", to_yaml(CONFIG))
    output = tmp_path / "out"
    flags = ["serve", "--run", "mine", "--storage", f"{tmp_path}/runs", "--gpus", "2", "--output", str(output)]
    assert run_deploy([*flags, "--most-replicas", "3", "--accelerator", "H100"]) == 0
    written = yaml.safe_load((output / FILE).read_text())
    assert written["http_options"]["host"] == "127.0.0.1"
    (model,) = written["applications"][0]["args"]["llm_configs"]
    assert model["model_loading_config"] == {"model_id": "mine", "model_source": f"{tmp_path}/runs/mine/export/hugging_face"}
    assert model["engine_kwargs"] == {"max_model_len": 64, "tensor_parallel_size": 2}
    assert model["deployment_config"]["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 3}
    assert model["accelerator_type"] == "H100"
    said = capsys.readouterr().out
    assert "export --run mine" in said
    assert "--merge" not in said
    assert f"serve deploy {output}/{FILE}" in said
    tuned = replace(CONFIG, model=replace(CONFIG.model, init_from="base"), lora=Lora(rank=2))
    Folder(f"{tmp_path}/runs/mine").put("config.yaml", to_yaml(tuned))
    assert run_deploy([*flags, "--overwrite", "true"]) == 0
    assert "--to hugging_face --merge true\n" in capsys.readouterr().out
    assert run_deploy([*flags, "--run", "none"]) == 2
    assert "there is no such run" in capsys.readouterr().err


def test_a_place_says_where_the_model_lies() -> None:
    text = rendered_serving(DeployServe(run="mine", place="kubernetes"), CONFIG)
    (model,) = _models(text)
    assert not model["model_loading_config"]["model_source"].startswith(str(Path.cwd()))


def test_an_address_stands_there_as_rays_clients_read_it() -> None:
    storage = "s3://key:secret@bucket/runs?region=eu-west-1&endpoint_override=http://minio:9000"
    (model,) = _models(rendered_serving(DeployServe(run="mine", storage=storage), CONFIG))
    assert model["model_loading_config"]["model_source"] == "s3://bucket/runs/mine/export/hugging_face"


def _models(text: str) -> Any:
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
def test_a_wrong_field_is_named(old: str, new: str, names: tuple[str, ...]) -> None:
    text = rendered_serving(DeployServe(run="mine"), CONFIG)
    assert look_at_serving(text)
    with rejected("serve.yaml", *names):
        look_at_serving(text.replace(old, new))


def test_what_cannot_be_served_so_is_refused() -> None:
    with refused("task", "classification", names=["`mlflow models serve`"]):
        rendered_serving(DeployServe(run="mine"), replace(CONFIG, task="classification"))
    with refused("model.norm", "post", names=["`pre`"]):
        rendered_serving(DeployServe(run="mine"), Config(model=Model(norm="post")))
    with refused("least_replicas", 4, names=["most_replicas, 1"]):
        DeployServe(run="mine", least_replicas=4)
