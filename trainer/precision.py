"""How the dense layers multiply: the job's `trainer.precision`.

float32    torch as it comes; through MKL, which is slow on AMD CPUs
medium     torch.set_float32_matmul_precision('medium'): products of float32 layers in bfloat16 through oneDNN
bfloat16   autocast: layers in bfloat16, loss, parameters and optimizer in float32
auto       ...
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Precision:
    name: Literal["float32", "medium", "bfloat16"]

    def context(self) -> AbstractContextManager[object]:
        """Wraps forward; backward follows the dtypes that forward chose."""
        if self.name == "bfloat16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return nullcontext()


def use_precision(name: Literal["float32", "medium", "bfloat16"]) -> Precision:
    torch.set_float32_matmul_precision("medium" if name == "medium" else "highest")
    return Precision(name)
