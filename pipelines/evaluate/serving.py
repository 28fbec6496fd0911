"""A language model behind OpenAI's protocol: `transformers serve` with token authentication.

The engine is that of `transformers`: this builds its application as its command does, requires a token of every request,
and listens on a socket of its own. Requests name the model by the run's name.

    served = Server(exported, "tickets", token="...", device="cpu")
    with listen_on("127.0.0.1", 0) as socket:
        served.run(socket)                                    # until SIGINT or SIGTERM
"""

import os
import socket as sockets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raystride.pipelines.config import SettingError
from raystride.pipelines.evaluate.middleware import ModelList, TokenRequired
from raystride.pipelines.storage.folder import Folder

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
        guarded: Any = TokenRequired(ModelList(application, name), token)
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


def _link_model(exported: Folder, place: Path) -> None:
    """Links or downloads the model's folder under its name."""
    if exported.local:
        place.symlink_to(exported.local, target_is_directory=True)
        return
    place.mkdir()
    for name in exported.names():
        exported.download(name, place / name)
