"""Answers requests with a trained language model, by OpenAI's protocol, on this machine.

python ray_jobs/serve.py --run NAME
python ray_jobs/serve.py --run NAME --port 8000 --device cpu
"""

import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["serve", *sys.argv[1:]]))

from raystride.pipelines.config.jobs import Serve
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.launch.exit_codes import DONE, guarded

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.opening import Opened

QUESTION = "Who are you?"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    about = "Answer requests with a trained language model, by OpenAI's protocol."
    return command(Serve, _serve, arguments, program="raystride serve", description=about)


def _serve(parsed: Parsed[Serve]) -> int:
    return guarded(lambda: _served(parsed.settings), own_handlers=True)  # uvicorn hears Ctrl-C in any case


def _served(settings: Serve) -> int:
    from raystride.pipelines.evaluate.serving import Server, listening, require_packages

    require_packages()
    from raystride.pipelines.launch.finished import export_to_serve

    folder, opened = export_to_serve(settings)
    token = settings.token or os.environ.get("RAYSTRIDE_SERVE_TOKEN") or secrets.token_urlsafe(24)
    with listening(settings.host, settings.port) as socket:
        server = Server(folder, settings.run, token=token, device=settings.device)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"http://{host}:{socket.getsockname()[1]}/v1"
        print(f"results  {folder}")
        print(f"serving  {settings.run} of step {opened.step} at {address}, until Ctrl-C")
        print(f"ask      {_question(settings.run, address, token, opened)}", flush=True)
        server.run(socket)
    return DONE


def _question(run: str, address: str, token: str, opened: "Opened") -> str:
    """A command that asks it, for the shell."""
    body: dict[str, Any] = {"model": run, "max_tokens": 64, "temperature": 0}
    chat = getattr(opened.encoder, "chat", None) is not None
    body |= {"messages": [{"role": "user", "content": QUESTION}]} if chat else {"prompt": QUESTION}
    path = "chat/completions" if chat else "completions"
    headers = f"-H 'Authorization: Bearer {token}' -H 'Content-Type: application/json'"
    return f"curl -s {address}/{path} {headers} -d '{json.dumps(body)}'"
