"""Who may call a server: every RPC that it has, with and without tokens and certificates; changes without a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from embedding_server.errors import InvalidInput, PermissionDenied, Unauthenticated
from embedding_server.served_versions import Versions
from embedding_server.shard import Shard
from frostline.v1 import embedding_pb2 as pb
from frostline.v1 import embedding_pb2_grpc as pb_grpc
from services import security as security_module
from services.model_client import ModelClient
from services.security import ROLES_BY_METHOD, ServerSecurity
from services.security_options import Credentials, SecurityOptions
from services.served_model import ServedModel, ServeWhat
from services.shard_client import RemoteStore
from services.shard_server import ShardServer
from services.snapshot_server import SnapshotServer
from tests.services.authority import Files, Pair, lines_of_key, new_token, write_secret
from tests.trainer.trained_snapshots import make_snapshot

Serve = Callable[..., list[str]]
TIMEOUT_S = 20.0
REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
TRAINERS, READERS = {"train", "admin"}, {"train", "serve", "admin"}
SERVED = {"frostline.v1.EmbeddingShard", "frostline.v1.EmbeddingLookup", "grpc.health.v1.Health"}


def expected_roles(method: str) -> set[str]:
    """What the design says, not what the table says."""
    if method.startswith("/frostline.v1.EmbeddingShard/") and not method.endswith("/DescribeTables"):
        return TRAINERS
    return {"admin"} if method.endswith("/ChooseVersion") else READERS


@pytest.fixture
def connect() -> Iterator[Callable[..., grpc.Channel]]:
    """connect(address, ca PEM or None: plain, client's Pair) -> a channel."""
    channels: list[grpc.Channel] = []

    def open_channel(address: str, ca: bytes | None = None, pair: Pair | None = None) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if ca is None:
            channels.append(grpc.insecure_channel(address, options=options))
        else:
            key, certificate = (pair.key, pair.certificate) if pair else (None, None)
            credentials = grpc.ssl_channel_credentials(ca, key, certificate)
            channels.append(grpc.secure_channel(address, credentials, options=options))
        return channels[-1]

    yield open_channel
    for channel in channels:
        channel.close()


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)


def status_of(channel: grpc.Channel, method: str, token: str | None = None) -> grpc.StatusCode:
    """Of a call without a message: a method that takes one answers UNIMPLEMENTED to that, once the call may be made."""
    call = channel.stream_stream(method)(iter(()), metadata=bearer(token), timeout=TIMEOUT_S)
    return call.code()


