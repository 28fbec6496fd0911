"""Passwords, keys and tokens of addresses are redacted in files and messages, and restored from the given ones."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import Config, DataConfig, ModelConfig, RecordConfig, SettingError, TokenizerConfig
from raystride.pipelines.config.parse import Parsed, from_yaml, to_yaml
from raystride.pipelines.launch.run_store.location import locate_run
from raystride.pipelines.system import credentials
from raystride.pipelines.system.credentials import (
    MissingSecret,
    public_uri,
    redact,
    redact_exception,
    redact_uris,
    remember_secrets,
    restore_secrets,
    strip_credentials,
)
from raystride.pipelines.system.storage.folder import Folder, resolve_filesystem
from tests.errors import refused

WITH_SECRETS = {
    "https://user:hunter2x@host:5000/path": "https://***@host:5000/path",
    "https://token8c1f@host/path": "https://***@host/path",
    "https://user:p@ss:w0rd@host/": "https://***@host/",
    "https://user:pa'ss@host/": "https://***@host/",
    "postgresql+psycopg2://me:a/b#c@db/x": "postgresql+psycopg2://***@db/x",
    "s3://AKIA:wJalr%2FXUtn@bucket/runs/a": "s3://***@bucket/runs/a",
    "s3://bucket/a?access_key=AKIA&secret_key=wJalr&region=eu": "s3://bucket/a?access_key=***&secret_key=***&region=eu",
    "https://a.blob.core.windows.net/c/x.csv?sv=2024&sig=5fQ%3D&se=1": (
        "https://a.blob.core.windows.net/c/x.csv?sv=2024&sig=***&se=1"
    ),
    "https://h/x?X-Amz-Credential=AK&X-Amz-Signature=9f": "https://h/x?X-Amz-Credential=***&X-Amz-Signature=***",
    "gs://b/x?access_token=ya29#a": "gs://b/x?access_token=***#a",
    "mssql+pyodbc:///?odbc_connect=PWD%3Dx": "mssql+pyodbc:///?odbc_connect=***",
    "simplecache::s3://AKIA:wJalr@bucket/a": "simplecache::s3://***@bucket/a",
}
WITHOUT = [
    "https://host:5000/path@1",
    "http://host:8080/a:b@c",
    "http://[::1]:5000/a@b",
    "sqlite:////tmp/a@b/mlflow.db",
    "abfs://container@account.dfs.core.windows.net/x",
    "hdfs://alice@namenode:9000/x",
    "s3://bucket/a:b@c?region=eu&tokenizer=bpe",
    "s3://bucket/**/*.txt",
    "/data/a=b/key=5@x",
    "python",
    "me@example.org",
]


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that was given no settings yet, by someone without accounts."""
    for name in ("_logins", "_parameters"):
        monkeypatch.setattr(credentials, name, {})
    monkeypatch.setattr(credentials, "_values", set())
    monkeypatch.setenv("HOME", "/nonexistent")
    for name in (*credentials.SECRET_SOURCES, *credentials.AWS_LOGIN, *credentials.MLFLOW_LOGIN):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("uri", "shown"), WITH_SECRETS.items())
def test_what_is_secret_is_masked_and_comes_back(uri: str, shown: str) -> None:
    assert redact_uris(uri) == shown
    assert redact_uris(shown) == shown
    assert "***" not in strip_credentials(uri)
    assert strip_credentials(strip_credentials(uri)) == strip_credentials(uri) == strip_credentials(shown)
    with pytest.raises(MissingSecret) as raised:
        restore_secrets(shown)
    assert (raised.value.address, raised.value.variables[0]) == (shown, "RAYSTRIDE_URIS")
    assert shown in str(raised.value)
    remember_secrets(uri)
    assert restore_secrets(shown) == uri


@pytest.mark.parametrize("uri", WITHOUT)
def test_what_is_not_stays(uri: str) -> None:
    assert redact_uris(uri) == strip_credentials(uri) == restore_secrets(uri) == redact(uri) == uri


@given(st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=6), st.sampled_from("!$^*-_.~"))
def test_no_password_stays(password: str, mark: str) -> None:
    password += mark + "Q7"
    for uri in (f"https://user:{password}@host/a", f"s3://bucket/x?secret_key={password}&region=eu"):
        assert password not in redact_uris(uri)
        assert password not in redact_uris(f"cannot reach '{uri}' (refused), see {uri} or --record.mlflow_uri={uri}")


def test_texts_keep_all_else() -> None:
    text = "GET 'https://u:pw@h/a?sig=x&b=1': 403; see https://docs/x?page=2, s3://b/c"
    assert redact_uris(text) == "GET 'https://***@h/a?sig=***&b=1': 403; see https://docs/x?page=2, s3://b/c"


def test_a_link_has_no_user_either() -> None:
    assert public_uri("https://user:secret@host:5000/path") == "https://host:5000/path"
    assert public_uri("postgresql://user@host/db?password=x") == "postgresql://host/db"
    assert public_uri("sqlite:////tmp/a@b/mlflow.db") == "sqlite:////tmp/a@b/mlflow.db"


