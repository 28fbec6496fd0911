"""Serves a trained language model on this machine, with the OpenAI API.

python ray_jobs/serve.py --run NAME
python ray_jobs/serve.py --run NAME --port 8000 --device cpu
"""

import json
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config.jobs import ServeConfig
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.launch.console.exit_codes import DONE

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.load_run import LoadedModel

TOKEN_VARIABLE = "RAYSTRIDE_SERVE_TOKEN"  # noqa: S105, a name
EXAMPLE_PROMPT = "Who are you?"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    about = "Answer requests with a trained language model, by OpenAI's protocol."
    return command(ServeConfig, _run_job, arguments, program="raystride serve", description=about)


def _run_job(parsed: Parsed[ServeConfig]) -> int:
    settings = parsed.settings
    from raystride.pipelines.evaluate.serving import Server, listen_on, require_packages

    require_packages()
    from raystride.pipelines.launch.finished import export_for_serving

    folder, opened = export_for_serving(settings)
    given = settings.token or os.environ.get(TOKEN_VARIABLE)
    token = given or secrets.token_urlsafe(24)
    header = _authorization_header(token, is_new=not given)
    with listen_on(settings.host, settings.port) as socket:
        server = Server(folder, settings.run, token=token, device=settings.device)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"http://{host}:{socket.getsockname()[1]}/v1"
        print(f"results  {folder}")
        print(f"serving  {settings.run} of {opened.step_text} at {address}, until Ctrl-C")
        print(f"ask      {_curl_command(settings.run, address, header, opened)}", flush=True)
        server.run(socket)
    return DONE


def _authorization_header(token: str, *, is_new: bool) -> str:
    """Returns the header, quoted for the shell. Only a new token is in it: a screen may be a log that others read.

    A given one is that of the variable, also where it came as a setting.
    """
    return f"'Authorization: Bearer {token}'" if is_new else f'"Authorization: Bearer ${TOKEN_VARIABLE}"'


def _curl_command(run: str, address: str, quoted_header: str, opened: "LoadedModel") -> str:
    """Returns a shell command that sends an example request with the header of the token."""
    body: dict[str, Any] = {"model": run, "max_tokens": 64, "temperature": 0}
    chat = getattr(opened.encoder, "chat", None) is not None
    body |= {"messages": [{"role": "user", "content": EXAMPLE_PROMPT}]} if chat else {"prompt": EXAMPLE_PROMPT}
    path = "chat/completions" if chat else "completions"
    headers = f"-H {quoted_header} -H 'Content-Type: application/json'"
    return f"curl -s {address}/{path} {headers} -d '{json.dumps(body)}'"
