"""A language model behind OpenAI's protocol: `transformers serve` with token authentication.

The engine is that of `transformers`: this builds its application as its command does, requires a token of every request,
and listens on a socket of its own. Requests name the model by the run's name, the only one in the list of models.

    served = Server(exported, "tickets", token="...", device="cpu")
    with listen_on("127.0.0.1", 0) as socket:
        served.run(socket)                                    # until SIGINT or SIGTERM
"""

import hmac
import json
import os
import socket as sockets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raystride.pipelines.config import SettingError
from raystride.pipelines.system.storage.folder import Folder

MODELS_PATH = "/v1/models"
HEALTH_PATH = "/health"
"""The readiness probe; needs no token."""
Application = Callable[[Any, Any, Any], Awaitable[None]]


class TokenRequired:
    """An ASGI middleware that refuses requests without the token (401)."""

    def __init__(self, application: Application, token: str) -> None:
        self._application, self._expected = application, f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one connection."""
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "lifespan" or scope.get("path") == HEALTH_PATH or hmac.compare_digest(given, self._expected):
            await self._application(scope, receive, send)
            return
        message = "send the token that `raystride serve` printed or was given, as `Authorization: Bearer TOKEN`"
        await _refuse(send, 401, message, (b"www-authenticate", b"Bearer"), code="invalid_api_key")


class ModelList:
    """An ASGI middleware that answers `/v1/models` and `/v1/models/NAME`, as OpenAI's protocol has them, with one model.

    The list of transformers is that of its cache; the cache's folder may not exist.
    """

    def __init__(self, application: Application, name: str) -> None:
        self._application = application
        self._model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "raystride"}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one connection."""
        path = scope.get("path", "").rstrip("/")
        if scope["type"] != "http" or scope["method"] != "GET" or not f"{path}/".startswith(f"{MODELS_PATH}/"):
            await self._application(scope, receive, send)
            return
        name = path.removeprefix(MODELS_PATH).removeprefix("/")
        if not name:
            await _send_json(send, 200, {"object": "list", "data": [self._model]})
        elif name == self._model["id"]:
            await _send_json(send, 200, self._model)
        else:
            message = f"there is no model {name!r}; this server has {self._model['id']!r}"
            await _refuse(send, 404, message, param="model", code="model_not_found")


class CheckedRequests:
    """An ASGI middleware that refuses (400) questions which the engine would answer otherwise than asked, or fail on."""

    def __init__(self, application: Application, *, has_chat: bool) -> None:
        self._application, self._has_chat = application, has_chat

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one connection."""
        kind = QUESTIONS.get(scope.get("path", "").rstrip("/"))
        if scope["type"] != "http" or scope["method"] != "POST" or kind is None:
            await self._application(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if (refused := refuse_question(kind, body, has_chat=self._has_chat)) is not None:
            parameter, reason = refused
            await _refuse(send, 400, f"{parameter} {reason}", param=parameter, code=None)
            return
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Any:
            return waiting.pop() if waiting else await receive()

        await self._application(scope, receive_again, send)


QUESTIONS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
"""The paths of questions, with what each must have."""


def _is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (lambda value: isinstance(value, str) and bool(value), "must be a text that is not empty, one a request"),
    "messages": (lambda value: isinstance(value, list) and bool(value), "must be a list of messages that is not empty"),
    "max_tokens": (_is_count, "must be a whole number of at least 1"),
    "max_completion_tokens": (_is_count, "must be a whole number of at least 1"),
    "temperature": (_is_number(0, 2), "must be a number from 0 to 2"),
    "top_p": (_is_number(1e-9, 1), "must be a number above 0, and at most 1"),
    "seed": (lambda value: isinstance(value, int), "must be a whole number"),
    "stop": (_is_stop, "must be a text, or a list of texts, none of them empty"),
    "stream": (lambda value: isinstance(value, bool), "must be true or false"),
    "frequency_penalty": (_is_number(-2, 2), "must be a number from -2 to 2"),
    "presence_penalty": (_is_number(0, 0), "is not supported: leave it out"),
    "n": (lambda value: value == 1, "must be 1: ask again for another answer"),
    "best_of": (lambda value: value == 1, "must be 1"),
    "echo": (lambda value: value is False, "is not supported: leave it out"),
    "logprobs": (lambda value: value is False, "is not supported: leave it out"),
    "top_logprobs": (lambda value: value == 0, "is not supported: leave it out"),
}
"""For each part of a question which values are taken, besides null, and the sentence about the others."""


def refuse_question(kind: str, body: bytes, *, has_chat: bool) -> tuple[str, str] | None:
    """Returns the name of the part of a question that cannot be answered as asked, and why; None where all can.

    `kind`: `prompt` or `messages`, what it must have; `has_chat`: whether the model has a chat template.
    """
    try:
        asked = json.loads(body)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        return "body", "must be a JSON object"
    if kind == "messages" and not has_chat:
        return kind, "need a model with a chat template, which this one lacks: ask /v1/completions"
    for name, (is_taken, rule) in RULES.items():
        if (value := asked.get(name)) is None:
            if name == kind:
                return name, rule
        elif not is_taken(value):
            return name, rule
    return None


async def _refuse(send: Any, status: int, message: str, *headers: tuple[bytes, bytes], **about: str | None) -> None:
    """Sends an error in the form of OpenAI's protocol; `about`: its `param` and `code`."""
    await _send_json(send, status, {"error": {"message": message, "type": "invalid_request_error", **about}}, *headers)


