"""`frostline inspect RUN`: the mask info that a run has written, also while it goes on, as JSON or for people.

    documents = read_run(Path("runs/movielens"))     {arm: document of mask_report.py, and its failures}
    for part in describe(documents): console.print(part)

Importing this module imports neither torch nor numba.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from embedding_server.errors import InvalidInput
from embedding_server.store import HEAT_BAND_OF_ONE, NUM_HEAT_BANDS
from trainer.failures import failure_lines, read_failures
from trainer.mask_report import MASK_FILE, MOST
from trainer.report import bytes_text

MAX_MASK_BYTES = 64 << 20
_RUNS = Path("runs")  # where a run lies that is given by its name; trainer.output_dir's default
_BLOCKS = " ▁▂▃▄▅▆▇█"
_KEYS = frozenset({"job", "arm", "step", "samples", "tables", "total", "largest_hot_table", "events"})


def read_run(run: Path) -> dict[str, dict[str, Any]]:
    """Documents by arm. `run`: the folder of a run, the folder of one of its arms, or the name of a run in runs/.
    Those of arms that lost a process have "failures", records of failures.py.

    InvalidInput if there is none, or it is not one.
    """
    folder = run if run.exists() or run.is_absolute() else _RUNS / run
    if not folder.is_dir():
        raise InvalidInput(f"{run}: is no folder; give the folder of a run, e.g. runs/<name of the job>")
    paths = [folder / MASK_FILE] if (folder / MASK_FILE).is_file() else sorted(folder.glob(f"*/{MASK_FILE}"))
    if not paths:
        raise InvalidInput(
            f"{folder}: no arm in it has a {MASK_FILE}; a run writes it at its first re-selection and at its end"
        )
    documents = {path.parent.name: _read(path) for path in sorted(paths, key=_written_at)}
    for path in paths:
        failures = read_failures(path.parent)
        if failures:
            documents[path.parent.name]["failures"] = failures
    return documents


def _written_at(path: Path) -> float:
    """0 if it is gone by now, which reading it will tell."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_MASK_BYTES:
            raise InvalidInput(f"{path}: {path.stat().st_size} bytes, and mask info has at most {MAX_MASK_BYTES}")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{path}: cannot be read as mask info ({error}); run the job again") from None
    if not isinstance(document, dict) or not document.keys() >= _KEYS or not _can_be_shown(document):
        raise InvalidInput(f"{path}: is not mask info of this version; run the job again")
    return document


def _can_be_shown(document: Mapping[str, Any]) -> bool:
    """Everything that `describe` looks for is there: another version may have written the file."""
    try:
        for _ in describe({"": document}):
            pass
    except (AttributeError, LookupError, TypeError, ValueError):
        return False
    return True


def describe(documents: Mapping[str, Mapping[str, Any]]) -> Iterator[RenderableType]:
    """What rich prints, 100 columns wide with short names: for each arm rows and bytes by tier, moves by reason, ranks
    and traffic, the control group, heat, events."""
    for arm, document in documents.items():
        tables: Mapping[str, Any] = document["tables"]
        yield Text(f"{document['job']}, arm {arm}: step {document['step']:,}, {_samples(document)}", "bold")
        yield _table("rows and bytes by tier", _TIERS, tables, document["total"])
        yield _table("moves since the first step", _MOVES, tables, document["total"])
        yield _table("ranks and traffic", _TRAFFIC, tables, document["total"])
        judged = {name: table for name, table in tables.items() if table["control"]}
        if judged:
            yield _table(
                "logloss of rows that may freeze, above that of control rows of the same heat", _CONTROL, judged
            )
        yield Text("rows by heat, an octave a column, # marks heat 1 to 2", "italic")
        for name, table in tables.items():
            yield from _histogram_lines(name, table["heat_histogram"])
        largest = document["largest_hot_table"]
        if largest and largest["share"] > MOST and len(tables) > 1:
            yield Text(f"table {largest['table']!r} holds {largest['share']:.0%} of all hot rows")
        for event, times in Counter(document["events"]).items():
            yield Text(f"event: {event}" + (f" ({times} times)" if times > 1 else ""))
        for line in failure_lines(document.get("failures", ())):
            yield Text(line)
        yield Text()


