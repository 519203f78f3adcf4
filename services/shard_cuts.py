"""Cuts and restores over all shards of a store, for RemoteStore; an error names the shard that is at fault.

Thread safety: any thread; nothing is kept here.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from embedding_server.errors import FencedEpoch, FrostlineError, InvalidInput, StoreUnavailable
from embedding_server.store import CutProgress, Identity
from frostline.v1 import embedding_pb2 as pb
from services.advance_messages import caller_message, progress_of
from services.shard_channel import ShardChannel, call_every
from services.sliced_calls import Channels, in_slices, replies_of


def begin_cut(channels: Channels, who: Identity, step: int, folder: str, parent: str | None = None) -> None:
    """As EmbeddingStore.begin_cut: where one shard cannot begin, the others abandon the cut."""
    folder, base = _text(folder), "" if parent is None else _text(parent)

    def request(channel: ShardChannel, number: int) -> pb.AdvanceRequest:
        cut = pb.BeginCut(folder=folder, shard_index=channel.index, num_shards=len(channels), slice=number, parent=base)
        return pb.AdvanceRequest(caller=caller_message(who), step=step, begin_cut=cut)

    try:
        in_slices("EmbeddingShard/Advance", channels, request, pb.AdvanceResponse)
        for channel, progress in zip(channels, cut_progress(channels, who), strict=True):
            if progress.error is not None:
                raise StoreUnavailable(
                    f"{channel.name}: the cut of step {step} cannot begin in {folder}: {progress.error}; free or repair"
                    " the disk, or name another folder"
                )
    except FencedEpoch:
        raise  # this caller can abandon nothing any more, and the new epoch has
    except FrostlineError:
        _abandon(channels, who)  # what became of that is not what the caller asks about
        raise


def cut_progress(channels: Channels, who: Identity) -> list[CutProgress]:
    request = pb.GetCutProgressRequest(caller=caller_message(who)).SerializeToString()
    replies = replies_of(call_every("EmbeddingShard/GetCutProgress", [(channel, request) for channel in channels]))
    return [progress_of(pb.GetCutProgressResponse.FromString(reply)) for reply in replies]


def abandon_cut(channels: Channels, who: Identity) -> None:
    replies_of(_abandon(channels, who))


def _abandon(channels: Channels, who: Identity) -> list[bytes | FrostlineError]:
    request = pb.AbandonCutRequest(caller=caller_message(who)).SerializeToString()
    return call_every("EmbeddingShard/AbandonCut", [(channel, request) for channel in channels])


def _text(folder: str | os.PathLike[str]) -> str:
    """As a message takes it. InvalidInput."""
    text = os.fspath(folder)
    if not text or text != text.encode("utf-8", "replace").decode():
        raise InvalidInput(f"folder {text!r:.200} is no path that a message can carry; name it in valid UTF-8")
    return text


def restore(channels: Channels, who: Identity, folder: str, anew: Collection[str]) -> None:
    folder = _text(folder)

    def request(channel: ShardChannel, number: int) -> pb.RestoreRequest:
        return pb.RestoreRequest(caller=caller_message(who), folder=folder, slice=number, anew=sorted(anew))

    in_slices("EmbeddingShard/Restore", channels, request, pb.RestoreResponse)
