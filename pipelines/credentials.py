"""What of an address may be written down: all of it but passwords, keys and tokens.

Settings are written with `***` in their place. Whoever goes on with them gives the secrets again: on the command line or in
the environment, where `RAYSTRIDE_URIS` holds whole addresses with blanks between. A process knows the secrets of settings
that it was given, so they also go from what other programs say of them.

    masked("s3://AKIA:wJalr@bucket/runs")                     # "s3://***@bucket/runs"
    masked("GET https://host/a.csv?sig=5fQ&page=2 failed")    # "GET https://host/a.csv?sig=***&page=2 failed"
    whole("s3://***@bucket/runs")                             # with its secret again; raises MissingSecret
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

MASK = "***"
URIS = "RAYSTRIDE_URIS"
"""Whole addresses, with blanks between, from which secrets are taken where settings were written without them."""
GIVEN_IN = (URIS, "MLFLOW_TRACKING_URI")
LEAST_VALUE, LEAST_KEY = 6, 16
"""A secret that is shorter stands in half of all words; a user's name that is longer is the first half of a key."""
MLFLOW_LOGIN = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
AWS_LOGIN = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_URI = re.compile(r"[a-zA-Z][a-zA-Z0-9+.\-]*://[^\s'\"<>]+")
# A password should have its slashes encoded, and is understood by some without; `host:5000/a@b` has none.
_LOGIN = re.compile(r"(?<=://)(?:[^\s/?#]+|(?!\[)[^\s/?#@:]*:(?!\d+[/?#])[^@]*)(?=@)")
_PARAMETER = re.compile(
    r"(?<=[?&;#])([\w.\-]*(?:passw|passphrase|pwd|secret|token(?!iz)|signature|credential|odbc_connect"
    r"|(?:api|access|account|private|subscription|shared)[_\-]?key)[\w.\-]*|sig|key|auth|pass|sas)=([^&;#]+)",
    re.IGNORECASE,
)

_logins: dict[tuple[str, str], str] = {}
"""Users with passwords that this process was given, by scheme and host."""
_parameters: dict[tuple[str, str, str], str] = {}
"""Secret parameters, by scheme, host and name."""
_values: set[str] = set()
"""All of these by themselves."""


