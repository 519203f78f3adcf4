"""Certificates and keys as gRPC takes them, checked before it does: gRPC itself says little about what is wrong.

The checks are those of OpenSSL: the key is that of the certificate, a CA's file holds certificates. Whether a
certificate is trusted, of the right name and in its time is decided in each handshake.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from embedding_server.errors import InvalidInput
from services.secret_files import read_file
from services.security_options import Credentials, SecurityOptions


def server_configuration(options: SecurityOptions) -> grpc.ServerCertificateConfiguration:
    """InvalidInput, naming the file, if one cannot be used."""
    assert options.tls_cert and options.tls_key, "SecurityOptions has both or neither"
    pair = _read_pair(options.tls_cert, options.tls_key)
    roots = _read_roots(options.tls_client_ca) if options.tls_client_ca else None
    return grpc.ssl_server_certificate_configuration((pair,), root_certificates=roots)


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """InvalidInput, naming the file, if one cannot be used."""
    roots = _read_roots(credentials.tls_ca) if credentials.tls_ca else None
    if not credentials.tls_cert or not credentials.tls_key:
        return grpc.ssl_channel_credentials(root_certificates=roots)
    key, certificate = _read_pair(credentials.tls_cert, credentials.tls_key)
    return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=certificate)


def _read_roots(path: Path) -> bytes:
    data = read_file(path, "CA certificates", is_secret=False)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        raise InvalidInput(f"CA certificates {path}: holds no certificate in PEM") from None
    return data


def _read_pair(certificate_path: Path, key_path: Path) -> tuple[bytes, bytes]:
    """(key, certificate). Checks the bytes that were read, not what the paths hold a moment later."""
    certificate = read_file(certificate_path, "certificate", is_secret=False)
    key = read_file(key_path, "key", is_secret=True)

    def no_password() -> str:
        raise InvalidInput(f"key {key_path}: is encrypted, and a server has nobody to ask; decrypt it (openssl pkey)")

    try:
        with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate_file, key_file, password=no_password)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise InvalidInput(
            f"certificate {certificate_path} and key {key_path}: OpenSSL says {reason}; both must be PEM, the key that "
            "of the file's first certificate"
        ) from None
    return key, certificate


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A path, for OpenSSL, of a file that is in memory alone."""
    descriptor = os.memfd_create("frostline-pem")
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
