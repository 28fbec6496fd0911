"""`raystride deploy serve`: writes a configuration that serves a run's model on GPUs with Ray Serve LLM and vLLM.

The configuration is for `serve deploy`. It reads the model's export from the storage.

    text = render_serving_config(settings, config)            # YAML with one application
"""

from pathlib import Path
from typing import Any

import yaml

from raystride.pipelines.config import ModelConfig, SettingError
from raystride.pipelines.config.combinations import DECODERS
from raystride.pipelines.config.deploy import DeployServeConfig
from raystride.pipelines.config.stored_run import missing_run, read_settings
from raystride.pipelines.launch.deploy.plan import load_place
from raystride.pipelines.launch.deploy.render import write_files
from raystride.pipelines.system.commands import shell_command
from raystride.pipelines.system.credentials import strip_credentials
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.object_stores import join_address, split_options

FILE_NAME = "serve.yaml"


def write_serving_config(settings: DeployServeConfig) -> list[str]:
    """Renders and writes the configuration. Returns the lines to print. Raises SettingError."""
    storage = Folder.from_uri(settings.storage)
    folder = storage / settings.run
    if not folder.exists("config.yaml"):
        raise missing_run(
            storage, settings.run, [name for name in storage.names() if (storage / name).exists("config.yaml")]
        )
    config = read_settings(folder)
    text = render_serving_config(settings, config.task, config.model)
    flags = f"--checkpoint {settings.checkpoint} --average {settings.average} --to hugging_face"
    flags += " --merge true" if config.lora.rank else ""
    output = Path(settings.output or f"serve-{settings.run}")
    write_files({FILE_NAME: text}, output, overwrite=settings.overwrite)
    return [
        f"results  {output}/{FILE_NAME}",
        f"next     {shell_command('export', settings.run, str(storage), flags)}",
        f"next     serve deploy {output}/{FILE_NAME}   # on a Ray cluster with ray[serve,llm]; see docs/serving.md",
    ]


def render_serving_config(settings: DeployServeConfig, task: str, model_config: ModelConfig) -> str:
    """Returns the configuration as YAML. Raises SettingError if the model is no decoder or has no Hugging Face layout."""
    from raystride.model.hugging_face_config import model_type

    if task not in DECODERS:
        raise SettingError(
            f"task is {task!r}: Ray Serve LLM serves decoders; `mlflow models serve` serves this one",
            setting="task",
            value=task,
        )
    try:
        model_type(model_config)
    except ValueError as error:
        raise SettingError.from_error(error) from error
    place = load_place(settings.place) if settings.place else None
    storage = place.storage if place else Folder.from_uri(settings.storage).uri
    engine: dict[str, Any] = {"max_model_len": model_config.context, "tensor_parallel_size": settings.gpus}
    replicas = {"min_replicas": settings.min_replicas, "max_replicas": settings.max_replicas}
    model: dict[str, Any] = {
        "model_loading_config": {
            "model_id": settings.run,
            # Ray's own clients read this address; they take options and credentials from their environment.
            "model_source": split_options(strip_credentials(join_address(storage, f"{settings.run}/export/hugging_face")))[
                0
            ],
        },
        "engine_kwargs": engine,
        "deployment_config": {"autoscaling_config": replicas},
    }
    if settings.accelerator:
        model["accelerator_type"] = settings.accelerator
    application = {
        "name": settings.run,
        "import_path": "ray.serve.llm:build_openai_app",
        "route_prefix": "/",
        "args": {"llm_configs": [model]},
    }
    # Ray Serve requires no token, so it listens on the head's loopback address alone; opening it is up to the user.
    serve_config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": settings.port},
        "applications": [application],
    }
    return yaml.safe_dump(serve_config, sort_keys=False)
