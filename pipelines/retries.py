"""What a file system does badly for a while is done again, here and nowhere else; what it refuses is raised at once.

Transient is what the same request may not meet a second later: a busy or restarting server, a broken connection, a stale
handle of NFS. A file that is not there, a permission, a wrong key or bucket are answers, and asking again would only delay
them. Below this layer object stores' clients send a single failed request again by themselves, three times; above it nobody
retries. There are libraries for this; the training loop, which goes through here, imports with PyTorch and NumPy alone.

    retried(lambda: system.get_file_info(path))
"""

import errno
import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

TRIES = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
WITHIN_S = 60.0
"""Seconds after its beginning in which an operation is tried again; a try that is under way then may still end."""

_NUMBERS = {
    number
    for name in (
        # A server that is busy or restarts; NFS and FUSE pass on what happened on the way as EIO.
        *("EAGAIN", "EBUSY", "EINTR", "EIO", "EREMOTEIO", "ESTALE", "ETIMEDOUT"),
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EPIPE", "ESHUTDOWN", "ENOTCONN"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH"),
    )
    if (number := getattr(errno, name, None)) is not None
}
_STATUSES = {408, 425, 429}
"""Of HTTP, besides those from 500 on."""
_TEXTS = re.compile(
    # Amazon's, as pyarrow spells them; an upload that is unknown was completed by a try whose answer was lost.
    r"AWS Error (SLOW_DOWN|THROTTLING|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|NETWORK_CONNECTION|REQUEST_TIMEOUT"
    r"|NO_SUCH_UPLOAD)|SlowDown|RequestTimeout\b|InternalError|ServiceUnavailable|NoSuchUpload"
    # By curl's numbers: no answer, a partial one, a reset, too slow.
    r"|curlCode: (5|6|7|16|18|28|35|52|55|56|92)\b"
    r"|HTTP status:? \(?(408|425|429|5\d\d)\b"
    # Google's and Azure's.
    r"|\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED)\b|ServerBusy|OperationTimedOut"
    r"|[Cc]onnection (was |has been )?(reset|refused|closed|aborted|broken)|[Bb]roken pipe|[Tt]imed? ?-?out"
    r"|Timeout was reached"
)
_CLASSES = {
    *("ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"),  # aiohttp
    *("ConnectionClosedError", "EndpointConnectionError", "HTTPClientError", "IncompleteReadError"),  # botocore
    *("ResponseStreamingError", "ReadTimeoutError", "ConnectTimeoutError"),
    *("ServiceRequestError", "ServiceResponseError", "IncompleteReadError"),  # azure
    *("TransportError", "RetryError"),  # google
    *("ChunkedEncodingError", "ConnectionError", "Timeout", "ProtocolError"),  # requests, urllib3
    *("IncompleteRead", "RemoteDisconnected"),  # http.client
}
"""Errors of the clients that fsspec goes through, by name, since none of them need be installed."""


def transient(error: BaseException) -> bool:
    """Whether the same may go well a moment later."""
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError | IsADirectoryError | NotADirectoryError):
        return False
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NUMBERS
    status = _status(error)
    if status is not None:
        return status in _STATUSES or status >= 500
    if any(kind.__name__ in _CLASSES for kind in type(error).__mro__):
        return True
    return isinstance(error, OSError) and _TEXTS.search(str(error)) is not None


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error carries, as aiohttp, gcsfs, Azure's, requests' and botocore's do."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    sources = (response, *(getattr(error, name, None) for name in ("status", "status_code", "code")))
    for found in (*sources, getattr(response, "status_code", None)):
        if isinstance(found, int) and 100 <= found < 600:
            return int(found)
    return None


def retried(
    operation: Callable[[], Result],
    *,
    tries: int = TRIES,
    within_s: float = WITHIN_S,
    pause_s: float = FIRST_PAUSE_S,
) -> Result:
    """What `operation` returns, which is called again while it fails for the moment. Raises what its last try raised."""
    began = time.monotonic()
    for number in range(1, tries + 1):
        try:
            return operation()
        except Exception as error:
            # Doubled each time, and drawn, so that thousands of ranks which failed together do not come back together.
            pause = min(LONGEST_PAUSE_S, pause_s * 2 ** (number - 1)) * random.uniform(0.5, 1.0)
            if number == tries or not transient(error) or time.monotonic() - began + pause > within_s:
                raise
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")
