"""Redacts passwords, keys and tokens in URIs and texts, and restores them.

Settings are stored with `***` in place of secrets. To resume, a user gives the secrets again: on the command line or in the
environment, in `RAYSTRIDE_URIS`, complete URIs separated by blanks. A process remembers the secrets of its settings, so that
they are also redacted in other programs' messages.

    redact_uris("s3://AKIA:wJalr@bucket/runs")                     # "s3://***@bucket/runs"
    redact_uris("GET https://host/a.csv?sig=5fQ&page=2 failed")    # "GET https://host/a.csv?sig=***&page=2 failed"
    restore_secrets("s3://***@bucket/runs")                        # with its secret again; raises MissingSecret
"""

import os
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

MASK = "***"
URIS_VARIABLE = "RAYSTRIDE_URIS"
"""Complete URIs, separated by blanks: the source of secrets for settings that were stored without them."""
SECRET_SOURCES = (URIS_VARIABLE, "MLFLOW_TRACKING_URI")
MIN_VALUE_LENGTH, MIN_KEY_LENGTH = 6, 16
"""A shorter secret would match in half of all words; a longer user name is the first half of a key."""
MLFLOW_LOGIN = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
AWS_LOGIN = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_URI = re.compile(r"[a-zA-Z][a-zA-Z0-9+.\-]*://[^\s'\"<>]+")
# Slashes in a password should be encoded, but some programs accept plain ones; `host:5000/a@b` has no password.
_LOGIN = re.compile(r"(?<=://)(?:[^\s/?#]+|(?!\[)[^\s/?#@:]*:(?!\d+[/?#])[^@]*)(?=@)")
_PARAMETER = re.compile(
    r"(?<=[?&;#])([\w.\-]*(?:passw|passphrase|pwd|secret|token(?!iz)|signature|credential|odbc_connect"
    r"|(?:api|access|account|private|subscription|shared)[_\-]?key)[\w.\-]*|sig|key|auth|pass|sas)=([^&;#]+)",
    re.IGNORECASE,
)

_logins: dict[tuple[str, str], str] = {}
"""Known logins (`user:password`), by scheme and host."""
_parameters: dict[tuple[str, str, str], str] = {}
"""Known secret query parameters, by scheme, host and name."""
_values: set[str] = set()
"""All known secrets, without context."""


