"""Notebooks in kernels of their own, as JupyterLab starts them; their sockets are files, so that no port is borrowed."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.ray_jobs.jobs import environment

ROOT = Path(__file__).parents[1]


class Notebook:
    """A notebook that runs in a folder, with the raystride of this checkout."""

    def __init__(self, page: Any, folder: Path) -> None:
        self._folder = folder
        manager = AsyncKernelManager(transport="ipc", ip=str(folder / "kernel"))
        self._client = NotebookClient(page, km=manager, timeout=None, resources={"metadata": {"path": str(folder)}})

    @classmethod
    def of_cells(cls, cells: Sequence[str], folder: Path) -> "Notebook":
        """A notebook of code cells."""
        return cls(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), folder)

    def run(self) -> None:
        """Runs all cells; raises CellExecutionError if one fails."""
        runtime = {"JUPYTER_RUNTIME_DIR": str(self._folder), "IPYTHONDIR": str(self._folder / "ipython")}
        self._client.execute(env=os.environ | environment() | {"PYTHONPATH": str(ROOT)} | runtime)

    @property
    def kernel_pid(self) -> int:
        """Process of the running kernel, which Stop signals with SIGINT."""
        return int(self._client.km.provisioner.process.pid)

    def texts(self, cell: int) -> list[str]:
        """What a code cell has printed and shown, HTML before plain text."""
        outputs = [each for each in self._client.nb.cells if each.cell_type == "code"][cell].outputs
        data = [output.data if "data" in output else {"text/plain": output.get("text", "")} for output in outputs]
        return [str(each.get("text/html", each.get("text/plain", ""))) for each in data]
