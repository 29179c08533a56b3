"""Raw addresses as typed pointers, which the flat kernels read and write.

These are intrinsics, which emit their few instructions where they are used. As functions, each would be compiled
separately for every type it is called with, and compiling is what a first step spends its time on.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import internals

CACHE_LINE = 64

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


@intrinsic
def pointer(typing_context, address, kind):
    """The memory at an address, as numbers of this type. Whoever made the address keeps the memory alive."""
    result = types.CPointer(kind.instance_type)

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(result))

    return result(types.int64, kind), codegen


@intrinsic
def only_if(typing_context, is_there, value):
    """The value, or None where ``is_there`` is None."""
    result = types.none if isinstance(is_there, types.NoneType) else value

    def codegen(context, builder, signature, arguments):
        return context.get_dummy_value() if result is types.none else arguments[1]

    return result(is_there, value), codegen


@intrinsic
def room(typing_context, count):
    """Room for a literal number of int64, on the stack.

    A part of the work must not run out of memory. On a thread of the pool nobody would hear of it, and the other parts
    would have been updated.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    size, result = count.literal_value, types.CPointer(types.int64)

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(internals.on_the_stack(builder, size), context.get_value_type(result))

    return result(count), codegen


@intrinsic
def prefetch(typing_context, address, byte_count):
    """Ask for a row's cache lines; beyond eight the hardware's own prefetcher has caught on."""

    def codegen(context, builder, signature, arguments):
        first, wanted = arguments
        byte = _I8.as_pointer()
        most = _I64(8 * CACHE_LINE)
        end = builder.add(first, builder.select(builder.icmp_signed("<", wanted, most), wanted, most))
        before = builder.basic_block
        loop, after = builder.append_basic_block("ask"), builder.append_basic_block("asked")
        builder.cbranch(builder.icmp_signed("<", first, end), loop, after)
        builder.position_at_end(loop)
        here = builder.phi(_I64)
        shape = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        read, keep_close, data = _I32(0), _I32(3), _I32(1)
        function = internals.llvm_function(builder, shape, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(here, byte), read, keep_close, data])
        following = builder.add(here, _I64(CACHE_LINE))
        here.add_incoming(first, before)
        here.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, end), loop, after)
        builder.position_at_end(after)

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_group(typing_context, address, job, low, high, keys, spare):
    """Call ``ids.group``, which is compiled once for all kernels, at its address."""

    def codegen(context, builder, signature, arguments):
        address, *integers = arguments
        return internals.call_code(builder, address, integers)

    return types.int64(*[types.int64] * 6), codegen
