"""Shards that somebody else starts and restarts (launch: external), and whether any shards answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from embedding_server.errors import FrostlineError, StoreUnavailable
from frostline.v1 import embedding_pb2 as pb
from services.security_options import Credentials
from services.shard_channel import CallTimes, ShardChannel, call_every
from trainer.job import Job

#: how long a job waits for shards that it cannot restart: a pod that is scheduled anew and compiles its kernels
RETURN_TIMEOUT_S = 600.0
#: how long a shard that runs may take to answer, before it counts as hung
ANSWER_TIMEOUT_S = 10.0
_POLL_S = 0.5


def silent_shards(
    addresses: Sequence[str], timeout_s: float | None = None, credentials: Credentials | None = None
) -> dict[int, FrostlineError]:
    """The shards that do not answer within ANSWER_TIMEOUT_S, by index, with why."""
    timeout_s = ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
    times = CallTimes(deadline_s=timeout_s, try_s=timeout_s, reconnect_s=timeout_s)
    channels = [ShardChannel(index, address, times, credentials) for index, address in enumerate(addresses)]
    request = pb.DescribeTablesRequest().SerializeToString()
    try:
        answers = call_every("EmbeddingShard/DescribeTables", [(channel, request) for channel in channels])
    finally:
        for channel in channels:
            channel.close()
    return {index: answer for index, answer in enumerate(answers) if isinstance(answer, FrostlineError)}


def wait_for_return(
    addresses: Sequence[str], timeout_s: float | None = None, credentials: Credentials | None = None
) -> None:
    """Returns when all answer. StoreUnavailable, naming those that do not, after RETURN_TIMEOUT_S."""
    timeout_s = RETURN_TIMEOUT_S if timeout_s is None else timeout_s
    deadline_s = time.monotonic() + timeout_s
    while silent := silent_shards(addresses, min(ANSWER_TIMEOUT_S, timeout_s), credentials):
        if time.monotonic() > deadline_s:
            names = ", ".join(f"shard {index} ({addresses[index]})" for index in silent)
            raise StoreUnavailable(
                f"{names} did not come back within {timeout_s:g} s; start them again at their addresses, then resume "
                "the job by its name (--resume)"
            )
        time.sleep(_POLL_S)


def with_environment(job: Job, environment: Mapping[str, str]) -> Job:
    """The job with the credentials that the environment names, for shards of others and where it has none itself."""
    servers = job.servers
    if servers.store != "remote" or servers.launch != "external":
        return job
    given = Credentials.from_environment(environment).given()
    missing = {name: value for name, value in given.items() if not getattr(servers, name)}
    return job.model_copy(update={"servers": servers.model_copy(update=missing)}) if missing else job
