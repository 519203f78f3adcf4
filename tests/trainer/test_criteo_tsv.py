from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import line_blocks as line_blocks_module
from trainer.data.criteo_tsv import NUM_FEATURES, parse_rows
from trainer.data.line_blocks import line_blocks
from trainer.data.registry import open_reader
from trainer.job import make_job

integers = st.one_of(st.just(""), st.integers(-(10**9), 10**18 - 1).map(str))
words = st.one_of(st.just(""), st.integers(0, 2**32 - 1).map(lambda x: f"{x:08x}"), st.sampled_from(["0", "FF", "aB"]))
rows = st.tuples(
    st.integers(0, 1), st.lists(integers, min_size=13, max_size=13), st.lists(words, min_size=26, max_size=26)
)


def parse(lines: list[str]) -> tuple[np.ndarray, ...]:
    buffer = np.frombuffer("\n".join(lines).encode() or b"\n", np.uint8)
    lengths = np.array([len(line) for line in lines])
    starts = np.cumsum(lengths + 1) - lengths - 1
    k = len(lines)
    dense, row_ids = np.zeros((k, 13), np.float32), np.zeros((26, k), np.int64)
    present, labels, faults = np.zeros((26, k), np.int32), np.zeros(k, np.float32), np.zeros((k, 2), np.int32)
    parse_rows(buffer, starts, starts + lengths, dense, row_ids, present, labels, faults)
    return dense, row_ids, present, labels, faults


@given(st.lists(rows, min_size=1, max_size=5))
def test_the_kernel_reads_what_python_reads(samples: list[tuple[int, list[str], list[str]]]) -> None:
    dense, row_ids, present, labels, faults = parse(["\t".join([str(y), *x, *w]) for y, x, w in samples])
    assert not faults.any()
    for i, (label, numbers, hexes) in enumerate(samples):
        assert labels[i] == label
        expected = [math.log1p(max(int(x), 0)) if x else 0.0 for x in numbers]
        np.testing.assert_allclose(dense[i], expected, rtol=1e-6)
        assert row_ids[:, i].tolist() == [int(w, 16) if w else 0 for w in hexes]
        assert present[:, i].tolist() == [int(bool(w)) for w in hexes]


@given(st.binary(max_size=200))
def test_the_kernel_survives_any_bytes(content: bytes) -> None:
    line = content.replace(b"\n", b"").decode("latin-1")
    *_, faults = parse([line.encode("latin-1").decode("ascii", "replace").replace("\ufffd", "?")])
    assert faults[0, 0] != 0


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_and_their_numbers_do_not_depend_on_blocks(
    block_bytes: int, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_blocks_module, "BLOCK_BYTES", block_bytes)
    files = [tmp_path / f"{name}{suffix}" for name in ("a", "b")]
    for path, content in zip(files, [b"one\n\nthree\n", b"four\nfive"], strict=True):
        path.write_bytes(gzip.compress(content) if suffix else content)
    for skip in range(6):
        seen = [
            (block.path.name[0], block.first_row + i, block.line(i), block.is_cut)
            for block, first in line_blocks(files, skip)
            for i in range(first, block.num_rows)
        ]
        expected = [("a", 1, b"one"), ("a", 2, b""), ("a", 3, b"three"), ("b", 1, b"four"), ("b", 2, b"five")][skip:]
        assert [entry[:3] for entry in seen] == expected
        assert not any(is_cut for name, row, _, is_cut in seen if (name, row) != ("b", 2))


def test_empty_fields_are_empty_bags_and_zeros(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("\t".join(["1", *[""] * 13, *[""] * 25, "ff"]) + "\n")
    job = make_job({"name": "a", "data": {"reader": "criteo_tsv", "train": [path]}, "model": {"kind": "deepfm"}})
    (batch,) = open_reader(job)
    assert batch.dense.tolist() == [[0.0] * 13]
    assert batch.sparse.lengths().tolist() == [0] * (NUM_FEATURES - 1) + [1]
    assert batch.sparse.values().tolist() == [255]
