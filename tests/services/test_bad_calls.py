"""Bad calls at the wire: the right status, a message that names table, position and rule, and an unchanged state.

Requests are made with the generated classes, not with our codec: this is what another client sends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from embedding_server.kernels.hashing import buckets_of
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS
from frostline.v1 import embedding_pb2 as pb
from frostline.v1 import embedding_pb2_grpc as pb_grpc
from services import rpc_errors, tensor_codec

OFF = PolicySpec(kind="off")
SPECS = [
    TableSpec(name="user", dim=4, optimizer=OptimizerSpec(kind="sgd"), policy=OFF, init_min=0.0, init_max=0.0),
    TableSpec(name="item", dim=8, optimizer=OptimizerSpec(kind="adagrad"), policy=OFF),
    TableSpec(name="idle", dim=4, policy=PolicySpec(kind="idle")),
]
JOB = "job"
CUT = "cut-000000000001-1"


def ids_of_shard(shard: int, num_shards: int, count: int) -> np.ndarray:
    """The first row_ids that belong to a shard."""
    row_ids = np.arange(50 * count * num_shards)
    mine = buckets_of(row_ids, NUM_BUCKETS) * num_shards // NUM_BUCKETS == shard
    return row_ids[mine][:count]


# The server under test is shard 0 of 2: half of all row_ids are foreign to it.
IDS = ids_of_shard(0, 2, 8)
FOREIGN = int(ids_of_shard(1, 2, 1)[0])


class Client:
    """Stubs of one server, and the requests of a worker that has pushed step 1 and pulled step 2."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
        self.shard = pb_grpc.EmbeddingShardStub(self.channel)
        self.lookup = pb_grpc.EmbeddingLookupStub(self.channel)

    def prepare(self) -> None:
        self.shard.CreateTables(pb.CreateTablesRequest(spec_json=[spec.model_dump_json() for spec in SPECS]))
        self.shard.BeginEpoch(begin(epoch=1))
        self.shard.Pull(pull(step=1))
        self.shard.Push(push(step=1))
        self.shard.Pull(pull(step=2))

    def state(self) -> tuple[bytes, bytes, tuple[int, int]]:
        """Rows, counts and step of the shard: equal before and after a call that was refused."""
        rows = self.lookup.Lookup(lookup()).SerializeToString()
        info = self.shard.GetMaskInfo(pb.GetMaskInfoRequest()).SerializeToString()
        epoch = self.shard.GetEpoch(pb.GetEpochRequest(job=JOB))
        return rows, info, (epoch.epoch, epoch.last_step)


def begin(**changes: Any) -> pb.BeginEpochRequest:
    return pb.BeginEpochRequest(**{"job": JOB, "num_workers": 1, "mode": pb.UPDATE_MODE_SYNC, "epoch": 2} | changes)


def caller(**changes: Any) -> pb.Caller:
    return pb.Caller(**{"job": JOB, "epoch": 1, "worker": 0} | changes)


def pull(row_ids: np.ndarray = IDS, table: str = "user", **changes: Any) -> pb.PullRequest:
    fields = {
        "caller": caller(),
        "step": 2,
        "wire_dtype": pb.WIRE_DTYPE_FLOAT32,
        "tables": [pb.TableIds(table=table, num_rows=len(row_ids))],
        "row_ids": row_ids.tobytes(),
    }
    return pb.PullRequest(**fields | changes)


def gradients_of(table: str = "user", num_rows: int = len(IDS), **changes: Any) -> pb.TableGradients:
    return pb.TableGradients(**{"table": table, "num_rows": num_rows, "dim": 4, "learning_rate": 1.0} | changes)


def push(values: np.ndarray | None = None, row_ids: np.ndarray = IDS, **changes: Any) -> pb.PushRequest:
    if values is None:
        values = np.ones((len(row_ids), 4), np.float32)
    fields = {
        "caller": caller(),
        "step": 2,
        "wire_dtype": pb.WIRE_DTYPE_FLOAT32,
        "tables": [gradients_of(num_rows=len(row_ids))],
        "row_ids": row_ids.tobytes(),
        "values": values.tobytes(),
    }
    return pb.PushRequest(**fields | changes)


