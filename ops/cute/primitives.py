"""Device primitives: tagged stores and loads, what a wait needs, shared-memory and warp arithmetic.

Addresses of memory that peers share are 64-bit integers, as they come from a table that the rendezvous
filled; ``cute.Tensor`` is used for everything that belongs to one rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

try:
    from cutlass.memory import SmemAllocator
except ImportError:  # before 4.8
    from cutlass.utils import SmemAllocator

WARP = 32
FULL = 0xFFFFFFFF


def _asm(result, operands, text: str, constraints: str, loc, ip, side_effects: bool = True):
    return llvm.inline_asm(
        result,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _words(result, count: int, loc, ip) -> tuple[Uint32, ...]:
    return tuple(Uint32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(count))


@dsl_user_op
def store_pair(address: Int64, word_0: Uint32, word_1: Uint32, epoch: Uint32, *, loc=None, ip=None) -> None:
    """``ll_push``: 16 bytes ``(word_0, epoch, word_1, epoch)`` to memory of any GPU, in one store.

    The halves may arrive one by one, each whole: that is all a reader relies on.
    """
    operands = (Int64(address), Uint32(word_0), Uint32(epoch), Uint32(word_1))
    _asm(None, operands, "st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $2};", "l,r,r,r,~{memory}", loc, ip)


@dsl_user_op
def store_words(address: Int64, word_0: Uint32, word_1: Uint32, *, loc=None, ip=None) -> None:
    """Two words without tags, for the block that stores them itself."""
    operands = (Int64(address), Uint32(word_0), Uint32(word_1))
    _asm(None, operands, "st.global.v2.u32 [$0], {$1, $2};", "l,r,r,~{memory}", loc, ip)


@dsl_user_op
def poll_pair(
    address: Int64, epoch: Uint32, word_0: Uint32, tag_0: Uint32, word_1: Uint32, tag_1: Uint32, *, loc=None, ip=None
) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """A whole LL pair ``(word_0, tag_0, word_1, tag_1)``; each half is atomic, so both tags must be looked at.

    It is loaded unless both tags that are given are ``epoch``: then what is given comes back, in the same
    registers. (Moves under a predicate, one for each pair, would make some loads wait for others.)
    """
    struct = llvm.StructType.get_literal([T.i32()] * 4)
    text = (
        "{\n.reg .pred %late;\n.reg .b32 %first, %second;\n"
        "xor.b32 %first, $1, $5;\nxor.b32 %second, $3, $5;\nor.b32 %first, %first, %second;\n"
        "setp.ne.u32 %late, %first, 0;\n@%late ld.volatile.global.v4.u32 {$0, $1, $2, $3}, [$4];\n}"
    )
    operands = (Int64(address), Uint32(epoch), Uint32(word_0), Uint32(tag_0), Uint32(word_1), Uint32(tag_1))
    constraints = "=r,=r,=r,=r,l,r,0,1,2,3,~{memory}"
    return _words(_asm(struct, operands, text, constraints, loc, ip), 4, loc, ip)


@dsl_user_op
def poll_half(address: Int64, epoch: Uint32, word: Uint32, tag: Uint32, *, loc=None, ip=None) -> tuple[Uint32, Uint32]:
    """One half ``(word, tag)`` of an LL pair, on the terms of :func:`poll_pair`."""
    struct = llvm.StructType.get_literal([T.i32()] * 2)
    text = "{\n.reg .pred %late;\nsetp.ne.u32 %late, $1, $3;\n@%late ld.volatile.global.v2.u32 {$0, $1}, [$2];\n}"
    operands = (Int64(address), Uint32(epoch), Uint32(word), Uint32(tag))
    return _words(_asm(struct, operands, text, "=r,=r,l,r,0,1,~{memory}", loc, ip), 2, loc, ip)


@dsl_user_op
def late_tags(tag_0: Uint32, tag_1: Uint32, epoch: Uint32, *, loc=None, ip=None) -> Uint32:
    """0 when both tags are ``epoch``. Told of it, the compiler would chain comparisons instead of merging bits."""
    text = "{\n.reg .b32 %other;\nxor.b32 %other, $1, $3;\nxor.b32 $0, $2, $3;\nor.b32 $0, $0, %other;\n}"
    operands = (Uint32(tag_0), Uint32(tag_1), Uint32(epoch))
    return Uint32(_asm(T.i32(), operands, text, "=&r,r,r,r", loc, ip, side_effects=False))


@dsl_user_op
def load_half(address: Int64, *, loc=None, ip=None) -> Uint32:
    """The word of half an LL pair that was waited for."""
    return Uint32(_asm(T.i32(), (Int64(address),), "ld.volatile.global.u32 $0, [$1];", "=r,l,~{memory}", loc, ip))


@dsl_user_op
def load_words(address: Int64, *, loc=None, ip=None) -> tuple[Uint32, Uint32]:
    """Two words of a row that no tag guards: a kernel before this one wrote it."""
    struct = llvm.StructType.get_literal([T.i32()] * 2)
    text = "ld.global.v2.u32 {$0, $1}, [$2];"
    return _words(_asm(struct, (Int64(address),), text, "=r,=r,l,~{memory}", loc, ip), 2, loc, ip)


@dsl_user_op
def load_word(address: Int64, *, loc=None, ip=None) -> Uint32:
    """One word of a row that no tag guards."""
    return Uint32(_asm(T.i32(), (Int64(address),), "ld.global.u32 $0, [$1];", "=r,l,~{memory}", loc, ip))


@dsl_user_op
def load_sys(address: Int64, *, loc=None, ip=None) -> Int32:
    return Int32(_asm(T.i32(), (Int64(address),), "ld.relaxed.sys.global.b32 $0, [$1];", "=r,l,~{memory}", loc, ip))


@dsl_user_op
def store_sys(address: Int64, value: Int32, *, loc=None, ip=None) -> None:
    operands = (Int64(address), Int32(value))
    _asm(None, operands, "st.relaxed.sys.global.b32 [$0], $1;", "l,r,~{memory}", loc, ip)


@dsl_user_op
def claim_sys(address: Int64, *, loc=None, ip=None) -> Int32:
    """Compare-and-swap 0 -> 1; returns what was there."""
    text = "atom.relaxed.sys.global.cas.b32 $0, [$1], 0, 1;"
    return Int32(_asm(T.i32(), (Int64(address),), text, "=r,l,~{memory}", loc, ip))


@dsl_user_op
def exchange_word(address: Int64, value: Int32, *, loc=None, ip=None) -> Int32:
    """Stores a word of this GPU's memory and returns what was there."""
    text = "atom.relaxed.gpu.global.exch.b32 $0, [$1], $2;"
    return Int32(_asm(T.i32(), (Int64(address), Int32(value)), text, "=r,l,r,~{memory}", loc, ip))


