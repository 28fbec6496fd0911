"""TLS between the nodes of a private Ray cluster: a certificate authority for each job, and a certificate for each node.

    environment |= make_authority()                                    # once a job, beside its token
    environment |= write_node_certificate(folder, host, environment)   # on each node before `ray start`: RAY_USE_TLS, paths

Each node gets the authority's key beside the token, in the environment of the process that starts Ray there and of no other,
and signs its own certificate: only the node itself knows its address.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from raystride.pipelines.cluster.certificates import AUTHORITY, AUTHORITY_KEY, make_certificates, ray_environment

AUTHORITY_VARIABLE = "RAYSTRIDE_OWN_AUTHORITY"
"""Environment variable with the texts of the authority's files by name, as JSON."""
VALID_DAYS = 365
"""Validity of a node's certificate: longer than a job may last."""


def make_authority() -> dict[str, str]:
    """Makes a new certificate authority. Returns it as the environment variable AUTHORITY_VARIABLE."""
    with tempfile.TemporaryDirectory() as scratch:
        make_certificates(Path(scratch), [], host_folder="", days=VALID_DAYS)
        files = {name: (Path(scratch) / name).read_text() for name in (AUTHORITY, AUTHORITY_KEY)}
        return {AUTHORITY_VARIABLE: json.dumps(files)}


def write_node_certificate(folder: Path, host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Writes the certificate of the node with this address below `folder`, which only the user can read.

    Returns Ray's environment variables for TLS; none if `environment` has no authority. Raises OSError.
    """
    if AUTHORITY_VARIABLE not in environment:
        return {}
    tls_folder = folder / "tls"
    tls_folder.mkdir(mode=0o700)
    for name, text in json.loads(environment[AUTHORITY_VARIABLE]).items():
        (tls_folder / name).write_text(text)
    (certificate_folder,) = make_certificates(tls_folder, [host], host_folder=str(tls_folder / host), days=VALID_DAYS)
    (tls_folder / AUTHORITY_KEY).unlink()
    return ray_environment(str(certificate_folder))
