"""Kernel: a function that numba compiles for named signatures only.

Explicit signatures because requests arrive as read-only, possibly unaligned views of network buffers: left to itself
numba would compile each kernel again for every mixture of array flags, in the middle of somebody's call. Nothing is
compiled at import; `warm_up` does it (or loads numba's cache) before a shard serves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


def array(dtype: types.Type, ndim: int = 1) -> types.Type:
    """A contiguous array that the kernel may write."""
    return types.Array(dtype, ndim, "C")


def view(dtype: types.Type, ndim: int = 1) -> types.Type:
    """A contiguous array that the kernel only reads: read-only and unaligned ones are welcome."""
    return types.Array(dtype, ndim, "C", readonly=True, aligned=False)


@intrinsic
def pointer(typingctx, address):
    """int64 address -> void pointer, for carray."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def prefetch(typingctx, address):
    """Asks for the cache line at an int64 address (LLVM llvm.prefetch: read, keep in every level)."""

    def codegen(context, builder, signature, args):
        address = ir.IntType(8).as_pointer()
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address, i32, i32, i32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [address], kind)
        builder.call(function, [builder.inttoptr(args[0], address), i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


class Kernel:
    """A function that numba compiles, for its signatures only, at the first call or at `compile`."""

    registry: ClassVar[list[Kernel]] = []

    def __init__(self, function: Callable[..., Any], signatures: list[Any]) -> None:
        self._function, self._signatures = function, signatures
        self._compiled: Callable[..., Any] | None = None
        self.__doc__ = function.__doc__
        self.module = function.__module__
        Kernel.registry.append(self)

    def compile(self) -> Callable[..., Any]:
        if self._compiled is None:
            self._compiled = njit(self._signatures, nogil=True, cache=True, error_model="numpy")(self._function)
        return self._compiled

    def __call__(self, *args: Any) -> Any:
        return (self._compiled or self.compile())(*args)


def kernel(*signatures: Any) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator: a Kernel of these signatures."""
    return lambda function: Kernel(function, list(signatures))


def warm_up(modules: Collection[str] | None = None) -> None:
    """Compiles every kernel that was imported, or those of some modules, or loads them from numba's cache."""
    for each in Kernel.registry:
        if modules is None or each.module in modules:
            each.compile()
