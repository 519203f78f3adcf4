"""Meetings: the workers of a job wait for one another at a step, so that all of them do alike what none may do alone.

A meeting is over when every worker has come, and tells each what all of them said. It fails for all of them when they
have come for different things, or when one of them went on to the next step instead: so workers that differ get an
error and do not wait for ever. A worker that never comes is told of by the caller's deadline.

Meetings of a step have numbers, which each worker counts for itself, so that one that is sent again is known as such.

Thread safety: none; they belong to the thread that owns the shard.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field

from embedding_server.errors import FencedEpoch, FrostlineError, InvalidInput, NotReady
from embedding_server.steps import JobSteps

MAX_TEXT_BYTES = 64 << 10  # of a topic, or of words
_MAX_REMEMBERED = 8  # meetings that are over: a worker has one at a time, so a repeat is of the last

Key = tuple[int, int]  # step and number


@dataclass(slots=True)
class _Meeting:
    said: dict[int, tuple[str, str]] = field(default_factory=dict)  # topic and words by worker
    waiting: list[Future[list[str]]] = field(default_factory=list)
    error: FrostlineError | None = None


class Meetings:
    """Of one job; a new epoch begins without any."""

    def __init__(self, steps: JobSteps) -> None:
        self._steps = steps
        self._open: dict[Key, _Meeting] = {}
        self._over: OrderedDict[Key, _Meeting] = OrderedDict()

    def come(self, worker: int, step: int, number: int, topic: str, words: str) -> Future[list[str]]:
        """The words of all workers, in order, once they are here. NotReady, InvalidInput."""
        future: Future[list[str]] = Future()
        key = (step, number)
        if key not in self._over:  # a repeat is answered though others have gone on since
            self._check(worker, step, topic, words)
        meeting = self._over.get(key) or self._open.setdefault(key, _Meeting())
        known = meeting.said.setdefault(worker, (topic, words))
        if known != (topic, words):
            raise InvalidInput(
                f"job {self._steps.job!r}, worker {worker}: meeting {number} of step {step} is about {topic[:200]!r}"
                f" now and was about {known[0][:200]!r}; count the meetings of a step from 0"
            )
        meeting.waiting.append(future)
        if key in self._over:
            self._answer(meeting)
        elif len(meeting.said) == self._steps.num_workers:
            self._end(key, self._difference(meeting, step))
        return future

    def _check(self, worker: int, step: int, topic: str, words: str) -> None:
        steps = self._steps
        for text in (topic, words):
            if len(text.encode()) > MAX_TEXT_BYTES:
                raise InvalidInput(f"job {steps.job!r}: a meeting takes texts of at most {MAX_TEXT_BYTES} bytes")
        if steps.applied[worker] != step or steps.pulled[worker] != step:
            raise NotReady(
                f"job {steps.job!r}, worker {worker}: it is at step {steps.applied[worker]}, and has pulled step"
                f" {steps.pulled[worker]}; workers meet at step {step} between its push and the pull of the next"
            )
        ahead = [w for w, pulled in enumerate(steps.pulled) if pulled > step]
        if ahead:
            raise self._went_on(ahead[0], step)

    def _went_on(self, worker: int, step: int) -> NotReady:
        return NotReady(
            f"job {self._steps.job!r}: worker {worker} has pulled step {step + 1} and did not come to the meeting of"
            f" step {step}; every worker must make the same calls at the same step"
        )

    def _difference(self, meeting: _Meeting, step: int) -> InvalidInput | None:
        topics = {worker: topic for worker, (topic, _) in sorted(meeting.said.items())}
        first = topics[0]
        for worker, topic in topics.items():
            if topic != first:
                return InvalidInput(
                    f"job {self._steps.job!r}: at step {step} worker 0 wants {first[:200]!r} and worker {worker}"
                    f" {topic[:200]!r}; every worker must make the same calls, nothing was done"
                )
        return None

    def went_on(self, worker: int, step: int) -> None:
        """A worker has pulled `step`: who waits for it at an earlier one waits in vain."""
        for key in [key for key in self._open if key[0] < step]:
            self._end(key, self._went_on(worker, key[0]))

    def _end(self, key: Key, error: FrostlineError | None) -> None:
        meeting = self._over[key] = self._open.pop(key)
        meeting.error = error
        if len(self._over) > _MAX_REMEMBERED:
            self._over.popitem(last=False)
        self._answer(meeting)

    @staticmethod
    def _answer(meeting: _Meeting) -> None:
        for future in meeting.waiting:
            if future.cancelled():
                continue
            if meeting.error is not None:
                future.set_exception(meeting.error)
            else:
                future.set_result([words for _, (_, words) in sorted(meeting.said.items())])
        meeting.waiting.clear()

    def fence(self, epoch: int) -> None:
        """A new epoch has begun."""
        error = FencedEpoch(f"job {self._steps.job!r}: epoch {epoch} has begun; stop this worker", epoch)
        for key in list(self._open):
            self._end(key, error)
        self._over.clear()