@dsl_user_op
def fence_sys(*, loc=None, ip=None) -> None:
    _asm(None, (), "fence.acq_rel.sys;", "~{memory}", loc, ip)


@dsl_user_op
def trap(*, loc=None, ip=None) -> None:
    _asm(None, (), "trap;", "", loc, ip)


@dsl_user_op
def sleep(nanoseconds: Int32, *, loc=None, ip=None) -> None:
    _asm(None, (Int32(nanoseconds),), "nanosleep.u32 $0;", "r", loc, ip)


@dsl_user_op
def global_timer(*, loc=None, ip=None) -> Int64:
    return Int64(_asm(T.i64(), (), "mov.u64 $0, %globaltimer;", "=l", loc, ip))


@dsl_user_op
def count_shared(address: Int32, *, loc=None, ip=None) -> None:
    """Adds 1 to a word of shared memory. Lanes that count in the same word cost as much as one."""
    _asm(None, (Int32(address),), "red.shared.add.u32 [$0], 1;", "r,~{memory}", loc, ip)


@dsl_user_op
def or_shared(address: Int32, value: Uint32, *, loc=None, ip=None) -> None:
    """Sets bits in a word of shared memory."""
    _asm(None, (Int32(address), Uint32(value)), "red.shared.or.b32 [$0], $1;", "r,r,~{memory}", loc, ip)


@dsl_user_op
def bit_length(value: Uint32, *, loc=None, ip=None) -> Int32:
    """Bits needed to write ``value``; 0 for 0."""
    zeros = _asm(T.i32(), (Uint32(value),), "clz.b32 $0, $1;", "=r,r", loc, ip, side_effects=False)
    return Int32(32) - Int32(zeros)


