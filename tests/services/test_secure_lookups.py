"""Look-ups with TLS and tokens: both clients, the gateway on both of its sides, and the command."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from typer.testing import CliRunner

from embedding_server.errors import StoreUnavailable, Unauthenticated
from embedding_server.spec import TableSpec
from services import cli
from services.lookup_client import AsyncLookupClient, LookupClient
from services.lookup_gateway import LookupGateway
from services.security import ServerSecurity
from services.security_options import Credentials
from services.shard_client import RemoteStore
from services.tries import CallTimes
from tests.services.authority import Files, new_token, write_secret

Serve = Callable[..., list[str]]
FAST = CallTimes(deadline_s=5.0, try_s=2.0, reconnect_s=1.0)


@pytest.fixture
def shards(serve: Serve, files: Files) -> list[str]:
    addresses = serve(2, security=ServerSecurity(files.options(), "127.0.0.1"))
    store = RemoteStore(addresses, credentials=files.client("train"))
    store.create_tables([TableSpec(name="t", dim=4)])
    store.close()
    return addresses


@pytest.fixture
def gateway(shards: list[str], files: Files) -> Iterator[str]:
    security = ServerSecurity(files.options(), "127.0.0.1")
    server = LookupGateway(shards, security=security, credentials=files.client("serve"))
    yield server.start()
    server.stop(grace_s=0.5)


def test_both_clients_read_shards_and_a_gateway(shards: list[str], gateway: str, files: Files) -> None:
    ids = {"t": np.arange(10)}
    for addresses in (shards, [gateway]):
        with LookupClient(addresses, times=FAST, credentials=files.client("serve")) as client:
            assert not client.lookup(ids)["t"].found.any()

        async def look_up(addresses: list[str] = addresses) -> bool:
            async with AsyncLookupClient(addresses, times=FAST, credentials=files.client("serve")) as client:
                return bool((await client.lookup(ids))["t"].found.any())

        assert not asyncio.run(look_up())
        for wrong in (
            Credentials(tls_ca=files.ca),
            files.client(token_file=write_secret(files.ca.with_name("w"), new_token())),
        ):
            with pytest.raises(Unauthenticated):
                LookupClient(addresses, times=FAST, credentials=wrong)


def test_a_gateway_whose_own_token_is_refused_says_so(shards: list[str], gateway: str, files: Files) -> None:
    with LookupClient([gateway], times=FAST, credentials=files.client("admin")) as client:
        client.lookup({"t": np.arange(10)})
        files.tokens["serve"] = new_token()
        files.write_tokens()

        def look_up_for_a_while() -> None:  # the shards look at their file once in a second
            for _ in range(100):
                client.lookup({"t": np.arange(10)})
                time.sleep(0.05)

        with pytest.raises(StoreUnavailable, match="the shards refuse this gateway"):
            look_up_for_a_while()


def test_the_command_takes_credentials(gateway: str, files: Files) -> None:
    options = ["--tls-ca", str(files.ca), "--token-file", str(files.client_token("serve")), "--json"]
    result = CliRunner().invoke(cli.app, ["lookup", "t", "1", "--address", gateway, *options])
    assert result.exit_code == 0, result.output
    assert [row["found"] for row in json.loads(result.stdout)["rows"]] == [False]
    environment = {"FROSTLINE_TLS_CA": str(files.ca)}
    refused = CliRunner().invoke(cli.app, ["lookup", "t", "1", "--address", gateway], env=environment)
    assert (refused.exit_code, "no token" in refused.stderr) == (1, True)