def methods_of(channel: grpc.Channel, token: str | None) -> list[str]:
    """Every method that the server has, as it says itself."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    def ask(**request: str) -> reflection_pb2.ServerReflectionResponse:
        requests = iter([reflection_pb2.ServerReflectionRequest(**request)])
        return next(iter(stub.ServerReflectionInfo(requests, metadata=bearer(token), timeout=TIMEOUT_S)))

    found = []
    for service in ask(list_services="").list_services_response.service:
        (data,) = ask(file_containing_symbol=service.name).file_descriptor_response.file_descriptor_proto
        file = FileDescriptorProto.FromString(data)
        (described,) = [each for each in file.service if f"{file.package}.{each.name}" == service.name]
        found += [f"/{service.name}/{method.name}" for method in described.method]
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_every_rpc_needs_a_token_of_its_role(serve: Serve, files: Files, connect: Callable) -> None:
    (address,) = serve(security=ServerSecurity(files.options(), "127.0.0.1"))
    assert check_every_method(connect(address, files.authority.pem), files, SERVED) >= 19


def test_every_rpc_of_a_server_of_snapshots_needs_a_token_of_its_role(
    files: Files, connect: Callable, tmp_path: Path
) -> None:
    cut, _ = make_snapshot(tmp_path / "snapshots", deltas=False)
    served = ServedModel(cut, ServeWhat(rows_only=True))
    server = SnapshotServer(Versions(served), security=ServerSecurity(files.options(), "127.0.0.1"))
    address = server.start()
    try:
        services = {"frostline.v1.ModelServing", "frostline.v1.EmbeddingLookup", "grpc.health.v1.Health"}
        assert check_every_method(connect(address, files.authority.pem), files, services) >= 8
        token = tmp_path / "serve"
        write_secret(token, files.tokens["serve"] + "\n")
        client = ModelClient(address, credentials=Credentials(tls_ca=files.ca, token_file=token))
        assert client.describe().version.snapshot_id == cut.name
        with pytest.raises(PermissionDenied, match="ChooseVersion"):
            client.choose("")
        client.close()
    finally:
        server.stop()


def check_every_method(channel: grpc.Channel, files: Files, services: set[str]) -> int:
    """How many there are; each is asked for without a token, with wrong ones, and with one of each role."""
    methods = methods_of(channel, files.tokens["serve"])
    assert {method.split("/")[1] for method in methods} >= services | {"grpc.reflection.v1alpha.ServerReflection"}
    guarded = [method for method in methods if not method.startswith("/grpc.health.v1.Health/")]
    for method in guarded:
        assert method in ROLES_BY_METHOD, f"{method} is admin's alone: name its roles in ROLES_BY_METHOD"
        for token in (None, new_token(), files.tokens["train"][:-1], "", " ", files.tokens["train"].upper()):
            assert status_of(channel, method, token) == grpc.StatusCode.UNAUTHENTICATED, (method, token)
        for role, token in files.tokens.items():
            status = status_of(channel, method, token)
            if role in expected_roles(method):
                assert status not in REFUSED, (method, role)
            else:
                assert status == grpc.StatusCode.PERMISSION_DENIED, (method, role)
    for method in set(methods) - set(guarded):
        for token in (None, new_token(), *files.tokens.values()):
            assert status_of(channel, method, token) not in REFUSED, method
    return len(methods)


def test_health_alone_answers_to_everybody(serve: Serve, files: Files, connect: Callable) -> None:
    (address,) = serve(security=ServerSecurity(files.options(), "127.0.0.1"))
    stub = health_pb2_grpc.HealthStub(connect(address, files.authority.pem))
    request = health_pb2.HealthCheckRequest()
    assert stub.Check(request, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(request, timeout=TIMEOUT_S)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_a_method_that_nobody_has_put_in_the_table_is_admins(serve: Serve, files: Files, connect: Callable) -> None:
    (address,) = serve(security=ServerSecurity(files.options(), "127.0.0.1"))
    channel = connect(address, files.authority.pem)
    for method in ("/frostline.v1.EmbeddingShard/NoSuchCall", "/grpc.health.v1.HealthOfMine/Check", "/x/y"):
        assert status_of(channel, method) == grpc.StatusCode.UNAUTHENTICATED
        assert status_of(channel, method, files.tokens["train"]) == grpc.StatusCode.PERMISSION_DENIED
        assert status_of(channel, method, files.tokens["admin"]) == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("client", ["of another CA", "none", "expired"])
def test_every_rpc_refuses_a_wrong_client_certificate(
    serve: Serve, files: Files, connect: Callable, client: str
) -> None:
    (address,) = serve(security=ServerSecurity(files.options(tls_client_ca=files.ca), "127.0.0.1"))
    right = connect(address, files.authority.pem, files.authority.issue("trainer"))
    methods = methods_of(right, files.tokens["admin"])
    pairs = {
        "of another CA": files.other_authority.issue("trainer"),
        "none": None,
        "expired": files.authority.issue("trainer", days=-1),
    }
    wrong = connect(address, files.authority.pem, pairs[client])
    for method in methods:  # health too: there is no call without a connection
        assert status_of(wrong, method, files.tokens["admin"]) == grpc.StatusCode.UNAVAILABLE, method
        assert status_of(right, method, files.tokens["admin"]) not in {*REFUSED, grpc.StatusCode.UNAVAILABLE}, method


def test_a_client_refuses_a_server_of_another_ca_or_in_plain(serve: Serve, files: Files, connect: Callable) -> None:
    secure, plain = serve(security=ServerSecurity(files.options(), "127.0.0.1")) + serve()
    method, token = "/frostline.v1.EmbeddingLookup/ListTables", files.tokens["serve"]
    assert status_of(connect(secure, files.other_authority.pem), method, token) == grpc.StatusCode.UNAVAILABLE
    assert status_of(connect(plain, files.authority.pem), method, token) == grpc.StatusCode.UNAVAILABLE
    assert status_of(connect(secure), method, token) == grpc.StatusCode.UNAVAILABLE


def test_a_refused_call_is_not_read(serve: Serve, files: Files, connect: Callable) -> None:
    """Neither waits a thread for a request that never comes, nor is a large one taken in."""
    (address,) = serve(security=ServerSecurity(files.options(tls_cert=None, tls_key=None), "127.0.0.1"))
    channel = connect(address)

    def nothing() -> Iterator[bytes]:
        time.sleep(TIMEOUT_S)
        yield b""

    silent = [
        channel.stream_stream("/frostline.v1.EmbeddingShard/Push")(nothing(), timeout=TIMEOUT_S) for _ in range(8)
    ]
    started_s = time.monotonic()
    assert {call.code() for call in silent} == {grpc.StatusCode.UNAUTHENTICATED}
    assert time.monotonic() - started_s < TIMEOUT_S / 2
    push = channel.unary_unary("/frostline.v1.EmbeddingShard/Push")
    with pytest.raises(grpc.RpcError, match="no token") as refused:
        push(bytes(32 << 20), timeout=TIMEOUT_S)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_tokens_change_without_a_restart(
    serve: Serve, files: Files, connect: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security_module, "TOKEN_CHECK_S", 0.05)
    (address,) = serve(security=ServerSecurity(files.options(), "127.0.0.1"))
    channel, method = connect(address, files.authority.pem), "/frostline.v1.EmbeddingShard/GetEpoch"
    old = files.tokens["train"]
    assert status_of(channel, method, old) not in REFUSED
    files.tokens["train"] = new_token()
    assert status_of(channel, method, files.tokens["train"]) == grpc.StatusCode.UNAUTHENTICATED
    files.write_tokens()
    wait_until(lambda: status_of(channel, method, files.tokens["train"]) not in REFUSED)
    assert status_of(channel, method, old) == grpc.StatusCode.UNAUTHENTICATED
    # a file that cannot be used lets in and keeps out whom the one before did
    write_secret(files.token_file, "trian nobody-knows-this-token\n")
    time.sleep(0.1)
    assert status_of(channel, method, files.tokens["train"]) not in REFUSED
    assert status_of(channel, method, "nobody-knows-this-token") == grpc.StatusCode.UNAUTHENTICATED


def test_certificates_change_without_a_restart(serve: Serve, files: Files, connect: Callable) -> None:
    (address,) = serve(security=ServerSecurity(files.options(tls_client_ca=files.ca), "127.0.0.1"))
    method, token = "/frostline.v1.EmbeddingLookup/ListTables", files.tokens["serve"]
    ours, theirs = files.authority, files.other_authority
    old_client, new_client = ours.issue("client"), theirs.issue("client")
    before = connect(address, ours.pem, old_client)
    assert status_of(before, method, token) not in {*REFUSED, grpc.StatusCode.UNAVAILABLE}
    # one file after the other: the new certificate does not fit the old key, so the old pair is shown
    pair = theirs.issue()
    write_secret(files.cert, pair.certificate)
    assert status_of(connect(address, ours.pem, old_client), method, token) != grpc.StatusCode.UNAVAILABLE
    assert status_of(connect(address, theirs.pem, old_client), method, token) == grpc.StatusCode.UNAVAILABLE
    write_secret(files.key, pair.key)
    assert status_of(connect(address, theirs.pem, old_client), method, token) != grpc.StatusCode.UNAVAILABLE
    assert status_of(connect(address, ours.pem, old_client), method, token) == grpc.StatusCode.UNAVAILABLE
    # whose certificates are taken
    assert status_of(connect(address, theirs.pem, new_client), method, token) == grpc.StatusCode.UNAVAILABLE
    write_secret(files.ca, theirs.pem)
    assert status_of(connect(address, theirs.pem, new_client), method, token) != grpc.StatusCode.UNAVAILABLE
    assert status_of(connect(address, theirs.pem, old_client), method, token) == grpc.StatusCode.UNAVAILABLE
    # a connection that is open stays
    assert status_of(before, method, token) not in {*REFUSED, grpc.StatusCode.UNAVAILABLE}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "shard-0", ""])
def test_a_server_that_others_reach_needs_both_or_a_word(files: Files, host: str) -> None:
    for missing, message in (
        ({"tls_cert": None, "tls_key": None}, r"no TLS \(--tls-cert, --tls-key\): .* or add --insecure"),
        ({"token_file": None}, r"no tokens \(--token-file\): "),
        ({"tls_cert": None, "tls_key": None, "token_file": None}, "no TLS .* and no tokens"),
    ):
        with pytest.raises(InvalidInput, match=f"--host {host} can be reached from other machines.*{message}"):
            ServerSecurity(files.options(**missing), host)
        ServerSecurity(files.options(**missing, insecure=True), host)
        ServerSecurity(files.options(**missing), "127.0.0.1")
    ServerSecurity(files.options(), host)
    with pytest.raises(InvalidInput, match="--insecure"):
        ShardServer(Shard(memory_limit_bytes=64 << 20, backend="cpu"), host=host)


def test_files_that_cannot_be_used_are_named(files: Files, tmp_path: Path) -> None:
    other = files.authority.issue()
    _, other_key = other.write(tmp_path, "other")
    _, readable_key = other.write(tmp_path, "readable")
    readable_key.chmod(0o644)
    encrypted = write_secret(tmp_path / "encrypted.key", _encrypted(other.key))
    empty = write_secret(tmp_path / "empty.pem", "")
    cases: list[tuple[dict[str, Path], str]] = [
        ({"tls_cert": tmp_path / "missing"}, r"certificate .*missing: cannot be read \(No such file"),
        ({"tls_cert": empty}, r"empty\.pem and key .*server\.key: OpenSSL says "),
        ({"tls_key": empty}, r"server\.pem and key .*empty\.pem: OpenSSL says "),
        ({"tls_key": other_key}, r"server\.pem and key .*other\.key: OpenSSL says KEY_VALUES_MISMATCH"),
        ({"tls_key": readable_key}, r"key .*readable\.key: its mode 0644 lets others read or write it"),
        ({"tls_key": encrypted}, r"encrypted\.key: is encrypted"),
        ({"tls_client_ca": files.key}, r"CA certificates .*server\.key: holds no certificate"),
        ({"token_file": tmp_path / "missing"}, r"token file .*missing: cannot be read"),
    ]
    for changes, message in cases:
        with pytest.raises(InvalidInput, match=message):
            ServerSecurity(files.options(**changes), "127.0.0.1")
    with pytest.raises(InvalidInput, match="tls_cert without tls_key"):
        SecurityOptions(tls_cert=files.cert)
    with pytest.raises(InvalidInput, match="tls_client_ca without tls_cert"):
        SecurityOptions(tls_client_ca=files.ca)


def _encrypted(key: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    )


class Noting(grpc.ServerInterceptor):
    """What an interceptor of others sees."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    def intercept_service(self, continuation: Callable, details: grpc.HandlerCallDetails) -> Any:
        self.methods.append(details.method)
        return continuation(details)


