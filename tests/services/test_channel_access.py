"""The client's side of TLS and tokens: what it refuses to send, and files that change under it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from embedding_server.errors import InvalidInput, StoreUnavailable, Unauthenticated
from services import channel_access
from services import security as security_module
from services.channel_access import ChannelAccess
from services.external_shards import silent_shards, with_environment
from services.security import ServerSecurity
from services.security_options import Credentials
from services.shard_channel import CallTimes
from services.shard_client import RemoteStore
from tests.services.authority import Files, new_token, write_secret
from trainer.job import make_job

Serve = Callable[..., list[str]]
FAST = CallTimes(deadline_s=20.0, try_s=5.0, reconnect_s=3.0)


@pytest.mark.parametrize("address", ["10.0.0.5:7100", "shard-0:7100", "[::2]:7100", "dns:///localhost:7100"])
def test_a_token_does_not_leave_this_machine_in_the_clear(files: Files, address: str) -> None:
    with pytest.raises(InvalidInput, match=r"the token would go to .*7100 in the clear; use TLS"):
        ChannelAccess(files.client(tls_ca=None), address)
    for allowed in ({"insecure": True, "tls_ca": None}, {"tls": True, "tls_ca": None}, {}):
        ChannelAccess(files.client(**allowed), address)
    ChannelAccess(Credentials(), address)
    for here in ("127.0.0.1:7100", "localhost:7100", "[::1]:7100"):
        ChannelAccess(files.client(tls_ca=None), here)


def test_files_that_cannot_be_used_are_named(files: Files, tmp_path: Path) -> None:
    for changes, message in (
        ({"tls_ca": tmp_path / "missing"}, r"CA certificates .*missing: cannot be read"),
        ({"tls_ca": files.key}, r"CA certificates .*server\.key: holds no certificate"),
        ({"tls_cert": files.cert, "tls_key": files.ca}, "OpenSSL says"),
        ({"token_file": tmp_path / "missing"}, r"token file .*missing: cannot be read"),
        ({"token_file": files.token_file}, "has 3 lines; a client's has one"),
    ):
        with pytest.raises(InvalidInput, match=message):
            RemoteStore(["127.0.0.1:1"], credentials=files.client(**changes))  # type: ignore[arg-type]


def test_a_token_of_plain_grpc_on_this_machine(serve: Serve, files: Files) -> None:
    addresses = serve(2, security=ServerSecurity(files.options(tls_cert=None, tls_key=None), "127.0.0.1"))
    store = RemoteStore(addresses, credentials=files.client(tls_ca=None))
    assert store.table_specs() == {}
    store.close()
    with pytest.raises(Unauthenticated, match="no token; send the metadata"):
        RemoteStore(addresses)


def test_a_token_that_is_refused_is_read_again(
    serve: Serve, files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However seldom the client looks: calls, calls of several shards and hints go on with the new one."""
    monkeypatch.setattr(channel_access, "TOKEN_CHECK_S", 1000.0)
    monkeypatch.setattr(security_module, "TOKEN_CHECK_S", 0.0)
    addresses = serve(2, security=ServerSecurity(files.options(), "127.0.0.1"))
    store = RemoteStore(addresses, credentials=files.client())
    files.tokens["train"] = new_token()
    files.client_token("train")
    assert store.table_specs() == {}
    files.write_tokens()
    with caplog.at_level(logging.INFO):
        assert store.table_specs() == {}
        assert store.begin_epoch("job", 1, "sync").epoch == 1
    assert [record.getMessage() for record in caplog.records if record.name == "services.secret_files"] == [
        "the token file changed and was read again"  # of the server, then of each channel
    ] * 3
    files.tokens["train"] = new_token()
    files.write_tokens()
    with pytest.raises(Unauthenticated, match="not one of this server's"):
        store.table_specs()
    store.close()


def test_a_client_follows_new_certificates_when_it_connects_again(serve: Serve, files: Files) -> None:
    cert, key = files.authority.issue("trainer").write(files.folder, "client")
    credentials = files.client(tls_cert=cert, tls_key=key)

    def security() -> ServerSecurity:
        return ServerSecurity(files.options(tls_client_ca=files.ca), "127.0.0.1")

    (address,) = serve(security=security())
    store = RemoteStore([address], credentials=credentials, times=FAST)
    theirs = files.other_authority
    write_secret(files.ca, theirs.pem)
    theirs.issue().write(files.folder, "server")
    theirs.issue("trainer").write(files.folder, "client")
    assert store.table_specs() == {}  # on the connection that is open
    serve.servers[0].stop(grace_s=0.1)  # type: ignore[attr-defined]
    serve(ports=[int(address.rpartition(":")[2])], security=security())
    assert store.table_specs() == {}
    store.close()


def test_a_server_of_another_ca_is_unavailable_and_why_is_said(serve: Serve, files: Files) -> None:
    (address,) = serve(security=ServerSecurity(files.options(), "127.0.0.1"))
    other = write_secret(files.folder / "other.pem", files.other_authority.pem)
    with pytest.raises(StoreUnavailable, match=r"shard 0 \(127.*CERTIFICATE_VERIFY_FAILED"):
        RemoteStore([address], credentials=files.client(tls_ca=other), times=FAST)
    assert list(silent_shards([address], 0.5, files.client(tls_ca=other))) == [0]
    assert silent_shards([address], 10.0, files.client()) == {}
    (refused,) = silent_shards([address], 10.0, Credentials(tls_ca=files.ca)).values()
    assert isinstance(refused, Unauthenticated)


def test_the_environment_names_files_for_shards_of_others(files: Files) -> None:
    environment = {"FROSTLINE_TLS_CA": "/a/ca.pem", "FROSTLINE_TOKEN_FILE": "/a/token", "FROSTLINE_TLS": "0"}
    given = Credentials.from_environment(environment)
    assert given == Credentials(tls_ca=Path("/a/ca.pem"), token_file=Path("/a/token"))
    assert given.uses_tls
    assert Credentials.from_environment({}) == Credentials()
    assert Credentials.from_environment({"FROSTLINE_TLS": "1", "FROSTLINE_TLS_CA": ""}) == Credentials(tls=True)
    for wrong, message in (({"FROSTLINE_TLS": "yes"}, "must be 1 or 0"), ({"FROSTLINE_TLS_KEY": "/k"}, "tls_cert")):
        with pytest.raises(InvalidInput, match=message):
            Credentials.from_environment(wrong)
    job = {"name": "j", "data": {"reader": "movielens"}}
    external = {"launch": "external", "addresses": ["a:1"], "token_file": "/b/token"}
    filled = with_environment(make_job({**job, "servers": external}), environment)
    assert Credentials.of_job(filled.servers) == Credentials(tls_ca=Path("/a/ca.pem"), token_file=Path("/b/token"))
    assert Credentials.of_job(filled.arm_jobs()["main"].servers) == Credentials.of_job(filled.servers)
    local = make_job(job)
    assert with_environment(local, environment) is local
