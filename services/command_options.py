"""What the subcommands of `frostline` share: options, sizes as text, errors as exit status. Imports nothing heavy.

Exit status: 0 done, 1 failed (`ckpt verify`: the snapshot is damaged; `ckpt gc`: a job in use was left alone), 2 the
input is wrong (a job file, an option, a file to import; `ckpt verify`: there is no snapshot), 3 `tune` is done and no
setting keeps what it was asked for, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console

from services.security_options import (
    SERVER_TLS_CERT_VAR,
    SERVER_TLS_CLIENT_CA_VAR,
    SERVER_TLS_KEY_VAR,
    SERVER_TOKEN_FILE_VAR,
    TLS_CA_VAR,
    TLS_CERT_VAR,
    TLS_KEY_VAR,
    TLS_SERVER_NAME_VAR,
    TLS_VAR,
    TOKEN_FILE_VAR,
)

NO_SETTING_STATUS = 3

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job; `frostline schema` describes it.")]
SettingsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Overrides a key of the job; may be repeated.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Results as JSON on standard output, all else on standard error.")
]

#: of servers; a path each, for a secret that is an option stands in process lists
TlsCertOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", envvar=SERVER_TLS_CERT_VAR, help="This server's certificate (PEM); read again when it changes."
    ),
]
TlsKeyOption = Annotated[
    Path | None,
    typer.Option("--tls-key", envvar=SERVER_TLS_KEY_VAR, help="The key of --tls-cert (PEM), mode 0600 or 0640."),
]
TlsClientCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-ca",
        envvar=SERVER_TLS_CLIENT_CA_VAR,
        help="Mutual TLS: clients must have a certificate of one of these CAs (PEM).",
    ),
]
TokensOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=SERVER_TOKEN_FILE_VAR,
        help="A line for each token: its role (train, serve, admin), a space, the token. Mode 0600 or 0640; read again"
        " when it changes. Every call but those of health needs one of them.",
    ),
]
InsecureServerOption = Annotated[
    bool, typer.Option("--insecure", help="Lets --host be other than loopback without TLS or without tokens.")
]

#: of clients
TlsOption = Annotated[
    bool, typer.Option("--tls", envvar=TLS_VAR, help="TLS with public CAs; the other options of TLS imply it.")
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar=TLS_CA_VAR, help="The server's certificate must be of one of these CAs (PEM)."),
]
ClientCertOption = Annotated[
    Path | None,
    typer.Option("--tls-cert", envvar=TLS_CERT_VAR, help="Certificate (PEM), for servers that ask for one."),
]
ClientKeyOption = Annotated[
    Path | None, typer.Option("--tls-key", envvar=TLS_KEY_VAR, help="The key of --tls-cert (PEM), mode 0600 or 0640.")
]
TlsServerNameOption = Annotated[
    str | None,
    typer.Option(
        "--tls-server-name",
        envvar=TLS_SERVER_NAME_VAR,
        help="Name in the server's certificate; default: the one in the address.",
    ),
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", envvar=TOKEN_FILE_VAR, help="File with one token in it, mode 0600 or 0640."),
]
InsecureClientOption = Annotated[
    bool, typer.Option("--insecure", help="Lets the token leave this machine without TLS.")
]


def size_bytes(text: str | int) -> int:
    """Bytes, or text like 4GiB, as in a job."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is not a size; write bytes, or text like 4GiB") from None


def quiet_torch() -> None:
    """torchrec 1.8 makes torch warn there on import, about a function that it means to use."""
    logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: False)


def wide_console(stderr: bool = False) -> Console:
    """A console whose tables keep their cells in a pipe or a file too: those have no width of their own."""
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 240
    return console


@contextmanager
def errors_to_exit_status(console: Console) -> Iterator[None]:
    """Our errors as a line and an exit status; anything else is a bug and shows its trace."""
    from embedding_server.errors import FrostlineError, InvalidInput

    try:
        yield
    except FrostlineError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, InvalidInput) else 1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(130) from None
