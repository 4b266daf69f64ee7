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
    warp_inclusive_sum,
    warp_max,
    warp_min,
    warp_or,
    warp_sum,
)

#: A bin of so few keys is ranked by comparing each with each, a warp a key: that costs less than a pass.
DIRECT = 64

_DIGITS_OF_ORD, _DIGITS_OF_POSITION, _RANK_DIRECTLY, _FOUND = range(4)


@dataclass(frozen=True)
class BlockSelect:
    """Radix selection and placement by one block. Made by :meth:`allocate`.

    A pass has a bin a thread, 9 or 10 bits of the keys: then the bin of the threshold mostly holds so few keys
    after the first pass that they are ranked directly.

    Attributes:
        threads: of the block, 512 or 1024.
        measured: whether to find the range of the keys before the first pass, and to spread the bins over it.
            It pays for candidates that were selected before: their floats share a sign and few exponents.
        histogram: shared, a word a bin; zero between passes.
        partials: shared, a word of each warp, for four reductions at once.
        members: shared, ord and inverted position of the keys that are ranked directly.
        result: shared, digit, keys above it, keys in it; or the threshold; word 3 counts members.
    """

    threads: int
    measured: bool
    histogram: cute.Tensor
    partials: cute.Tensor
    members: cute.Tensor
    result: cute.Tensor

    @classmethod
    def allocate(cls, smem: SmemAllocator, threads: int, measured: bool) -> BlockSelect:
        assert threads in (512, 1024)
        sizes = (threads, 4 * WARP, 2 * DIRECT, 4)
        return cls(threads, measured, *(shared_words(smem, size) for size in sizes))

    warps = property(lambda self: self.threads // WARP)
    digit_bits = property(lambda self: self.threads.bit_length() - 1)

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
            ord_bits, position_bits: widths that hold every key (ignored when ``measured``).
        """
        tid, _, _ = cute.arch.thread_idx()
        histogram, result = self.histogram, self.result
        histogram[tid] = Uint32(0)
        if tid == 0:
            result[3] = Uint32(0)
        base = Uint32(0)
        if const_expr(self.measured):
            base, ord_bits, position_bits = self._range(source, ords, positions)
        else:
            cute.arch.sync_threads()
        high = Uint32(1)
        low = Uint32(0)
        state = Int32(_DIGITS_OF_ORD)
        in_positions = Boolean(False)
        shift = self._first_shift(ord_bits)
        prefix = Uint32(0)
        mask = Uint32(0)
        while state < _RANK_DIRECTLY:
            bins = Int32(histogram.iterator.toint())
            for group in cutlass.range(source.groups, unroll=1):
                source.load(group, ords, positions)
                for i in cutlass.range_constexpr(source.items):
                    value, open = look_at(ords[i], positions[i], in_positions, high, base, prefix, mask)
                    if open:
                        digit = (value >> Uint32(shift)) & (self.threads - 1)
                        add_shared(bins + Int32(digit) * 4, Uint32(1))
            cute.arch.sync_threads()
            self._find_digit(count)
            cute.arch.sync_threads()
            digit, above, inside = result[0], Int32(result[1]), Int32(result[2])
            count = count - above
            prefix = prefix | (digit << Uint32(shift))
            mask = Uint32(0) - (Uint32(1) << Uint32(shift))
            if inside == 0:  # fewer candidates than asked for: keep all
                state = Int32(_FOUND)
            elif inside == count or (in_positions and shift == 0):
                high = high if in_positions else base + prefix
                low = prefix if in_positions else low
                state = Int32(_FOUND)
            elif inside <= DIRECT:
                state = Int32(_RANK_DIRECTLY)
            elif shift == 0:  # ties at the threshold: the smaller positions win
                high = base + prefix
                in_positions = Boolean(True)
                shift = self._first_shift(position_bits)
                prefix = bits_above(position_bits)
                mask = Uint32(0)
            else:
                shift = cutlass.max(shift - self.digit_bits, Int32(0))
        if state == _RANK_DIRECTLY:
            self._gather_members(source, ords, positions, in_positions, high, base, prefix, mask)
            cute.arch.sync_threads()
            self._rank_members(Int32(result[3]), count)
            cute.arch.sync_threads()
            high, low = result[0], result[1]
        return high, low

    def _first_shift(self, bits: Int32) -> Int32:
        return cutlass.max(bits - self.digit_bits, Int32(0))

    @cute.jit
    def _range(self, source: Source, ords: cute.Tensor, positions: cute.Tensor):
        """The smallest ord, bits of the difference to the largest, bits that positions need. Has a barrier."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp, partials = tid % WARP, tid // WARP, self.partials
        least, most, where = Uint32(FULL), Uint32(0), Uint32(0)
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            for i in cutlass.range_constexpr(source.items):
                least = cutlass.min(least, ords[i] - 1)  # an empty one, 0, becomes the largest
                most = cutlass.max(most, ords[i])
                where = where | positions[i]
        least, most, where = warp_min(least), warp_max(most), warp_or(where)
        if lane == 0:
            partials[warp] = least
            partials[WARP + warp] = most
            partials[2 * WARP + warp] = where
        cute.arch.sync_threads()
        there = lane < self.warps
        least = warp_min(partials[lane] if there else Uint32(FULL)) + 1
        most = warp_max(partials[WARP + lane] if there else Uint32(0))
        where = warp_or(partials[2 * WARP + lane] if there else Uint32(0))
        return least, bit_length(most - least), bit_length(where)

    @cute.jit
    def _find_digit(self, count: Int32) -> None:
        """Finds the bin that holds the ``count``-th largest key, and clears the histogram. Has a barrier."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp, partials = tid % WARP, tid // WARP, self.partials
        histogram, result = self.histogram, self.result
        bin = self.threads - 1 - tid  # thread 0 has the largest digit
        inside = Int32(histogram[bin])
        histogram[bin] = Uint32(0)
        upto = warp_inclusive_sum(inside, lane)
        if lane == WARP - 1:
            partials[3 * WARP + warp] = Uint32(upto)
        cute.arch.sync_threads()
        upto = upto + warp_sum(Int32(partials[3 * WARP + lane]) if lane < warp else Int32(0))
        if (upto - inside < count) & (count <= upto):
            result[0] = Uint32(bin)
            result[1] = Uint32(upto - inside)
            result[2] = Uint32(inside)
        if (tid == self.threads - 1) & (upto < count):
            result[1] = Uint32(0)
            result[2] = Uint32(0)

    @cute.jit
    def _gather_members(
        self,
        source: Source,
        ords: cute.Tensor,
        positions: cute.Tensor,
        in_positions: Boolean,
        high: Uint32,
        base: Uint32,
        prefix: Uint32,
        mask: Uint32,
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        members, below = self.members, lower_lanes()
        own_bit = below + 1
        counter = Int32(self.result.iterator.toint()) + 12
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            found, lanes = Int32(0), []
            for i in cutlass.range_constexpr(source.items):
                _, open = look_at(ords[i], positions[i], in_positions, high, base, prefix, mask)
                lanes += [ballot(open)]
                found = found + Int32(cute.arch.popc(lanes[i]))
            if found != 0:
                place = Int32(0)
                if tid % WARP == 0:
                    place = take_shared(counter, found)
                place = cute.arch.shuffle_sync(place, 0)
                for i in cutlass.range_constexpr(source.items):
                    if (lanes[i] & own_bit) != 0:
                        own = place + Int32(cute.arch.popc(lanes[i] & below))
                        members[2 * own] = ords[i]
                        members[2 * own + 1] = ~positions[i]
                    place = place + Int32(cute.arch.popc(lanes[i]))

    @cute.jit
    def _rank_members(self, size: Int32, count: Int32) -> None:
        """Leaves the ``count``-th largest member in ``result``."""
        tid, _, _ = cute.arch.thread_idx()
        members, result = self.members, self.result
        lane, warp = tid % WARP, tid // WARP
        others = [lane + i * WARP for i in range(DIRECT // WARP)]
        other_ords = [members[2 * other] for other in others]
        other_inverses = [members[2 * other + 1] for other in others]
        for m in cutlass.range(warp, size, self.warps, unroll=1):
            ord, inverse = members[2 * m], members[2 * m + 1]
            larger, as_large = Int32(0), Int32(0)
            for i in cutlass.range_constexpr(DIRECT // WARP):
                there = others[i] < size
                same_ord = other_ords[i] == ord
                above = (other_ords[i] > ord) | (same_ord & (other_inverses[i] > inverse))
                same = same_ord & (other_inverses[i] == inverse)
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
                mine = mine + Int32(kept)
                sink.observe(group, i, kept, positions[i])
        mine = warp_sum(mine)
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
        own_bit = below + 1
        for group in cutlass.range(source.groups, unroll=1):
            source.load(group, ords, positions)
            # All votes before the first branch: so that they do not wait for one another.
            lanes = [ballot(is_kept(ords[i], positions[i], high, low)) for i in range(source.items)]
            for i in cutlass.range_constexpr(source.items):
                if (lanes[i] & own_bit) != 0:
                    sink.put(first + Int32(cute.arch.popc(lanes[i] & below)), group, i, ords[i], positions[i])
                first = first + Int32(cute.arch.popc(lanes[i]))
