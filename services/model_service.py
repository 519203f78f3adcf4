"""ModelServing: decode, ask the version that is served, map errors, encode. No logic here."""

from __future__ import annotations

import grpc
from google.protobuf.message import Message

from embedding_server.errors import InvalidInput
from embedding_server.served_versions import Versions
from frostline.v1 import embedding_pb2 as pb
from services import model_calls
from services.admission import Admission
from services.following import Follower
from services.lookup_codec import version_message
from services.rpc_calls import answered
from services.served_model import ServedModel


class ModelServicer:
    def __init__(self, versions: Versions[ServedModel], admission: Admission, follower: Follower | None) -> None:
        """follower: None if one snapshot is served and no other will be."""
        self._versions, self._admission, self._follower = versions, admission, follower

    @answered
    def Predict(self, request: pb.PredictRequest, context: grpc.ServicerContext) -> Message:
        size = request.ByteSize() + model_calls.predict_size(request)
        with self._admission.call(), self._admission.bytes(size), self._versions.pinned() as served:
            return model_calls.predict(served, request)

    @answered
    def DescribeModel(self, request: pb.DescribeModelRequest, context: grpc.ServicerContext) -> Message:
        with self._versions.pinned() as served:
            return model_calls.describe(served, self._follower.state if self._follower else None)

    @answered
    def ChooseVersion(self, request: pb.ChooseVersionRequest, context: grpc.ServicerContext) -> Message:
        if self._follower is None:
            raise InvalidInput("ChooseVersion: this server serves one snapshot; start it with --follow to choose")
        self._follower.choose(request.snapshot_id)
        with self._versions.pinned() as served:
            return pb.ChooseVersionResponse(version=version_message(served.version))
