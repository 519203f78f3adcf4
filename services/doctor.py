"""`frostline doctor`: looks at the machine and the environment, and says how to mend what is wrong.

Each check is a function that returns one Check; none changes anything or opens a connection. Packages are looked up by
their installed metadata, so that a broken build is described instead of failing an import.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.allocator import set_allocator

Verdict = Literal["ok", "warn", "fail"]

MIN_PYTHON = (3, 11)
MIN_SHARED_MEMORY_BYTES = 128 << 20  # Ray keeps its object store there; jobs put nothing large into it
MIN_OPEN_FILES = 1024  # segments are mapped, sockets are few; Ray opens some hundred
GIB = 1 << 30
TRAINING_PINS = "make setup, or install all of requirements/cpu.txt or requirements/cuda.txt with --no-deps"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: Verdict
    found: str
    remedy: str = ""  # what to do; empty when all is well


def examine() -> list[Check]:
    """Every check, in the order of the list below."""
    return [check() for check in CHECKS]


def is_healthy(checks: list[Check]) -> bool:
    return all(check.verdict != "fail" for check in checks)


def check_python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < MIN_PYTHON:
        return Check("python", "fail", found, "use Python 3.11 or later: make PYTHON=python3.12")
    return Check("python", "ok", found)


def check_torch() -> Check:
    """The build of torch: '2.13.0+cpu', '2.13.0+cu130', or '2.13.0' (a CUDA build, on PyPI)."""
    version = _version("torch")
    if version is None:
        return Check("torch", "warn", "not installed: shards and clients run, training does not", TRAINING_PINS)
    build = torch_build(version)
    has_gpu = shutil.which("nvidia-smi") is not None
    if build == "CUDA" and not has_gpu:
        return Check(
            "torch", "warn", f"{version}, a CUDA build, and no NVIDIA driver here",
            "it works; the CPU build of requirements/cpu.txt is GBs smaller",
        )  # fmt: skip
    if build == "CPU" and has_gpu:
        return Check(
            "torch", "warn", f"{version}, a CPU build beside an NVIDIA driver", "for GPUs: requirements/cuda.txt"
        )
    return Check("torch", "ok", f"{version}, {build} build")


def check_pairing() -> Check:
    """torchrec and fbgemm 1.X are compiled against torch 2.(X+5) and against no other."""
    torch, torchrec = _version("torch"), _version("torchrec")
    fbgemm = _version("fbgemm-gpu-cpu") or _version("fbgemm-gpu")
    found = f"torch {torch}, torchrec {torchrec}, fbgemm {fbgemm}"
    missing = [name for name, version in (("torch", torch), ("torchrec", torchrec), ("fbgemm", fbgemm)) if not version]
    if torch is None or torchrec is None or fbgemm is None:
        return Check("ABI pairing", "warn", found, f"to train, add {', '.join(missing)}: {TRAINING_PINS}")
    if not is_pair(torch, torchrec) or not is_pair(torch, fbgemm):
        wanted = f"1.{_minor(torch) - 5}"
        return Check(
            "ABI pairing",
            "fail",
            found,
            f"torch {torch} needs torchrec and fbgemm {wanted}.x (rule: 1.X with torch 2.(X+5))",
        )
    return Check("ABI pairing", "ok", found)


def check_fbgemm() -> Check:
    """fbgemm-gpu and fbgemm-gpu-cpu unpack over each other; torch's build says which one belongs."""
    cpu, cuda, torch = _version("fbgemm-gpu-cpu"), _version("fbgemm-gpu"), _version("torch")
    if cpu and cuda:
        return Check(
            "fbgemm", "fail", f"fbgemm-gpu-cpu {cpu} and fbgemm-gpu {cuda}, one unpacked over the other",
            "pip uninstall fbgemm-gpu fbgemm-gpu-cpu, then make setup; install torchrec with --no-deps",
        )  # fmt: skip
    if not cpu and not cuda:
        return Check("fbgemm", "warn", "not installed: shards and clients run, training does not", TRAINING_PINS)
    build = torch_build(torch) if torch else "CPU"
    if bool(cpu) != (build == "CPU"):
        return Check(
            "fbgemm", "fail", f"{'fbgemm-gpu-cpu' if cpu else 'fbgemm-gpu'} with a {build} build of torch",
            "install requirements/cpu.txt or requirements/cuda.txt, whole",
        )  # fmt: skip
    return Check("fbgemm", "ok", f"fbgemm-gpu-cpu {cpu}" if cpu else f"fbgemm-gpu {cuda}")


def check_packages() -> Check:
    names = ("ray", "grpcio", "protobuf", "numba", "numpy", "safetensors", "pydantic")
    versions = {name: _version(name) for name in names}
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Check("packages", "fail", found, f"make setup, or pip install {' '.join(missing)}")
    protobuf = versions["protobuf"] or ""
    if not protobuf.startswith("7."):
        return Check(
            "packages", "fail", found, "the generated code needs protobuf 7.x: pip install 'protobuf>=7.35.1,<8'"
        )
    return Check("packages", "ok", found)


