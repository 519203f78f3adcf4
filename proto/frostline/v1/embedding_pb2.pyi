from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WireDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIRE_DTYPE_UNSPECIFIED: _ClassVar[WireDtype]
    WIRE_DTYPE_FLOAT32: _ClassVar[WireDtype]
    WIRE_DTYPE_FLOAT16: _ClassVar[WireDtype]
    WIRE_DTYPE_BFLOAT16: _ClassVar[WireDtype]
    WIRE_DTYPE_STORED: _ClassVar[WireDtype]

class Flag(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FLAG_UNSPECIFIED: _ClassVar[Flag]
    FLAG_TRAINABLE: _ClassVar[Flag]
    FLAG_DEFAULT: _ClassVar[Flag]
    FLAG_FOUND: _ClassVar[Flag]
    FLAG_INITIAL: _ClassVar[Flag]

class RowFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_FORMAT_UNSPECIFIED: _ClassVar[RowFormat]
    ROW_FORMAT_INT4: _ClassVar[RowFormat]
    ROW_FORMAT_INT8: _ClassVar[RowFormat]
    ROW_FORMAT_FLOAT16: _ClassVar[RowFormat]
    ROW_FORMAT_FLOAT32: _ClassVar[RowFormat]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_SUM: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]

class UpdateMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_MODE_UNSPECIFIED: _ClassVar[UpdateMode]
    UPDATE_MODE_SYNC: _ClassVar[UpdateMode]
    UPDATE_MODE_PIPELINED: _ClassVar[UpdateMode]

class ErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_KIND_UNSPECIFIED: _ClassVar[ErrorKind]
    ERROR_KIND_INVALID_INPUT: _ClassVar[ErrorKind]
    ERROR_KIND_UNKNOWN_TABLE: _ClassVar[ErrorKind]
    ERROR_KIND_TABLE_CONFLICT: _ClassVar[ErrorKind]
    ERROR_KIND_STEP_GAP: _ClassVar[ErrorKind]
    ERROR_KIND_NOT_READY: _ClassVar[ErrorKind]
    ERROR_KIND_FENCED_EPOCH: _ClassVar[ErrorKind]
    ERROR_KIND_OVERLOADED: _ClassVar[ErrorKind]
    ERROR_KIND_SEGMENT_CORRUPT: _ClassVar[ErrorKind]
    ERROR_KIND_STORE_UNAVAILABLE: _ClassVar[ErrorKind]
    ERROR_KIND_WRONG_SHARD: _ClassVar[ErrorKind]
