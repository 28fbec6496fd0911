"""`raystride deploy serve`: writes a configuration that serves a run's model on GPUs with Ray Serve LLM and vLLM.

The configuration is for `serve deploy`. It reads the model's export from the storage, and every field is checked before the
file is written.

    text = render_serving_config(settings, config)            # YAML with one application
    check_serving_config(text)                                # ["serve.yaml: fields of Ray Serve and of its LLMConfig"]
"""

from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.combinations import DECODERS
from raystride.pipelines.config.deploy import DeployServeConfig
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.launch.deploy.plan import load_place
from raystride.pipelines.launch.deploy.render import write_files
from raystride.pipelines.launch.deploy.validate import FileError
from raystride.pipelines.system.commands import shell_command
from raystride.pipelines.system.credentials import strip_credentials
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.object_stores import join_address, split_options

FILE_NAME = "serve.yaml"
_COUNT_SCHEMA = {"type": "integer", "minimum": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}


def _object_schema(*required: str, **fields: Any) -> dict[str, Any]:
    """Returns the JSON schema of an object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


_LLM_CONFIG_SCHEMA = _object_schema(
    "model_loading_config",
    model_loading_config=_object_schema(
        "model_id", model_id=_TEXT_SCHEMA, model_source=_TEXT_SCHEMA, tokenizer_source=_TEXT_SCHEMA
    ),
    llm_engine={"enum": ["vLLM", "SGLang"]},
    engine_kwargs={"type": "object"},
    accelerator_type=_TEXT_SCHEMA,
    placement_group_config={"type": "object"},
    runtime_env={"type": "object"},
    lora_config={"type": "object"},
    deployment_config=_object_schema(
        name=_TEXT_SCHEMA,
        num_replicas=_COUNT_SCHEMA,
        ray_actor_options={"type": "object"},
        max_ongoing_requests=_COUNT_SCHEMA,
        max_queued_requests={"type": "integer"},
        autoscaling_config={"type": "object"},
        health_check_period_s={"type": "number"},
        health_check_timeout_s={"type": "number"},
        graceful_shutdown_timeout_s={"type": "number"},
    ),
    server_cls=_TEXT_SCHEMA,
    experimental_configs={"type": "object"},
    log_engine_metrics={"type": "boolean"},
)
"""Fields of `ray.serve.llm.LLMConfig` in Ray 2.60 and 2.61; the class itself needs the packages of Ray Serve and vLLM."""
_APPLICATION_SCHEMA = _object_schema(
    "name",
    "import_path",
    "args",
    name=_TEXT_SCHEMA,
    import_path={"const": "ray.serve.llm:build_openai_app"},
    route_prefix={"type": "string", "pattern": "^/"},
    args=_object_schema("llm_configs", llm_configs={"type": "array", "items": _LLM_CONFIG_SCHEMA, "minItems": 1}),
)
_SCHEMA = _object_schema(
    "applications",
    proxy_location={"enum": ["Disabled", "HeadOnly", "EveryNode"]},
    http_options=_object_schema(host=_TEXT_SCHEMA, port={"type": "integer", "minimum": 1, "maximum": 65535}),
    applications={"type": "array", "items": _APPLICATION_SCHEMA, "minItems": 1},
)
"""The part of Ray Serve's configuration that is written here."""


def write_serving_config(settings: DeployServeConfig) -> list[str]:
    """Renders, checks and writes the configuration. Returns the lines to print. Raises SettingError."""
    storage = Folder.from_uri(settings.storage)
    folder = storage / settings.run
    if not folder.exists("config.yaml"):
        raise SettingError(
            f"--run {settings.run}: there is no such run in {storage}; `raystride runs list` shows them",
            setting="run",
            value=settings.run,
        )
    config = from_yaml(Config, folder.read("config.yaml").decode())
    text = render_serving_config(settings, config)
    checks = check_serving_config(text)
    flags = f"--checkpoint {settings.checkpoint} --average {settings.average} --to hugging_face"
    flags += " --merge true" if config.lora.rank else ""
    output = Path(settings.output or f"serve-{settings.run}")
    write_files({FILE_NAME: text}, output, overwrite=settings.overwrite)
    return [
        *checks,
        f"results  {output}/{FILE_NAME}",
        f"next     {shell_command('export', settings.run, str(storage), flags)}",
        f"next     serve deploy {output}/{FILE_NAME}   # on a Ray cluster with ray[serve,llm]; see docs/serving.md",
    ]


def render_serving_config(settings: DeployServeConfig, config: Config) -> str:
    """Returns the configuration as YAML. Raises SettingError if the model is no decoder or has no Hugging Face layout."""
    from raystride.model.hugging_face_config import model_type

    if config.task not in DECODERS:
        raise SettingError(
            f"task is {config.task!r}: Ray Serve LLM serves decoders; `mlflow models serve` serves this one",
            setting="task",
            value=config.task,
        )
    try:
        model_type(config.model)
    except ValueError as error:
        raise SettingError.from_error(error) from error
    place = load_place(settings.place) if settings.place else None
    storage = place.storage if place else Folder.from_uri(settings.storage).uri
    engine: dict[str, Any] = {"max_model_len": config.model.context, "tensor_parallel_size": settings.gpus}
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


def check_serving_config(text: str) -> list[str]:
    """Checks every field. Returns a line for each check. Raises FileError for an unknown field or a wrong value."""
    errors = sorted(Draft202012Validator(_SCHEMA).iter_errors(yaml.safe_load(text)), key=lambda error: error.json_path)
    if errors:
        faults = [f"{error.json_path.removeprefix('$.')}: {error.message}" for error in errors]
        raise FileError("; ".join(f"{FILE_NAME}: {fault}" for fault in faults), file=FILE_NAME, faults=faults)
    return [f"{FILE_NAME}: fields of Ray Serve and of its LLMConfig"]
