"""Selection of the best candidates of a row by one thread block: radix select, then stable compaction.

Selection finds the key of the last candidate to keep; compaction keeps all from there on in the order of the
candidates. The scheduling of threads does not show in the result: shared atomics only count.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from .candidates import Sink, Source, is_kept
from .primitives import (
    FULL,
    WARP,
    SmemAllocator,
    ballot,
    bit_length,
    bits_above,
    byte_sum,
    count_shared,
    lanes_of,
    lower_lanes,
    shared_words,
    warp_inclusive_sum,
    warp_max,
    warp_min,
    warp_or,
    warp_sum,
)

#: Candidates of a thread that are voted on and then written together: what registers allow.
AT_ONCE = 16


@dataclass(frozen=True)
class BlockSelect:
    """Radix selection and placement by one block. Made by :meth:`allocate`.

    A pass has a bin a thread, 9 or 10 bits of the keys: after the second the bin of the threshold mostly holds
    one key. (Ranking the keys of a small bin by comparing each with each costs as much, and is more code.)

    Attributes:
        threads: of the block, 512 or 1024.
        ord_bits: width that holds every ord; None to find their range before the first pass, and spread the bins
            over it. That pays for candidates that were selected before: they share a sign and few exponents.
        histogram: shared, a word a bin, zero between passes; and one for what is not counted.
        partials: shared, a word of each warp, for three reductions at once.
        result: shared, digit, keys above it, keys in it.
    """

    threads: int
    ord_bits: int | None
    histogram: cute.Tensor
    partials: cute.Tensor
    result: cute.Tensor

    @classmethod
    def allocate(cls, smem: SmemAllocator, threads: int, ord_bits: int | None = None) -> BlockSelect:
        assert threads in (512, 1024)
        sizes = (threads + 4, 3 * WARP, 4)
        return cls(threads, ord_bits, *(shared_words(smem, size) for size in sizes))

    warps = property(lambda self: self.threads // WARP)
    digit_bits = property(lambda self: self.threads.bit_length() - 1)

    @cute.jit
    def threshold(self, source: Source, ords: cute.Tensor, positions: cute.Tensor, count: Int32):
        """``(ord, inverted position)`` of the last of the best ``count``; ``(1, 0)`` when there are no more.

        Args:
            source: the candidates; ``ords`` and ``positions`` are its registers.
            count: how many to keep, at least 1.
        """
        tid, _, _ = cute.arch.thread_idx()
        self.histogram[tid] = Uint32(0)
        if const_expr(self.ord_bits is None):
            base, ord_bits = self._range(source, ords, positions)
        else:
            base, ord_bits = Uint32(0), Int32(self.ord_bits)
            cute.arch.sync_threads()
        high = Uint32(1)
        low = Uint32(0)
        found = Boolean(False)
        in_positions = Boolean(False)
        shift = self._first_shift(ord_bits)
        prefix = Uint32(0)
        mask = Uint32(0)
        while not found:
            if in_positions:
                self._count_digits(source, ords, positions, True, high, prefix, mask, shift)
            else:
                self._count_digits(source, ords, positions, False, base, prefix, mask, shift)
            digit, above, inside = self._find_digit(count)
            count = count - above
            prefix = prefix | (digit << Uint32(shift))
            mask = Uint32(0) - (Uint32(1) << Uint32(shift))
            if inside == 0:  # fewer candidates than asked for: keep all
                found = Boolean(True)
            elif inside == count or (in_positions and shift == 0):
                # Of the smallest digit, the threshold can be 0, which is no candidate.
                high = high if in_positions else cutlass.max(base + prefix, Uint32(1))
                low = prefix if in_positions else low
                found = Boolean(True)
            elif shift == 0:  # ties at the threshold: the smaller positions win
                high = base + prefix
                in_positions = Boolean(True)
                position_bits = self._position_bits(source, ords, positions, high)
                shift = self._first_shift(position_bits)
                prefix = bits_above(position_bits)
                mask = Uint32(0)
            else:
                shift = cutlass.max(shift - self.digit_bits, Int32(0))
        return high, low

    @cute.jit
    def narrow(self, source: Source, ords: cute.Tensor, positions: cute.Tensor, count: Int32, room: int):
        """``(an ord not above the threshold's, how many are left)``: the candidates from this ord on.

        It takes passes over the ords until at most ``room`` are left; when more are, they tie. Needs ``ord_bits``.
        """
        tid, _, _ = cute.arch.thread_idx()
        self.histogram[tid] = Uint32(0)
        cute.arch.sync_threads()
        missing, left = count, Int32(room + 1)
        shift = self._first_shift(Int32(self.ord_bits)) + self.digit_bits
        prefix = Uint32(0)
        while (left > room) & (shift > 0):
            mask = bits_above(shift)
            shift = cutlass.max(shift - self.digit_bits, Int32(0))
            self._count_digits(source, ords, positions, False, Uint32(0), prefix, mask, shift)
            digit, above, inside = self._find_digit(missing)
            missing = missing - above
            left = count - missing + inside
            if inside != 0:  # else there are fewer than asked for
                prefix = prefix | (digit << Uint32(shift))
        return cutlass.max(prefix, Uint32(1)), left

    @cute.jit
    def _count_digits(
        self,
        source: Source,
        ords: cute.Tensor,
        positions: cute.Tensor,
        of_positions: cutlass.Constexpr[bool],
        start: Uint32,
        prefix: Uint32,
        mask: Uint32,
        shift: Int32,
    ) -> None:
        """The histogram of a digit over the candidates that the passes before left open.

        Args:
            of_positions: whether of the inverted positions of the candidates whose ord is ``start``; else of
                the ords from ``start`` on.
        """
        bins = Int32(self.histogram.iterator.toint())
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            for i in cutlass.range_constexpr(source.items):
                if const_expr(of_positions):
                    value, open = ~positions[i], ords[i] == start
                else:
                    value, open = ords[i] - start, ords[i] != 0
                digit = Int32(value >> Uint32(shift)) & (self.threads - 1)
                # The others count in a bin that is not read: a branch around each atomic costs more.
                open = open & (((value ^ prefix) & mask) == 0)
                count_shared(bins + 4 * (digit if open else Int32(self.threads)))

    def _first_shift(self, bits: Int32) -> Int32:
        return cutlass.max(bits - self.digit_bits, Int32(0))

    @cute.jit
    def _range(self, source: Source, ords: cute.Tensor, positions: cute.Tensor):
        """The smallest ord, and bits of the difference to the largest. Has a barrier."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp, partials = tid % WARP, tid // WARP, self.partials
        least, most = Uint32(FULL), Uint32(0)
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            for i in cutlass.range_constexpr(source.items):
                least = cutlass.min(least, ords[i] - 1)  # an empty one, 0, becomes the largest
                most = cutlass.max(most, ords[i])
        least, most = warp_min(least), warp_max(most)
        if lane == 0:
            partials[warp] = least
            partials[WARP + warp] = most
        cute.arch.sync_threads()
        there = lane < self.warps
        least = warp_min(partials[lane] if there else Uint32(FULL)) + 1
        most = warp_max(partials[WARP + lane] if there else Uint32(0))
        return least, bit_length(most - least)

    @cute.jit
    def _position_bits(self, source: Source, ords: cute.Tensor, positions: cute.Tensor, high: Uint32):
        """Bits that the positions of the candidates with ord ``high`` need. Has a barrier."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp, partials = tid % WARP, tid // WARP, self.partials
        where = Uint32(0)
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            for i in cutlass.range_constexpr(source.items):
                where = where | (positions[i] if ords[i] == high else Uint32(0))
        where = warp_or(where)
        if lane == 0:
            partials[warp] = where
        cute.arch.sync_threads()
        return bit_length(warp_or(partials[lane] if lane < self.warps else Uint32(0)))

    @cute.jit
    def _find_digit(self, count: Int32):
        """``(bin of the count-th largest key, keys above it, keys in it)``; 0 in it when there are fewer.

        Clears the histogram. Begins and ends with a barrier, and has one.
        """
        tid, _, _ = cute.arch.thread_idx()
        lane, warp, partials = tid % WARP, tid // WARP, self.partials
        histogram, result = self.histogram, self.result
        cute.arch.sync_threads()
        bin = self.threads - 1 - tid  # thread 0 has the largest digit
        inside = Int32(histogram[bin])
        histogram[bin] = Uint32(0)
        upto = warp_inclusive_sum(inside, lane)
        if lane == WARP - 1:
            partials[2 * WARP + warp] = Uint32(upto)
        cute.arch.sync_threads()
        upto = upto + warp_sum(Int32(partials[2 * WARP + lane]) if lane < warp else Int32(0))
        if (upto - inside < count) & (count <= upto):
            result[0] = Uint32(bin)
            result[1] = Uint32(upto - inside)
            result[2] = Uint32(inside)
        if (tid == self.threads - 1) & (upto < count):
            result[1] = Uint32(0)
            result[2] = Uint32(0)
        cute.arch.sync_threads()
        return result[0], Int32(result[1]), Int32(result[2])

    @cute.jit
    def count(self, source: Source, ords: cute.Tensor, positions: cute.Tensor, high: Uint32, low: Uint32, sink: Sink):
        """``(number of candidates from the threshold on, place of the first of this warp)``."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp, partials = tid % WARP, tid // WARP, self.partials
        mine = Int32(0)
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            kept = [is_kept(ords[i], positions[i], high, low) for i in range(source.items)]
            mine = mine + sum(byte_sum(lanes) for lanes in lanes_of(kept))
            for i in cutlass.range_constexpr(source.items):
                sink.observe(group, i, kept[i], positions[i])
        if lane == 0:
            partials[2 * WARP + warp] = Uint32(mine)
        sink.publish(partials, warp, lane)
        cute.arch.sync_threads()
        sink.collect(partials, self.warps, lane)
        of_lane = Int32(partials[2 * WARP + lane]) if lane < self.warps else Int32(0)
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
        own_bit = below + 1
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            for start in cutlass.range_constexpr(0, source.items, AT_ONCE):
                some = range(start, min(start + AT_ONCE, source.items))
                # All votes before the first store: so that they do not wait for one another.
                kept = [is_kept(ords[i], positions[i], high, low) for i in some]
                votes = [ballot(k) for k in kept]
                for word, lanes in enumerate(lanes_of(kept)):
                    before = lanes * 0x01010100  # in each byte the sum of those below it
                    for j in cutlass.range_constexpr(4 * word, min(4 * word + 4, len(some))):
                        of_item = Int32((before >> (8 * (j % 4))) & 0xFF) + Int32(cute.arch.popc(votes[j] & below))
                        i = some[j]
                        sink.put((votes[j] & own_bit) != 0, first + of_item, group, i, ords[i], positions[i])
                    first = first + byte_sum(lanes)
