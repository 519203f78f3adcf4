"""A gRPC server of some services, with health and reflection: what a gateway is made of.

Life: created (health NOT_SERVING), `start`, serving (health SERVING), `stop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from embedding_server.errors import StoreUnavailable
from services.admission import Limits
from services.security import ServerSecurity
from services.shard_server import SERVER_OPTIONS, SPARE_THREADS


class RpcServer:
    """Thread safety: `stop` may be called from any thread, `start` once."""

    def __init__(
        self,
        services: Mapping[str, grpc.GenericRpcHandler],
        limits: Limits,
        security: ServerSecurity,
        *,
        thread_name: str = "rpc",
    ) -> None:
        """services: handlers by full name. security: who may call, and the host to bind."""
        max_rpcs = limits.max_calls + SPARE_THREADS
        self._security = security
        self._host = security.host
        self._services = tuple(services)
        self._health = health.HealthServicer()
        self._pool = ThreadPoolExecutor(max_rpcs, thread_name_prefix=thread_name)
        self._server = grpc.server(
            self._pool,
            interceptors=security.interceptors,
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=max_rpcs,
        )
        self._server.add_generic_rpc_handlers(tuple(services.values()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def _set_health(self, status: int) -> None:
        for service in ("", *self._services):
            self._health.set(service, status)

    def start(self, port: int = 0) -> str:
        """Binds and serves; port 0 takes a free one. Returns "host:port". Raises StoreUnavailable if it cannot bind."""
        try:
            bound = self._security.add_port(self._server, port)
        except RuntimeError as error:
            raise StoreUnavailable(f"cannot listen on {self._host}:{port}: {error}; choose another --port") from error
        self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return f"{self._host}:{bound}"

    def stop(self, grace_s: float = 5.0) -> None:
        """Drains: no new calls, running ones finish within `grace_s`."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait(grace_s + 1.0)
        self._pool.shutdown(wait=False)
