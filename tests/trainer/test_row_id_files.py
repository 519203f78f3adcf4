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
