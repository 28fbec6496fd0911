"""Variables of other programs: proxies that never stand between us and this machine, and a table that the docs show."""

import http.server
import os
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from raystride.pipelines.system.variables import LOOPBACK, VARIABLES, exempt_loopback_from_proxies

DEAD = "http://127.0.0.1:9"


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a web server on loopback."""
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
@pytest.mark.parametrize("exempt", ["", "example.org, internal"])
def test_a_proxy_is_not_asked_for_this_machine(server: str, name: str, exempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, DEAD)
    monkeypatch.setenv("no_proxy", exempt)
    monkeypatch.setenv("NO_PROXY", exempt)
    with pytest.raises(requests.exceptions.ProxyError):
        requests.get(server, timeout=5)
    exempt_loopback_from_proxies()
    assert requests.get(server, timeout=5).status_code == 200
    # `urlopen` would keep an opener with the dead proxy for all that this process opens later.
    with urllib.request.build_opener().open(server, timeout=5) as answer:
        assert answer.status == 200
    assert os.environ["no_proxy"].split(",") == [*filter(None, exempt.replace(" ", "").split(",")), *LOOPBACK]
    exempt_loopback_from_proxies()
    assert os.environ["NO_PROXY"].count("localhost") == 1


@pytest.mark.parametrize("before", [{}, {"no_proxy": "internal"}, {"http_proxy": ""}, {"http_proxy": DEAD, "NO_PROXY": "*"}])
def test_what_needs_no_exemption_stays_as_it_is(before: dict[str, str]) -> None:
    environment = dict(before)
    exempt_loopback_from_proxies(environment)
    assert environment == before


def test_the_docs_show_the_table() -> None:
    page = " ".join((Path(__file__).parents[3] / "docs" / "commands.md").read_text().split())
    for names, meaning in VARIABLES.items():
        shown = ", ".join(f"`{name}`" for name in names.split(", "))
        assert f"| {shown} | {meaning} |" in page, names