def check_imports() -> Check:
    """Imports torch, torchrec and fbgemm in a process of its own, which a bad build may abort."""
    if _version("torchrec") is None:
        return Check("imports", "warn", "no torchrec to import", TRAINING_PINS)
    code = "import torch, fbgemm_gpu, torchrec"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(
            "imports", "fail", "importing torchrec took over 120 s", "look for a slow disk, or a hanging driver"
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Check(
            "imports", "fail", lines[-1] if lines else f"ended with {done.returncode}", "see `ABI pairing` and `fbgemm`"
        )
    return Check("imports", "ok", "torch, fbgemm_gpu, torchrec")


def check_cores() -> Check:
    usable, quota = len(os.sched_getaffinity(0)), _cpu_quota()
    found = f"{usable} usable of {os.cpu_count()}" + (f", cgroup quota {quota:g}" if quota else "")
    found += f", OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in os.environ else ""
    if quota and quota < usable:
        return Check(
            "cores and threads",
            "warn",
            found,
            f"set trainer.threads={max(1, int(quota))}: more threads than the quota stall",
        )
    return Check("cores and threads", "ok", found)


def check_cpu() -> Check:
    """What the dense layers can use: bfloat16 units make precision=bfloat16 fast."""
    flags = _cpu_flags()
    wide = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "neither AVX2 nor AVX-512"
    half = "bfloat16 units" if flags & {"avx512_bf16", "amx_bf16"} else "no bfloat16 units"
    return Check("CPU", "ok", f"{_cpu_model()}: {wide}, {half}")


def check_memory() -> Check:
    total, limit = _memory_bytes()
    usable = usable_memory_bytes()
    found = f"{total / GIB:.1f} GiB" + (f", cgroup limit {limit / GIB:.1f} GiB" if limit and limit < total else "")
    if usable < 4 * GIB:
        return Check("memory", "warn", found, "lower servers.memory_limit_bytes and servers.num_shards")
    return Check("memory", "ok", found)


def check_shared_memory() -> Check:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Check("shared memory", "warn", "no /dev/shm", "Ray will use /tmp, slower; mount a tmpfs at /dev/shm")
    free = shutil.disk_usage(path).free
    if free < MIN_SHARED_MEMORY_BYTES:
        return Check(
            "shared memory", "warn", f"{free >> 20} MiB free", "docker run --shm-size=1g, or free some of /dev/shm"
        )
    return Check("shared memory", "ok", f"{free / GIB:.1f} GiB free in /dev/shm")


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        return Check("open files", "warn", f"limit {soft} (hard {hard})", f"ulimit -n {MIN_OPEN_FILES * 16}")
    return Check("open files", "ok", f"limit {soft}")


def check_allocator() -> Check:
    report = set_allocator()
    remedy = "" if report.is_set else "large messages are some three times slower; use a distribution with glibc"
    return Check("allocator", "ok" if report.is_set else "warn", report.message.removeprefix("allocator: "), remedy)


def check_kernels() -> Check:
    try:
        from embedding_server.kernels import choose_backend

        return Check("row kernels", "ok", str(choose_backend("auto")))
    except Exception as error:
        return Check("row kernels", "fail", f"{type(error).__name__}: {error}", "see `packages`; numba compiles them")


def check_ray() -> Check:
    """A local Ray needs nothing; a cluster needs the same mode and token everywhere, or a client waits 30 s in vain."""
    mode = os.environ.get("RAY_AUTH_MODE")
    address = os.environ.get("RAY_ADDRESS")
    found = f"RAY_AUTH_MODE={mode or 'unset'}, RAY_ADDRESS={address or 'unset (a local Ray is started)'}"
    if address and mode is None:
        return Check("Ray", "warn", found, "set RAY_AUTH_MODE=token for head, workers and client alike")
    return Check("Ray", "ok", found)


CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_torch,
    check_pairing,
    check_fbgemm,
    check_packages,
    check_imports,
    check_cores,
    check_cpu,
    check_memory,
    check_shared_memory,
    check_open_files,
    check_allocator,
    check_kernels,
    check_ray,
)


def torch_build(version: str) -> str:
    """'CPU' or 'CUDA', from the local part of the version; a version without one is PyPI's, which is CUDA on Linux."""
    _, plus, local = version.partition("+")
    if local.startswith("cpu") or (not plus and sys.platform == "darwin"):
        return "CPU"
    return "CUDA"


def is_pair(torch: str, other: str) -> bool:
    """Whether torchrec or fbgemm of version `other` belongs to this torch: 1.X with 2.(X+5)."""
    major, _, _ = torch.partition(".")
    return major == "2" and other.startswith("1.") and _minor(other) + 5 == _minor(torch)


def _minor(version: str) -> int:
    parts = version.split("+")[0].split(".")
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else -1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_lines(key: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(key)]


def _cpu_flags() -> set[str]:
    lines = _cpu_lines("flags")
    return set(lines[0].split()) if lines else set()


def _cpu_model() -> str:
    lines = _cpu_lines("model name")
    return lines[0] if lines else platform.machine()


def usable_memory_bytes() -> int:
    """Of this machine, or of this cgroup if it may use less; pages of files count in both."""
    total, limit = _memory_bytes()
    return min(total, limit) if limit else total


def _memory_bytes() -> tuple[int, int | None]:
    """(of the machine, limit of this cgroup)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, _cgroup_number("memory.max", "memory/memory.limit_in_bytes")


def _cgroup_number(v2: str, v1: str) -> int | None:
    """A limit of this cgroup in bytes; None when there is none."""
    for path in (Path("/sys/fs/cgroup") / v2, Path("/sys/fs/cgroup") / v1):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _cpu_quota() -> float | None:
    """Cores that the cgroup grants; None without a quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota != "max" else None


def as_document(checks: list[Check]) -> dict[str, Any]:
    return {
        "healthy": is_healthy(checks),
        "checks": [{"name": c.name, "verdict": c.verdict, "found": c.found, "remedy": c.remedy} for c in checks],
    }
