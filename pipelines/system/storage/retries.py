"""Retries transient file-system errors with exponential backoff; raises permanent ones at once.

Transient errors may be gone a second later: a busy or restarting server, a broken connection, a stale handle of NFS. A
missing file, a permission, a wrong key or bucket are permanent, and a retry would only delay the error. Below this layer
object stores' clients resend a single failed request three times; no layer above retries. There are libraries for this, but
this module belongs to the training loop, which imports PyTorch and NumPy alone.

    retry(lambda: system.get_file_info(path))
"""

import errno
import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

MAX_TRIES = 8
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
RETRY_WINDOW_S = 60.0
"""Seconds since the first try; after this time an operation is not tried again; a try in progress may still end."""

_jitter = random.SystemRandom()
"""Differs between processes, also where a training has seeded `random` in all of them, and draws nothing from it."""
_TRANSIENT_ERRNOS = {
    number
    for name in (
        # A server that is busy or restarts; NFS and FUSE report network errors as EIO.
        *("EAGAIN", "EBUSY", "EINTR", "EIO", "EREMOTEIO", "ESTALE", "ETIMEDOUT"),
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EPIPE", "ESHUTDOWN", "ENOTCONN"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH"),
    )
    if (number := getattr(errno, name, None)) is not None
}
_TRANSIENT_STATUSES = {408, 425, 429}
"""HTTP status codes, besides those from 500 on."""
_TRANSIENT_MESSAGES = re.compile(
    # Amazon's, as pyarrow spells them; after NO_SUCH_UPLOAD an earlier try completed the upload, but its answer was lost.
    r"AWS Error (SLOW_DOWN|THROTTLING|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|NETWORK_CONNECTION|REQUEST_TIMEOUT"
    r"|NO_SUCH_UPLOAD)|SlowDown|RequestTimeout\b|InternalError|ServiceUnavailable|NoSuchUpload"
    # By curl's codes: no answer, a partial one, a reset, too slow.
    r"|curlCode: (5|6|7|16|18|28|35|52|55|56|92)\b"
    r"|HTTP status:? \(?(408|425|429|5\d\d)\b"
    # Google's and Azure's.
    r"|\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED)\b|ServerBusy|OperationTimedOut"
    r"|[Cc]onnection (was |has been )?(reset|refused|closed|aborted|broken)|[Bb]roken pipe|[Tt]imed? ?-?out"
    r"|Timeout was reached"
)
_TRANSIENT_CLASSES = {
    *("ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"),  # aiohttp
    *("ConnectionClosedError", "EndpointConnectionError", "HTTPClientError", "IncompleteReadError"),  # botocore
    *("ResponseStreamingError", "ReadTimeoutError", "ConnectTimeoutError"),
    *("ServiceRequestError", "ServiceResponseError", "IncompleteReadError"),  # azure
    *("TransportError", "RetryError"),  # google
    *("ChunkedEncodingError", "ConnectionError", "Timeout", "ProtocolError"),  # requests, urllib3
    *("IncompleteRead", "RemoteDisconnected"),  # http.client
}
"""Error classes of fsspec's clients, by name, since these need not be installed."""


def is_transient(error: BaseException) -> bool:
    """Returns whether the same operation may succeed a moment later."""
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError | IsADirectoryError | NotADirectoryError):
        return False
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT_ERRNOS
    status = _http_status(error)
    if status is not None:
        return status in _TRANSIENT_STATUSES or status >= 500
    if any(kind.__name__ in _TRANSIENT_CLASSES for kind in type(error).__mro__):
        return True
    return isinstance(error, OSError) and _TRANSIENT_MESSAGES.search(str(error)) is not None


def _http_status(error: BaseException) -> int | None:
    """Returns the HTTP status of an error of aiohttp, gcsfs, Azure, requests or botocore; None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    sources = (response, *(getattr(error, name, None) for name in ("status", "status_code", "code")))
    for found in (*sources, getattr(response, "status_code", None)):
        if isinstance(found, int) and 100 <= found < 600:
            return int(found)
    return None


def retry(
    operation: Callable[[], Result],
    *,
    max_tries: int = MAX_TRIES,
    window_s: float = RETRY_WINDOW_S,
    pause_s: float = FIRST_PAUSE_S,
) -> Result:
    """Calls `operation` until it succeeds or fails permanently; returns its result. Raises the last try's error."""
    began = time.monotonic()
    for number in range(1, max_tries + 1):
        try:
            return operation()
        except Exception as error:
            # Doubled each time, with jitter, so that thousands of ranks that failed together do not retry together.
            pause = min(MAX_PAUSE_S, pause_s * 2 ** (number - 1)) * _jitter.uniform(0.5, 1.0)
            if number == max_tries or not is_transient(error) or time.monotonic() - began + pause > window_s:
                raise
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")
