"""Transient errors are retried a limited number of times; permanent ones are raised at once."""

import errno
import http.client
import os

import pytest

from raystride.pipelines.system.storage.retries import MAX_TRIES, is_transient, retry


class _Answer(Exception):
    """An error of a client that carries what the server said, as those of gcsfs, aiohttp and Azure do."""

    def __init__(self, **attributes: object) -> None:
        super().__init__("the server said no")
        self.__dict__.update(attributes)


class EndpointConnectionError(Exception):
    """As botocore calls it."""


class Forbidden(EndpointConnectionError):
    """A class that a client might derive from it."""

    status = 403


SAID = "When reading information for key 'x' in bucket 'b': AWS Error {} during HeadObject operation: {}"
PASSES = [
    *(OSError(number, os.strerror(number)) for number in (errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EIO)),
    *(ConnectionResetError(), TimeoutError(), http.client.IncompleteRead(b""), EndpointConnectionError()),
    OSError(SAID.format("NETWORK_CONNECTION", "curlCode: 7, Could not connect to server")),
    OSError(SAID.format("NETWORK_CONNECTION", "curlCode: 28, Timeout was reached; Details: Operation too slow.")),
    OSError(SAID.format("SLOW_DOWN", "Please reduce your request rate.")),
    OSError(SAID.format("UNKNOWN (HTTP status 503)", "No response body.")),
    OSError(SAID.format("NO_SUCH_UPLOAD", "The specified upload does not exist.")),
    OSError("google::cloud::Status(UNAVAILABLE: Permanent error)"),
    *(_Answer(status=429), _Answer(status_code=503), _Answer(code=500)),
    _Answer(response={"ResponseMetadata": {"HTTPStatusCode": 500}}),
]
STAYS = [
    *(FileNotFoundError(2, "none"), PermissionError(13, "no"), IsADirectoryError(21, "folder")),
    *(OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ENAMETOOLONG)),
    OSError(SAID.format("ACCESS_DENIED", "No response body.")),
    OSError(SAID.format("NO_SUCH_BUCKET", "The specified bucket does not exist")),
    OSError(SAID.format("SIGNATURE_DOES_NOT_MATCH", "Check your key and signing method.")),
    OSError(SAID.format("INVALID_ACCESS_KEY_ID", "does not exist in our records.")),
    *(ValueError("no JSON"), KeyError("x"), Forbidden(), _Answer(status=404), _Answer(status_code=401)),
]


@pytest.mark.parametrize("error", PASSES, ids=repr)
def test_what_may_pass(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize("error", STAYS, ids=repr)
def test_what_stays(error: Exception) -> None:
    assert not is_transient(error)


class _Failing:
    """Fails some times, and then returns how often it was called."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error, self.calls = times, error, 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return self.calls


def test_what_passes_is_tried_again() -> None:
    assert retry(_Failing(3, ConnectionResetError()), pause_s=0) == 4


def test_tries_are_bounded() -> None:
    failing = _Failing(100, ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        retry(failing, pause_s=0)
    assert failing.calls == MAX_TRIES


def test_time_is_bounded() -> None:
    failing = _Failing(100, ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        retry(failing, window_s=0.0, pause_s=0.01)
    assert failing.calls == 1


@pytest.mark.parametrize("error", [FileNotFoundError(2, "none"), PermissionError(13, "no"), OSError(errno.ENOSPC, "full")])
def test_an_answer_is_not_asked_for_again(error: OSError) -> None:
    failing = _Failing(1, error)
    with pytest.raises(type(error)):
        retry(failing, pause_s=0)
    assert failing.calls == 1
