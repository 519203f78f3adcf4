"""The client processes of the look-up benchmark.

    python -m benchmarks.lookup_clients ROLE ADDRESS SHAPE_JSON

prints a sum over the bits of some rows, which must be equal for all, then answers each request on standard input, a
number of rows or `ranking`, with the rows/s of its median call.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

#: calls of a turn, by request; each with row_ids of its own
CALLS = {"100": 200, "1000": 100, "10000": 20, "ranking": 20}
WARMUPS = 5
LARGE = "large"
#: row_ids of each table in a ranking request
RANKING = {**{f"user_{i}": 1 for i in range(5)}, **{f"item_{i}": 500 for i in range(15)}}

Ids = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Shape:
    """Rows in the servers. The large table serves requests of one table, the others ranking requests."""

    rows: int = 200_000
    user_rows: int = 5_000
    item_rows: int = 20_000
    dim: int = 64

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def tables(self) -> dict[str, np.ndarray]:
        """Row_ids int64 of each table: hashes, as those of strings are, and unique."""
        sizes = {LARGE: self.rows}
        sizes |= {name: self.user_rows if name.startswith("user") else self.item_rows for name in RANKING}
        random = np.random.default_rng(7)
        return {name: random.integers(-(2**63), 2**63 - 1, size) for name, size in sizes.items()}

    def num_rows(self, request: str) -> int:
        return sum(RANKING.values()) if request == "ranking" else int(request)

    def calls(self, request: str) -> list[Ids]:
        """Row_ids of each call of a turn: known ones, drawn without repeats."""
        wanted = RANKING if request == "ranking" else {LARGE: int(request)}
        tables, random = self.tables(), np.random.default_rng(self.num_rows(request))
        return [
            {name: random.choice(tables[name], count, replace=False) for name, count in wanted.items()}
            for _ in range(CALLS[request])
        ]


class OurClient:
    def __init__(self, address: str, dim: int) -> None:
        from services.lookup_client import LookupClient

        self._client = LookupClient([address])

    def look_up(self, ids: Ids) -> list[np.ndarray]:
        return [table.values for table in self._client.lookup(ids).values()]


class Rows:
    """A client of Redis: a row is a string value of dim float32, its key the table's name and the row_id's 8 bytes."""

    def __init__(self, address: str, dim: int) -> None:
        import redis
        from redis.utils import HIREDIS_AVAILABLE

        host, colon, port = address.rpartition(":")
        where: dict[str, Any] = {"host": host, "port": int(port)} if colon else {"unix_socket_path": address}
        if not HIREDIS_AVAILABLE:
            raise SystemExit("redis-py finds no hiredis, with which it is to be measured; make setup installs it")
        self._redis, self._dim = redis.Redis(**where), dim

    @staticmethod
    def keys(table: str, row_ids: np.ndarray) -> list[bytes]:
        prefix, raw = table.encode() + b":", row_ids.tobytes()
        return [prefix + raw[at : at + 8] for at in range(0, len(raw), 8)]

    def look_up(self, ids: Ids) -> list[np.ndarray]:
        if len(ids) == 1:
            ((name, row_ids),) = ids.items()
            return [self._decode(self._redis.mget(self.keys(name, row_ids)))]
        pipeline = self._redis.pipeline(transaction=False)
        for name, row_ids in ids.items():
            pipeline.mget(self.keys(name, row_ids))
        return [self._decode(values) for values in pipeline.execute()]

    def _decode(self, values: Any) -> np.ndarray:
        return np.frombuffer(b"".join(values), np.float32).reshape(len(values), self._dim)


CLIENTS: dict[str, Any] = {"ours": OurClient, "redis": Rows, "redis_unix": Rows}


def bit_sum(client: Any, shape: Shape) -> int:
    """Over the rows of a call of each request: equal where the clients read the same rows in the same order."""
    total = 0
    for request in CALLS:
        for rows in client.look_up(shape.calls(request)[0]):
            weights = np.arange(1, rows.size + 1, dtype=np.uint64)
            total += int((np.ascontiguousarray(rows).view(np.uint32).reshape(-1) * weights).sum(dtype=np.uint64))
    return total


def turn(client: Any, calls: list[Ids]) -> float:
    """Rows/s of the median call, in seconds."""
    times = []
    for ids in calls:
        started = time.perf_counter()
        client.look_up(ids)
        times.append(time.perf_counter() - started)
    return sum(map(len, calls[0].values())) / statistics.median(times)


def main(role: str, address: str, shape_json: str) -> None:
    shape = Shape(**json.loads(shape_json))
    client = CLIENTS[role](address, shape.dim)
    print(bit_sum(client, shape), flush=True)
    calls: dict[str, list[Ids]] = {}
    for line in sys.stdin:
        request = line.strip()
        if request not in calls:
            calls[request] = shape.calls(request)
            turn(client, calls[request][:WARMUPS])
        print(turn(client, calls[request]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