def lookup(row_ids: np.ndarray = IDS, **changes: Any) -> pb.LookupRequest:
    fields = {
        "wire_dtype": pb.WIRE_DTYPE_FLOAT32,
        "tables": [pb.TableLookup(table="user", num_rows=len(row_ids))],
        "row_ids": row_ids.tobytes(),
    }
    return pb.LookupRequest(**fields | changes)


def pooled(bags_of: list[int], **changes: Any) -> pb.LookupRequest:
    """Of IDS, in bags of these lengths."""
    bags = {"pooling": pb.POOLING_SUM, "num_bags": len(bags_of)}
    tables = [pb.TableLookup(table="user", num_rows=len(IDS), **bags)]
    return lookup(**{"tables": tables, "lengths": np.array(bags_of, np.int64).tobytes()} | changes)


def delete(step: int = 1, table: str = "user", row_ids: bytes = b"12345678") -> pb.AdvanceRequest:
    action = pb.DeleteRows(tables=[pb.TableIds(table=table, num_rows=1)], row_ids=row_ids, is_last=True)
    return pb.AdvanceRequest(caller=caller(), step=step, delete_rows=action)


def cut(**changes: Any) -> pb.AdvanceRequest:
    fields = {"caller": caller(), "step": 1} | {key: changes.pop(key) for key in ("caller", "step") if key in changes}
    action = {"folder": f"/nowhere/job/{CUT}", "shard_index": 0, "num_shards": 2} | changes
    return pb.AdvanceRequest(**fields, begin_cut=pb.BeginCut(**action))


def restore(**changes: Any) -> pb.RestoreRequest:
    return pb.RestoreRequest(**{"caller": caller(), "folder": f"/nowhere/job/{CUT}"} | changes)


def spoiled(bad: float, position: int, column: int = 1) -> np.ndarray:
    values = np.ones((len(IDS), 4), np.float32)
    values[position, column] = bad
    return values


def bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def create(**changes: Any) -> pb.CreateTablesRequest:
    text = json.dumps({"name": "new", "dim": 4} | changes)
    return pb.CreateTablesRequest(spec_json=[text])


@pytest.fixture
def client(serve: Callable[..., list[str]]) -> Iterator[Client]:
    client = Client(serve(num_shards=2)[0])
    client.prepare()
    yield client
    client.channel.close()


INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
ABORTED = grpc.StatusCode.ABORTED
EXISTS = grpc.StatusCode.ALREADY_EXISTS

HALF, BRAIN = pb.WIRE_DTYPE_FLOAT16, pb.WIRE_DTYPE_BFLOAT16
OF_9 = [pb.TableIds(table="user", num_rows=9)]
WITH_DEFAULT = [gradients_of(has_default_gradient=True)]
NAN_DEFAULT = np.array([0, np.nan, 0, 0], np.float32).tobytes()
WITH_FOREIGN = np.concatenate((IDS[:5], [FOREIGN], IDS[6:]))
BIG = np.resize(IDS, 2_100_000)
DONE_STEP_1 = {"caller": caller(), "step": 1}

