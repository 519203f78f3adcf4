"""Limits of a server: what is refused, with which pushback, and that room comes back."""

from __future__ import annotations

import pytest

from embedding_server.errors import Overloaded
from services.admission import Admission, Limits


def test_calls_are_bounded_and_come_back() -> None:
    admission = Admission(Limits(max_calls=2, retry_after_ms=70))
    with admission.call():
        with admission.call():
            with pytest.raises(Overloaded, match=r"max_calls=2 .* try again in 70 ms") as refused, admission.call():
                pass
            assert refused.value.retry_after_ms == 70
        with admission.call():
            pass


def test_bytes_are_bounded_and_come_back() -> None:
    admission = Admission(Limits(max_bytes=100))
    with admission.bytes(60):
        refused = pytest.raises(Overloaded, match=r"60 bytes are in the server, 41 more pass max_bytes=100")
        with refused, admission.bytes(41):
            pass
        with admission.bytes(40):
            pass
    with admission.bytes(100):
        pass


def test_one_call_above_the_limit_is_let_in_alone() -> None:
    admission = Admission(Limits(max_bytes=100))
    with admission.bytes(500), pytest.raises(Overloaded), admission.bytes(1):
        pass


def test_released_bytes_are_given_back_once() -> None:
    admission = Admission(Limits(max_bytes=100))
    with admission.bytes(100) as held:
        held.release()
        held.release()
        with admission.bytes(100), pytest.raises(Overloaded), admission.bytes(1):
            pass
    with admission.bytes(100), pytest.raises(Overloaded), admission.bytes(1):
        pass


def test_room_comes_back_after_an_error() -> None:
    admission = Admission(Limits(max_calls=1, max_bytes=10))
    for _ in range(3):
        with pytest.raises(KeyError), admission.call(), admission.bytes(10):
            raise KeyError
