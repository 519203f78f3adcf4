"""Every error that Frostline raises on purpose, as one small tree.

    FrostlineError
    |-- InvalidInput (ValueError)    the caller sent something that can never be accepted
    |   |-- UnknownTable             ... it names a table that was not created
    |   `-- WrongShard               ... it names a row_id of a bucket that this shard does not have
    |-- TableConflict                a table exists already with another spec
    |-- StepGap                      a Push or Pull skips a step; carries expected_step
    |-- NotReady                     the call is right but comes too early (no epoch begun, step not yet applied)
    |-- FencedEpoch                  the caller's epoch is over; carries current_epoch
    |-- Overloaded                   a named limit is full now; carries retry_after_ms
    |-- Unauthenticated              the caller showed no token that the server knows
    |-- PermissionDenied             it did, and the token's role may not make this call
    |-- SegmentCorrupt               a file of frozen rows does not hold what it should; carries path
    `-- StoreUnavailable             no shard answers, workers are waited for in vain, or the disk takes no epoch or cut

A message says what, the value, the rule and the next step. services/rpc_errors.py maps each class to one
gRPC status and back, so that a remote store raises the same classes as an in-process one.
`assert` is kept for our own bugs.
"""

from __future__ import annotations


class FrostlineError(Exception):
    """Root of the tree."""


class InvalidInput(FrostlineError, ValueError):
    """A request, spec or batch breaks a rule; sending it again cannot help. State is unchanged."""


class UnknownTable(InvalidInput):
    """A request names a table that the store does not have."""


class WrongShard(InvalidInput):
    """A row_id went to a shard that does not have its bucket. Learn the buckets anew and send it to the right one."""


class TableConflict(FrostlineError):
    """CreateTables names an existing table with a different spec."""


class StepGap(FrostlineError):
    """A step was skipped. `expected_step` is the step that the shard would take next from this worker."""

    def __init__(self, message: str, expected_step: int) -> None:
        super().__init__(message)
        self.expected_step = expected_step


class NotReady(FrostlineError):
    """The call comes before what it needs: no epoch begun, or an Advance while a step is in flight."""


class FencedEpoch(FrostlineError):
    """The caller belongs to an epoch that has ended. `current_epoch` is the one the shard serves."""

    def __init__(self, message: str, current_epoch: int) -> None:
        super().__init__(message)
        self.current_epoch = current_epoch


class Overloaded(FrostlineError):
    """A named limit (calls in flight, bytes admitted) is full. Try again after `retry_after_ms` ms."""

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class Unauthenticated(FrostlineError):
    """The server asks for a token, and the call had none, or one that the server does not know."""

    is_over = False  # set by a client that has another token by now


class PermissionDenied(FrostlineError):
    """The role of the call's token may not make this call."""


class SegmentCorrupt(FrostlineError):
    """A segment file is truncated, altered or not a segment. `path` names it."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class StoreUnavailable(FrostlineError):
    """No answer within the deadline and its retries, or none that would hold: the disk does not take an epoch."""
