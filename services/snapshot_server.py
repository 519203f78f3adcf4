"""SnapshotServer: EmbeddingLookup and ModelServing of snapshots behind a port, with health and reflection.

Calls run on the threads of gRPC, several at a time: a snapshot never changes, and each call pins the version that it
reads to its end. Health has the services, and `follow`: SERVING while the newest snapshot is served or about to be,
NOT_SERVING while it is refused or another is held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from embedding_server.errors import StoreUnavailable
from embedding_server.lookup import LookupSource
from embedding_server.served_versions import Versions
from services.admission import Admission, Limits
from services.following import Follower
from services.lookup_service import LookupServicer
from services.model_service import ModelServicer
from services.security import ServerSecurity
from services.security_options import SecurityOptions
from services.served_model import ServedModel
from services.shard_server import LOOKUP_SERVICE, SERVER_OPTIONS, SPARE_THREADS, handlers_of

MODEL_SERVICE = "frostline.v1.ModelServing"
FOLLOW_HEALTH = "follow"
_HEALTH_S = 1.0  # between looks at the follower


class SnapshotServer:
    """Takes ownership of versions and follower.

    Life: created (health NOT_SERVING), `start`, `serving` (health SERVING), `stop`.
    """

    def __init__(
        self,
        versions: Versions[ServedModel],
        follower: Follower | None = None,
        limits: Limits | None = None,
        security: ServerSecurity | None = None,
    ) -> None:
        """security: who may call, and the host to bind; None: anybody on this machine."""
        limits = limits or Limits()
        self._versions, self._follower = versions, follower
        self._security = security or ServerSecurity(SecurityOptions(), "127.0.0.1")
        self.admission = Admission(limits)
        max_rpcs = limits.max_calls + SPARE_THREADS
        self._health = health.HealthServicer()
        self._pool = ThreadPoolExecutor(max_rpcs, thread_name_prefix="serve-rpc")
        self._server = grpc.server(
            self._pool,
            interceptors=self._security.interceptors,
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=max_rpcs,
        )
        lookups = LookupServicer(self._run, self._dims, self.admission)
        model = ModelServicer(versions, self.admission, follower)
        self._server.add_generic_rpc_handlers(
            (handlers_of("EmbeddingLookup", lookups), handlers_of("ModelServing", model))
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (LOOKUP_SERVICE, MODEL_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._watch_follower, name="follow-health", daemon=True)
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def _run(self, context: grpc.ServicerContext, work: Callable[[LookupSource], Any]) -> Any:
        with self._versions.pinned() as served:
            return work(served.snapshot)

    def _dims(self) -> dict[str, int]:
        with self._versions.pinned() as served:
            return {name: spec.dim for name, spec in served.snapshot.table_specs().items()}

    def _set_health(self, status: int) -> None:
        for service in ("", LOOKUP_SERVICE, MODEL_SERVICE):
            self._health.set(service, status)

    def _watch_follower(self) -> None:
        assert self._follower is not None
        while True:
            state = self._follower.state
            is_behind = bool(state.refusal) or (state.is_held and state.newest_id != state.served_id)
            status = health_pb2.HealthCheckResponse
            self._health.set(FOLLOW_HEALTH, status.NOT_SERVING if is_behind else status.SERVING)
            if self._stopping.wait(_HEALTH_S):
                return

    def start(self, port: int = 0) -> str:
        """Binds and serves; port 0 takes a free one. Returns "host:port". Raises StoreUnavailable if it cannot bind."""
        host = self._security.host
        try:
            bound = self._security.add_port(self._server, port)
        except RuntimeError as error:
            raise StoreUnavailable(f"cannot listen on {host}:{port}: {error}; choose another --port") from error
        self._server.start()
        if self._follower is not None:
            self._follower.start()
            self._watch.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return f"{host}:{bound}"

    def stop(self, grace_s: float = 5.0) -> None:
        """Drains: health NOT_SERVING, no new calls; running ones finish within `grace_s`."""
        self._health.enter_graceful_shutdown()
        self._stopping.set()
        if self._follower is not None:
            self._follower.stop()
        self._server.stop(grace_s).wait(grace_s + 1.0)
        self._versions.close()
        self._pool.shutdown(wait=False)
