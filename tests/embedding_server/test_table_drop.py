"""A table goes while the executor writes one of its segments: the drop waits for it, ends, and leaves no file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from embedding_server.shard import Shard
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import Identity

SPEC = TableSpec(name="t", dim=64, policy=PolicySpec(idle_steps=1, control_fraction=0.0))
IDS = np.arange(20_000)


def _begin_write(shard: Shard) -> Identity:
    """Freezes all rows; returns while the executor, which is kept from it, has their segment to write."""
    shard.create_tables([SPEC])
    who = Identity("job", shard.begin_epoch("job", 1, "sync", 1).epoch, 0)
    for step, pulled in ((1, IDS), (2, IDS[:0]), (3, IDS[:0])):
        shard.pull(who, step, {"t": pulled}, "float32").result(0)
        shard.push(who, step, {}, "float32").result(0)
    while not shard.reselect(who, 3, {})[1]:
        pass
    while not shard.is_being_written:
        shard.maintain()
    return who


def _drop(shard: Shard, who: Identity, go_on: Callable[[], None]) -> None:
    assert not any(shard.drop_tables(who, 3, ["t"]) for _ in range(5))  # it waits
    go_on()
    for _ in range(1000):
        if shard.drop_tables(who, 3, ["t"]):
            return
    pytest.fail("the drop does not end")


def _close(shard: Shard, who: Identity, go_on: Callable[[], None]) -> None:
    assert not shard.drop_tables(who, 3, ["t"])
    go_on()
    shard.close()


@pytest.mark.parametrize("end", [_drop, _close])
def test_a_drop_ends_that_began_while_a_segment_was_written(
    tmp_path: Path, end: Callable[[Shard, Identity, Callable[[], None]], None]
) -> None:
    may_write = Event()
    with ThreadPoolExecutor(1) as writer:
        writer.submit(may_write.wait, 30)
        shard = Shard(data_dir=tmp_path, memory_limit_bytes=64 << 20, backend="cpu", writer=writer)
        who = _begin_write(shard)

        def write() -> None:
            may_write.set()
            writer.submit(int).result(30)  # behind the segment

        end(shard, who, write)
        assert not list(tmp_path.rglob("*.safetensors*"))
        if end is _drop:
            shard.close()