# name: (method, request, status, what the message holds)
BAD_CALLS: dict[str, tuple[str, Any, grpc.StatusCode, list[str]]] = {
    # Pull
    "pull: unknown table": ("Pull", pull(table="nope"), NOT_FOUND, ["'nope'", "user"]),
    "pull: rows missing": ("Pull", pull(tables=OF_9), INVALID, ["row_ids has 64 bytes", "asks for 72", "9 rows x 8"]),
    "pull: row_id cut": ("Pull", pull(row_ids=IDS, tables=OF_9[:0]), INVALID, ["row_ids has 64 bytes", "asks for 0"]),
    "pull: table twice": (
        "Pull", pull(tables=[pb.TableIds(table="user", num_rows=4)] * 2), INVALID, ["'user'", "twice"]
    ),
    "pull: no wire_dtype": ("Pull", pull(wire_dtype=0), INVALID, ["wire_dtype=0", "float32, float16, bfloat16"]),
    "pull: other wire_dtype": ("Pull", pull(wire_dtype=9), INVALID, ["wire_dtype=9"]),
    "pull: part out of range": ("Pull", pull(part=2, num_parts=2), INVALID, ["part=2", "num_parts=2"]),
    "pull: too many parts": ("Pull", pull(num_parts=5000), INVALID, ["num_parts=5000", "256"]),
    "pull: foreign row_id": (
        "Pull", pull(row_ids=WITH_FOREIGN), INVALID, ["'user'", str(FOREIGN), "position 5", "another shard"]
    ),
    "pull: reply too large": ("Pull", pull(row_ids=BIG, table="item"), INVALID, ["2100000 rows", "in parts"]),
    "pull: old epoch": ("Pull", pull(caller=caller(epoch=0)), ABORTED, ["epoch 0", "current epoch 1"]),
    "pull: epoch to come": ("Pull", pull(caller=caller(epoch=2)), ABORTED, ["epoch 2", "current epoch 1"]),
    "pull: unknown job": ("Pull", pull(caller=caller(job="x")), PRECONDITION, ["'x'", "BeginEpoch"]),
    "pull: no such worker": ("Pull", pull(caller=caller(worker=1)), INVALID, ["worker=1", "[0, 1)"]),
    "pull: step 0": ("Pull", pull(step=0), INVALID, ["step=0", "at least 1"]),
    "pull: step gap": ("Pull", pull(step=4), PRECONDITION, ["step 4", "step 3"]),
    # Push
    "push: unknown table": ("Push", push(tables=[gradients_of("nope")]), NOT_FOUND, ["'nope'"]),
    "push: NaN": ("Push", push(spoiled(np.nan, 6)), INVALID, ["'user'", f"row_id {IDS[6]}", "position 6", "column 1"]),
    "push: infinity": ("Push", push(spoiled(np.inf, 0)), INVALID, ["'user'", "position 0", "not finite"]),
    "push: -infinity": ("Push", push(spoiled(-np.inf, 7, 3)), INVALID, ["position 7", "column 3"]),
    "push: NaN in bfloat16": (
        "Push", push(bfloat16(spoiled(np.nan, 2)), wire_dtype=BRAIN), INVALID, ["position 2", "not finite"]
    ),
    "push: infinity in float16": (
        "Push", push(spoiled(np.inf, 4).astype(np.float16), wire_dtype=HALF), INVALID, ["position 4", "not finite"]
    ),
    "push: NaN in the default row": (
        "Push", push(tables=WITH_DEFAULT, default_gradients=NAN_DEFAULT), INVALID, ["'user'", "default", "not finite"]
    ),
    "push: default row too short": (
        "Push", push(tables=WITH_DEFAULT, default_gradients=bytes(12)), INVALID, ["default_gradients has 12", "16"]
    ),
    "push: default row unannounced": (
        "Push", push(default_gradients=bytes(16)), INVALID, ["default_gradients has 16", "asks for 0"]
    ),
    "push: wrong dim": (
        "Push", push(np.ones((8, 8), np.float32), tables=[gradients_of(dim=8)]), INVALID, ["'user'", "[8, 8]", "dim 4"]
    ),
    "push: dim 0": ("Push", push(tables=[gradients_of(dim=0)], values=IDS[:0]), INVALID, ["'user'", "dim=0"]),
    "push: values missing": ("Push", push(np.ones((7, 4), np.float32)), INVALID, ["values has 112 bytes", "128"]),
    "push: values of another dtype": ("Push", push(wire_dtype=HALF), INVALID, ["values has 128 bytes", "64"]),
    "push: row_ids missing": ("Push", push(tables=[gradients_of(num_rows=9)]), INVALID, ["row_ids has 64", "72"]),
    "push: table twice": (
        "Push", push(tables=[gradients_of(num_rows=4)] * 2), INVALID, ["'user'", "twice"]
    ),
    "push: foreign row_id": ("Push", push(row_ids=WITH_FOREIGN), INVALID, ["'user'", str(FOREIGN), "position 5"]),
    "push: learning_rate NaN": (
        "Push", push(tables=[gradients_of(learning_rate=np.nan)]), INVALID, ["'user'", "learning_rate=nan"]
    ),
    "push: learning_rate negative": (
        "Push", push(tables=[gradients_of(learning_rate=-0.5)]), INVALID, ["'user'", "learning_rate=-0.5"]
    ),
    "push: no wire_dtype": ("Push", push(wire_dtype=0), INVALID, ["wire_dtype=0"]),
    "push: old epoch": ("Push", push(caller=caller(epoch=0)), ABORTED, ["epoch 0", "current epoch 1"]),
    "push: step gap": ("Push", push(step=3), PRECONDITION, ["step 3", "step 2"]),
    "push: step 0": ("Push", push(step=0), INVALID, ["step=0"]),
    "push: no such worker": ("Push", push(caller=caller(worker=7)), INVALID, ["worker=7"]),
    "push: part out of range": ("Push", push(part=1), INVALID, ["part=1", "num_parts=1"]),
    # CreateTables
    "create: dim 6": ("CreateTables", create(dim=6), INVALID, ["'new'", "dim=6", "multiple of 4", "set dim=8"]),
    "create: dim 0": ("CreateTables", create(dim=0), INVALID, ["dim=0", "set dim=4"]),
    "create: dim too large": ("CreateTables", create(dim=8192), INVALID, ["dim=8192", "4096"]),
    "create: no name": ("CreateTables", create(name=""), INVALID, ["name"]),
    "create: unknown key": ("CreateTables", create(learning_rate=1), INVALID, ["learning_rate", "not permitted"]),
    "create: no JSON": ("CreateTables", pb.CreateTablesRequest(spec_json=["{"]), INVALID, ["JSON"]),
    "create: other spec": ("CreateTables", create(name="user", dim=8), EXISTS, ["'user'", "dim: 4 != 8"]),
    # BeginEpoch
    "begin: epoch not above": ("BeginEpoch", begin(epoch=1), ABORTED, ["epoch 1", "must be above"]),
    "begin: no workers": ("BeginEpoch", begin(num_workers=0), INVALID, ["num_workers=0"]),
    "begin: too many workers": ("BeginEpoch", begin(num_workers=5000), INVALID, ["num_workers=5000"]),
    "begin: no mode": ("BeginEpoch", begin(mode=0), INVALID, ["mode=0", "sync", "pipelined"]),
    # Advance
    "advance: no action": (
        "Advance", pb.AdvanceRequest(caller=caller(), step=1), INVALID, ["collect_heat", "reselect"]
    ),
    "advance: step under way": (
        "Advance", pb.AdvanceRequest(**DONE_STEP_1, collect_heat=pb.CollectHeat()), PRECONDITION, ["step 1", "pulled"]
    ),
    "advance: step not applied": (
        "Advance", pb.AdvanceRequest(caller=caller(), step=2, reselect=pb.Reselect()), PRECONDITION, ["step 2"]
    ),
    "advance: end of a data pass too early": (
        "Advance",
        pb.AdvanceRequest(**DONE_STEP_1, end_data_pass=pb.EndDataPass()),
        PRECONDITION,
        ["step 1", "pulled"],
    ),
    "advance: heat from a bucket that is none": (
        "GetMaskInfo",
        pb.GetMaskInfoRequest(with_heat=True, first_bucket=NUM_BUCKETS),
        INVALID,
        ["first_bucket=1024", "[0, 1024)"],
    ),
    # Cuts
    "delete: step under way": ("Advance", delete(), PRECONDITION, ["step 1", "pulled"]),
    "delete: unknown table": ("Advance", delete(step=2, table="x"), PRECONDITION, ["step 2", "applied"]),
    "delete: half a row_id": ("Advance", delete(row_ids=b"1234"), INVALID, ["4 bytes of row_ids for 1 rows"]),
    "drop: step under way": (
        "Advance",
        pb.AdvanceRequest(**DONE_STEP_1, drop_tables=pb.DropTables(tables=["user"])),
        PRECONDITION,
        ["step 1", "pulled"],
    ),
    "meet: step under way": (
        "Meet",
        pb.MeetRequest(**DONE_STEP_1, topic="drop"),
        PRECONDITION,
        ["worker 0", "has pulled step 2"],
    ),
    "meet: old epoch": ("Meet", pb.MeetRequest(caller=caller(epoch=0), step=1), ABORTED, ["epoch 0"]),
    "cut: no folder": ("Advance", cut(folder=""), INVALID, ["folder ''", "absolute path"]),
    "cut: relative folder": ("Advance", cut(folder=f"job/{CUT}"), INVALID, ["folder 'job/", "absolute path"]),
    "cut: way up": ("Advance", cut(folder=f"/tmp/../etc/{CUT}"), INVALID, ["'/tmp/../etc/", "'..'"]),
    "cut: folder of no cut": ("Advance", cut(folder="/tmp/job/cut"), INVALID, ["'/tmp/job/cut'", "cut-STEP-EPOCH"]),
    "cut: parent of no cut": ("Advance", cut(parent="/tmp/job/cut"), INVALID, ["'/tmp/job/cut'", "cut-STEP-EPOCH"]),
    "cut: way up to a parent": ("Advance", cut(parent=f"/tmp/../{CUT}"), INVALID, ["'/tmp/../", "'..'"]),
    "cut: no such shard": ("Advance", cut(shard_index=2), INVALID, ["shard_index=2", "num_shards=2"]),
    "cut: too many shards": ("Advance", cut(num_shards=5000), INVALID, ["num_shards=5000", "1024"]),
    "cut: step under way": ("Advance", cut(), PRECONDITION, ["step 1", "pulled"]),
    "cut: step not applied": ("Advance", cut(step=2), PRECONDITION, ["step 2", "applied"]),
    "cut: old epoch": ("Advance", cut(caller=caller(epoch=0)), ABORTED, ["epoch 0", "current epoch 1"]),
    "cut: unknown job": ("Advance", cut(caller=caller(job="x")), PRECONDITION, ["'x'", "BeginEpoch"]),
    "progress: no cut": ("GetCutProgress", pb.GetCutProgressRequest(caller=caller()), PRECONDITION, ["no cut"]),
    "progress: old epoch": (
        "GetCutProgress", pb.GetCutProgressRequest(caller=caller(epoch=0)), ABORTED, ["epoch 0", "current epoch 1"]
    ),
    "abandon: old epoch": (
        "AbandonCut", pb.AbandonCutRequest(caller=caller(epoch=0)), ABORTED, ["epoch 0", "current epoch 1"]
    ),
    "abandon: unknown job": ("AbandonCut", pb.AbandonCutRequest(caller=caller(job="x")), PRECONDITION, ["'x'"]),
    "restore: relative folder": ("Restore", restore(folder=CUT), INVALID, ["Restore: folder 'cut-", "absolute path"]),
    "restore: epoch that takes none": ("Restore", restore(), PRECONDITION, ["epoch 1", "will_restore"]),
    "restore: old epoch": ("Restore", restore(caller=caller(epoch=0)), ABORTED, ["epoch 0", "current epoch 1"]),
    "restore: unknown job": ("Restore", restore(caller=caller(job="x")), PRECONDITION, ["'x'", "BeginEpoch"]),
    # Prefetch
    "prefetch: unknown table": (
        "Prefetch",
        pb.PrefetchRequest(tables=[pb.TableIds(table="x", num_rows=1)], row_ids=bytes(8)),
        NOT_FOUND,
        ["'x'"],
    ),
    "prefetch: rows missing": (
        "Prefetch",
        pb.PrefetchRequest(tables=[pb.TableIds(table="user", num_rows=2)], row_ids=bytes(8)),
        INVALID,
        ["Prefetch: row_ids has 8 bytes", "16"],
    ),
    # EmbeddingLookup
    "lookup: unknown table": ("Lookup", lookup(tables=[pb.TableLookup(table="x", num_rows=8)]), NOT_FOUND, ["'x'"]),
    "lookup: rows missing": (
        "Lookup",
        lookup(tables=[pb.TableLookup(table="user", num_rows=9)]),
        INVALID,
        ["Lookup: row_ids has 64 bytes", "72"],
    ),
    "lookup: row_id of another shard": ("Lookup", lookup(row_ids=WITH_FOREIGN), INVALID, ["another shard", "position"]),
    "lookup: no wire_dtype": ("Lookup", lookup(wire_dtype=0), INVALID, ["wire_dtype=0", "4 (stored)"]),
    "lookup: wire_dtype of a later version": ("Lookup", lookup(wire_dtype=9), INVALID, ["wire_dtype=9"]),
    "lookup: reply too large": ("Lookup", lookup(row_ids=np.resize(IDS, 4_000_000)), INVALID, ["4000000 rows"]),
    "lookup: too many rows to pool": (
        "Lookup",
        lookup(
            row_ids=np.resize(IDS, 4_000_000),
            tables=[pb.TableLookup(table="user", num_rows=4_000_000, pooling=pb.POOLING_SUM, num_bags=1)],
            lengths=np.array([4_000_000], np.int64).tobytes(),
        ),
        INVALID,
        ["4000000 rows", "bytes"],
    ),
    "lookup: stored rows cannot be pooled": (
        "Lookup", pooled([8], wire_dtype=pb.WIRE_DTYPE_STORED), INVALID, ["'user'", "stored", "pooled"]
    ),
    "lookup: lengths below 0": ("Lookup", pooled([10, -2]), INVALID, ["'user'", "lengths[1]=-2"]),
    "lookup: lengths do not add up": (
        "Lookup", pooled([3, 4]), INVALID, ["'user'", "2 bags add up to 7", "8 row_ids"]
    ),
    "lookup: lengths that wrap around": ("Lookup", pooled([2**62] * 4 + [8]), INVALID, ["5 bags add up to"]),
    "lookup: lengths missing": ("Lookup", pooled([3, 5], lengths=b""), INVALID, ["lengths has 0 bytes", "8 or 16"]),
    "lookup: half a length": ("Lookup", pooled([3, 5], lengths=bytes(10)), INVALID, ["lengths has 10 bytes"]),
    "lookup: bags without pooling": (
        "Lookup",
        pooled([8], tables=[pb.TableLookup(table="user", num_rows=8, num_bags=1)]),
        INVALID,
        ["'user'", "num_bags=1", "without pooling"],
    ),
    "get: unknown table": ("GetTable", pb.GetTableRequest(name="x"), NOT_FOUND, ["'x'", "ListTables"]),
}  # fmt: skip


