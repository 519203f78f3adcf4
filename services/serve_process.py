"""The process of `frostline serve`: a snapshot, or the newest one of a job, read-only.

    {"address": "127.0.0.1:41235", "snapshot": "cut-000000000120-1", "pid": 4711}

is the one line on standard output, printed when it serves. Logs go to standard error. Stop it with SIGTERM or SIGINT:
it drains and ends with status 0.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from services.admission import Limits
from services.security_options import SecurityOptions
from services.shard_process import prepare_process

if TYPE_CHECKING:
    from embedding_server.served_versions import Versions
    from services.following import Follower
    from services.served_model import ServedModel

log = logging.getLogger(__name__)

_LOOKUP_KERNELS = frozenset(f"embedding_server.kernels.{name}" for name in ("served", "lookups", "paging", "frozen"))


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `frostline serve`."""

    snapshot: Path  # a snapshot, or the folder of a job or of jobs
    follow: bool = False
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    rows_only: bool = False
    factories: tuple[str, ...] = ()
    threads: int = 1  # of torch, for Predict
    poll_s: float = 0.5
    limits: Limits = field(default_factory=Limits)
    security: SecurityOptions = field(default_factory=SecurityOptions)
    drain_s: float = 5.0


def run_serve(options: ServeOptions) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Main thread only, and first thing in the process."""
    stopping = prepare_process("serve", options.threads, is_bound_to_stdin=False)
    # After the settings above: these imports load numba and, for Predict, torch.
    from embedding_server.errors import FrostlineError
    from embedding_server.kernels.kernel import warm_up
    from services.security import ServerSecurity
    from services.snapshot_server import SnapshotServer

    try:
        security = ServerSecurity(options.security, options.host)
        versions, follower = _open(options, stopping)
        if versions is None:
            return 0  # it was stopped before there was anything to serve
        warm_up(_LOOKUP_KERNELS if options.rows_only else None)
        server = SnapshotServer(versions, follower, options.limits, security)
        address = server.start(options.port)
    except FrostlineError as error:
        log.error("%s", error)
        return 1
    except OSError as error:
        log.error("%s; check the snapshot's folder, --host and --port", error)
        return 1
    log.info("callers: %s", security)
    _announce(versions, address)
    stopping.wait()
    log.info("stopping: draining for at most %.0f s", options.drain_s)
    server.stop(options.drain_s)
    log.info("stopped")
    return 0


def _open(options: ServeOptions, stopping: threading.Event) -> tuple[Versions[ServedModel] | None, Follower | None]:
    from embedding_server.served_versions import Versions
    from services.following import Follower, job_folder_in
    from services.served_model import ServedModel, ServeWhat
    from trainer.snapshot_list import find_cut

    what = ServeWhat(options.rows_only, options.factories)
    if options.follow:
        follower = Follower(job_folder_in(options.snapshot), what, options.poll_s)
        return follower.begin(stopping), follower
    served = ServedModel(find_cut(options.snapshot), what)
    if not served.has_model:
        log.info("no Predict: %s", served.no_model)
    return Versions(served), None


def _announce(versions: Versions[ServedModel], address: str) -> None:
    with versions.pinned() as served:
        snapshot = served.version.snapshot_id
    print(json.dumps({"address": address, "snapshot": snapshot, "pid": os.getpid()}), flush=True)
    log.info("serving %s at %s", snapshot, address)
