"""The process of one shard: what `frostline shard` runs, and the starter of local shards that trainers use.

    {"address": "127.0.0.1:41235", "shard_index": 0, "num_shards": 2, "pid": 4711}

is the one line on standard output, printed when the shard serves. Logs go to standard error.
Stop it with SIGTERM or SIGINT: it drains and ends with status 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from embedding_server.failpoints import set_from_environment
from services.admission import Limits
from services.allocator import set_allocator
from services.local_shards import LocalShards, start_shards
from services.security_options import SecurityOptions

if TYPE_CHECKING:
    import numpy as np

    from embedding_server.shard import Shard

__all__ = ["LocalShards", "ShardOptions", "main", "owned_buckets", "parse_buckets", "run_shard", "start_shards"]

log = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """Options of `frostline shard`."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    shard_index: int = 0
    num_shards: int = 1
    buckets: tuple[int, int] | None = None  # first and last, both included; None: an even share by shard_index
    data_dir: Path | None = None  # None: a temporary folder, removed at the end
    memory_limit_bytes: int = 8 * GIB
    backend: str = "auto"
    threads: int = 1
    limits: Limits = field(default_factory=Limits)
    snapshot_root: Path | None = (
        None  # clients may have cuts written and read in it; None: anywhere, if host is loopback
    )
    scores: tuple[str, ...] = ()  # modules to import first: they call embedding_server.scores.register_score
    security: SecurityOptions = field(default_factory=SecurityOptions)
    drain_s: float = 5.0
    is_bound_to_stdin: bool = False  # end when standard input closes: the process that started us has gone


def run_shard(options: ShardOptions) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Main thread only, and first thing in the process."""
    set_from_environment(os.environ)
    stopping = prepare_process(f"shard {options.shard_index}", options.threads, options.is_bound_to_stdin)
    # After the settings above: these imports load numba and, on a GPU, torch.
    from embedding_server.errors import FrostlineError
    from services.security import ServerSecurity
    from services.shard_server import ShardServer
    from services.warm_up import warm_up

    try:
        security = ServerSecurity(options.security, options.host)  # before a minute of warming up
        _import_scores(options.scores)
        warm_up(options.backend)
        root = options.snapshot_root
        server = ShardServer(
            _open_shard(options), options.limits, host=options.host, snapshot_root=root, security=security
        )
        address = server.start(options.port)
    except FrostlineError as error:
        log.error("%s", error)
        return 1
    except OSError as error:  # a folder that cannot be made or written, a port that is taken
        log.error("%s; check --data-dir, --host and --port", error)
        return 1
    log.info("callers: %s", security)
    _announce(options, address)
    stopping.wait()
    log.info("stopping: draining for at most %.0f s", options.drain_s)
    server.stop(options.drain_s)
    log.info("stopped")
    return 0


def prepare_process(name: str, threads: int, is_bound_to_stdin: bool) -> threading.Event:
    """What every server process does first: allocator, threads, logs. The event is set when the process is to end."""
    allocator = set_allocator()
    _set_threads(threads)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s")
    log.info(allocator.message)
    return _stop_event(is_bound_to_stdin)


def _import_scores(modules: Sequence[str]) -> None:
    """Whoever starts a shard names the modules; a job can only name a score that one of them registered."""
    from embedding_server.errors import InvalidInput
    from embedding_server.scores import score_names

    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise InvalidInput(
                f"--scores {name}: cannot be imported ({error}); it must be a module on PYTHONPATH of the shard"
            ) from error
    if modules:
        log.info("scores: %s", ", ".join(score_names()))


def _set_threads(threads: int) -> None:
    """The kernels are single-threaded; this bounds the pools that libraries start on import."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)


def _stop_event(is_bound_to_stdin: bool) -> threading.Event:
    """Set by SIGTERM, SIGINT and, if asked for, the end of standard input."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())

    def watch() -> None:
        while os.read(0, 4096):
            pass
        stopping.set()

    if is_bound_to_stdin:
        threading.Thread(target=watch, name="stdin-watch", daemon=True).start()
    return stopping


def _open_shard(options: ShardOptions) -> Shard:
    from embedding_server.shard import Shard

    return Shard(
        buckets=owned_buckets(options.shard_index, options.num_shards, options.buckets),
        data_dir=options.data_dir,
        memory_limit_bytes=options.memory_limit_bytes,
        backend=options.backend,
        # segment files are written and synced beside the executor, which goes on serving
        writer=ThreadPoolExecutor(1, thread_name_prefix="segment-writer"),
    )


def owned_buckets(shard_index: int, num_shards: int, buckets: tuple[int, int] | None = None) -> np.ndarray:
    """bool[NUM_BUCKETS]: bucket b belongs to shard floor(b * num_shards / NUM_BUCKETS), or to whom `buckets` says."""
    import numpy as np

    from embedding_server.errors import InvalidInput
    from embedding_server.store import NUM_BUCKETS

    if not 1 <= num_shards <= NUM_BUCKETS:
        raise InvalidInput(f"num_shards={num_shards} must be 1 to {NUM_BUCKETS}, the number of buckets")
    if not 0 <= shard_index < num_shards:
        raise InvalidInput(f"shard_index={shard_index} must be 0 to {num_shards - 1}; shards count from 0")
    number = np.arange(NUM_BUCKETS)
    if buckets is None:
        return number * num_shards // NUM_BUCKETS == shard_index
    first, last = buckets
    if not 0 <= first <= last < NUM_BUCKETS:
        raise InvalidInput(f"buckets {first}-{last} must lie within 0-{NUM_BUCKETS - 1}, the lower first")
    return (number >= first) & (number <= last)


def _announce(options: ShardOptions, address: str) -> None:
    line = {
        "address": address,
        "shard_index": options.shard_index,
        "num_shards": options.num_shards,
        "pid": os.getpid(),
    }
    print(json.dumps(line), flush=True)
    log.info("serving at %s", address)


def parse_buckets(text: str) -> tuple[int, int]:
    """ "a-b" as (a, b). Raises InvalidInput."""
    from embedding_server.errors import InvalidInput

    first, dash, last = text.partition("-")
    if not (dash and first.isdigit() and last.isdigit()):
        raise InvalidInput(f"buckets {text!r} must be first-last, for example 0-511")
    return int(first), int(last)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m services.shard_process`: the same process without the command's terminal libraries."""
    defaults = ShardOptions()
    parser = argparse.ArgumentParser(prog="services.shard_process", description="Serves one shard.")
    parser.add_argument("--host", default=defaults.host)
    parser.add_argument("--port", type=int, default=defaults.port)
    parser.add_argument("--shard-index", type=int, default=defaults.shard_index)
    parser.add_argument("--num-shards", type=int, default=defaults.num_shards)
    parser.add_argument("--buckets", type=parse_buckets)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--snapshot-root", type=Path)
    parser.add_argument("--memory-limit-bytes", type=int, default=defaults.memory_limit_bytes)
    parser.add_argument("--backend", default=defaults.backend)
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--scores", action="append", default=[])
    for name in ("tls_cert", "tls_key", "tls_client_ca", "token_file"):
        parser.add_argument("--" + name.replace("_", "-"), type=Path)
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--bound-to-stdin", dest="is_bound_to_stdin", action="store_true")
    options = vars(parser.parse_args(arguments))
    files = {field.name: options.pop(field.name) for field in fields(SecurityOptions)}
    try:
        security = SecurityOptions(**files)
    except ValueError as error:
        parser.error(str(error))
    return run_shard(ShardOptions(**{**options, "scores": tuple(options["scores"]), "security": security}))


if __name__ == "__main__":
    sys.exit(main())
