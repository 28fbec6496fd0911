"""ASGI middlewares of the server: every request needs the token, and the list of models has the run's one.

application = TokenRequired(ModelList(application, "tickets"), token="...")
"""

import hmac
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

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
        error = {"error": {"message": message, "type": "invalid_request_error", "code": "invalid_api_key"}}
        await _send_json(send, 401, error, (b"www-authenticate", b"Bearer"))


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
            error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
            await _send_json(send, 404, {"error": error})


async def _send_json(send: Any, status: int, content: object, *headers: tuple[bytes, bytes]) -> None:
    typed = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": status, "headers": [typed, *headers]})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