class MissingSecret(ValueError):
    """The secret of a stored URI is unknown to this process.

    `address` has `***` in its place; any one of the environment variables `variables` can provide it.
    """

    def __init__(self, message: str = "", *, address: str = "", variables: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.address, self.variables = address, tuple(variables)


def redact_uris(text: str) -> str:
    """Replaces the secrets in a text's URIs by `***`."""
    if "://" not in text or not ("@" in text or "=" in text):
        return text
    if re.match(r"[\w+.\-]+://\S*$", text):  # a URI by itself may contain quotation marks
        return _redact_uri(text)
    return _URI.sub(lambda found: _redact_uri(found[0]), text)


def is_redacted(uri: str) -> bool:
    """Returns whether a URI's secrets are replaced by `***`."""
    return f"://{MASK}@" in uri or ("://" in uri and f"={MASK}" in uri)


def redact_all_uris(value: Any) -> Any:
    """Applies `redact_uris` to all strings of a nested value, such as a setting."""
    return _map_strings(value, redact_uris)


def redact(text: str) -> str:
    """Redacts all secrets that this process knows, also outside URIs, for messages to people."""
    text = redact_uris(text)
    for value in _values:
        text = text.replace(value, MASK)
    return text


def strip_credentials(value: Any) -> Any:
    """Removes the secrets from all URIs of a nested value, as if they had come from the environment instead."""
    return _map_strings(value, _strip_uri)


def public_uri(uri: str) -> str:
    """Returns the URI without secrets and user, a link to click."""
    uri = _strip_uri(uri)
    host = urlsplit(uri).netloc
    return uri.replace(host, host.rpartition("@")[2], 1) if "@" in host else uri


def remember_secrets(uri: str) -> None:
    """Remembers the secrets of a URI in this process."""
    if is_redacted(uri) or (shown := redact_uris(uri)) == uri:
        return
    scheme, host = _scheme_and_host(shown)
    if (login := _LOGIN.search(uri)) and f"{MASK}@" in shown:
        _logins[scheme, host] = login[0]
        user, _, password = login[0].partition(":")
        _remember_values(password or user, *([user] if len(user) >= MIN_KEY_LENGTH else []))
    for name, value in _PARAMETER.findall(uri):
        _parameters[scheme, host, name] = value
        _remember_values(value)


def restore_secrets(uri: str, logins: Sequence[str] = ()) -> str:
    """Returns the URI with its secrets in place of `***`.

    `logins` are environment variables, any one of which serves instead, as AWS's do for S3. Raises MissingSecret.
    """
    if not is_redacted(uri):
        return uri
    for name in SECRET_SOURCES:
        for given in os.environ.get(name, "").split():
            remember_secrets(given)
    scheme, host = _scheme_and_host(redact_uris(uri))
    if f"://{MASK}@" in uri and (login := _logins.get((scheme, host))):
        uri = uri.replace(f"://{MASK}@", f"://{login}@", 1)
    uri = _PARAMETER.sub(lambda found: _restore_parameter(found, scheme, host), uri)
    if f"://{MASK}@" in uri and _has_login(scheme, logins):
        uri = uri.replace(f"://{MASK}@", "://", 1)
    if is_redacted(uri):
        variables = (*logins, *(AWS_LOGIN[:1] if scheme.startswith("s3") and not logins else ()))
        raise MissingSecret(
            f"the password or key of {uri} is not kept with the settings: give the whole address again, on the command line "
            f"or in {URIS_VARIABLE}" + (f", or set {', '.join(variables)}" if variables else ""),
            address=uri,
            variables=(URIS_VARIABLE, *variables),
        )
    return uri


def redact_exception(error: BaseException) -> None:
    """Redacts all secrets that this process knows in an exception's texts, and in those of its causes and contexts."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        if (exception := left.pop()) is None or id(exception) in seen:
            continue
        seen.add(id(exception))
        exception.args = tuple(redact(part) if isinstance(part, str) else part for part in exception.args)
        for name in ("filename", "strerror"):
            if isinstance(text := getattr(exception, name, None), str) and redact(text) != text:
                setattr(exception, name, redact(text))
        left += [exception.__cause__, exception.__context__]


def _map_strings(value: Any, transform: Any) -> Any:
    if isinstance(value, str):
        return transform(value)
    if isinstance(value, dict):
        return {key: _map_strings(item, transform) for key, item in value.items()}
    return type(value)(_map_strings(item, transform) for item in value) if isinstance(value, list | tuple) else value


def _redact_uri(uri: str) -> str:
    head = uri.partition("://")[0]
    login = _LOGIN.search(uri)
    # A user without a password is a token in a web address; in other schemes it is a container, or an account.
    if login and (":" in login[0] or head.lower() in ("http", "https")):
        uri = f"{uri[: login.start()]}{MASK}{uri[login.end() :]}"
    return _PARAMETER.sub(rf"\1={MASK}", uri)


def _strip_uri(uri: str) -> str:
    if not is_redacted(shown := redact_uris(uri)):
        return uri
    shown = re.sub(rf"([?&;#])[\w.\-]+={re.escape(MASK)}", r"\1", shown.replace(f"://{MASK}@", "://"))
    return re.sub(r"([?&;#])[&;]+", r"\1", shown).rstrip("?&;#")


def _restore_parameter(found: re.Match[str], scheme: str, host: str) -> str:
    """Returns a URI's parameter, with its value restored if that is known."""
    return f"{found[1]}={_parameters.get((scheme, host, found[1]), MASK)}" if found[2] == MASK else found[0]


def _scheme_and_host(shown: str) -> tuple[str, str]:
    """Returns scheme and host of a redacted URI."""
    scheme, _, rest = shown.partition("://")
    return scheme.lower(), re.split(r"[/?#]", rest.removeprefix(f"{MASK}@"), maxsplit=1)[0]


def _remember_values(*values: str) -> None:
    _values.update(value for secret in values for value in (secret, unquote(secret)) if len(value) >= MIN_VALUE_LENGTH)


def _has_login(scheme: str, logins: Sequence[str]) -> bool:
    """Returns whether the environment has a login for programs of that scheme."""
    if scheme.startswith("s3"):
        logins = (*logins, *AWS_LOGIN)
        if os.path.exists(os.path.expanduser("~/.aws/credentials")):
            return True
    return any(os.environ.get(name) for name in logins)
