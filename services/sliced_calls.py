"""A call that every shard does in slices: it is sent again, with the number of the slice, until each shard is done.

Thread safety: any thread; nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from embedding_server.errors import FrostlineError
from frostline.v1 import embedding_pb2 as pb
from services.shard_channel import ShardChannel, call_every

Channels = Sequence[ShardChannel]
#: of a channel and the number of the slice
Sliced = Callable[[ShardChannel, int], pb.AdvanceRequest | pb.RestoreRequest]
Answer = TypeVar("Answer", pb.AdvanceResponse, pb.RestoreResponse)


def in_slices(
    method: str, channels: Channels, request: Sliced, cls: type[Answer], first: int = 0
) -> tuple[list[Answer], int]:
    """Sends slice after slice to each shard until it is done; all answers, and the number of the next slice.

    An error is raised when all shards have answered, so that none of them is at work then.
    """
    answers: list[Answer] = []
    waiting, number = list(channels), first
    while waiting:
        requests = [(channel, request(channel, number).SerializeToString()) for channel in waiting]
        of_slice = [cls.FromString(reply) for reply in replies_of(call_every(method, requests))]
        waiting = [channel for channel, answer in zip(waiting, of_slice, strict=True) if not answer.done]
        answers += of_slice
        number += 1
    return answers, number


def replies_of(outcomes: Sequence[bytes | FrostlineError]) -> list[bytes]:
    """Raises the first error."""
    replies = []
    for outcome in outcomes:
        if isinstance(outcome, FrostlineError):
            raise outcome
        replies.append(outcome)
    return replies