def _with_secrets() -> Config:
    return Config(
        storage="s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@bucket/runs",
        data=DataConfig(
            source="https://me:hunter22@data/a.txt?sig=5fQabc",
            validation="source",
            validation_source="https://me:hunter22@data/b.txt",
            test_source="s3://bucket/x?secret_key=wJalrXUtnFEMI",
        ),
        tokenizer=TokenizerConfig(kind="file", file="https://token8c1f@hub/tokenizer.json"),
        model=ModelConfig(init_from="s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@bucket/model"),
        record=RecordConfig(mlflow_uri="https://me:hunter22@tracking"),
    )


SECRETS = ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI", "hunter22", "5fQabc", "token8c1f")


def test_settings_are_written_without_secrets_and_have_them_again() -> None:
    config = _with_secrets()
    text = to_yaml(config) + str(config.flat()) + str(config.fixed_settings()) + str(config.naming_settings())
    assert not [secret for secret in SECRETS if secret in text]
    stored = from_yaml(Config, to_yaml(config))
    assert stored.record.mlflow_uri == "https://***@tracking"
    assert stored.fixed_settings() == config.fixed_settings()
    assert stored.default_run("a") == config.default_run("a")
    assert stored.with_secrets() == config
    assert config.with_secrets() is config


def test_other_keys_are_no_other_settings() -> None:
    config = _with_secrets()
    other = replace(config, model=ModelConfig(init_from="s3://AKIAOTHER:another@bucket/model"))
    plain = replace(config, model=ModelConfig(init_from="s3://bucket/model"))
    assert config.fixed_settings() == other.fixed_settings() == plain.fixed_settings()
    assert config.default_run("a") == other.default_run("a") == plain.default_run("a")


def test_a_secret_that_is_missing_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Config(record=RecordConfig(mlflow_uri="https://***@tracking"))
    with refused("record.mlflow_uri", "https://***@tracking", names=["'https://***@tracking'", "MLFLOW_TRACKING_PASSWORD"]):
        locate_run(Parsed(stored, "run"))
    assert locate_run(Parsed(replace(stored, record=replace(stored.record, mlflow=False)), "run"))
    for name, value, expected in (
        ("MLFLOW_TRACKING_PASSWORD", "hunter22", "https://tracking"),
        ("MLFLOW_TRACKING_URI", "https://me:hunter22@tracking", "https://me:hunter22@tracking"),
        ("RAYSTRIDE_URIS", "s3://a:bcdefg@b https://you:hunter23@tracking", "https://you:hunter23@tracking"),
    ):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            credentials._logins.clear()
            assert locate_run(Parsed(stored, "run"))[0].record.mlflow_uri == expected
    credentials._logins.clear()
    with refused("data.source", "s3://***@bucket/x", names=["'s3://***@bucket/x'", "AWS_ACCESS_KEY_ID"]):
        locate_run(Parsed(Config(data=DataConfig(source="s3://***@bucket/x")), "run"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    assert locate_run(Parsed(Config(data=DataConfig(source="s3://***@bucket/x")), "run"))[0].data.source == "s3://bucket/x"
    with pytest.raises(MissingSecret, match=r"the password or key of https://\*\*\*@host/x is not kept"):
        resolve_filesystem("https://***@host/x")


def test_a_password_is_hidden_as_it_was_given_and_as_it_is_meant() -> None:
    remember_secrets("https://user:p%40ss1word@host/a")
    assert redact("refused p%40ss1word, that is p@ss1word") == "refused ***, that is ***"


def test_a_scheme_in_capitals_is_no_other_host() -> None:
    remember_secrets("https://user:hunter2x@host/a")
    assert restore_secrets("HTTPS://***@host/a") == "HTTPS://user:hunter2x@host/a"


def test_folders_and_errors_say_none(tmp_path: Path) -> None:
    folder = Folder("s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@bucket/runs") / "a"
    assert (str(folder), repr(folder)) == ("s3://***@bucket/runs/a", "Folder('s3://***@bucket/runs/a')")
    assert folder.uri == "s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@bucket/runs/a"
    assert str(SettingError(f"storage is {folder.uri!r}")) == "storage is 's3://***@bucket/runs/a'"
    assert redact("the key AKIAIOSFODNN7EXAMPLE is not known") == "the key *** is not known"
    outer = RuntimeError(f"no {folder.uri}", 7)
    outer.__cause__ = OSError(13, "refused for wJalrXUtnFEMI", folder.uri)
    redact_exception(outer)
    assert outer.args == ("no s3://***@bucket/runs/a", 7)
    assert str(outer.__cause__) == "[Errno 13] refused for ***: 's3://***@bucket/runs/a'"
    handled = RuntimeError("nothing secret")
    handled.__context__ = KeyError("wJalrXUtnFEMI")  # raised while that was handled, `from None` or not
    redact_exception(handled)
    assert handled.__context__.args == ("***",)


def test_whoever_is_sent_settings_knows_what_not_to_say(tmp_path: Path) -> None:
    """A worker has them by pickle, which makes no section anew."""
    (tmp_path / "sent").write_bytes(pickle.dumps((_with_secrets(), Folder("s3://AKIAX:another-key@other/runs"))))
    code = (
        "import pickle, sys; from raystride.pipelines.system.credentials import redact;"
        f"pickle.load(open({str(tmp_path / 'sent')!r}, 'rb')); print(redact('hunter22 5fQabc another-key else'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "*** *** *** else\n"
