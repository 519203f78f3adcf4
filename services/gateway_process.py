"""The process of a gateway: what `frostline shard --fanout` runs.

    {"address": "127.0.0.1:41300", "fanout": ["10.0.0.1:7100", "10.0.0.2:7100"], "pid": 4712}

is the one line on standard output, printed when the gateway serves. All else is as in shard_process.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.admission import Limits
from services.security_options import Credentials, SecurityOptions
from services.shard_process import prepare_process

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Options of `frostline shard --fanout`."""

    addresses: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    threads: int = 1
    limits: Limits = field(default_factory=Limits)
    security: SecurityOptions = field(default_factory=SecurityOptions)  # who may call the gateway
    credentials: Credentials = field(default_factory=Credentials)  # of the gateway, at the shards
    drain_s: float = 5.0
    is_bound_to_stdin: bool = False  # end when standard input closes: the process that started us has gone


def run_gateway(options: GatewayOptions) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Main thread only, and first thing in the process."""
    stopping = prepare_process("gateway", options.threads, options.is_bound_to_stdin)
    # After the settings above: these imports load numba.
    from embedding_server.errors import FrostlineError
    from services.lookup_gateway import LookupGateway
    from services.security import ServerSecurity

    try:
        security = ServerSecurity(options.security, options.host)
        gateway = LookupGateway(
            options.addresses,
            options.limits,
            host=options.host,
            security=security,
            credentials=options.credentials,
        )
        address = gateway.start(options.port)
    except FrostlineError as error:
        log.error("%s", error)
        return 1
    print(json.dumps({"address": address, "fanout": list(options.addresses), "pid": os.getpid()}), flush=True)
    log.info("callers: %s", security)
    log.info("serving at %s for %s", address, ", ".join(options.addresses))
    stopping.wait()
    log.info("stopping: draining for at most %.0f s", options.drain_s)
    gateway.stop(options.drain_s)
    log.info("stopped")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m services.gateway_process`: the same process without the command's terminal libraries."""
    parser = argparse.ArgumentParser(prog="services.gateway_process", description="Serves look-ups of several shards.")
    parser.add_argument("--fanout", dest="addresses", action="append", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bound-to-stdin", dest="is_bound_to_stdin", action="store_true")
    options = vars(parser.parse_args(arguments))
    return run_gateway(GatewayOptions(**{**options, "addresses": tuple(options["addresses"])}))


if __name__ == "__main__":
    sys.exit(main())
