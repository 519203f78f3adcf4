"""ModelClient: Predict and the choice of the version on a server of snapshots, numpy in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message

from embedding_server.lookup import Version
from frostline.v1 import embedding_pb2 as pb
from frostline.v1 import embedding_pb2_grpc
from services import rpc_errors
from services.channel_access import ChannelAccess
from services.lookup_codec import version_of
from services.security_options import Credentials
from services.shard_channel import CHANNEL_OPTIONS, check_address

DEADLINE_S = 10.0
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Predictions:
    scores: np.ndarray  # float32[B]
    version: Version


class ModelClient:
    """Thread safety: any thread. Raises what the server raised, or StoreUnavailable; nothing is repeated."""

    def __init__(self, address: str, deadline_s: float = DEADLINE_S, *, credentials: Credentials | None = None) -> None:
        check_address(address, "the server")
        self._access = ChannelAccess(credentials or Credentials(), address)
        self._channel = self._access.open(CHANNEL_OPTIONS)
        self._stub = embedding_pb2_grpc.ModelServingStub(self._channel)
        self._address, self._deadline_s = address, deadline_s

    def predict(self, dense: np.ndarray, bags: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Predictions:
        """dense float32[B, width]; bags: by feature row_ids int64[n] and lengths int[B]."""
        request = pb.PredictRequest(
            num_examples=dense.shape[0],
            dense=np.ascontiguousarray(dense, "<f4").tobytes(),
            features=[pb.FeatureBags(feature=name, num_rows=ids.shape[0]) for name, (ids, _) in bags.items()],
            row_ids=b"".join(np.ascontiguousarray(ids, "<i8").tobytes() for ids, _ in bags.values()),
            lengths=b"".join(np.ascontiguousarray(lengths, "<i4").tobytes() for _, lengths in bags.values()),
        )
        answer = self._call(self._stub.Predict, request)
        return Predictions(np.frombuffer(answer.scores, "<f4"), version_of(answer.version))

    def describe(self) -> pb.DescribeModelResponse:
        answer: pb.DescribeModelResponse = self._call(self._stub.DescribeModel, pb.DescribeModelRequest())
        return answer

    def choose(self, snapshot_id: str) -> Version:
        """Empty: follow the newest again. Waits until it is served."""
        request = pb.ChooseVersionRequest(snapshot_id=snapshot_id)
        return version_of(self._call(self._stub.ChooseVersion, request).version)

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: Callable[..., M], request: Message) -> M:
        try:
            return method(request, timeout=self._deadline_s, metadata=self._access.metadata())
        except grpc.RpcError as error:
            raise rpc_errors.from_rpc_error(error, f"the server at {self._address}") from error