def send(client: Client, method: str, request: Any) -> grpc.RpcError:
    """The error of a call."""
    stub = client.lookup if method in ("Lookup", "GetTable") else client.shard
    with pytest.raises(grpc.RpcError) as refused:
        getattr(stub, method)(request, timeout=20)
    return refused.value


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_refused_and_changes_nothing(client: Client, name: str) -> None:
    method, request, status, fragments = BAD_CALLS[name]
    before = client.state()
    error = send(client, method, request)
    assert error.code() == status, error.details()
    for fragment in fragments:
        assert fragment in error.details()
    assert any(key == rpc_errors.DETAIL_KEY for key, _ in error.trailing_metadata())
    assert client.state() == before
    # The worker goes on where it was.
    assert client.shard.Push(push()).rows_applied == len(IDS)
    assert client.state()[2] == (1, 2)


@pytest.mark.parametrize(
    ("table", "status", "fragment"), [("idle", INVALID, "'idle'"), ("nope", NOT_FOUND, "does not exist")]
)
def test_a_frostline_for_a_table_that_takes_none(
    client: Client, table: str, status: grpc.StatusCode, fragment: str
) -> None:
    client.shard.Push(push())
    before = client.state()
    action = pb.Reselect(frostlines=[pb.Frostline(table=table, bin=1)])
    error = send(client, "Advance", pb.AdvanceRequest(caller=caller(), step=2, reselect=action))
    assert error.code() == status
    assert fragment in error.details()
    assert client.state() == before