class MissingSecret(ValueError):
    """An address was written down without its password or key, and nothing has given it again.

    `address` has `***` in place of it; `variables` are those of the environment of which one would do.
    """

    def __init__(self, message: str = "", *, address: str = "", variables: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.address, self.variables = address, tuple(variables)


def masked(text: str) -> str:
    """The text with `***` for the secrets in its addresses."""
    if "://" not in text or not ("@" in text or "=" in text):
        return text
    if re.match(r"[\w+.\-]+://\S*$", text):  # an address alone may hold quotation marks
        return _masked(text)
    return _URI.sub(lambda found: _masked(found[0]), text)


def is_masked(uri: str) -> bool:
    """Whether the address was written without its secrets."""
    return f"://{MASK}@" in uri or ("://" in uri and f"={MASK}" in uri)


def masked_all(value: Any) -> Any:
    """The same of a setting's value, and of all texts in it."""
    return _changed(value, masked)


def hidden(text: str) -> str:
    """The text without any secret that this process knows, for what is said to people: not only in addresses."""
    text = masked(text)
    for value in _values:
        text = text.replace(value, MASK)
    return text


def stripped(value: Any) -> Any:
    """A setting's value as if its addresses had been given without secrets, which are then taken from the environment."""
    return _changed(value, _stripped)


def public(uri: str) -> str:
    """The address without secrets and without a user, as a link that one can follow."""
    uri = _stripped(uri)
    host = urlsplit(uri).netloc
    return uri.replace(host, host.rpartition("@")[2], 1) if "@" in host else uri


def note(uri: str) -> None:
    """Has this process know the secrets of an address, if it has any."""
    if is_masked(uri) or (shown := masked(uri)) == uri:
        return
    scheme, host = _host(shown)
    if (login := _LOGIN.search(uri)) and f"{MASK}@" in shown:
        _logins[scheme, host] = login[0]
        user, _, password = login[0].partition(":")
        _remember(password or user, *([user] if len(user) >= LEAST_KEY else []))
    for name, value in _PARAMETER.findall(uri):
        _parameters[scheme, host, name] = value
        _remember(value)


def whole(uri: str, logins: Sequence[str] = ()) -> str:
    """The address with the secrets that it was written without.

    `logins` are variables of the environment of which one will do instead, as for S3 those that AWS's programs know. Raises
    MissingSecret.
    """
    if not is_masked(uri):
        return uri
    for name in GIVEN_IN:
        for given in os.environ.get(name, "").split():
            note(given)
    scheme, host = _host(masked(uri))
    if f"://{MASK}@" in uri and (login := _logins.get((scheme, host))):
        uri = uri.replace(f"://{MASK}@", f"://{login}@", 1)
    uri = _PARAMETER.sub(lambda found: _filled(found, scheme, host), uri)
    if f"://{MASK}@" in uri and _has_login(scheme, logins):
        uri = uri.replace(f"://{MASK}@", "://", 1)
    if is_masked(uri):
        variables = (*logins, *(AWS_LOGIN[:1] if scheme.startswith("s3") and not logins else ()))
        raise MissingSecret(
            f"the password or key of {uri} is not kept with the settings: give the whole address again, on the command line "
            f"or in {URIS}" + (f", or set {', '.join(variables)}" if variables else ""),
            address=uri,
            variables=(URIS, *variables),
        )
    return uri


def conceal(error: BaseException) -> None:
    """Takes all secrets that this process knows out of an exception's texts, and of those that led to it."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        if (each := left.pop()) is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.args = tuple(hidden(part) if isinstance(part, str) else part for part in each.args)
        for name in ("filename", "strerror"):
            if isinstance(text := getattr(each, name, None), str) and hidden(text) != text:
                setattr(each, name, hidden(text))
        left += [each.__cause__, each.__context__]


def _changed(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _changed(item, change) for key, item in value.items()}
    return type(value)(_changed(item, change) for item in value) if isinstance(value, list | tuple) else value


def _masked(uri: str) -> str:
    head = uri.partition("://")[0]
    login = _LOGIN.search(uri)
    # A user alone is a token where a browser would show it; elsewhere it is a container, or an account.
    if login and (":" in login[0] or head.lower() in ("http", "https")):
        uri = f"{uri[: login.start()]}{MASK}{uri[login.end() :]}"
    return _PARAMETER.sub(rf"\1={MASK}", uri)


def _stripped(uri: str) -> str:
    if not is_masked(shown := masked(uri)):
        return uri
    shown = re.sub(rf"([?&;#])[\w.\-]+={re.escape(MASK)}", r"\1", shown.replace(f"://{MASK}@", "://"))
    return re.sub(r"([?&;#])[&;]+", r"\1", shown).rstrip("?&;#")


def _filled(found: re.Match[str], scheme: str, host: str) -> str:
    """A parameter of an address, with its value again where that is known."""
    return f"{found[1]}={_parameters.get((scheme, host, found[1]), MASK)}" if found[2] == MASK else found[0]


def _host(shown: str) -> tuple[str, str]:
    """Scheme and host of an address whose secrets are masked."""
    scheme, _, rest = shown.partition("://")
    return scheme.lower(), re.split(r"[/?#]", rest.removeprefix(f"{MASK}@"), maxsplit=1)[0]


def _remember(*values: str) -> None:
    _values.update(value for each in values for value in (each, unquote(each)) if len(value) >= LEAST_VALUE)


def _has_login(scheme: str, logins: Sequence[str]) -> bool:
    """Whether the environment has what programs of that scheme log in with."""
    if scheme.startswith("s3"):
        logins = (*logins, *AWS_LOGIN)
        if (Path.home() / ".aws" / "credentials").exists():
            return True
    return any(os.environ.get(name) for name in logins)
