"""What the calls of ModelServing do, as plain functions on a version that is served."""

from __future__ import annotations

import math

import numpy as np

from embedding_server.errors import InvalidInput
from frostline.v1 import embedding_pb2 as pb
from services import tensor_codec
from services.following import FollowState
from services.lookup_codec import version_message
from services.served_model import ServedModel


def predict_size(request: pb.PredictRequest) -> int:
    """Bytes that the call takes beside the request: what the model computes on. InvalidInput above the limit."""
    size = 4 * request.num_examples + 2 * (len(request.dense) + len(request.row_ids) + len(request.lengths))
    if size > tensor_codec.MAX_PAYLOAD_BYTES:
        raise InvalidInput(
            f"Predict: {request.num_examples} examples take {size} bytes, above the limit of"
            f" {tensor_codec.MAX_PAYLOAD_BYTES} bytes a message; send them in parts"
        )
    return size


def predict(served: ServedModel, request: pb.PredictRequest) -> pb.PredictResponse:
    """Raises InvalidInput."""
    from trainer.scoring import Bags

    model = served.model
    num, width = request.num_examples, model.schema.num_dense
    dense = _array("dense", request.dense, np.float32, num * width, f"{num} examples x {width} features x 4 bytes")
    total = sum(entry.num_rows for entry in request.features)
    row_ids = _array("row_ids", request.row_ids, np.int64, total, f"{total} row_ids x 8 bytes")
    num_bags = num * len(request.features)
    lengths = _array("lengths", request.lengths, np.int32, num_bags, f"{num_bags} bags x 4 bytes")
    bags: dict[str, Bags] = {}
    at = 0
    for k, entry in enumerate(request.features):
        if entry.feature in bags:
            raise InvalidInput(f"Predict: feature {entry.feature!r} is there twice; send each once")
        bags[entry.feature] = Bags(row_ids[at : at + entry.num_rows], lengths[k * num : (k + 1) * num])
        at += entry.num_rows
    scores = model.score(dense.reshape(num, width), bags)
    return pb.PredictResponse(scores=scores.astype("<f4").tobytes(), version=version_message(served.version))


def _array(field: str, data: bytes, dtype: type, count: int, rule: str) -> np.ndarray:
    expected = count * np.dtype(dtype).itemsize
    if len(data) != expected:
        raise InvalidInput(f"Predict: {field} has {len(data)} bytes, and must have {expected} ({rule})")
    return np.frombuffer(data, dtype)


def describe(served: ServedModel, follow: FollowState | None) -> pb.DescribeModelResponse:
    answer = pb.DescribeModelResponse(version=version_message(served.version), no_model=served.no_model)
    if served.has_model:
        schema = served.model.schema
        answer.dense.extend(schema.dense)
        answer.features.extend(pb.ModelFeature(name=f.name, table=f.table) for f in schema.features)
    if follow is not None:
        assert math.isfinite(follow.seconds_behind)
        answer.follow.CopyFrom(
            pb.FollowState(
                newest_id=follow.newest_id,
                steps_behind=follow.steps_behind,
                seconds_behind=follow.seconds_behind,
                is_held=follow.is_held,
                refusal=follow.refusal,
                num_swaps=follow.num_swaps,
            )
        )
    return answer
