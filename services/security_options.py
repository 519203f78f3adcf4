"""What a server and a client are told about TLS and tokens: paths alone, so that it may be logged, kept and sent on.

No secret is ever an option, an environment variable or a key of a job: those stand in process lists, in /proc and in
the resolved job that snapshots keep. Nothing here reads a file; security.py and channel_access.py do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from embedding_server.errors import InvalidInput

#: of servers; a gateway is a client too, so the names differ
SERVER_TLS_CERT_VAR = "FROSTLINE_SERVER_TLS_CERT"
SERVER_TLS_KEY_VAR = "FROSTLINE_SERVER_TLS_KEY"
SERVER_TLS_CLIENT_CA_VAR = "FROSTLINE_SERVER_TLS_CLIENT_CA"
SERVER_TOKEN_FILE_VAR = "FROSTLINE_SERVER_TOKEN_FILE"
#: of clients
TLS_VAR = "FROSTLINE_TLS"
TLS_CA_VAR = "FROSTLINE_TLS_CA"
TLS_CERT_VAR = "FROSTLINE_TLS_CERT"
TLS_KEY_VAR = "FROSTLINE_TLS_KEY"
TLS_SERVER_NAME_VAR = "FROSTLINE_TLS_SERVER_NAME"
TOKEN_FILE_VAR = "FROSTLINE_TOKEN_FILE"


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """What a server shows and asks for."""

    tls_cert: Path | None = None  # PEM: the server's certificate, then those between it and its CA
    tls_key: Path | None = None  # PEM, not encrypted
    tls_client_ca: Path | None = None  # PEM: clients must have a certificate of one of these CAs (mutual TLS)
    token_file: Path | None = None  # a line for each token: its role, a space, the token
    insecure: bool = False  # may listen beyond this machine without TLS or without tokens

    def __post_init__(self) -> None:
        _check_pair(self.tls_cert, self.tls_key)
        if self.tls_client_ca and not self.tls_cert:
            raise InvalidInput("tls_client_ca without tls_cert: clients show certificates within TLS; give tls_cert")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client checks and shows. TLS is on if any of its fields is given."""

    tls: bool = False  # with the CAs that gRPC knows, where tls_ca is not given
    tls_ca: Path | None = None  # PEM: the server's certificate must be of one of these CAs
    tls_cert: Path | None = None  # PEM: for servers that ask for one (mutual TLS)
    tls_key: Path | None = None
    tls_server_name: str | None = None  # the name in the server's certificate, where it is not the address
    token_file: Path | None = None  # one line: the token, or its role, a space and the token
    insecure: bool = False  # the token may leave this machine without TLS

    def __post_init__(self) -> None:
        _check_pair(self.tls_cert, self.tls_key)

    @property
    def uses_tls(self) -> bool:
        return self.tls or any((self.tls_ca, self.tls_cert, self.tls_server_name))

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Credentials:
        """FROSTLINE_TLS=1, FROSTLINE_TLS_CA, _CERT, _KEY and _SERVER_NAME, FROSTLINE_TOKEN_FILE. For entry points."""
        text = environment.get(TLS_VAR, "")
        if text not in ("", "0", "1"):
            raise InvalidInput(f"{TLS_VAR}={text!r} must be 1 or 0")
        return Credentials(
            tls=text == "1",
            tls_ca=_path(environment.get(TLS_CA_VAR)),
            tls_cert=_path(environment.get(TLS_CERT_VAR)),
            tls_key=_path(environment.get(TLS_KEY_VAR)),
            tls_server_name=environment.get(TLS_SERVER_NAME_VAR) or None,
            token_file=_path(environment.get(TOKEN_FILE_VAR)),
        )

    @staticmethod
    def of_job(servers: Any) -> Credentials:
        """Of the section `servers` of a job (trainer/access_spec.py has the same names)."""
        return Credentials(**{field.name: getattr(servers, field.name) for field in fields(Credentials)})

    def given(self) -> dict[str, Any]:
        """Fields that say something, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value}


def _path(text: str | None) -> Path | None:
    return Path(text).expanduser().absolute() if text else None


def _check_pair(tls_cert: Path | None, tls_key: Path | None) -> None:
    if bool(tls_cert) != bool(tls_key):
        given, missing = ("tls_cert", "tls_key") if tls_cert else ("tls_key", "tls_cert")
        raise InvalidInput(f"{given} without {missing}: a certificate and its key go together; give both or neither")
