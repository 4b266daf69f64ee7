"""Selection of the best candidates of a row by one thread block: radix select, then stable compaction.

Selection finds the key of the last candidate to keep; compaction keeps all from there on in the order of the
candidates. The scheduling of threads does not show in the result: shared atomics count, and give places only
to keys that are then ranked.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from .candidates import Sink, Source, is_kept, look_at
from .primitives import (
    FULL,
    WARP,
    SmemAllocator,
    add_shared,
    ballot,
    bit_length,
    bits_above,
    lower_lanes,
    shared_words,
    take_shared,
    warp_and,
    warp_inclusive_sum,
    warp_or,
    warp_sum,
)

#: A bin of so few keys is ranked by comparing each with each, a warp a key: that costs less than a pass.
DIRECT = 64

_DIGITS_OF_ORD, _DIGITS_OF_POSITION, _RANK_DIRECTLY, _FOUND = range(4)


@dataclass(frozen=True)
class BlockSelect:
    """Radix selection and placement by one block. Made by :meth:`allocate`.

    Attributes:
        threads: of the block, a multiple of 32 and at least 512 (a histogram is cleared in few steps).
        digit_bits: of a radix pass, 5 to 10: each of 32 lanes looks through at most 32 bins. 8 suits candidates
            that were selected before (they share their leading bits), 10 raw scores (with fewer bits most of
            them would meet in the bins of a few exponents).
        common_bits: whether to find the leading bits that all keys share before the first pass.
        histograms: shared, two of ``2**digit_bits`` words; one is cleared while the other fills.
        partials: shared, a word of each warp, for four reductions at once.
        members: shared, ord and inverted position of the keys that are ranked directly.
        result: shared, digit, keys above it, keys in it; or the threshold; word 3 counts members.
    """

    threads: int
    digit_bits: int
    common_bits: bool
    histograms: cute.Tensor
    partials: cute.Tensor
    members: cute.Tensor
    result: cute.Tensor

    @classmethod
    def allocate(cls, smem: SmemAllocator, threads: int, digit_bits: int, common_bits: bool) -> BlockSelect:
        assert threads % WARP == 0 and 512 <= threads <= 1024 and 5 <= digit_bits <= 10
        sizes = (2 << digit_bits, 4 * WARP, 2 * DIRECT, 4)
        return cls(threads, digit_bits, common_bits, *(shared_words(smem, size) for size in sizes))

    warps = property(lambda self: self.threads // WARP)
    bins = property(lambda self: 1 << self.digit_bits)

    @cute.jit
    def threshold(
        self,
        source: Source,
        ords: cute.Tensor,
        positions: cute.Tensor,
        count: Int32,
        ord_bits: Int32,
        position_bits: Int32,
    ):
        """``(ord, inverted position)`` of the last of the best ``count``; ``(1, 0)`` when there are no more.

        Args:
            source: the candidates; ``ords`` and ``positions`` are its registers.
            count: how many to keep, at least 1.
            ord_bits, position_bits: widths that hold every key (ignored with ``common_bits``).
        """
        tid, _, _ = cute.arch.thread_idx()
        histograms, result = self.histograms, self.result
        for i in cutlass.range(tid, 2 * self.bins, self.threads, unroll=1):
            histograms[i] = Uint32(0)
        if tid == 0:
            result[3] = Uint32(0)
        prefix = Uint32(0)
        if const_expr(self.common_bits):
            ord_bits, position_bits, prefix = self._common(source, ords, positions)
        else:
            cute.arch.sync_threads()
        high = Uint32(1)
        low = Uint32(0)
        state = Int32(_DIGITS_OF_ORD)
        in_positions = Boolean(False)
        shift = self._first_shift(ord_bits)
        mask = Uint32(0)
        half = Int32(0)
        while state < _RANK_DIRECTLY:
            histogram = Int32(histograms.iterator.toint()) + half * (4 * self.bins)
            for group in cutlass.range(source.groups, unroll=1):
                source.load(group, ords, positions)
                for i in cutlass.range_constexpr(source.items):
                    value, open = look_at(ords[i], positions[i], in_positions, high, prefix, mask)
                    if open:
                        digit = (value >> Uint32(shift)) & (self.bins - 1)
                        add_shared(histogram + Int32(digit) * 4, Uint32(1))
            cute.arch.sync_threads()
            self._find_digit(half, count)
            cute.arch.sync_threads()
            digit, above, inside = result[0], Int32(result[1]), Int32(result[2])
            half = 1 - half
            count = count - above
            prefix = prefix | (digit << Uint32(shift))
            mask = Uint32(0) - (Uint32(1) << Uint32(shift))
            if inside == 0:  # fewer candidates than asked for: keep all
                state = Int32(_FOUND)
            elif inside == count or (in_positions and shift == 0):
                high = high if in_positions else prefix
                low = prefix if in_positions else low
                state = Int32(_FOUND)
            elif inside <= DIRECT:
                state = Int32(_RANK_DIRECTLY)
            elif shift == 0:  # ties at the threshold: the smaller positions win
                high = prefix
                in_positions = Boolean(True)
                shift = self._first_shift(position_bits)
                prefix = bits_above(position_bits)
                mask = Uint32(0)
            else:
                shift = cutlass.max(shift - self.digit_bits, Int32(0))
        if state == _RANK_DIRECTLY:
            self._gather_members(source, ords, positions, in_positions, high, prefix, mask)
            cute.arch.sync_threads()
            self._rank_members(Int32(result[3]), count)
            cute.arch.sync_threads()
            high, low = result[0], result[1]
        return high, low

    def _first_shift(self, bits: Int32) -> Int32:
        return cutlass.max(bits - self.digit_bits, Int32(0))

    @cute.jit
    def _common(self, source: Source, ords: cute.Tensor, positions: cute.Tensor):
        """Bits in which ords differ, bits that positions need, leading bits that all ords share. Has a barrier."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp, partials = tid % WARP, tid // WARP, self.partials
        every, some, where = Uint32(FULL), Uint32(0), Uint32(0)
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            for i in cutlass.range_constexpr(source.items):
                every = every & (ords[i] if ords[i] != 0 else Uint32(FULL))
                some = some | ords[i]
                where = where | positions[i]
        every, some, where = warp_and(every), warp_or(some), warp_or(where)
        if lane == 0:
            partials[warp] = every
            partials[WARP + warp] = some
            partials[2 * WARP + warp] = where
        cute.arch.sync_threads()
        there = lane < self.warps
        every = warp_and(partials[lane] if there else Uint32(FULL))
        some = warp_or(partials[WARP + lane] if there else Uint32(0))
        where = warp_or(partials[2 * WARP + lane] if there else Uint32(0))
        bits = bit_length(every ^ some)
        return bits, bit_length(where), some & bits_above(bits)

    @cute.jit
    def _find_digit(self, half: Int32, count: Int32) -> None:
        """Warp 0 finds the bin that holds the ``count``-th largest key; the others clear the other histogram."""
        tid, _, _ = cute.arch.thread_idx()
        histograms, result = self.histograms, self.result
        per = const_expr(self.bins // WARP)
        if tid < WARP:
            first = half * self.bins
            group = WARP - 1 - tid  # lane 0 has the largest digits
            own = Int32(0)
            for i in cutlass.range_constexpr(per):
                # Rotated, so that 32 lanes read 32 banks.
                own = own + Int32(histograms[first + group * per + (i + tid // (WARP // per)) % per])
            upto = warp_inclusive_sum(own, tid)
            holder = ballot((upto - own < count) & (count <= upto))
            if holder == 0:
                if tid == 0:
                    result[1] = Uint32(0)
                    result[2] = Uint32(0)
            else:
                lane = cute.arch.popc(holder - 1)  # a single bit is set
                before = cute.arch.shuffle_sync(upto - own, Int32(lane))
                bin = (WARP - 1 - Int32(lane)) * per + (per - 1 - tid)
                inside = Int32(0)
                if tid < per:
                    inside = Int32(histograms[first + bin])
                upto = before + warp_inclusive_sum(inside, tid)
                if (upto - inside < count) & (count <= upto):
                    result[0] = Uint32(bin)
                    result[1] = Uint32(upto - inside)
                    result[2] = Uint32(inside)
        else:
            for i in cutlass.range(tid - WARP, self.bins, self.threads - WARP, unroll=1):
                histograms[(1 - half) * self.bins + i] = Uint32(0)

    @cute.jit
    def _gather_members(
        self,
        source: Source,
        ords: cute.Tensor,
        positions: cute.Tensor,
        in_positions: Boolean,
        high: Uint32,
        prefix: Uint32,
        mask: Uint32,
    ) -> None:
        members = self.members
        counter = Int32(self.result.iterator.toint()) + 12
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            for i in cutlass.range_constexpr(source.items):
                _, open = look_at(ords[i], positions[i], in_positions, high, prefix, mask)
                if open:
                    place = take_shared(counter)
                    members[2 * place] = ords[i]
                    members[2 * place + 1] = ~positions[i]

    @cute.jit
    def _rank_members(self, size: Int32, count: Int32) -> None:
        """Leaves the ``count``-th largest member in ``result``."""
        tid, _, _ = cute.arch.thread_idx()
        members, result = self.members, self.result
        lane, warp = tid % WARP, tid // WARP
        for m in cutlass.range(warp, size, self.warps, unroll=1):
            ord, inverse = members[2 * m], members[2 * m + 1]
            larger, as_large = Int32(0), Int32(0)
            for i in cutlass.range_constexpr(DIRECT // WARP):
                other = lane + i * WARP
                other_ord, other_inverse = members[2 * other], members[2 * other + 1]
                there = other < size
                above = (other_ord > ord) | ((other_ord == ord) & (other_inverse > inverse))
                same = (other_ord == ord) & (other_inverse == inverse)
                larger = larger + Int32(cute.arch.popc(ballot(there & above)))
                as_large = as_large + Int32(cute.arch.popc(ballot(there & (above | same))))
            if (larger < count) & (count <= as_large) & (lane == 0):
                result[0] = ord
                result[1] = inverse

    @cute.jit
    def count(self, source: Source, ords: cute.Tensor, positions: cute.Tensor, high: Uint32, low: Uint32, sink: Sink):
        """``(number of candidates from the threshold on, place of the first of this warp)``."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp, partials = tid % WARP, tid // WARP, self.partials
        mine = Int32(0)
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            for i in cutlass.range_constexpr(source.items):
                kept = is_kept(ords[i], positions[i], high, low)
                mine = mine + Int32(cute.arch.popc(ballot(kept)))
                sink.observe(group, i, kept, positions[i])
        if lane == 0:
            partials[3 * WARP + warp] = Uint32(mine)
        sink.publish(partials, warp, lane)
        cute.arch.sync_threads()
        sink.collect(partials, self.warps, lane)
        of_lane = Int32(partials[3 * WARP + lane]) if lane < self.warps else Int32(0)
        return warp_sum(of_lane), warp_sum(of_lane if lane < warp else Int32(0))

    @cute.jit
    def write(
        self,
        source: Source,
        ords: cute.Tensor,
        positions: cute.Tensor,
        high: Uint32,
        low: Uint32,
        first: Int32,
        sink: Sink,
    ) -> None:
        """Puts the candidates from the threshold on, in candidate order; ``first`` is what :meth:`count` gave."""
        below = lower_lanes()
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            for i in cutlass.range_constexpr(source.items):
                kept = is_kept(ords[i], positions[i], high, low)
                lanes = ballot(kept)
                if kept:
                    sink.put(first + Int32(cute.arch.popc(lanes & below)), group, i, ords[i], positions[i])
                first = first + Int32(cute.arch.popc(lanes))
