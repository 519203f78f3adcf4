"""What the calls of EmbeddingLookup do, as plain functions on a LookupSource. Lookup itself is LookupSource.look_up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.lookup import LookupSource
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS, WIRE_NUMPY
from frostline.v1 import embedding_pb2 as pb
from services import tensor_codec
from services.advance_messages import stats_message
from services.lookup_codec import LookupCall, version_message


def bucket_ranges(buckets: np.ndarray) -> list[pb.BucketRange]:
    """bool[NUM_BUCKETS] as ranges."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], buckets, [False]))))
    return [pb.BucketRange(first=int(a), last=int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def table_message(spec: TableSpec) -> pb.Table:
    return pb.Table(name=spec.name, dim=spec.dim, spec_json=spec.model_dump_json())


def list_tables(source: LookupSource, places: Sequence[pb.LookupPlace]) -> pb.ListTablesResponse:
    specs = source.table_specs()
    return pb.ListTablesResponse(
        tables=[table_message(spec) for spec in specs.values()],
        versions=[version_message(source.version(name)) for name in specs],
        num_buckets=NUM_BUCKETS,
        buckets=bucket_ranges(source.buckets),
        places=places,
    )


def get_table(source: LookupSource, request: pb.GetTableRequest) -> pb.GetTableResponse:
    """Raises UnknownTable."""
    spec = source.spec(request.name)
    return pb.GetTableResponse(
        table=table_message(spec),
        mask_info=stats_message(spec.name, source.stats(spec.name)),
        version=version_message(source.version(spec.name)),
        num_buckets=NUM_BUCKETS,
        buckets=bucket_ranges(source.buckets),
    )


def check_size(call: LookupCall, dims: Mapping[str, int]) -> int:
    """Most bytes that the reply takes, unknown tables left out. InvalidInput if they pass the limit.

    Rows to be pooled count as float32, though they are not sent: what a call costs the shard is bounded by them.
    """
    itemsize = 4 if call.encoding == "stored" else WIRE_NUMPY[call.encoding].itemsize
    size = read = 0
    for query in call.queries:
        dim, num_rows = dims.get(query.table, 0), query.row_ids.shape[0]
        size += 2 * num_rows + query.num_vectors * dim * itemsize
        read += 2 * num_rows + num_rows * dim * (itemsize if query.pooling is None else 4)
    if max(size, read) > tensor_codec.MAX_PAYLOAD_BYTES:
        num_rows = sum(query.row_ids.shape[0] for query in call.queries)
        raise InvalidInput(
            f"Lookup: {num_rows} rows in {len(call.queries)} tables are {max(size, read)} bytes, above the limit of"
            f" {tensor_codec.MAX_PAYLOAD_BYTES} bytes a message; send the request in parts"
        )
    return size
