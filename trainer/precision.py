"""How the dense layers multiply: the job's `trainer.precision`.

    float32    float32 throughout, torchrec's layers through oneDNN (dense_kernels.py)
    medium     torch's own layers after torch.set_float32_matmul_precision('medium'): products may round to bfloat16
    bfloat16   autocast: layers in bfloat16; parameters, loss, optimizer, rows and their gradients in float32
    auto       bfloat16 on CPUs with bfloat16 units, else float32

Why `auto` is sound, measured on a 2-core AMD EPYC (Zen 4):
- MovieLens-100K, DLRM_DCN, two seeds: test AUC 0.7896 / 0.7921 in float32, 0.7893 / 0.7923 medium, 0.7894 / 0.7923
  bfloat16. Seeds differ ten times more than precisions.
- dense part of DLRM 512-256-64 / 512-512-256-1 at batch 4096, CPU time a step: float32 as torch ships it 347 ms, medium
  285, autocast 167, our layers in float32 240, our layers in bfloat16 119.
- a CPU without such units emulates bfloat16 products, which is slower than float32.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from trainer.dense_kernels import use_fast_layers

log = logging.getLogger(__name__)

PrecisionName = Literal["auto", "float32", "medium", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Precision:
    """A resolved precision; never auto."""

    name: Literal["float32", "medium", "bfloat16"]

    def activate(self) -> None:
        """Sets what torch keeps for the whole process."""
        torch.set_float32_matmul_precision("medium" if self.name == "medium" else "highest")

    def prepare(self, model: torch.nn.Module) -> None:
        """Puts faster layers into the model, in place. Parameters stay the same objects."""
        if self.name != "medium":
            use_fast_layers(model)

    def context(self) -> AbstractContextManager[object]:
        """Wraps forward; backward follows the dtypes that forward chose."""
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.name == "bfloat16" else nullcontext()


def choose_precision(name: PrecisionName) -> Precision:
    """Resolves auto; one log line says what and why."""
    if name != "auto":
        return Precision(name)
    if has_bfloat16_units():
        log.info("dense precision: bfloat16, the CPU has bfloat16 units")
        return Precision("bfloat16")
    log.info("dense precision: float32, the CPU has no bfloat16 units")
    return Precision("float32")


def has_bfloat16_units() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
