"""Who may call a server: TLS, client certificates, bearer tokens with roles. One object for every server of ours.

    security = ServerSecurity(SecurityOptions(tls_cert=..., tls_key=..., token_file=...), host)
    server = grpc.server(pool, interceptors=[*security.interceptors, *others])
    port = security.add_port(server, 0)

Every call but those of health needs a token, if there is a file of them: without one, or with one that is not in the
file, it is UNAUTHENTICATED; with one whose role may not make the call, PERMISSION_DENIED. Refusals come before a byte
of the request is read. Certificates and tokens are read again when their files change, without a restart; calls under
way and connections that are open stay.

Beyond loopback a server starts only with TLS and tokens, or with --insecure.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

from embedding_server.errors import InvalidInput
from services.certificates import server_configuration
from services.secret_files import Reloaded
from services.security_options import SecurityOptions
from services.snapshot_paths import is_loopback
from services.tokens import ROLES, Role, TokenSet, bearer_token, read_server_tokens

log = logging.getLogger(__name__)

#: how old a look at the file of tokens may be: a token that is taken out works no longer than this
TOKEN_CHECK_S = 1.0
#: refusals are told together, once in so many seconds, so that they cannot fill a disk
REFUSALS_LOGGED_EVERY_S = 60.0

HEALTH = "/grpc.health.v1.Health/"

_TRAIN: frozenset[Role] = frozenset(("train", "admin"))
_READ: frozenset[Role] = frozenset(("train", "serve", "admin"))
_ADMIN: frozenset[Role] = frozenset(("admin",))

#: Who may call what; a method that is not here is admin's alone, so a new one is closed until it is put here.
#: `train` may create, drop, restore and delete, because a job does so by itself: worker 0 creates the tables, every
#: recovery restores them, erasure and drops are steps of a training loop. To keep it from them would protect nothing,
#: for who may push can make any row worthless.
ROLES_BY_METHOD: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        "/frostline.v1.EmbeddingShard/DescribeTables": _READ,  # which buckets are where: clients that look up need it
        "/frostline.v1.EmbeddingShard/CreateTables": _TRAIN,
        "/frostline.v1.EmbeddingShard/GetEpoch": _TRAIN,
        "/frostline.v1.EmbeddingShard/BeginEpoch": _TRAIN,
        "/frostline.v1.EmbeddingShard/Pull": _TRAIN,
        "/frostline.v1.EmbeddingShard/Push": _TRAIN,
        "/frostline.v1.EmbeddingShard/Advance": _TRAIN,
        "/frostline.v1.EmbeddingShard/GetCutProgress": _TRAIN,
        "/frostline.v1.EmbeddingShard/AbandonCut": _TRAIN,
        "/frostline.v1.EmbeddingShard/Restore": _TRAIN,
        "/frostline.v1.EmbeddingShard/GetMaskInfo": _TRAIN,
        "/frostline.v1.EmbeddingShard/Meet": _TRAIN,
        "/frostline.v1.EmbeddingShard/Prefetch": _TRAIN,
        "/frostline.v1.EmbeddingLookup/Lookup": _READ,
        "/frostline.v1.EmbeddingLookup/ListTables": _READ,
        "/frostline.v1.EmbeddingLookup/GetTable": _READ,
        "/frostline.v1.ModelServing/Predict": _READ,
        "/frostline.v1.ModelServing/DescribeModel": _READ,
        "/frostline.v1.ModelServing/ChooseVersion": _ADMIN,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _READ,
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _READ,
    }
)


class TokenInterceptor(grpc.ServerInterceptor):
    """Refuses calls without a token of the right role. It runs on gRPC's one serving thread, so it does little.

    refusals: how many, by reason; the serving thread alone adds to it, any may read it.
    """

    def __init__(self, tokens: Reloaded[TokenSet]) -> None:
        self._tokens = tokens
        self.refusals: Counter[str] = Counter(no_token=0, wrong_token=0, wrong_role=0)
        self._logged: Counter[str] = Counter()
        self._log_after_s = 0.0

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method = details.method
        token = bearer_token(details.invocation_metadata)
        role = self._tokens.current().role_of(token) if token else None
        if role is not None and role in ROLES_BY_METHOD.get(method, _ADMIN):
            return continuation(details)
        if method.startswith(HEALTH):
            return continuation(details)
        if role is not None:
            return self._refuse("wrong_role", grpc.StatusCode.PERMISSION_DENIED, _role_text(role, method))
        if token is None:
            text = "no token; send the metadata `authorization: Bearer TOKEN` (clients of ours: a token file)"
            return self._refuse("no_token", grpc.StatusCode.UNAUTHENTICATED, text)
        text = "the token is not one of this server's; take one that is in its token file"
        return self._refuse("wrong_token", grpc.StatusCode.UNAUTHENTICATED, text)

    def _refuse(self, reason: str, status: grpc.StatusCode, text: str) -> grpc.RpcMethodHandler:
        self.refusals[reason] += 1
        now_s = time.monotonic()
        if now_s >= self._log_after_s:
            self._log_after_s = now_s + REFUSALS_LOGGED_EVERY_S
            new, self._logged = self.refusals - self._logged, self.refusals.copy()
            counts = ", ".join(f"{count} {name}" for name, count in new.items())
            log.warning("calls refused since the last such line: %s; the last one: %s", counts, text)

        def abort(request: Any, context: grpc.ServicerContext) -> Any:
            return context.abort(status, text)

        # The kind whose requests are an iterator: what the caller sends is never read, and no thread waits for it.
        return grpc.stream_stream_rpc_method_handler(abort)


def _role_text(role: Role, method: str) -> str:
    if method not in ROLES_BY_METHOD:
        return f"role {role!r} may not call {method!r:.200}: it is not one of the calls that others than admin have"
    allowed = ", ".join(name for name in ROLES if name in ROLES_BY_METHOD[method])
    return f"role {role!r} may not call {method}; a token of one of these roles may: {allowed}"


class ServerSecurity:
    """TLS and tokens of one server. Thread safety: every method may be called from any thread."""

    def __init__(self, options: SecurityOptions, host: str) -> None:
        """host: what the server will bind. InvalidInput if the files cannot be used, or are needed and not given."""
        _check_reach(options, host)
        self.host = host
        self._options = options
        self._certificates: Reloaded[grpc.ServerCertificateConfiguration] | None = None
        if options.tls_cert:
            files = [path for path in (options.tls_cert, options.tls_key, options.tls_client_ca) if path]
            self._certificates = Reloaded(files, "the certificate", lambda: server_configuration(options), 0.0)
        self._tokens: Reloaded[TokenSet] | None = None
        self.interceptors: tuple[TokenInterceptor, ...] = ()
        if options.token_file:
            self._tokens = _reloaded_tokens(options.token_file)
            self.interceptors = (TokenInterceptor(self._tokens),)

    def add_port(self, server: grpc.Server, port: int) -> int:
        """Binds the host that this was made for; port 0: a free one. Returns the port. RuntimeError if it cannot."""
        address = f"{self.host}:{port}"
        if self._certificates is None:
            return server.add_insecure_port(address)
        certificates = self._certificates
        shown = certificates.current()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """gRPC asks before each handshake; None: as before, so it need not parse them again."""
            nonlocal shown
            before, shown = shown, certificates.current()
            return None if shown is before else shown

        credentials = grpc.dynamic_ssl_server_credentials(
            shown, fetch, require_client_authentication=self._options.tls_client_ca is not None
        )
        return server.add_secure_port(address, credentials)

    def __str__(self) -> str:
        """For a log: what is asked of callers."""
        options = self._options
        tls = f"TLS with {options.tls_cert}" if options.tls_cert else "no TLS"
        if options.tls_client_ca:
            tls += f", client certificates of {options.tls_client_ca}"
        tokens = f"tokens of {options.token_file} ({self._tokens.current()})" if self._tokens else "no tokens"
        return f"{tls}; {tokens}"


def _reloaded_tokens(path: Path) -> Reloaded[TokenSet]:
    return Reloaded([path], "the token file", lambda: read_server_tokens(path), TOKEN_CHECK_S)


def _check_reach(options: SecurityOptions, host: str) -> None:
    missing = [
        *([] if options.tls_cert else ["TLS (--tls-cert, --tls-key)"]),
        *([] if options.token_file else ["tokens (--token-file)"]),
    ]
    if missing and not options.insecure and not is_loopback(host):
        raise InvalidInput(
            f"--host {host} can be reached from other machines, and this server would have no "
            f"{' and no '.join(missing)}: whoever reaches it could read and change every row; give them, or bind "
            "127.0.0.1, or add --insecure where the network itself keeps strangers out"
        )
