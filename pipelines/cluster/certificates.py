"""Certificates by which the hosts of a cluster know each other: Ray then takes and makes no connection (gRPC) without TLS.

    raystride certificates 10.0.0.1 10.0.0.2,gpu-2.example --output tls
    # tls/10.0.0.1/ goes to /etc/raystride/tls on that host, and `. /etc/raystride/tls/ray.env` before `ray start`

Both sides show a certificate, so whoever has none of this authority gets no word out of a host, token or not. The folder
keeps the authority: another host later is the same command with its address. Exit codes: 0 done, 2 wrong arguments.
"""

import argparse
import ipaddress
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shlex import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY, AUTHORITY_KEY = "ca.pem", "ca.key"
CERTIFICATE, KEY, VARIABLES = "host.pem", "host.key", "ray.env"
EARLIER = timedelta(days=1)
"""How long before now they hold already: hosts' clocks differ."""
AUTHORITY_DAYS = 3650
HERE = ("localhost", "127.0.0.1")
"""What a host's processes call their own host besides."""


class BadCertificates(ValueError):
    """A host, a folder or a time for which no certificate can be made; the message says what to do.

    `flag` is `hosts`, `output` or `days`, and `value` what was given for it.
    """

    def __init__(self, message: str = "", *, flag: str = "", value: object = None) -> None:
        super().__init__(message)
        self.flag, self.value = flag, value


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, writes the folders and says where each goes; the exit code."""
    parser = argparse.ArgumentParser(prog="raystride certificates", description="Makes certificates for a cluster's TLS.")
    parser.add_argument("hosts", nargs="+", help="each host's address in the cluster, further names after commas")
    parser.add_argument("--output", default="tls", help="folder with a folder for each host, and the authority's key")
    parser.add_argument("--at", default="/etc/raystride/tls", help="where a host's folder will lie there")
    parser.add_argument("--days", type=int, default=365, help="how long they hold (default 365)")
    given = parser.parse_args(arguments)
    try:
        made = make_certificates(Path(given.output), given.hosts, given.at, given.days)
    except (BadCertificates, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"results  {given.output}: folders for hosts, and {AUTHORITY_KEY}, which stays with you")
    for folder in made:
        print(f"copy     {copy_command(folder, given.at)}")
    print(f"next     on each host: . {quote(f'{given.at}/{VARIABLES}')} && ray start ...")
    return 0


def copy_command(folder: Path, at: str) -> str:
    """Returns a shell command that copies what is in a host's folder to that host, over what an earlier time has left."""
    host = folder.name
    target = f"[{host}]" if ":" in host else host  # scp would take the colons of IPv6 for its own
    return f"ssh {host} mkdir -p {quote(quote(at))} && scp -p {quote(str(folder))}/* {quote(f'{target}:{at}/')}"


def days_left(environment: Mapping[str, str] = os.environ) -> float | None:
    """Returns days until the certificate of this host's Ray ends; None if it has none, or it cannot be read."""
    file = environment.get("RAY_TLS_SERVER_CERT")
    if not file or environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    try:
        found = x509.load_pem_x509_certificate(Path(file).read_bytes())
    except (OSError, ValueError):
        return None
    return (found.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def make_certificates(place: Path, hosts: Sequence[str], at: str, days: int) -> list[Path]:
    """A folder below `place` for each host, named by the first of its names; the authority that is there goes on.

    Raises BadCertificates, before anything is written.
    """
    if days < 1:
        raise BadCertificates(f"--days is {days}: certificates hold for at least a day", flag="days", value=days)
    named = [_names(host) for host in hosts]
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority, key = _authority(place)
    if authority.not_valid_after_utc < datetime.now(UTC) + timedelta(days=days):
        raise BadCertificates(
            f"--days is {days}, but the authority in {place} ends on {authority.not_valid_after_utc:%Y-%m-%d}: "
            "give fewer, or another --output, with new certificates for all hosts",
            flag="days",
            value=days,
        )
    return [_make_host(place / names[0], names, authority, key, at, days) for names in named]


def _names(host: str) -> list[str]:
    """A host's address and names, as the command line has them."""
    names = host.split(",")
    for name in names:
        if not _is_address(name) and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.\-]*[A-Za-z0-9])?", name):
            message = f"{host!r} is no host: give its address in the cluster, and names after commas"
            raise BadCertificates(message, flag="hosts", value=host)
    if not _is_address(names[0]):
        message = f"{host!r} begins with a name: Ray calls hosts by their addresses, so that comes first"
        raise BadCertificates(message, flag="hosts", value=host)
    return names


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _authority(place: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority in a folder, made where there is none. Raises BadCertificates where half of one is there."""
    files = place / AUTHORITY, place / AUTHORITY_KEY
    if not any(file.exists() for file in files):
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Ray cluster")])
        made = (
            _builder(name, key.public_key(), AUTHORITY_DAYS)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write_key(files[1], key)
        files[0].write_bytes(_pem(made))
    try:
        found = x509.load_pem_x509_certificate(files[0].read_bytes())
        key_found = serialization.load_pem_private_key(files[1].read_bytes(), None)
    except (OSError, ValueError) as error:
        message = f"{place} has no whole authority ({error}): give another --output"
        raise BadCertificates(message, flag="output", value=place) from None
    if not isinstance(key_found, ec.EllipticCurvePrivateKey) or key_found.public_key() != found.public_key():
        message = f"{files[1]} is not the key of {files[0]}: give another --output"
        raise BadCertificates(message, flag="output", value=place)
    return found, key_found


def _make_host(
    folder: Path, names: list[str], authority: x509.Certificate, signer: ec.EllipticCurvePrivateKey, at: str, days: int
) -> Path:
    folder.mkdir(exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    known = [
        x509.IPAddress(ipaddress.ip_address(name)) if _is_address(name) else x509.DNSName(name)
        for name in dict.fromkeys((*names, *HERE))
    ]
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    made = (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])]), key.public_key(), days)
        .issuer_name(authority.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(both, critical=False)
        .add_extension(x509.SubjectAlternativeName(known), critical=False)
        .sign(signer, hashes.SHA256())
    )
    # Both under their names at once, as far as files can: one without the other fits nothing.
    _write_key(folder / f"{KEY}.new", key)
    (folder / f"{CERTIFICATE}.new").write_bytes(_pem(made))
    for name in (KEY, CERTIFICATE):
        (folder / f"{name}.new").replace(folder / name)
    (folder / AUTHORITY).write_bytes(_pem(authority))
    lines = (f"export {name}={quote(value)}\n" for name, value in ray_variables(at).items())
    (folder / VARIABLES).write_text("".join(lines))
    return folder


def ray_variables(at: str) -> dict[str, str]:
    """What has Ray use the certificate of this host, whose folder lies there."""
    places = {"SERVER_CERT": CERTIFICATE, "SERVER_KEY": KEY, "CA_CERT": AUTHORITY}
    return {"RAY_USE_TLS": "1", **{f"RAY_TLS_{name}": f"{at}/{file}" for name, file in places.items()}}


def _builder(subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, public_key=key, serial_number=x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(authority: bool) -> x509.KeyUsage:
    never = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
        False,
    )
    return x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **never)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Writes a key that nobody but its owner may read at any moment."""
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(text)


if __name__ == "__main__":
    sys.exit(main())
