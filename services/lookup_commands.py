"""`frostline lookup`: rows of a table that runs, for people and for scripts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from services.command_options import (
    ClientCertOption,
    ClientKeyOption,
    InsecureClientOption,
    JsonOption,
    TlsCaOption,
    TlsOption,
    TlsServerNameOption,
    TokenOption,
    errors_to_exit_status,
    wide_console,
)

if TYPE_CHECKING:
    from services.lookup_reads import LookedUp
    from services.security_options import Credentials

#: values of a row that the table shows; --json has all of them
SHOWN_VALUES = 6
TIMEOUT_S = 10.0

AddressOption = Annotated[
    list[str],
    typer.Option(
        "--address", metavar="HOST:PORT", help="A shard, a gateway or a server of a snapshot; all shards, repeated."
    ),
]


def add_to(app: typer.Typer) -> None:
    app.command(name="lookup", context_settings={"ignore_unknown_options": True})(lookup)


def lookup(
    table: Annotated[str, typer.Argument(metavar="TABLE")],
    row_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Any int64, negative ones too.")],
    address: AddressOption,
    encoding: Annotated[str, typer.Option(help="How values travel: float32, float16, bfloat16 or stored.")] = "float32",
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: ClientCertOption = None,
    tls_key: ClientKeyOption = None,
    tls_server_name: TlsServerNameOption = None,
    token_file: TokenOption = None,
    insecure: InsecureClientOption = False,
    as_json: JsonOption = False,
) -> None:
    """Looks rows up while they train, or in a snapshot that is served; it counts no visit and thaws nothing."""
    with errors_to_exit_status(Console(stderr=True)):
        from services.security_options import Credentials

        ids = [_row_id(text) for text in row_ids]
        credentials = Credentials(tls, tls_ca, tls_cert, tls_key, tls_server_name, token_file, insecure)
        found = _look_up(table, ids, address, encoding, credentials)
    if as_json:
        print(json.dumps(_document(table, ids, found)))
    else:
        _show(table, ids, found)


def _row_id(text: str) -> int:
    from embedding_server.errors import InvalidInput

    try:
        row_id = int(text)
    except ValueError:
        raise InvalidInput(f"row_id {text!r} is not an integer") from None
    if not -(2**63) <= row_id < 2**63:
        raise InvalidInput(f"row_id {text} is outside int64, -2^63 to 2^63 - 1")
    return row_id


def _look_up(table: str, ids: list[int], addresses: list[str], encoding: Any, credentials: Credentials) -> LookedUp:
    import numpy as np

    from services.lookup_client import LookupClient

    with LookupClient(addresses, credentials=credentials) as client:
        return client.lookup({table: np.array(ids, np.int64)}, encoding=encoding, timeout_s=TIMEOUT_S)[table]


def _document(table: str, ids: list[int], found: LookedUp) -> dict[str, Any]:
    from dataclasses import asdict

    from services.lookup_reads import STATES

    return {
        "table": table,
        "versions": [asdict(version) for version in found.versions],
        "rows": [
            {"row_id": row_id, "found": bool(is_found), "state": STATES[state], "values": values.tolist()}
            for row_id, is_found, state, values in zip(ids, found.found, found.states, found.values, strict=True)
        ],
    }


def _show(table: str, ids: list[int], found: LookedUp) -> None:
    from services.lookup_reads import STATES

    shown = Table(title=f"table {table}, {len(ids)} row_ids", title_justify="left")
    for column in ("row_id", "found", "state", "values"):
        shown.add_column(column, justify="right" if column == "row_id" else "left")
    for row_id, is_found, state, values in zip(ids, found.found, found.states, found.values, strict=True):
        text = " ".join(f"{value:.6g}" for value in values[:SHOWN_VALUES].tolist())
        more = f" ... ({values.shape[0]})" if values.shape[0] > SHOWN_VALUES else ""
        shown.add_row(str(row_id), "yes" if is_found else "no", STATES[state], text + more)
    console = wide_console()
    console.print(shown)
    for version in found.versions:
        of = f"job {version.job!r}, epoch {version.epoch}, step {version.step}" if version.job else "no job yet"
        snapshot = f", snapshot {version.snapshot_id}" if version.snapshot_id else ""
        console.print(f"read at {of}{snapshot}", markup=False, highlight=False)
