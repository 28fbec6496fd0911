"""TLS certificates for the hosts of a cluster: with them, Ray accepts and makes no gRPC connection without TLS.

    folders = make_certificates(Path("tls"), ["10.0.0.1", "10.0.0.2,gpu-2.example"], "/etc/raystride/tls", days=365)
    # tls/10.0.0.1/ goes to /etc/raystride/tls on that host, and `. /etc/raystride/tls/ray.env` before `ray start`

TLS is mutual: clients without a certificate of this authority are rejected, with or without a token. The folder keeps the
authority, which signs further hosts later.
"""

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shlex import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from raystride.pipelines.system.errors import SettingError

AUTHORITY, AUTHORITY_KEY = "ca.pem", "ca.key"
CERTIFICATE, KEY, ENV_FILE = "host.pem", "host.key", "ray.env"
BACKDATED_BY = timedelta(days=1)
"""Certificates are valid from this long ago, as hosts' clocks differ."""
AUTHORITY_DAYS = 3650
LOCAL_NAMES = ("localhost", "127.0.0.1")
"""Further names of every host, used by its own processes."""


def days_left(environment: Mapping[str, str] = os.environ) -> float | None:
    """Returns the days until the certificate of this host's Ray expires; None if it has none or it cannot be read."""
    file = environment.get("RAY_TLS_SERVER_CERT")
    if not file or environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    try:
        found = x509.load_pem_x509_certificate(Path(file).read_bytes())
    except (OSError, ValueError):
        return None
    return (found.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def make_certificates(output_folder: Path, hosts: Sequence[str], host_folder: str, days: int) -> list[Path]:
    """Writes a folder below `output_folder` for each host, named by its first name; returns the folders.

    Reuses the authority in the folder if there is one. Raises SettingError before anything is written.
    """
    if days < 1:
        raise SettingError(f"--days is {days}: certificates hold for at least a day", setting="days", value=days)
    names_by_host = [_parse_host(host) for host in hosts]
    output_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority, key = _load_or_create_authority(output_folder)
    if authority.not_valid_after_utc < datetime.now(UTC) + timedelta(days=days):
        raise SettingError(
            f"--days is {days}, but the authority in {output_folder} ends on {authority.not_valid_after_utc:%Y-%m-%d}: "
            "give fewer, or another --output, with new certificates for all hosts",
            setting="days",
            value=days,
        )
    return [
        _write_host_certificate(output_folder / names[0], names, authority, key, host_folder, days)
        for names in names_by_host
    ]


def _parse_host(host: str) -> list[str]:
    """Splits a host of the command line into its address and names. Raises SettingError."""
    names = host.split(",")
    for name in names:
        if not _is_address(name) and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.\-]*[A-Za-z0-9])?", name):
            message = f"{host!r} is no host: give its address in the cluster, and names after commas"
            raise SettingError(message, setting="hosts", value=host)
    if not _is_address(names[0]):
        message = f"{host!r} begins with a name: Ray calls hosts by their addresses, so that comes first"
        raise SettingError(message, setting="hosts", value=host)
    return names


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _load_or_create_authority(output_folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Returns the authority in a folder, created if there is none. Raises SettingError if its files are incomplete."""
    files = output_folder / AUTHORITY, output_folder / AUTHORITY_KEY
    if not any(file.exists() for file in files):
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Ray cluster")])
        made = (
            _certificate_builder(name, key.public_key(), AUTHORITY_DAYS)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(authority=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write_key(files[1], key)
        files[0].write_bytes(_to_pem(made))
    try:
        found = x509.load_pem_x509_certificate(files[0].read_bytes())
        key_found = serialization.load_pem_private_key(files[1].read_bytes(), None)
    except (OSError, ValueError) as error:
        message = f"{output_folder} has no whole authority ({error}): give another --output"
        raise SettingError(message, setting="output", value=output_folder) from None
    if not isinstance(key_found, ec.EllipticCurvePrivateKey) or key_found.public_key() != found.public_key():
        message = f"{files[1]} is not the key of {files[0]}: give another --output"
        raise SettingError(message, setting="output", value=output_folder)
    return found, key_found


def _write_host_certificate(
    folder: Path,
    names: list[str],
    authority: x509.Certificate,
    signer: ec.EllipticCurvePrivateKey,
    host_folder: str,
    days: int,
) -> Path:
    folder.mkdir(exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    subject_names = [
        x509.IPAddress(ipaddress.ip_address(name)) if _is_address(name) else x509.DNSName(name)
        for name in dict.fromkeys((*names, *LOCAL_NAMES))
    ]
    client_and_server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    made = (
        _certificate_builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])]), key.public_key(), days)
        .issuer_name(authority.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(client_and_server, critical=False)
        .add_extension(x509.SubjectAlternativeName(subject_names), critical=False)
        # Asked for by RFC 5280, section 4.2.1.1, and by Python's own contexts since 3.13.
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    # Both files are replaced together, as far as possible: key and certificate are useless without each other.
    _write_key(folder / f"{KEY}.new", key)
    (folder / f"{CERTIFICATE}.new").write_bytes(_to_pem(made))
    for name in (KEY, CERTIFICATE):
        (folder / f"{name}.new").replace(folder / name)
    (folder / AUTHORITY).write_bytes(_to_pem(authority))
    lines = (f"export {name}={quote(value)}\n" for name, value in ray_environment(host_folder).items())
    (folder / ENV_FILE).write_text("".join(lines))
    return folder


def ray_environment(host_folder: str) -> dict[str, str]:
    """Returns the environment variables for Ray's TLS with the certificate in `host_folder` on the host."""
    places = {"SERVER_CERT": CERTIFICATE, "SERVER_KEY": KEY, "CA_CERT": AUTHORITY}
    return {"RAY_USE_TLS": "1", **{f"RAY_TLS_{name}": f"{host_folder}/{file}" for name, file in places.items()}}


def _certificate_builder(subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, public_key=key, serial_number=x509.random_serial_number())
        .not_valid_before(now - BACKDATED_BY)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(authority: bool) -> x509.KeyUsage:
    never = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
        False,
    )
    return x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **never)


def _to_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Writes a key that is never readable by anyone but its owner."""
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(text)
