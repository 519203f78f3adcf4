"""Files of row_ids: a line that is too long must not pass for several row_ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embedding_server.errors import InvalidInput
from trainer.row_id_files import read_erasures


def test_a_long_line_is_refused_and_not_split(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text(f"5\n{'':60}1234567\n")
    with pytest.raises(InvalidInput, match="line 2: has 64 characters or more"):
        read_erasures([f"user:{path}"])
    path.write_text("5\n  -7 \n\n9")
    erased = read_erasures([f"user:{path}"])["user"]
    assert erased.hold(np.array([5, -7, 9, 7])).tolist() == [True, True, True, False]
    assert len(erased) == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"(2,)", b"(2, "),  # NumPy's tokenizer raises what its documentation does not name
        (b"(2,)", b"(9999999999999999999999,)"),
        (b"(2,)", b"(-2,)"),
        (b"'<i8'", b"'xxx'"),
        (b"{'descr'", b"{" + b"-" * 5000 + b"1"),
        (b"NUMPY\x01", b"NUMPY\x09"),
    ],
)
def test_a_numpy_header_that_lies_is_an_error_of_ours(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.array([1, 2]))
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(InvalidInput, match="is no NumPy file of numbers"):
        read_erasures([f"user:{path}"])
