"""How a client reaches one server: a channel with or without TLS, and the token that its calls carry.

Files are read again when they change: a token within TOKEN_CHECK_S, or at once when the server refuses the old one;
certificates when a connection is lost (`is_outdated`), for an open one does not need them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import grpc

from embedding_server.errors import InvalidInput
from services.certificates import channel_credentials
from services.secret_files import Reloaded
from services.security_options import Credentials
from services.snapshot_paths import is_loopback
from services.tokens import AUTHORIZATION, read_client_token

TOKEN_CHECK_S = 1.0
ChannelOptions = Sequence[tuple[str, Any]]
Metadata = tuple[tuple[str, str], ...]


class ChannelAccess:
    """The credentials of one address. Thread safety: every method may be called from any thread."""

    def __init__(self, credentials: Credentials, address: str) -> None:
        """InvalidInput if a file cannot be used, or the token would cross a network in the clear."""
        self._credentials = credentials
        self._address = address
        self._certificates: Reloaded[grpc.ChannelCredentials] | None = None
        self._opened_with: grpc.ChannelCredentials | None = None
        self._token: Reloaded[Metadata] | None = None
        if credentials.token_file:
            path = credentials.token_file
            self._check_reach()
            self._token = Reloaded([path], "the token file", lambda: _metadata(read_client_token(path)), TOKEN_CHECK_S)
        if credentials.uses_tls:
            files = [path for path in (credentials.tls_ca, credentials.tls_cert, credentials.tls_key) if path]
            load = functools.partial(channel_credentials, credentials)
            self._certificates = Reloaded(files, "the certificate", load, TOKEN_CHECK_S)

    def open(self, options: ChannelOptions = ()) -> grpc.Channel:
        if self._certificates is None:
            return grpc.insecure_channel(self._address, options=options)
        self._opened_with = self._certificates.current()
        return grpc.secure_channel(self._address, self._opened_with, options=self._options(options))

    def open_aio(self, options: ChannelOptions = ()) -> grpc.aio.Channel:
        """The same within the running event loop."""
        if self._certificates is None:
            return grpc.aio.insecure_channel(self._address, options=options)
        self._opened_with = self._certificates.current()
        return grpc.aio.secure_channel(self._address, self._opened_with, options=self._options(options))

    def _options(self, options: ChannelOptions) -> ChannelOptions:
        name = self._credentials.tls_server_name
        return [*options, ("grpc.ssl_target_name_override", name)] if name else options

    def metadata(self) -> Metadata | None:
        """Of each call; None: there is no token."""
        return self._token.current() if self._token else None

    def has_other_token(self, refused: Metadata | None) -> bool:
        """Whether the file has another token than the one that a server has just refused."""
        if self._token is None:
            return False
        self._token.check()
        return self._token.current() != refused

    def is_outdated(self) -> bool:
        """Whether the certificates have changed since `open`, so that its channel connects with the old ones."""
        if self._certificates is None:
            return False
        self._certificates.check()
        return self._certificates.current() is not self._opened_with

    def _check_reach(self) -> None:
        credentials, host = self._credentials, self._address.rpartition(":")[0]
        if not credentials.uses_tls and not credentials.insecure and not is_loopback(host):
            raise InvalidInput(
                f"token file {credentials.token_file}: the token would go to {self._address} in the clear; use TLS "
                "(tls_ca, or tls for public CAs), or set insecure where the network itself keeps strangers out"
            )


def _metadata(token: str) -> Metadata:
    return ((AUTHORIZATION, f"Bearer {token}"),)
