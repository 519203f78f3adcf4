"""A certificate authority for tests, and files of certificates, keys and tokens as users have them."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.security_options import Credentials, SecurityOptions
from services.tokens import ROLES


def write_secret(path: Path, data: bytes | str) -> Path:
    """In one step, as whoever rotates secrets should: a new file under a temporary name, then renamed."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(data.encode() if isinstance(data, str) else data)
    temporary.chmod(0o600)
    os.replace(temporary, path)
    return path


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        return write_secret(folder / f"{name}.pem", self.certificate), write_secret(folder / f"{name}.key", self.key)


class Authority:
    """Issues certificates that a day ago began to be valid."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = self._signed(self._name, self._key.public_key(), is_ca=True)
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str = "localhost", days: int = 30) -> Pair:
        """For a server at 127.0.0.1 and localhost, or of that name; or for a client. days < 0: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._signed(subject, key.public_key(), is_ca=False, days=days)
        return Pair(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, is_ca: bool, days: int = 30):
        now = datetime.datetime.now(datetime.UTC)
        name = subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        names = [x509.DNSName(str(name))]
        if name == "localhost":
            names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=40))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def new_token() -> str:
    return secrets.token_hex(32)


def lines_of_key(key: bytes) -> list[str]:
    """What must be in no log: the lines of a PEM between its marks."""
    return [line for line in key.decode().splitlines() if line and not line.startswith("-----")]


class Files:
    """Certificates, keys and tokens of one server, and of clients of it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.authority, self.other_authority = Authority("ours"), Authority("theirs")
        self.ca = write_secret(folder / "ca.pem", self.authority.pem)
        self.pair = self.authority.issue()
        self.cert, self.key = self.pair.write(folder, "server")
        self.tokens: dict[str, str] = {role: new_token() for role in ROLES}
        self.token_file = folder / "tokens"
        self.write_tokens()

    def write_tokens(self) -> None:
        write_secret(self.token_file, "".join(f"{role} {token}\n" for role, token in self.tokens.items()))

    def options(self, **changes: Any) -> SecurityOptions:
        return SecurityOptions(**{"tls_cert": self.cert, "tls_key": self.key, "token_file": self.token_file} | changes)

    def client_token(self, role: str) -> Path:
        return write_secret(self.folder / f"token-{role}", self.tokens[role] + "\n")

    def client(self, role: str = "train", **changes: Any) -> Credentials:
        return Credentials(**{"tls_ca": self.ca, "token_file": self.client_token(role)} | changes)

    def secrets(self) -> list[str]:
        return [*self.tokens.values(), *lines_of_key(self.pair.key)]
