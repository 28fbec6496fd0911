"""`raystride deploy serve`: a run's model on GPUs by Ray Serve LLM, whose engine is vLLM.

A configuration for `serve deploy`, with the model's export below the storage, checked field by field before it is written.

    text = rendered_serving(settings, config)                 # YAML with one application
    look_at_serving(text)                                     # ["serve.yaml: fields of Ray Serve and its LLMConfig"]
"""

from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from raystride.pipelines.commands import pasted
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.combinations import DECODERS
from raystride.pipelines.config.deploy import DeployServe
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.credentials import stripped
from raystride.pipelines.deploy.plan import find_place
from raystride.pipelines.deploy.render import write
from raystride.pipelines.deploy.schemas import FileError
from raystride.pipelines.files import Folder
from raystride.pipelines.stores import address_below, split

FILE = "serve.yaml"
_COUNT = {"type": "integer", "minimum": 1}
_TEXT = {"type": "string", "minLength": 1}


def _fields(*needed: str, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(needed), "additionalProperties": False}


_LLM_CONFIG = _fields(
    "model_loading_config",
    model_loading_config=_fields("model_id", model_id=_TEXT, model_source=_TEXT, tokenizer_source=_TEXT),
    llm_engine={"enum": ["vLLM", "SGLang"]},
    engine_kwargs={"type": "object"},
    accelerator_type=_TEXT,
    placement_group_config={"type": "object"},
    runtime_env={"type": "object"},
    lora_config={"type": "object"},
    deployment_config=_fields(
        name=_TEXT,
        num_replicas=_COUNT,
        ray_actor_options={"type": "object"},
        max_ongoing_requests=_COUNT,
        max_queued_requests={"type": "integer"},
        autoscaling_config={"type": "object"},
        health_check_period_s={"type": "number"},
        health_check_timeout_s={"type": "number"},
        graceful_shutdown_timeout_s={"type": "number"},
    ),
    server_cls=_TEXT,
    experimental_configs={"type": "object"},
    log_engine_metrics={"type": "boolean"},
)
"""`ray.serve.llm.LLMConfig` of Ray 2.60 and 2.61, which cannot be imported without what Ray Serve and vLLM bring along."""
_APPLICATION = _fields(
    "name",
    "import_path",
    "args",
    name=_TEXT,
    import_path={"const": "ray.serve.llm:build_openai_app"},
    route_prefix={"type": "string", "pattern": "^/"},
    args=_fields("llm_configs", llm_configs={"type": "array", "items": _LLM_CONFIG, "minItems": 1}),
)
_SCHEMA = _fields(
    "applications",
    proxy_location={"enum": ["Disabled", "HeadOnly", "EveryNode"]},
    http_options=_fields(host=_TEXT, port={"type": "integer", "minimum": 1, "maximum": 65535}),
    applications={"type": "array", "items": _APPLICATION, "minItems": 1},
)
"""Of Ray Serve's own configuration, what is written here."""


def deploy_serving(settings: DeployServe) -> list[str]:
    """Renders, checks and writes; the lines that say so. Raises SettingError."""
    storage = Folder.at(settings.storage)
    folder = storage / settings.run
    if not folder.exists("config.yaml"):
        raise SettingError(
            f"--run {settings.run}: there is no such run in {storage}; `raystride runs list` shows them",
            setting="run",
            value=settings.run,
        )
    config = from_yaml(Config, folder.read("config.yaml").decode())
    text = rendered_serving(settings, config)
    looked = look_at_serving(text)
    chosen = f"--checkpoint {settings.checkpoint} --average {settings.average} --to hugging_face"
    chosen += " --merge true" if config.lora.rank else ""
    output = Path(settings.output or f"serve-{settings.run}")
    write({FILE: text}, output, overwrite=settings.overwrite)
    return [
        *looked,
        f"results  {output}/{FILE}",
        f"next     {pasted('export', settings.run, str(storage), chosen)}",
        f"next     serve deploy {output}/{FILE}   # on a Ray cluster with ray[serve,llm]; see docs/serving.md",
    ]


def rendered_serving(settings: DeployServe, config: Config) -> str:
    """The configuration. Raises SettingError for a model that is no decoder, or that its layout cannot say."""
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
        raise SettingError.of(error) from error
    place = find_place(settings.place) if settings.place else None
    storage = place.storage if place else Folder.at(settings.storage).uri
    engine: dict[str, Any] = {"max_model_len": config.model.context, "tensor_parallel_size": settings.gpus}
    replicas = {"min_replicas": settings.least_replicas, "max_replicas": settings.most_replicas}
    model: dict[str, Any] = {
        "model_loading_config": {
            "model_id": settings.run,
            # Ray's own clients read it, which take options and logins from their environment, and not from an address.
            "model_source": split(stripped(address_below(storage, f"{settings.run}/export/hugging_face")))[0],
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
    # Ray Serve asks for no token: it is reached through the head's own host, or by who opens it knowing that.
    whole = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": settings.port},
        "applications": [application],
    }
    return yaml.safe_dump(whole, sort_keys=False)


def look_at_serving(text: str) -> list[str]:
    """Looks at every field; a line that says so. Raises SettingError for one that is unknown or has a wrong value."""
    errors = sorted(Draft202012Validator(_SCHEMA).iter_errors(yaml.safe_load(text)), key=lambda error: error.json_path)
    if errors:
        faults = [f"{error.json_path.removeprefix('$.')}: {error.message}" for error in errors]
        raise FileError("; ".join(f"{FILE}: {fault}" for fault in faults), file=FILE, faults=faults)
    return [f"{FILE}: fields of Ray Serve and of its LLMConfig"]