async def _send_json(send: Any, status: int, content: object, *headers: tuple[bytes, bytes]) -> None:
    typed = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": status, "headers": [typed, *headers]})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


REQUIRED_PACKAGES = ("transformers", "fastapi", "uvicorn", "openai")
"""Packages of the extra `serve`."""


class Server:
    """A model of an exported folder, loaded and ready to answer."""

    def __init__(self, exported: Folder, name: str, *, token: str, device: str) -> None:
        """Loads the model under `name`, its name in requests. Raises SettingError if a package is missing."""
        require_packages()
        import uvicorn
        from transformers.cli.serving.chat_completion import ChatCompletionHandler
        from transformers.cli.serving.completion import CompletionHandler
        from transformers.cli.serving.model_manager import ModelManager
        from transformers.cli.serving.response import ResponseHandler
        from transformers.cli.serving.server import build_server
        from transformers.cli.serving.systemone import SystemOneHandler
        from transformers.cli.serving.transcription import TranscriptionHandler
        from transformers.cli.serving.utils import GenerationState

        self._place = tempfile.TemporaryDirectory()
        os.chdir(self._place.name)  # transformers takes the relative folder's name as the model's
        _link_model(exported, Path(name))
        self._models = _limit_to_context(ModelManager)(device=device, dtype="auto", force_model=name)
        self._state = GenerationState()
        parts: dict[str, Any] = {"model_manager": self._models, "generation_state": self._state}
        application = build_server(
            self._models,
            ChatCompletionHandler(**parts),
            completion_handler=CompletionHandler(**parts),
            response_handler=ResponseHandler(**parts),
            transcription_handler=TranscriptionHandler(self._models, self._state),
            systemone_handler=SystemOneHandler(**parts),
            generation_state=self._state,
        )
        checked = CheckedRequests(ModelList(application, name), has_chat=_has_chat(exported))
        guarded: Any = TokenRequired(checked, token)
        self._server = uvicorn.Server(uvicorn.Config(guarded, log_level="warning", access_log=False))

    def run(self, listen_on: sockets.socket) -> None:
        """Serves until SIGINT or SIGTERM, then finishes requests in progress."""
        try:
            self._server.run(sockets=[listen_on])
        except KeyboardInterrupt:  # uvicorn raises the signal again once it has stopped
            pass
        finally:
            self._state.shutdown()
            os.chdir("/")
            self._place.cleanup()


def require_packages() -> None:
    """Raises SettingError if a package is missing, with the command that installs all."""
    if missing := [name for name in REQUIRED_PACKAGES if find_spec(name) is None]:
        raise SettingError(f"`raystride serve` needs {', '.join(missing)}: pip install 'raystride[serve]'")


@contextmanager
def listen_on(host: str, port: int) -> Iterator[sockets.socket]:
    """Yields a listening socket, closed at the end of the block. Raises SettingError if it cannot listen."""
    try:
        family, kind, _, _, address = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)[0]
        listener = sockets.socket(family, kind)
        listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise SettingError(f"--host {host} --port {port}: {error}", setting="host", value=host) from error
    with listener:
        listener.listen()
        yield listener


def _limit_to_context(manager: Any) -> Any:
    """Returns the model manager's class with models that write no further than their context, and refuse longer prompts."""
    from fastapi import HTTPException

    class Bounded(manager):  # type: ignore[misc]
        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            model = super()._load_model(*args, **kwargs)
            write, context = model.generate, model.config.max_position_embeddings

            def generate(*inputs: Any, generation_config: Any, **more: Any) -> Any:
                length = (inputs[0] if inputs else more["input_ids"]).shape[-1]
                if length >= context:
                    raise HTTPException(400, f"the prompt has {length} tokens, and the model's context {context}")
                max_tokens = generation_config.max_new_tokens or context
                generation_config.max_new_tokens = min(max_tokens, context - length)
                return write(*inputs, generation_config=generation_config, **more)

            model.generate = generate
            return model

    return Bounded


def _has_chat(exported: Folder) -> bool:
    return exported.exists("chat_template.jinja") or "chat_template" in exported.read_json("tokenizer_config.json")


def _link_model(exported: Folder, place: Path) -> None:
    """Links or downloads the model's folder under its name."""
    if exported.local:
        place.symlink_to(exported.local, target_is_directory=True)
        return
    place.mkdir()
    for name in exported.names():
        exported.download(name, place / name)
