"""Row kernels, and the one place that decides which backend a shard uses.

| backend | rows live in | arithmetic | for |
|---|---|---|---|
| cpu | this process's memory | numba, cpu.py | shards on CPUs: the default |
| fbgemm | GPU memory | FBGEMM's table batched embeddings, fbgemm.py | `store: inproc` beside a GPU trainer |
| reference | this process's memory | plain torch, reference.py | tests; the others are compared with it |

Importing this package imports neither torch nor FBGEMM; a CPU shard never does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from embedding_server.errors import InvalidInput
from embedding_server.spec import OptimizerSpec

if TYPE_CHECKING:
    from embedding_server.hot_rows import HotRows

BackendName = Literal["cpu", "reference", "fbgemm"]
BACKEND_NAMES = ("cpu", "reference", "fbgemm")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """A chosen backend. `reason` says why it was taken and why the others were not."""

    name: BackendName
    reason: str

    def hot_rows(self, dim: int, optimizer: OptimizerSpec, max_rows: int, hot_bits: int = 32) -> HotRows:
        """An empty HotRows of this backend; InvalidInput when it cannot serve the optimizer or hot_bits."""
        from embedding_server import hot_rows

        if self.name == "cpu":
            return hot_rows.CpuHotRows(dim, optimizer, max_rows, hot_bits)
        if self.name == "reference":
            return hot_rows.ReferenceHotRows(dim, optimizer, max_rows, hot_bits)
        from embedding_server.kernels.fbgemm import FbgemmHotRows

        return FbgemmHotRows(dim, optimizer, max_rows, hot_bits)


def cpu_available() -> bool:
    """numba is installed."""
    return _is_installed("numba")


def torch_available() -> bool:
    """torch is installed: what the reference backend needs."""
    return _is_installed("torch")


def why_not_fbgemm() -> str:
    """Why rows cannot live in GPU memory here; empty if they can. Imports torch only where there is a GPU."""
    if not (_is_installed("torch") and _is_installed("fbgemm_gpu")):
        return "torch and fbgemm_gpu are not both installed"
    if _num_cuda_devices() == 0:
        return "no CUDA device"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} is not a CUDA build that works with this driver"
    return ""


def choose_backend(name: str = "auto") -> Backend:
    """Takes the named backend, or by itself the fastest that works here; logs one line with the reason.

    InvalidInput: unknown name, or what the named backend needs is missing. A named one is never replaced by another.
    """
    if name == "auto":
        backend = _best_backend()
    elif name in BACKEND_NAMES:
        missing = _why_not(name)
        if missing:
            raise InvalidInput(f"backend={name!r} cannot run here: {missing}; set backend='auto' or install it")
        backend = Backend(name, "asked for by name; the others were not considered")  # type: ignore[arg-type]
    else:
        raise InvalidInput(f"backend={name!r} is unknown; choose one of auto, {', '.join(BACKEND_NAMES)}")
    _log.info("row kernels: %s (%s)", backend.name, backend.reason)
    return backend


def _best_backend() -> Backend:
    no_gpu = why_not_fbgemm()
    if not no_gpu:
        return Backend("fbgemm", "a CUDA device is present; cpu: slower beside it; reference: for tests")
    if cpu_available():
        return Backend("cpu", f"numba is present; fbgemm: {no_gpu}; reference: for tests")
    if torch_available():
        return Backend("reference", f"slow; fbgemm: {no_gpu}; cpu: numba is not installed")
    raise InvalidInput("no backend can run here: install numba (cpu), or torch (reference)")


def _why_not(name: str) -> str:
    if name == "cpu":
        return "" if cpu_available() else "numba is not installed"
    if name == "reference":
        return "" if torch_available() else "torch is not installed"
    # Asked for by name, FBGEMM may also run on its CPU path: that is how CI compares it with the reference.
    return "" if torch_available() and _is_installed("fbgemm_gpu") else "torch and fbgemm_gpu are not both installed"


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _num_cuda_devices() -> int:
    """Asks the CUDA driver itself, which costs a CPU shard no import of torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