#: column: how a table's document, or the total, is shown in it; "" where it has none
_Columns = Mapping[str, Callable[[Any], str]]
_TIERS: _Columns = {
    "policy": lambda d: d["policy"]["kind"] if "policy" in d else "",
    "hot rows": lambda d: f"{d['rows']['hot']:,}",
    "of all": lambda d: f"{d['share_of_hot_rows']:.0%}" if "share_of_hot_rows" in d else "",
    "frozen rows": lambda d: f"{d['rows']['frozen']:,}",
    "hot": lambda d: bytes_text(d["bytes"]["hot"] + d["bytes"]["state"]),
    "frozen": lambda d: bytes_text(d["bytes"]["frozen"]),
    "index, heat": lambda d: bytes_text(d["bytes"]["index"] + d["bytes"]["heat"]),
    "total": lambda d: bytes_text(d["bytes"]["total"]),
    "peak": lambda d: bytes_text(d["bytes"]["peak"]),
}
_MOVES: _Columns = {
    "frozen: idle": lambda d: f"{d['moves']['frozen_idle']:,}",
    "rank": lambda d: f"{d['moves']['frozen_rank']:,}",
    "limit": lambda d: f"{d['moves']['frozen_limit']:,}",
    "thawed: visit": lambda d: f"{d['moves']['thawed_visit']:,}",
    "rank ": lambda d: f"{d['moves']['thawed_rank']:,}",
    "forgotten": lambda d: f"{d['moves']['forgotten']:,}",
    "erased": lambda d: _erased(d["rows"]["erased"], d["bytes"]["erasure_pending"]),
    "unfreezable now": lambda d: f"{d['rows']['unfreezable']:,}",
}
_TRAFFIC: _Columns = {
    "frostline": lambda d: _number(d["frostline"]["heat"]) if d.get("frostline") else "",
    "top-k overlap": lambda d: f"{d['topk_overlap']:.1%}" if d.get("topk_overlap") is not None else "",
    "updates a step": lambda d: _number(d.get("update_frequency")),
    "gradient rows": lambda d: f"{d['traffic']['gradient_rows']:,}",
    "not sent": lambda d: _saved(d["traffic"]),
    "push bytes saved": lambda d: bytes_text(d["traffic"]["bytes_push_saved"]),
}
_CONTROL: _Columns = {
    "difference": lambda d: _signed(d["control"]["difference"]),
    "95% from": lambda d: _signed(d["control"]["low"]),
    "to": lambda d: _signed(d["control"]["high"]),
    "max_loss": lambda d: f"{d['control']['max_loss']:g}",
    "look-ups of control": lambda d: f"{d['control']['lookups_control']:,}",
    "of others": lambda d: f"{d['control']['lookups_treated']:,}",
    "": lambda d: "too much is lost" if d["control"]["is_alarm"] else "",
}


def _table(title: str, columns: _Columns, tables: Mapping[str, Any], total: Mapping[str, Any] | None = None) -> Table:
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    result.add_column("table", overflow="fold")
    for name in columns:
        result.add_column(name.strip(), justify="right", overflow="fold")
    for name, document in tables.items():
        cells = [show(document) for show in columns.values()]
        result.add_row(Text(name), *cells, end_section=name == list(tables)[-1])  # a name is no markup
    if total and len(tables) > 1:
        result.add_row("all", *[show(total) for show in columns.values()])
    return result


def _samples(document: Mapping[str, Any]) -> str:
    since = document.get("since_step")  # of a run before this version had it: unknown
    return f"{document['samples']:,} samples" + (f" since step {since:,}, as all traffic below" if since else "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _erased(rows: int, pending: int) -> str:
    """With the bytes of segments that may still hold some of the rows."""
    return f"{rows:,}" + (f" ({bytes_text(pending)} pending)" if pending else "")


def _saved(traffic: Mapping[str, int]) -> str:
    saved, sent = traffic["gradient_rows_saved"], traffic["gradient_rows"]
    return f"{saved:,} ({saved / (saved + sent):.0%})" if saved else "0"


def _signed(value: float | None) -> str:
    return "too little seen" if value is None else f"{value:+.4f}"


def _histogram_lines(name: str, histogram: Mapping[str, Sequence[int]]) -> Iterator[Text]:
    """Two lines of blocks, hot and frozen, each scaled to its own highest column; nothing for a table without rows."""
    octaves = {kind: _octaves(histogram[kind]) for kind in ("hot", "frozen")}
    used = [i for i in range(NUM_HEAT_BANDS // 2) if octaves["hot"][i] or octaves["frozen"][i]]
    if not used:
        return
    first, last = min(used[0], HEAT_BAND_OF_ONE // 2), max(used[-1], HEAT_BAND_OF_ONE // 2)
    for kind, counts in octaves.items():
        shown = counts[first : last + 1]
        highest = max(shown)
        bars = "".join(_BLOCKS[-(-8 * count // highest)] if highest else " " for count in shown)
        yield Text(f"{name:>20} {kind:<6} |{bars}| {sum(counts):,} rows")
    marks = "".join("#" if i == HEAT_BAND_OF_ONE // 2 else " " for i in range(first, last + 1))
    yield Text(f"{'':>20} {'':<6}  {marks}")


def _octaves(bands: Sequence[int]) -> list[int]:
    return [bands[i] + bands[i + 1] for i in range(0, NUM_HEAT_BANDS, 2)]