WIRE_DTYPE_UNSPECIFIED: WireDtype
WIRE_DTYPE_FLOAT32: WireDtype
WIRE_DTYPE_FLOAT16: WireDtype
WIRE_DTYPE_BFLOAT16: WireDtype
WIRE_DTYPE_STORED: WireDtype
FLAG_UNSPECIFIED: Flag
FLAG_TRAINABLE: Flag
FLAG_DEFAULT: Flag
FLAG_FOUND: Flag
FLAG_INITIAL: Flag
ROW_FORMAT_UNSPECIFIED: RowFormat
ROW_FORMAT_INT4: RowFormat
ROW_FORMAT_INT8: RowFormat
ROW_FORMAT_FLOAT16: RowFormat
ROW_FORMAT_FLOAT32: RowFormat
POOLING_UNSPECIFIED: Pooling
POOLING_SUM: Pooling
POOLING_MEAN: Pooling
UPDATE_MODE_UNSPECIFIED: UpdateMode
UPDATE_MODE_SYNC: UpdateMode
UPDATE_MODE_PIPELINED: UpdateMode
ERROR_KIND_UNSPECIFIED: ErrorKind
ERROR_KIND_INVALID_INPUT: ErrorKind
ERROR_KIND_UNKNOWN_TABLE: ErrorKind
ERROR_KIND_TABLE_CONFLICT: ErrorKind
ERROR_KIND_STEP_GAP: ErrorKind
ERROR_KIND_NOT_READY: ErrorKind
ERROR_KIND_FENCED_EPOCH: ErrorKind
ERROR_KIND_OVERLOADED: ErrorKind
ERROR_KIND_SEGMENT_CORRUPT: ErrorKind
ERROR_KIND_STORE_UNAVAILABLE: ErrorKind
ERROR_KIND_WRONG_SHARD: ErrorKind

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "expected_step", "current_epoch", "retry_after_ms", "path")
    KIND_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_STEP_FIELD_NUMBER: _ClassVar[int]
    CURRENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    kind: ErrorKind
    expected_step: int
    current_epoch: int
    retry_after_ms: int
    path: str
    def __init__(self, kind: _Optional[_Union[ErrorKind, str]] = ..., expected_step: _Optional[int] = ..., current_epoch: _Optional[int] = ..., retry_after_ms: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("job", "epoch", "worker")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    worker: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., worker: _Optional[int] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("name", "dim", "spec_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    spec_json: str
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., spec_json: _Optional[str] = ...) -> None: ...

class BucketRange(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class DescribeTablesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeTablesResponse(_message.Message):
    __slots__ = ("tables", "buckets", "num_buckets")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    NUM_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    buckets: _containers.RepeatedCompositeFieldContainer[BucketRange]
    num_buckets: int
    def __init__(self, tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., buckets: _Optional[_Iterable[_Union[BucketRange, _Mapping]]] = ..., num_buckets: _Optional[int] = ...) -> None: ...

class CreateTablesRequest(_message.Message):
    __slots__ = ("spec_json",)
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    spec_json: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, spec_json: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateTablesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEpochRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class GetEpochResponse(_message.Message):
    __slots__ = ("epoch", "last_step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    last_step: int
    def __init__(self, epoch: _Optional[int] = ..., last_step: _Optional[int] = ...) -> None: ...

class BeginEpochRequest(_message.Message):
    __slots__ = ("job", "num_workers", "mode", "epoch", "token", "will_restore")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    WILL_RESTORE_FIELD_NUMBER: _ClassVar[int]
    job: str
    num_workers: int
    mode: UpdateMode
    epoch: int
    token: str
    will_restore: bool
    def __init__(self, job: _Optional[str] = ..., num_workers: _Optional[int] = ..., mode: _Optional[_Union[UpdateMode, str]] = ..., epoch: _Optional[int] = ..., token: _Optional[str] = ..., will_restore: _Optional[bool] = ...) -> None: ...

class BeginEpochResponse(_message.Message):
    __slots__ = ("epoch", "last_step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    last_step: int
    def __init__(self, epoch: _Optional[int] = ..., last_step: _Optional[int] = ...) -> None: ...

class TableIds(_message.Message):
    __slots__ = ("table", "num_rows")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    table: str
    num_rows: int
    def __init__(self, table: _Optional[str] = ..., num_rows: _Optional[int] = ...) -> None: ...

class TableRows(_message.Message):
    __slots__ = ("table", "num_rows", "dim")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    table: str
    num_rows: int
    dim: int
    def __init__(self, table: _Optional[str] = ..., num_rows: _Optional[int] = ..., dim: _Optional[int] = ...) -> None: ...

class TableGradients(_message.Message):
    __slots__ = ("table", "num_rows", "dim", "learning_rate", "has_default_gradient")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    HAS_DEFAULT_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    table: str
    num_rows: int
    dim: int
    learning_rate: float
    has_default_gradient: bool
    def __init__(self, table: _Optional[str] = ..., num_rows: _Optional[int] = ..., dim: _Optional[int] = ..., learning_rate: _Optional[float] = ..., has_default_gradient: _Optional[bool] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("caller", "step", "part", "num_parts", "wire_dtype", "tables", "row_ids", "padding")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    step: int
    part: int
    num_parts: int
    wire_dtype: WireDtype
    tables: _containers.RepeatedCompositeFieldContainer[TableIds]
    row_ids: bytes
    padding: bytes
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., part: _Optional[int] = ..., num_parts: _Optional[int] = ..., wire_dtype: _Optional[_Union[WireDtype, str]] = ..., tables: _Optional[_Iterable[_Union[TableIds, _Mapping]]] = ..., row_ids: _Optional[bytes] = ..., padding: _Optional[bytes] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("wire_dtype", "tables", "flags", "values", "padding")
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    wire_dtype: WireDtype
    tables: _containers.RepeatedCompositeFieldContainer[TableRows]
    flags: bytes
    values: bytes
    padding: bytes
    def __init__(self, wire_dtype: _Optional[_Union[WireDtype, str]] = ..., tables: _Optional[_Iterable[_Union[TableRows, _Mapping]]] = ..., flags: _Optional[bytes] = ..., values: _Optional[bytes] = ..., padding: _Optional[bytes] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("caller", "step", "part", "num_parts", "wire_dtype", "tables", "row_ids", "default_gradients", "values", "padding")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    step: int
    part: int
    num_parts: int
    wire_dtype: WireDtype
    tables: _containers.RepeatedCompositeFieldContainer[TableGradients]
    row_ids: bytes
    default_gradients: bytes
    values: bytes
    padding: bytes
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., part: _Optional[int] = ..., num_parts: _Optional[int] = ..., wire_dtype: _Optional[_Union[WireDtype, str]] = ..., tables: _Optional[_Iterable[_Union[TableGradients, _Mapping]]] = ..., row_ids: _Optional[bytes] = ..., default_gradients: _Optional[bytes] = ..., values: _Optional[bytes] = ..., padding: _Optional[bytes] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("step", "rows_applied", "rows_ignored", "duplicate")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    ROWS_IGNORED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    step: int
    rows_applied: int
    rows_ignored: int
    duplicate: bool
    def __init__(self, step: _Optional[int] = ..., rows_applied: _Optional[int] = ..., rows_ignored: _Optional[int] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class Frostline(_message.Message):
    __slots__ = ("table", "bin", "tie_fraction", "margin_bins", "held_fraction")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    BIN_FIELD_NUMBER: _ClassVar[int]
    TIE_FRACTION_FIELD_NUMBER: _ClassVar[int]
    MARGIN_BINS_FIELD_NUMBER: _ClassVar[int]
    HELD_FRACTION_FIELD_NUMBER: _ClassVar[int]
    table: str
    bin: int
    tie_fraction: float
    margin_bins: int
    held_fraction: float
    def __init__(self, table: _Optional[str] = ..., bin: _Optional[int] = ..., tie_fraction: _Optional[float] = ..., margin_bins: _Optional[int] = ..., held_fraction: _Optional[float] = ...) -> None: ...

class HeatHistogram(_message.Message):
    __slots__ = ("table", "counts", "rows_total", "rows_probation", "counts_hot")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ROWS_PROBATION_FIELD_NUMBER: _ClassVar[int]
    COUNTS_HOT_FIELD_NUMBER: _ClassVar[int]
    table: str
    counts: bytes
    rows_total: int
    rows_probation: int
    counts_hot: bytes
    def __init__(self, table: _Optional[str] = ..., counts: _Optional[bytes] = ..., rows_total: _Optional[int] = ..., rows_probation: _Optional[int] = ..., counts_hot: _Optional[bytes] = ...) -> None: ...

class Moves(_message.Message):
    __slots__ = ("table", "frozen", "thawed", "unfreezable", "forgotten")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    THAWED_FIELD_NUMBER: _ClassVar[int]
    UNFREEZABLE_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    table: str
    frozen: int
    thawed: int
    unfreezable: int
    forgotten: int
    def __init__(self, table: _Optional[str] = ..., frozen: _Optional[int] = ..., thawed: _Optional[int] = ..., unfreezable: _Optional[int] = ..., forgotten: _Optional[int] = ...) -> None: ...

class CollectHeat(_message.Message):
    __slots__ = ("first_bucket",)
    FIRST_BUCKET_FIELD_NUMBER: _ClassVar[int]
    first_bucket: int
    def __init__(self, first_bucket: _Optional[int] = ...) -> None: ...

class Reselect(_message.Message):
    __slots__ = ("frostlines", "slice")
    FROSTLINES_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    frostlines: _containers.RepeatedCompositeFieldContainer[Frostline]
    slice: int
    def __init__(self, frostlines: _Optional[_Iterable[_Union[Frostline, _Mapping]]] = ..., slice: _Optional[int] = ...) -> None: ...

class EndDataPass(_message.Message):
    __slots__ = ("slice",)
    SLICE_FIELD_NUMBER: _ClassVar[int]
    slice: int
    def __init__(self, slice: _Optional[int] = ...) -> None: ...

class BeginCut(_message.Message):
    __slots__ = ("folder", "shard_index", "num_shards", "slice", "parent")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    folder: str
    shard_index: int
    num_shards: int
    slice: int
    parent: str
    def __init__(self, folder: _Optional[str] = ..., shard_index: _Optional[int] = ..., num_shards: _Optional[int] = ..., slice: _Optional[int] = ..., parent: _Optional[str] = ...) -> None: ...

class DeleteRows(_message.Message):
    __slots__ = ("tables", "row_ids", "is_last", "slice")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableIds]
    row_ids: bytes
    is_last: bool
    slice: int
    def __init__(self, tables: _Optional[_Iterable[_Union[TableIds, _Mapping]]] = ..., row_ids: _Optional[bytes] = ..., is_last: _Optional[bool] = ..., slice: _Optional[int] = ...) -> None: ...

class DropTables(_message.Message):
    __slots__ = ("tables", "slice")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedScalarFieldContainer[str]
    slice: int
    def __init__(self, tables: _Optional[_Iterable[str]] = ..., slice: _Optional[int] = ...) -> None: ...

class ErasedRows(_message.Message):
    __slots__ = ("table", "hot", "frozen", "waiting", "unknown")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    HOT_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    table: str
    hot: int
    frozen: int
    waiting: int
    unknown: int
    def __init__(self, table: _Optional[str] = ..., hot: _Optional[int] = ..., frozen: _Optional[int] = ..., waiting: _Optional[int] = ..., unknown: _Optional[int] = ...) -> None: ...

class AdvanceRequest(_message.Message):
    __slots__ = ("caller", "step", "collect_heat", "reselect", "end_data_pass", "begin_cut", "delete_rows", "drop_tables")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COLLECT_HEAT_FIELD_NUMBER: _ClassVar[int]
    RESELECT_FIELD_NUMBER: _ClassVar[int]
    END_DATA_PASS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_CUT_FIELD_NUMBER: _ClassVar[int]
    DELETE_ROWS_FIELD_NUMBER: _ClassVar[int]
    DROP_TABLES_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    step: int
    collect_heat: CollectHeat
    reselect: Reselect
    end_data_pass: EndDataPass
    begin_cut: BeginCut
    delete_rows: DeleteRows
    drop_tables: DropTables
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., collect_heat: _Optional[_Union[CollectHeat, _Mapping]] = ..., reselect: _Optional[_Union[Reselect, _Mapping]] = ..., end_data_pass: _Optional[_Union[EndDataPass, _Mapping]] = ..., begin_cut: _Optional[_Union[BeginCut, _Mapping]] = ..., delete_rows: _Optional[_Union[DeleteRows, _Mapping]] = ..., drop_tables: _Optional[_Union[DropTables, _Mapping]] = ...) -> None: ...

class AdvanceResponse(_message.Message):
    __slots__ = ("histograms", "moves", "done", "next_bucket", "erased")
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    NEXT_BUCKET_FIELD_NUMBER: _ClassVar[int]
    ERASED_FIELD_NUMBER: _ClassVar[int]
    histograms: _containers.RepeatedCompositeFieldContainer[HeatHistogram]
    moves: _containers.RepeatedCompositeFieldContainer[Moves]
    done: bool
    next_bucket: int
    erased: _containers.RepeatedCompositeFieldContainer[ErasedRows]
    def __init__(self, histograms: _Optional[_Iterable[_Union[HeatHistogram, _Mapping]]] = ..., moves: _Optional[_Iterable[_Union[Moves, _Mapping]]] = ..., done: _Optional[bool] = ..., next_bucket: _Optional[int] = ..., erased: _Optional[_Iterable[_Union[ErasedRows, _Mapping]]] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("caller", "step", "number", "topic", "words")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    step: int
    number: int
    topic: str
    words: str
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., number: _Optional[int] = ..., topic: _Optional[str] = ..., words: _Optional[str] = ...) -> None: ...

class MeetResponse(_message.Message):
    __slots__ = ("words",)
    WORDS_FIELD_NUMBER: _ClassVar[int]
    words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, words: _Optional[_Iterable[str]] = ...) -> None: ...

class GetCutProgressRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class GetCutProgressResponse(_message.Message):
    __slots__ = ("step", "done", "error", "bytes_written", "rows")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    step: int
    done: bool
    error: str
    bytes_written: int
    rows: int
    def __init__(self, step: _Optional[int] = ..., done: _Optional[bool] = ..., error: _Optional[str] = ..., bytes_written: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class AbandonCutRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class AbandonCutResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("caller", "folder", "slice", "anew")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    folder: str
    slice: int
    anew: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., folder: _Optional[str] = ..., slice: _Optional[int] = ..., anew: _Optional[_Iterable[str]] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("done",)
    DONE_FIELD_NUMBER: _ClassVar[int]
    done: bool
    def __init__(self, done: _Optional[bool] = ...) -> None: ...

class GetMaskInfoRequest(_message.Message):
    __slots__ = ("with_heat", "first_bucket")
    WITH_HEAT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BUCKET_FIELD_NUMBER: _ClassVar[int]
    with_heat: bool
    first_bucket: int
    def __init__(self, with_heat: _Optional[bool] = ..., first_bucket: _Optional[int] = ...) -> None: ...

class TableMaskInfo(_message.Message):
    __slots__ = ("table", "rows_hot", "rows_frozen", "rows_probation", "rows_unfreezable", "rows_default_reads", "rows_ignored", "bytes_hot", "bytes_state", "bytes_frozen", "bytes_index", "bytes_heat", "moves_frozen", "moves_thawed", "bytes_peak", "moves_frozen_idle", "moves_frozen_rank", "moves_frozen_limit", "moves_thawed_visit", "moves_thawed_rank", "moves_forgotten", "heat_counts_hot", "heat_counts_frozen", "frostline", "rows_ranked", "rows_ranked_before", "rows_erased", "bytes_erasure_pending")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_HOT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FROZEN_FIELD_NUMBER: _ClassVar[int]
    ROWS_PROBATION_FIELD_NUMBER: _ClassVar[int]
    ROWS_UNFREEZABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_DEFAULT_READS_FIELD_NUMBER: _ClassVar[int]
    ROWS_IGNORED_FIELD_NUMBER: _ClassVar[int]
    BYTES_HOT_FIELD_NUMBER: _ClassVar[int]
    BYTES_STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FROZEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_INDEX_FIELD_NUMBER: _ClassVar[int]
    BYTES_HEAT_FIELD_NUMBER: _ClassVar[int]
    MOVES_FROZEN_FIELD_NUMBER: _ClassVar[int]
    MOVES_THAWED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PEAK_FIELD_NUMBER: _ClassVar[int]
    MOVES_FROZEN_IDLE_FIELD_NUMBER: _ClassVar[int]
    MOVES_FROZEN_RANK_FIELD_NUMBER: _ClassVar[int]
    MOVES_FROZEN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    MOVES_THAWED_VISIT_FIELD_NUMBER: _ClassVar[int]
    MOVES_THAWED_RANK_FIELD_NUMBER: _ClassVar[int]
    MOVES_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    HEAT_COUNTS_HOT_FIELD_NUMBER: _ClassVar[int]
    HEAT_COUNTS_FROZEN_FIELD_NUMBER: _ClassVar[int]
    FROSTLINE_FIELD_NUMBER: _ClassVar[int]
    ROWS_RANKED_FIELD_NUMBER: _ClassVar[int]
    ROWS_RANKED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    ROWS_ERASED_FIELD_NUMBER: _ClassVar[int]
    BYTES_ERASURE_PENDING_FIELD_NUMBER: _ClassVar[int]
    table: str
    rows_hot: int
    rows_frozen: int
    rows_probation: int
    rows_unfreezable: int
    rows_default_reads: int
    rows_ignored: int
    bytes_hot: int
    bytes_state: int
    bytes_frozen: int
    bytes_index: int
    bytes_heat: int
    moves_frozen: int
    moves_thawed: int
    bytes_peak: int
    moves_frozen_idle: int
    moves_frozen_rank: int
    moves_frozen_limit: int
    moves_thawed_visit: int
    moves_thawed_rank: int
    moves_forgotten: int
    heat_counts_hot: bytes
    heat_counts_frozen: bytes
    frostline: Frostline
    rows_ranked: int
    rows_ranked_before: int
    rows_erased: int
    bytes_erasure_pending: int
    def __init__(self, table: _Optional[str] = ..., rows_hot: _Optional[int] = ..., rows_frozen: _Optional[int] = ..., rows_probation: _Optional[int] = ..., rows_unfreezable: _Optional[int] = ..., rows_default_reads: _Optional[int] = ..., rows_ignored: _Optional[int] = ..., bytes_hot: _Optional[int] = ..., bytes_state: _Optional[int] = ..., bytes_frozen: _Optional[int] = ..., bytes_index: _Optional[int] = ..., bytes_heat: _Optional[int] = ..., moves_frozen: _Optional[int] = ..., moves_thawed: _Optional[int] = ..., bytes_peak: _Optional[int] = ..., moves_frozen_idle: _Optional[int] = ..., moves_frozen_rank: _Optional[int] = ..., moves_frozen_limit: _Optional[int] = ..., moves_thawed_visit: _Optional[int] = ..., moves_thawed_rank: _Optional[int] = ..., moves_forgotten: _Optional[int] = ..., heat_counts_hot: _Optional[bytes] = ..., heat_counts_frozen: _Optional[bytes] = ..., frostline: _Optional[_Union[Frostline, _Mapping]] = ..., rows_ranked: _Optional[int] = ..., rows_ranked_before: _Optional[int] = ..., rows_erased: _Optional[int] = ..., bytes_erasure_pending: _Optional[int] = ...) -> None: ...

class GetMaskInfoResponse(_message.Message):
    __slots__ = ("tables", "events", "next_bucket")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_BUCKET_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableMaskInfo]
    events: _containers.RepeatedScalarFieldContainer[str]
    next_bucket: int
    def __init__(self, tables: _Optional[_Iterable[_Union[TableMaskInfo, _Mapping]]] = ..., events: _Optional[_Iterable[str]] = ..., next_bucket: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("tables", "row_ids", "padding")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableIds]
    row_ids: bytes
    padding: bytes
    def __init__(self, tables: _Optional[_Iterable[_Union[TableIds, _Mapping]]] = ..., row_ids: _Optional[bytes] = ..., padding: _Optional[bytes] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Version(_message.Message):
    __slots__ = ("job", "epoch", "step", "snapshot_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    step: int
    snapshot_id: str
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., snapshot_id: _Optional[str] = ...) -> None: ...

class TableLookup(_message.Message):
    __slots__ = ("table", "num_rows", "pooling", "num_bags")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NUM_BAGS_FIELD_NUMBER: _ClassVar[int]
    table: str
    num_rows: int
    pooling: Pooling
    num_bags: int
    def __init__(self, table: _Optional[str] = ..., num_rows: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., num_bags: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("wire_dtype", "tables", "row_ids", "lengths", "padding")
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    wire_dtype: WireDtype
    tables: _containers.RepeatedCompositeFieldContainer[TableLookup]
    row_ids: bytes
    lengths: bytes
    padding: bytes
    def __init__(self, wire_dtype: _Optional[_Union[WireDtype, str]] = ..., tables: _Optional[_Iterable[_Union[TableLookup, _Mapping]]] = ..., row_ids: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., padding: _Optional[bytes] = ...) -> None: ...

class TableVectors(_message.Message):
    __slots__ = ("table", "num_rows", "dim", "pooling", "num_bags", "version")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NUM_BAGS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    table: str
    num_rows: int
    dim: int
    pooling: Pooling
    num_bags: int
    version: int
    def __init__(self, table: _Optional[str] = ..., num_rows: _Optional[int] = ..., dim: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., num_bags: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("wire_dtype", "tables", "flags", "values", "formats", "versions", "padding")
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    wire_dtype: WireDtype
    tables: _containers.RepeatedCompositeFieldContainer[TableVectors]
    flags: bytes
    values: bytes
    formats: bytes
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    padding: bytes
    def __init__(self, wire_dtype: _Optional[_Union[WireDtype, str]] = ..., tables: _Optional[_Iterable[_Union[TableVectors, _Mapping]]] = ..., flags: _Optional[bytes] = ..., values: _Optional[bytes] = ..., formats: _Optional[bytes] = ..., versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., padding: _Optional[bytes] = ...) -> None: ...

class LookupPlace(_message.Message):
    __slots__ = ("address", "buckets")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    address: str
    buckets: _containers.RepeatedCompositeFieldContainer[BucketRange]
    def __init__(self, address: _Optional[str] = ..., buckets: _Optional[_Iterable[_Union[BucketRange, _Mapping]]] = ...) -> None: ...

class ListTablesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTablesResponse(_message.Message):
    __slots__ = ("tables", "versions", "num_buckets", "buckets", "places")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    num_buckets: int
    buckets: _containers.RepeatedCompositeFieldContainer[BucketRange]
    places: _containers.RepeatedCompositeFieldContainer[LookupPlace]
    def __init__(self, tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., num_buckets: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[BucketRange, _Mapping]]] = ..., places: _Optional[_Iterable[_Union[LookupPlace, _Mapping]]] = ...) -> None: ...

class GetTableRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetTableResponse(_message.Message):
    __slots__ = ("table", "mask_info", "version", "num_buckets", "buckets")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    MASK_INFO_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    table: Table
    mask_info: TableMaskInfo
    version: Version
    num_buckets: int
    buckets: _containers.RepeatedCompositeFieldContainer[BucketRange]
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ..., mask_info: _Optional[_Union[TableMaskInfo, _Mapping]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., num_buckets: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[BucketRange, _Mapping]]] = ...) -> None: ...

class FeatureBags(_message.Message):
    __slots__ = ("feature", "num_rows")
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    feature: str
    num_rows: int
    def __init__(self, feature: _Optional[str] = ..., num_rows: _Optional[int] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("num_examples", "dense", "features", "row_ids", "lengths")
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    num_examples: int
    dense: bytes
    features: _containers.RepeatedCompositeFieldContainer[FeatureBags]
    row_ids: bytes
    lengths: bytes
    def __init__(self, num_examples: _Optional[int] = ..., dense: _Optional[bytes] = ..., features: _Optional[_Iterable[_Union[FeatureBags, _Mapping]]] = ..., row_ids: _Optional[bytes] = ..., lengths: _Optional[bytes] = ...) -> None: ...

class PredictResponse(_message.Message):
    __slots__ = ("scores", "version")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    scores: bytes
    version: Version
    def __init__(self, scores: _Optional[bytes] = ..., version: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class DescribeModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelFeature(_message.Message):
    __slots__ = ("name", "table")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    table: str
    def __init__(self, name: _Optional[str] = ..., table: _Optional[str] = ...) -> None: ...

class FollowState(_message.Message):
    __slots__ = ("newest_id", "steps_behind", "seconds_behind", "is_held", "refusal", "num_swaps")
    NEWEST_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPS_FIELD_NUMBER: _ClassVar[int]
    newest_id: str
    steps_behind: int
    seconds_behind: float
    is_held: bool
    refusal: str
    num_swaps: int
    def __init__(self, newest_id: _Optional[str] = ..., steps_behind: _Optional[int] = ..., seconds_behind: _Optional[float] = ..., is_held: _Optional[bool] = ..., refusal: _Optional[str] = ..., num_swaps: _Optional[int] = ...) -> None: ...

class DescribeModelResponse(_message.Message):
    __slots__ = ("version", "no_model", "dense", "features", "follow")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NO_MODEL_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    version: Version
    no_model: str
    dense: _containers.RepeatedScalarFieldContainer[str]
    features: _containers.RepeatedCompositeFieldContainer[ModelFeature]
    follow: FollowState
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., no_model: _Optional[str] = ..., dense: _Optional[_Iterable[str]] = ..., features: _Optional[_Iterable[_Union[ModelFeature, _Mapping]]] = ..., follow: _Optional[_Union[FollowState, _Mapping]] = ...) -> None: ...

class ChooseVersionRequest(_message.Message):
    __slots__ = ("snapshot_id",)
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    def __init__(self, snapshot_id: _Optional[str] = ...) -> None: ...

class ChooseVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: Version
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...