def test_other_interceptors_see_no_refused_calls(serve: Serve, files: Files, connect: Callable) -> None:
    noting, security = Noting(), ServerSecurity(files.options(), "127.0.0.1")
    (address,) = serve(security=security, interceptors=[noting])
    channel, method = connect(address, files.authority.pem), "/frostline.v1.EmbeddingShard/GetEpoch"
    for token in (None, new_token(), files.tokens["serve"], files.tokens["train"]):
        status_of(channel, method, token)
    assert noting.methods == [method]
    assert security.interceptors[0].refusals == {"no_token": 1, "wrong_token": 1, "wrong_role": 1}


def test_no_secret_is_in_any_log_error_or_text(
    serve: Serve, files: Files, connect: Callable, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    security = ServerSecurity(files.options(tls_client_ca=files.ca), "127.0.0.1")
    client_pair = files.authority.issue("client")
    cert, key = client_pair.write(files.folder, "client")
    credentials = files.client("train", tls_cert=cert, tls_key=key)
    (address,) = serve(security=security)
    wrong, texts = new_token(), []
    with_wrong = write_secret(files.folder / "wrong", wrong)
    store = RemoteStore([address], credentials=credentials)
    assert store.table_specs() == {}
    with pytest.raises(Unauthenticated, match="not one of this server's") as refused:
        RemoteStore([address], credentials=files.client(tls_cert=cert, tls_key=key, token_file=with_wrong))
    texts += [str(refused.value), repr(refused.value), repr(refused.value.__cause__ or refused.value.__context__)]
    reader = RemoteStore([address], credentials=files.client("serve", tls_cert=cert, tls_key=key))
    with pytest.raises(PermissionDenied, match=r"role 'serve' may not call .*GetEpoch; .*: train, admin") as denied:
        reader.begin_epoch("job", 1, "sync")
    texts += [str(denied.value), repr(denied.value.__context__)]
    write_secret(files.token_file, f"train {wrong}\n{wrong} serve\n")
    security._tokens.check()  # type: ignore[union-attr]
    write_secret(files.key, lines_of_key(files.pair.key)[0])
    status_of(connect(address, files.authority.pem, client_pair), "/x/y", files.tokens["admin"])
    texts += [
        repr(each) for each in (security, security._tokens, store, store._channels, credentials, security._options)
    ]
    texts += [str(security), *capfd.readouterr()]
    store.close()
    reader.close()
    assert "stays in use: token file" in caplog.text
    assert "stays in use: certificate" in caplog.text
    assert "calls refused since" in caplog.text
    for secret in (*files.secrets(), wrong, *lines_of_key(client_pair.key)):
        for text in (caplog.text, *texts):
            assert secret not in text


def test_names_are_checked_and_may_be_told(serve: Serve, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    named = files.authority.issue("shards.example")
    cert, key = named.write(files.folder, "named")
    (address,) = serve(security=ServerSecurity(files.options(tls_cert=cert, tls_key=key), "127.0.0.1"))
    channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(files.authority.pem))
    assert status_of(channel, "/x/y", files.tokens["admin"]) == grpc.StatusCode.UNAVAILABLE
    channel.close()
    store = RemoteStore([address], credentials=files.client(tls_server_name="shards.example"))
    stub = pb_grpc.EmbeddingShardStub(store._channels[0]._channel)
    with pytest.raises(grpc.RpcError, match="no token"):
        stub.GetEpoch(pb.GetEpochRequest(job="job"))
    store.close()