@dsl_user_op
def bits_above(bits: Int32, *, loc=None, ip=None) -> Uint32:
    """The mask of all bits but the lowest ``bits``; PTX clamps the shift, so 32 is allowed."""
    operands = (Uint32(FULL), Int32(bits))
    return Uint32(_asm(T.i32(), operands, "shl.b32 $0, $1, $2;", "=r,r,r", loc, ip, side_effects=False))


@dsl_user_op
def lower_lanes(*, loc=None, ip=None) -> Uint32:
    """The mask of the lanes below this one."""
    return Uint32(_asm(T.i32(), (), "mov.u32 $0, %lanemask_lt;", "=r", loc, ip, side_effects=False))


@dsl_user_op
def high_product(a: Uint32, b: Uint32, shift: Int32, *, loc=None, ip=None) -> Uint32:
    """``a * b >> shift`` through 64 bits."""
    text = "{ .reg .u64 p; mul.wide.u32 p, $1, $2; shr.u64 p, p, $3; cvt.u32.u64 $0, p; }"
    operands = (Uint32(a), Uint32(b), Int32(shift))
    return Uint32(_asm(T.i32(), operands, text, "=r,r,r,r", loc, ip, side_effects=False))


@dsl_user_op
def anew(value: Int32, *, loc=None, ip=None) -> Int32:
    """``value``, of which the compiler does not know that it had it before: what follows from it is computed again."""
    return Int32(_asm(T.i32(), (Int32(value),), "mov.b32 $0, $1;", "=r,r", loc, ip))


def element(memory: Int64, index: Uint32, size: int) -> Int64:
    """Address of element ``index`` of ``size`` bytes."""
    return memory + Int64(index) * size


def shared_words(smem: SmemAllocator, count: int) -> cute.Tensor:
    """``count`` words of shared memory, aligned for 16-byte access."""
    return smem.allocate_tensor(Uint32, cute.make_layout(count), byte_alignment=16)


def ballot(predicate: Boolean) -> Uint32:
    """The lanes on which ``predicate`` holds."""
    return Uint32(cute.arch.vote_ballot_sync(predicate))


def lanes_of(predicates: Sequence[Boolean]) -> list[Uint32]:
    """On how many lanes each holds: a byte each, four to a word. A count of each ballot's bits costs more."""
    packed = []
    for first in range(0, len(predicates), 4):
        bytes = (Uint32(holds) << (8 * i) for i, holds in enumerate(predicates[first : first + 4]))
        packed.append(Uint32(warp_sum(Int32(sum(bytes, Uint32(0))))))
    return packed


def byte_sum(word: Uint32) -> Int32:
    """The sum of the bytes of ``word``, when it is at most 255."""
    return Int32((word * 0x01010101) >> 24)


def warp_sum(value: Int32) -> Int32:
    return cute.arch.warp_redux_sync(value, "add")


def warp_or(value: Uint32) -> Uint32:
    return cute.arch.warp_redux_sync(value, "or")


def warp_min(value: Uint32) -> Uint32:
    return cute.arch.warp_redux_sync(value, "umin")


def warp_max(value: Uint32) -> Uint32:
    return cute.arch.warp_redux_sync(value, "umax")


@cute.jit
def warp_inclusive_sum(value: Int32, lane: Int32) -> Int32:
    """Sum of ``value`` over this lane and those below it."""
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, offset=1 << step, mask_and_clamp=0)
        value = value + (below if lane >= (1 << step) else Int32(0))
    return value


@dataclass(frozen=True)
class Divisor:
    """Exact division of non-negative 31-bit integers by a number known to the host alone.

    ``n // d == n * multiplier >> shift`` for ``l = ceil(log2 d)``, ``shift = 31 + l`` and
    ``multiplier = ceil(2**shift / d)``, which fits 32 bits. A division instruction would cost as much
    as the whole selection of a candidate.
    """

    divisor: Int32
    multiplier: Int32
    shift: Int32

    @staticmethod
    def arguments(divisor: int) -> tuple[int, int, int]:
        """What the host passes: divisor, multiplier as int32 bits, shift."""
        shift = 31 + (divisor - 1).bit_length()
        multiplier = -(-(1 << shift) // divisor)
        return divisor, multiplier - (multiplier >> 31 << 32), shift

    def divide(self, value: Int32) -> Int32:
        return Int32(high_product(Uint32(value), Uint32(self.multiplier), self.shift))