def test_details_carry_the_expected_step_and_the_current_epoch(client: Client) -> None:
    def detail(error: grpc.RpcError) -> pb.ErrorDetail:
        return pb.ErrorDetail.FromString(dict(error.trailing_metadata())[rpc_errors.DETAIL_KEY])

    gap = detail(send(client, "Push", push(step=9)))
    assert (gap.kind, gap.expected_step) == (pb.ERROR_KIND_STEP_GAP, 2)
    gap = detail(send(client, "Pull", pull(step=9)))
    assert (gap.kind, gap.expected_step) == (pb.ERROR_KIND_STEP_GAP, 3)
    client.shard.BeginEpoch(begin(epoch=5))
    fenced = detail(send(client, "Push", push()))
    assert (fenced.kind, fenced.current_epoch) == (pb.ERROR_KIND_FENCED_EPOCH, 5)


@pytest.mark.parametrize("bad_part", [0, 1, 2])
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (push(spoiled(np.nan, 3)), INVALID),
        (push(np.ones((1, 4), np.float32)), INVALID),
        (push(tables=[gradients_of("nope")]), NOT_FOUND),
        (push(row_ids=WITH_FOREIGN), INVALID),
        (push(wire_dtype=0), INVALID),
    ],
    ids=["NaN", "values missing", "unknown table", "foreign row_id", "no wire_dtype"],
)
def test_a_fault_in_any_part_of_a_split_push_changes_nothing(
    client: Client, bad_part: int, fault: pb.PushRequest, status: grpc.StatusCode
) -> None:
    before = client.state()
    for part in range(bad_part):
        assert client.shard.Push(push(part=part, num_parts=3)).rows_applied == 0
    request = pb.PushRequest.FromString(fault.SerializeToString())
    request.part, request.num_parts = bad_part, 3
    error = send(client, "Push", request)
    assert error.code() == status, error.details()
    assert client.state() == before
    # The parts that were fine are applied only with the others: the whole push again, three times 1 per value.
    for part in range(3):
        ack = client.shard.Push(push(part=part, num_parts=3))
    assert ack.rows_applied == len(IDS)
    reply = client.lookup.Lookup(lookup())
    assert (np.frombuffer(reply.values, np.float32) == -1.0 - 3.0).all()


