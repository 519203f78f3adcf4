"""A version is closed once, when nobody can read it any more."""

from __future__ import annotations

import threading

import pytest

from embedding_server.errors import StoreUnavailable
from embedding_server.served_versions import Versions


class Version:
    def __init__(self, name: str) -> None:
        self.name, self.times_closed = name, 0

    def close(self) -> None:
        self.times_closed += 1


def test_whoever_leaves_last_closes_the_old_one() -> None:
    first, second = Version("first"), Version("second")
    versions = Versions(first)
    with versions.pinned() as read:
        with versions.pinned() as again:
            assert read is again is first
            versions.replace(second)
            with versions.pinned() as now:
                assert now is second
        assert (first.times_closed, versions.num_open) == (0, 2)
    assert (first.times_closed, second.times_closed, versions.num_open) == (1, 0, 1)
    with versions.pinned():
        versions.close()
        assert second.times_closed == 0
        with pytest.raises(StoreUnavailable, match="shutting down"), versions.pinned():
            pass
    assert (first.times_closed, second.times_closed, versions.num_open) == (1, 1, 0)


def test_an_error_while_it_is_read_lets_go_of_it() -> None:
    version = Version("only")
    versions = Versions(version)
    with pytest.raises(KeyError), versions.pinned():
        raise KeyError
    versions.close()
    assert version.times_closed == 1


def test_no_reader_meets_a_closed_version() -> None:
    every = [Version(str(k)) for k in range(200)]
    versions, met, stopping = Versions(every[0]), [], threading.Event()

    def read() -> None:
        while not stopping.is_set():
            with versions.pinned() as version:
                met.append(version.times_closed)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in every[1:]:
        versions.replace(version)
    stopping.set()
    for thread in threads:
        thread.join()
    versions.close()
    assert not any(met) and {version.times_closed for version in every} == {1} and versions.num_open == 0
