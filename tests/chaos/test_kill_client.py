"""kill -9 of a user's own client at random moments: the next one goes on, and each step counts once on every shard."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.local_shards import _environment, start_shards
from services.shard_client import RemoteStore
from tests.chaos import trainee
from tests.chaos.seeds import seeds

STEPS, KILLS = 240, 3


def start_client(addresses: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, trainee.__file__, "--until", str(STEPS), *addresses],
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
    )


def steps_of(client: subprocess.Popen[str]) -> int:
    """The next step that the client has done; 0 if it has ended."""
    assert client.stdout is not None
    line = client.stdout.readline().split()
    return int(line[1]) if line else 0


@pytest.mark.parametrize("seed", seeds(num_quick=2))
def test_kill_9_of_a_client_at_a_random_moment(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    with start_shards(2, memory_limit_bytes=128 << 20, log_dir=tmp_path) as shards:
        for last in sorted(rng.sample(range(1, STEPS - 20), KILLS)):
            client = start_client(shards.addresses)
            assert client.stdout is not None
            first = steps_of(client)
            step = first
            while step < max(last, first):
                step = steps_of(client)
            time.sleep(rng.uniform(0.0, 0.02))  # a step takes about as long
            client.kill()
            client.wait()
            client.stdout.close()
        client = start_client(shards.addresses)
        output, _ = client.communicate()
        assert client.returncode == 0
        assert output.split()[-1] == str(STEPS)
        store = RemoteStore(shards.addresses)
        trainee.assert_equals_model(store, STEPS)
        assert store.begin_epoch(trainee.JOB, 1, "sync").epoch == KILLS + 2
        stats = store.stats().total()
        assert stats.rows_frozen > 0
        assert stats.rows_ignored == 0
        store.close()
