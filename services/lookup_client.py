"""LookupClient and AsyncLookupClient: rows of any tables from the shards that have them, for ranking services.

    client = LookupClient(["10.0.0.1:7100", "10.0.0.2:7100"])
    rows = client.lookup({"user": user_ids, "item": item_ids}, encoding="float16")
    rows["item"].values, rows["item"].found

A look-up is one message to each shard that has some of the row_ids, all at once: one hop. Which shard has which buckets
they say themselves. Several addresses with the same buckets are replicas: a call goes to one of them, and to another
when that one fails. What a look-up meets, and what comes of it, within its deadline:

    a shard cannot be reached, hangs or is full   tries.py: another replica, or the same after a pause
    ... and no replica answers                    the buckets are learned again, the look-up is repeated
    WrongShard, UnknownTable                      the same, if others have the row_ids or the table by now; or an error

Addresses may be a function: it is asked again at each learning, so a registry can tell where the shards have gone.
A server of a snapshot (`frostline serve`) and a gateway (`frostline shard --fanout`) are addresses like any other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from embedding_server.errors import FrostlineError, StoreUnavailable, UnknownTable, WrongShard
from embedding_server.lookup import Encoding, Version
from embedding_server.spec import TableSpec
from services.aio_channel import AioChannel, call_one
from services.aio_channel import call_every as aio_call_every
from services.allocator import set_allocator
from services.bucket_map import LIST_TABLES, LIST_TABLES_REQUEST, Addresses, BucketMap, addresses_now, make_map
from services.lookup_reads import Bags, LookedUp, LookupReads, ValueReads, queries_of
from services.security_options import Credentials
from services.shard_channel import PendingCall, ShardChannel, run_each, run_every
from services.tries import CallTimes, Target, Tries

__all__ = ["AsyncLookupClient", "Bags", "LookedUp", "LookupClient"]

log = logging.getLogger(__name__)

LOOKUP = "EmbeddingLookup/Lookup"
#: of a look-up in all; a try where there is another replica; before the buckets are learned again
LOOKUP_TIMES = CallTimes(deadline_s=5.0, try_s=1.0, reconnect_s=0.25)
#: a learning gives an address that long; within a look-up it has what is left of its deadline
LEARN_S = 2.0
#: how often a client looks whether an address is back that did not answer, and how often it learns in any case
PROBE_S = 1.0
REFRESH_S = 30.0
#: between two attempts that find nothing new
PAUSE_S = 0.05

T = TypeVar("T", bound=Target)
A = TypeVar("A")
R = TypeVar("R", bound=LookupReads)
Reads = Callable[[BucketMap], R]


class Call(NamedTuple):
    """One look-up with all its attempts."""

    deadline_s: float  # of time.monotonic()
    waits_for_room: bool


class _Router:
    """What both clients know: where the buckets are, and when to ask again. No IO.

    Thread safety: `map` is replaced whole; the rest is written under the client's lock for learning.
    """

    def __init__(self, addresses: Addresses, times: CallTimes) -> None:
        self.addresses = addresses
        self.times = times
        self.map: BucketMap | None = None
        self.is_closed = False
        self._learned_s = 0.0
        self._look_after_s = 0.0

    def learned(self, answers: Mapping[str, bytes | FrostlineError], targets: Mapping[str, Target]) -> BucketMap:
        """Takes the answers of all addresses. Raises the errors of make_map; the map stays as it was then."""
        found = make_map(answers)
        if self.map is not None and not self.map.routes_as(found):
            log.info("look-ups are routed anew: %d groups of shards, %d silent", found.num_groups, len(found.silent))
        for address, answer in answers.items():
            if isinstance(answer, bytes):
                targets[address].awake()
        self.map = found
        self._learned_s = time.monotonic()
        return found

    def should_refresh(self, targets: Mapping[str, Target], now_s: float) -> bool:
        """Whether it is time to learn beside the look-ups: someone is silent or rests, or it is long since."""
        if now_s < self._look_after_s:
            return False
        self._look_after_s = now_s + PROBE_S
        is_whole = self.map is not None and not self.map.silent
        is_whole = is_whole and all(target.rests_until_s <= now_s for target in list(targets.values()))
        return not is_whole or now_s - self._learned_s > REFRESH_S

    def tries(
        self,
        method: str,
        group: int,
        tables: Sequence[str],
        used: BucketMap,
        targets: Mapping[str, T],
        call: Call,
    ) -> Tries[T]:
        """Of one message to a group, whichever of its replicas has these tables."""
        now_s, times = time.monotonic(), self.times
        replicas = used.addresses_with(group, tables)
        left_s = call.deadline_s - now_s
        times = CallTimes(left_s, times.try_s if len(replicas) > 1 else left_s, times.reconnect_s)
        chosen = [targets[address] for address in replicas]
        return Tries(method, chosen, times, now_s, waits_for_room=call.waits_for_room)

    def begin(self, timeout_s: float | None, waits_for_room: bool = True) -> Call:
        timeout_s = self.times.deadline_s if timeout_s is None else timeout_s
        return Call(time.monotonic() + timeout_s, waits_for_room)

    def check_repeat(self, error: FrostlineError, used: BucketMap, deadline_s: float) -> None:
        """After learning: whether to repeat a look-up that failed with the map `used`. Raises `error` if it is not."""
        is_new = self.map is not None and not self.map.routes_as(used)
        may_pass = isinstance(error, (StoreUnavailable, WrongShard)) or is_new
        if self.is_closed or not may_pass or time.monotonic() + PAUSE_S >= deadline_s:
            raise error

    def table_specs(self) -> dict[str, TableSpec]:
        assert self.map is not None
        return {name: self.map.spec(name) for name in self.map.tables}


class LookupClient:
    """For threads. Thread safety: every method may be called from any thread; `_learning` guards learning."""

    def __init__(
        self, addresses: Addresses, *, times: CallTimes = LOOKUP_TIMES, credentials: Credentials | None = None
    ) -> None:
        """Learns where the buckets are. StoreUnavailable if nobody answers for some of them within times.deadline_s,
        InvalidInput if the shards do not fit together.

        times: of a look-up in all; of a try where there is another replica; and how long an address that cannot be
        reached is tried before the buckets are learned again. Sets glibc's allocator for this process (allocator.py).
        """
        set_allocator()
        self._router = _Router(addresses, times)
        self._credentials = credentials
        self._learning = threading.Lock()
        self._channels: dict[str, ShardChannel] = {}
        self._is_refreshing = False
        try:
            self._learn_in_time(None, time.monotonic() + times.deadline_s)
        except BaseException:
            self.close()
            raise

    # --- calls ---

    def lookup(
        self, ids: Mapping[str, Any], *, encoding: Encoding = "float32", timeout_s: float | None = None
    ) -> dict[str, LookedUp]:
        """Rows of row_ids by table, in their order, repeated or not; of Bags one vector a bag.

        ids: of each table integers [n] or Bags. encoding: how values travel; `stored` takes the fewest bytes and gives
        float32, and so does `bfloat16`. timeout_s: in place of times.deadline_s. An unknown row_id is no error (see
        `found`). Raises InvalidInput, UnknownTable, SegmentCorrupt, StoreUnavailable.
        """
        queries = queries_of(ids, encoding)
        return self.read(lambda used: ValueReads(queries, encoding, used), timeout_s).result()

    def read(self, reads: Reads[R], timeout_s: float | None = None, *, waits_for_room: bool = True) -> R:
        """Makes reads(map), sends its messages and has it take the replies; anew with another map where that may help.

        waits_for_room False: a full server is an error (Overloaded) at once, for the caller to wait."""
        call = self._router.begin(timeout_s, waits_for_room)

        def run(used: BucketMap) -> R:
            made = reads(used)
            for messages in made.rounds():
                pending = [self._pending(LOOKUP, m.group, m.tables, made.encode(m), used, call) for m in messages]
                for number, reply in run_each(pending):
                    made.place(messages[number], reply)
            return made

        return self._attempt(run, call)

    def ask_all(self, method: str, request: bytes, table: str, timeout_s: float | None = None) -> list[bytes]:
        """The same request about a table to one replica of every group; their replies."""
        call = self._router.begin(timeout_s)

        def run(used: BucketMap) -> list[bytes]:
            groups = range(used.num_groups)
            pending = [self._pending(method, group, [table], request, used, call) for group in groups]
            replies = dict(run_each(pending))
            return [replies[group] for group in groups]

        return self._attempt(run, call)

    def table_specs(self, timeout_s: float | None = None) -> dict[str, TableSpec]:
        """Of every table, as the shards have them now."""
        self._learn_in_time(self._router.map, self._router.begin(timeout_s).deadline_s)
        return self._router.table_specs()

    def dims(self) -> dict[str, int]:
        """Of the tables that it knows of; asks nobody."""
        assert self._router.map is not None
        return {name: table.dim for name, table in self._router.map.tables.items()}

    def version(self, table: str) -> Version:
        """What its rows had seen when the shards were last asked for their tables; asks nobody."""
        assert self._router.map is not None
        return self._router.map.versions.get(table, Version())

    def spec(self, table: str, timeout_s: float | None = None) -> TableSpec:
        """Of one table; asks the shards only if it is not known yet. Raises UnknownTable."""
        return self._attempt(lambda used: used.spec(table), self._router.begin(timeout_s))

    def close(self) -> None:
        """Ends running calls with StoreUnavailable."""
        self._router.is_closed = True
        for channel in list(self._channels.values()):
            channel.close()

    def __enter__(self) -> LookupClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- shared ---

    def _attempt(self, run: Callable[[BucketMap], A], call: Call) -> A:
        """run(map), and again with another map where that may help."""
        while True:
            used = self._router.map
            assert used is not None
            self._refresh_if_due()
            try:
                return run(used)
            except (StoreUnavailable, WrongShard, UnknownTable) as error:
                self._learn_after(error, used, call.deadline_s)

    def _pending(
        self, method: str, group: int, tables: Sequence[str], request: bytes, used: BucketMap, call: Call
    ) -> PendingCall:
        tries = self._router.tries(method, group, tables, used, self._channels, call)
        return PendingCall(tries, method, request)

    def _learn(self, seen: BucketMap | None, deadline_s: float) -> None:
        """Learns, unless somebody else has since `seen`. Raises what make_map raises."""
        router = self._router
        if not self._learning.acquire(timeout=max(deadline_s - time.monotonic(), 0.0)):
            raise StoreUnavailable("learning where the buckets are did not finish within the look-up's deadline")
        try:
            if router.map is not seen:
                return
            addresses = addresses_now(router.addresses)
            for address in addresses:
                if address not in self._channels:
                    self._channels[address] = ShardChannel(
                        len(self._channels), address, router.times, self._credentials
                    )
            left_s = max(min(deadline_s - time.monotonic(), LEARN_S), 0.001)
            times = CallTimes(left_s, left_s, 0.0)
            tries = [Tries(LIST_TABLES, (self._channels[address],), times, time.monotonic()) for address in addresses]
            answers = run_every([PendingCall(each, LIST_TABLES, LIST_TABLES_REQUEST) for each in tries])
            router.learned(dict(zip(addresses, answers, strict=True)), self._channels)
        finally:
            self._learning.release()

    def _learn_in_time(self, seen: BucketMap | None, deadline_s: float) -> None:
        """As _learn, again and again while shards do not answer and there is time."""
        while True:
            try:
                return self._learn(seen, deadline_s)
            except StoreUnavailable:
                if time.monotonic() + PAUSE_S >= deadline_s:
                    raise
                time.sleep(PAUSE_S)

    def _learn_after(self, error: FrostlineError, used: BucketMap, deadline_s: float) -> None:
        """Returns if the look-up is to be repeated; raises `error` else."""
        try:
            self._learn(used, deadline_s)
        except FrostlineError as why:  # buckets may be on their way from one shard to another
            log.info("learning where the buckets are failed: %s", why)
        self._router.check_repeat(error, used, deadline_s)
        time.sleep(PAUSE_S)

    def _refresh_if_due(self) -> None:
        if self._is_refreshing or not self._router.should_refresh(self._channels, time.monotonic()):
            return
        self._is_refreshing = True  # two at once would do no harm
        threading.Thread(target=self._refresh, name="lookup-refresh", daemon=True).start()

    def _refresh(self) -> None:
        try:
            self._learn(self._router.map, time.monotonic() + LEARN_S)
        except FrostlineError as error:
            if not self._router.is_closed:
                log.info("learning where the buckets are failed: %s", error)
        finally:
            self._is_refreshing = False


class AsyncLookupClient:
    """For asyncio: `async with AsyncLookupClient(addresses) as client: rows = await client.lookup(ids)`.

    It belongs to the event loop that it is first used in; any number of tasks of that loop may use it at once.
    """

    def __init__(
        self, addresses: Addresses, *, times: CallTimes = LOOKUP_TIMES, credentials: Credentials | None = None
    ) -> None:
        """As LookupClient, but the buckets are learned at `connect`, at `async with` or at the first look-up."""
        set_allocator()
        self._router = _Router(addresses, times)
        self._credentials = credentials
        self._learning: asyncio.Lock | None = None
        self._channels: dict[str, AioChannel] = {}
        self._refreshing: asyncio.Task[None] | None = None

    # --- calls ---

    async def connect(self) -> None:
        """Learns where the buckets are. Raises as LookupClient."""
        await self._learn_in_time(self._router.map, time.monotonic() + self._router.times.deadline_s)

    async def lookup(
        self, ids: Mapping[str, Any], *, encoding: Encoding = "float32", timeout_s: float | None = None
    ) -> dict[str, LookedUp]:
        """As LookupClient.lookup."""
        queries = queries_of(ids, encoding)
        return (await self.read(lambda used: ValueReads(queries, encoding, used), timeout_s)).result()

    async def read(self, reads: Reads[R], timeout_s: float | None = None, *, waits_for_room: bool = True) -> R:
        """As LookupClient.read."""
        router, call = self._router, self._router.begin(timeout_s, waits_for_room)
        if router.map is None:
            await self._learn_in_time(None, call.deadline_s)
        while True:
            used = router.map
            assert used is not None
            self._refresh_if_due()
            try:
                made = reads(used)
                await self._run(made, used, call)
                return made
            except (StoreUnavailable, WrongShard, UnknownTable) as error:
                await self._learn_after(error, used, call.deadline_s)

    async def table_specs(self) -> dict[str, TableSpec]:
        """Of every table, as the shards have them now."""
        await self.connect()
        return self._router.table_specs()

    async def close(self) -> None:
        """Ends running calls with StoreUnavailable."""
        self._router.is_closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        for channel in list(self._channels.values()):
            await channel.close()

    async def __aenter__(self) -> AsyncLookupClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- shared ---

    async def _run(self, reads: LookupReads, used: BucketMap, call: Call) -> None:
        for messages in reads.rounds():
            pending = []
            for m in messages:
                tries = self._router.tries(LOOKUP, m.group, m.tables, used, self._channels, call)
                pending.append(call_one(tries, LOOKUP, reads.encode(m)))
            for m, reply in zip(messages, await asyncio.gather(*pending), strict=True):
                reads.place(m, reply)

    async def _learn(self, seen: BucketMap | None, deadline_s: float) -> None:
        router = self._router
        self._learning = self._learning or asyncio.Lock()
        async with self._learning:
            if router.map is not seen:
                return
            addresses = addresses_now(router.addresses)
            for address in addresses:
                if address not in self._channels:
                    self._channels[address] = AioChannel(len(self._channels), address, self._credentials)
            left_s = max(min(deadline_s - time.monotonic(), LEARN_S), 0.001)
            requests = [(self._channels[address], LIST_TABLES_REQUEST) for address in addresses]
            answers = await aio_call_every(LIST_TABLES, requests, CallTimes(left_s, left_s, 0.0))
            router.learned(dict(zip(addresses, answers, strict=True)), self._channels)

    async def _learn_in_time(self, seen: BucketMap | None, deadline_s: float) -> None:
        while True:
            try:
                return await self._learn(seen, deadline_s)
            except StoreUnavailable:
                if time.monotonic() + PAUSE_S >= deadline_s:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def _learn_after(self, error: FrostlineError, used: BucketMap, deadline_s: float) -> None:
        try:
            await self._learn(used, deadline_s)
        except FrostlineError as why:
            log.info("learning where the buckets are failed: %s", why)
        self._router.check_repeat(error, used, deadline_s)
        await asyncio.sleep(PAUSE_S)

    def _refresh_if_due(self) -> None:
        is_running = self._refreshing is not None and not self._refreshing.done()
        if not is_running and self._router.should_refresh(self._channels, time.monotonic()):
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())

    async def _refresh(self) -> None:
        try:
            await self._learn(self._router.map, time.monotonic() + LEARN_S)
        except FrostlineError as error:
            if not self._router.is_closed:
                log.info("learning where the buckets are failed: %s", error)
