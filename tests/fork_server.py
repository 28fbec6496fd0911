"""The server from which the tests' processes are forked: one for all of pytest's processes.

It loads what takes seconds to import (`tests.warm`). Each process of pytest-xdist had one of its own, at twelve seconds of
processor time and some 500 MB. Now the controller starts one while tests are collected, and tells the others its address.
Where paths of tests are given on the command line, which may need none, each process starts its own at the first use.

    CONTEXT.Process(target=function).start()
"""

import os
from multiprocessing import forkserver, get_context, resource_tracker
from typing import Any

import pytest

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.warm"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Starts the server, in the controller, before a process of pytest-xdist; that process gets its address."""
    is_traced = "RAYSTRIDE_MAP" in os.environ  # each process and its children then have a folder of their own
    if node.config.args_source is not pytest.Config.ArgsSource.ARGS and not is_traced:
        forkserver.ensure_running()
        node.workerinput["fork_server"] = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    """Has this process, one of pytest-xdist's, fork from the controller's server."""
    # multiprocessing has no public way to share a server with a process that is not its starter's child.
    if address := getattr(config, "workerinput", {}).get("fork_server"):
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        server._forkserver_address = address
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the controller keeps the server alive
        server.ensure_running = resource_tracker.ensure_running
