from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from trainer.data.batch import Batch, Reader, Schema, Share
from trainer.pass_ends import PassEnds


class Passes(Reader):
    """Gives steps[p] batches in pass p and does not say how many there will be."""

    schema = Schema((), ())

    def __init__(self, *steps: int) -> None:
        super().__init__(Share(1, data_passes=len(steps)))
        self._steps = steps

    @property
    def steps_per_pass(self) -> int | None:
        return None

    def _batches(self, data_pass: int, first_step: int) -> Iterator[Batch]:
        for step in range(first_step, self._steps[data_pass]):
            features = KeyedJaggedTensor(["x"], torch.tensor([step]), lengths=torch.tensor([1], dtype=torch.int32))
            yield Batch(torch.empty(1, 0), features, torch.tensor([float(data_pass)]), 1)


@pytest.mark.parametrize(
    ("steps", "ends"),
    [((3, 2), [3, 5]), ((1,), [1]), ((1, 1, 1), [1, 2, 3]), ((0, 2), [2]), ((2, 0), [2]), ((), []), ((0, 0), [])],
)
def test_the_last_batch_of_each_pass_is_known_when_it_comes(steps: tuple[int, ...], ends: list[int]) -> None:
    batches = PassEnds(Passes(*steps))
    found, order = [], []
    for number, batch in enumerate(batches, start=1):
        order.append((int(batch.labels[0]), int(batch.sparse.values()[0])))
        if batches.is_end(number):
            found.append(number)
        assert not batches.is_end(number + 1)
    assert found == ends
    assert order == [(p, s) for p, count in enumerate(steps) for s in range(count)]
    assert next(batches, None) is None


def test_a_reader_that_goes_on_from_the_middle_of_a_pass() -> None:
    reader = Passes(3, 2)
    reader.load_state_dict({"batch_size": 1, "seed": 0, "data_pass": 0, "step_in_pass": 1, "rows_skipped": 0})
    batches = PassEnds(reader)
    assert len(list(batches)) == 4
    assert [step for step in range(1, 5) if batches.is_end(step)] == [2, 4]