def test_a_message_above_the_limit_is_refused_by_grpc(client: Client) -> None:
    before = client.state()
    error = send(client, "Push", push(padding=bytes(tensor_codec.MAX_MESSAGE_BYTES)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()
    assert client.state() == before


def test_bytes_that_are_no_message_are_refused(client: Client) -> None:
    for method in ("EmbeddingShard/Pull", "EmbeddingShard/Push", "EmbeddingLookup/Lookup"):
        raw = client.channel.unary_unary(f"/frostline.v1.{method}")
        with pytest.raises(grpc.RpcError) as refused:
            raw(b"not a message", timeout=20)
        assert refused.value.code() == INVALID


def test_any_int64_is_a_row_id_and_duplicates_are_summed(serve: Callable[..., list[str]]) -> None:
    client = Client(serve()[0])
    client.prepare()
    row_ids = np.array([-1, np.iinfo(np.int64).min, np.iinfo(np.int64).max, 0, -1, -1], np.int64)
    assert client.shard.Push(push()).step == 2
    assert len(client.shard.Pull(pull(row_ids, step=3)).flags) == 6
    gradients = np.arange(24, dtype=np.float32).reshape(6, 4)
    client.shard.Push(push(gradients, row_ids, step=3))
    reply = client.lookup.Lookup(lookup(row_ids))
    values = np.frombuffer(reply.values, np.float32).reshape(6, 4)
    minus_one = gradients[0] + gradients[4] + gradients[5]
    # Row 0 is one of IDS: steps 1 and 2 pushed 1 to each of its values.
    expected = [minus_one, gradients[1], gradients[2], gradients[3] + 2, minus_one, minus_one]
    assert (values == -np.stack(expected)).all()
    client.channel.close()


@pytest.mark.parametrize(
    "method", ["EmbeddingShard/BeginEpoch", "EmbeddingShard/Advance", "EmbeddingLookup/GetTable", "EmbeddingShard/Pull"]
)
def test_bytes_that_are_no_message_are_the_callers_fault(serve: Callable[..., list[str]], method: str) -> None:
    with grpc.insecure_channel(serve()[0]) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(f"/frostline.v1.{method}")(b"\xff" * 20, timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "message" in refused.value.details()


def test_a_message_of_tiny_fields_is_refused_at_a_bound(serve: Callable[..., list[str]]) -> None:
    with grpc.insecure_channel(serve()[0]) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/frostline.v1.EmbeddingLookup/Lookup")(b"\x08\x01" * (1 << 17), timeout=20)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 65536 fields" in refused.value.details()
