"""TLS between the nodes of a Ray of our own: an authority that lives as long as the job, and a certificate for each node.

    environment |= new_authority()                        # once, for all nodes of the job, beside its token
    environment |= certified(folder, host, environment)   # on each, before `ray start`: RAY_USE_TLS and where its files lie

The authority's key goes to each node beside the token, in the environment of the process that starts Ray there and of no
other, so that each signs for itself: which addresses the nodes have is known on them alone.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from raystride.pipelines.cluster.certificates import AUTHORITY, AUTHORITY_KEY, make_certificates, ray_variables

AUTHORITY_VARIABLE = "RAYSTRIDE_OWN_AUTHORITY"
"""Has the authority's files by their names, as JSON."""
DAYS = 365
"""How long a node's certificate holds: longer than a job may last."""


def new_authority() -> dict[str, str]:
    """The variable that has a new authority."""
    with tempfile.TemporaryDirectory() as place:
        make_certificates(Path(place), [], at="", days=DAYS)
        files = {name: (Path(place) / name).read_text() for name in (AUTHORITY, AUTHORITY_KEY)}
        return {AUTHORITY_VARIABLE: json.dumps(files)}


def certified(folder: Path, host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Ray's variables for the node at this address, with its files below the folder, which is the user's alone; empty
    without an authority.
    """
    if AUTHORITY_VARIABLE not in environment:
        return {}
    place = folder / "tls"
    place.mkdir(mode=0o700)
    for name, text in json.loads(environment[AUTHORITY_VARIABLE]).items():
        (place / name).write_text(text)
    (made,) = make_certificates(place, [host], at=str(place / host), days=DAYS)
    (place / AUTHORITY_KEY).unlink()
    return ray_variables(str(made))
