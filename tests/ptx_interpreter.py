"""Runs PTX on the CPU: the code that CuTe DSL generates for our kernels, checked where there is no GPU.

All threads of a block are numpy vectors. In every step the threads at the lowest program counter execute
one instruction, so diverged threads meet again where their paths do; which warps take part changes at
random, so that a missing barrier shows. Kernels that wait for each other are run block by block in turns.

Checked while running: global addresses lie in a tensor that was passed, shared addresses in what the block
may have and with no race, accesses are aligned, and warp-wide instructions find their whole warp. It knows the
instructions that these kernels use and raises ``NotImplementedError`` at any other; memory is sequentially
consistent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from ptx_program import Memory, Program
from shared_memory import SharedMemory

LANES = 32
Vector = np.ndarray
_TYPES = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "pred": np.bool_,
}  # fmt: skip
_WIDER = {np.int16: np.int32, np.uint16: np.uint32, np.int32: np.int64, np.uint32: np.uint64}
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_BITWISE = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "add": np.add,
    "min": np.minimum, "max": np.maximum,
}  # fmt: skip


class Trapped(Exception):
    """A thread executed ``trap``."""


class Block:
    """One thread block on its way through a program.

    Args:
        program: the kernel.
        parameters: the bytes of each of its parameters.
        memory: what it may touch.
        block, grid: its place in the grid, and the grid's size, in x and y.
        seed: of the order of warps.
    """

    def __init__(
        self,
        program: Program,
        parameters: Sequence[bytes],
        memory: Memory,
        block: tuple[int, int],
        grid: tuple[int, int],
        seed: int,
    ) -> None:
        self.program, self.memory, n = program, memory, program.threads
        self._parameters = {name: value for (name, _), value in zip(program.parameters, parameters, strict=True)}
        self._n, self._random = n, np.random.default_rng(seed)
        self._pc = np.zeros(n, np.int64)
        self._done, self._waiting = np.zeros(n, bool), np.zeros(n, bool)
        self._chosen, self._redraw = np.ones(n, bool), 0
        self.shared = SharedMemory()
        self.steps = 0
        tid = np.arange(n, dtype=np.uint32)
        lower = ((np.uint64(1) << (tid % LANES).astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
        self._registers: dict[str, Vector] = {
            "%tid.x": tid, "%lanemask_lt": lower, "%ctaid.x": self._same(block[0]), "%ctaid.y": self._same(block[1]),
            "%nctaid.x": self._same(grid[0]), "%nctaid.y": self._same(grid[1]), "__dynamic_shmem__0": self._same(0),
        }  # fmt: skip

    def _same(self, value: int, dtype: type = np.uint32) -> Vector:
        return np.full(self._n, value & ((1 << 8 * np.dtype(dtype).itemsize) - 1)).astype(dtype)

    def run(self, steps: int) -> bool:
        """Executes some ``steps`` instructions; True when all threads have returned."""
        end = self.steps + steps
        while self.steps < end:
            ready = ~(self._done | self._waiting)
            if not ready.any():
                if self._done.all():
                    return True
                self._waiting[:] = False  # all have come to the barrier
                self.shared.barrier()
                continue
            if self.steps >= self._redraw:
                share = self._random.choice([0.2, 1.0, 1.0, 1.0])
                self._chosen = np.repeat(self._random.random(self._n // LANES) < share, LANES)
                self._redraw = self.steps + int(self._random.integers(1, 60))
            if (ready & self._chosen).any():
                ready &= self._chosen
            pcs = self._pc[ready]
            pc = int(pcs.min())
            later = pcs[pcs > pc]
            self._straight(ready & (self._pc == pc), pc, int(later.min()) if len(later) else len(self.program.code))
        return False

    def _straight(self, threads: Vector, pc: int, end: int) -> None:
        """Runs ``threads`` from ``pc`` until they branch, stop, meet others at ``end`` or have had their turn."""
        op = ""
        while pc < end and not op.startswith(("bra", "bar", "ret")):
            self.steps += 1
            predicate, op, arguments = self.program.code[pc]
            pc += 1
            active = threads
            if predicate is not None:
                negated, register = predicate
                active = threads & (self._registers[register] ^ negated)
                if not active.any():
                    continue
            if op.startswith("bra"):
                self._pc[threads] = pc
                self._pc[active] = arguments[0]
                return
            self._execute(op, arguments, active)
            if self.steps >= self._redraw:
                break
        self._pc[threads] = pc

    def _value(self, operand: str, dtype: type) -> Vector:
        if operand[0] == "{":  # mov.b64 register, {low, high}
            low, high = (self._value(part, np.uint32).astype(np.uint64) for part in re.findall(r"%?\w+", operand))
            return low | high << np.uint64(32)
        if operand[0] in "%_":
            if operand == "%globaltimer":
                return self._same(1000 * self.steps, np.uint64)
            value = self._registers[operand]
            if value.dtype == np.bool_ or value.dtype == dtype:
                return value
            return value.view(dtype) if value.itemsize == np.dtype(dtype).itemsize else value.astype(dtype)
        return self._same(int(operand, 0), np.uint64).astype(dtype)

    def _set(self, register: str, value: Vector, active: Vector) -> None:
        old = self._registers.get(register)
        if old is not None and not active.all():
            value = np.where(active, value, old.view(value.dtype))
        self._registers[register] = value

    def _address(self, operand: str, active: Vector) -> Vector:
        base, offset = re.match(r"\[([%\w]+)(?:\+(-?\d+))?\]", operand).groups()
        return self._registers[base][active].astype(np.int64) + int(offset or 0)

    def _whole_warps(self, op: str, active: Vector) -> None:
        here, alive = active.reshape(-1, LANES), ~self._done.reshape(-1, LANES)
        some = here.any(1)
        if (here[some] != alive[some]).any():
            raise RuntimeError(f"{op}: threads of a warp are elsewhere")

    def _execute(self, op: str, arguments: list[str], active: Vector) -> None:
        name, *modifiers = op.split(".")
        dtype = _TYPES.get(modifiers[-1] if modifiers else "", np.uint32)
        if name in ("ld", "st"):
            self._access(name, modifiers, arguments, dtype, active)
        elif name in ("red", "atom"):
            self._atomic(name, modifiers, arguments, active)
        elif name == "bar":
            self._waiting |= active
        elif name == "ret":
            self._done |= active
        elif name == "trap":
            raise Trapped
        elif name not in ("griddepcontrol", "fence", "nanosleep"):
            if arguments[0][0] == "{":  # mov.b64 {low, high}, register
                pair = self._value(arguments[1], np.uint64)
                for register, shift in zip(re.findall(r"[%\w]+", arguments[0]), (0, 32), strict=True):  # "_": none
                    self._set(register, (pair >> np.uint64(shift)).astype(np.uint32), active)
                return
            with np.errstate(over="ignore"):
                value = self._compute(name, modifiers, arguments, dtype, active)
            self._set(arguments[0].split("|")[0], value, active)

    def _compute(self, name: str, modifiers: list[str], arguments: list[str], dtype: type, active: Vector) -> Vector:
        def v(i: int, as_type: type = dtype) -> Vector:
            return self._value(arguments[i], as_type)

        if name == "mov":
            return v(1).copy()
        if name in ("add", "sub", "min", "max"):
            return {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}[name](v(1), v(2))
        if name in ("and", "or", "xor"):
            return _BITWISE[name](v(1), v(2))
        if name in ("not", "neg"):
            return ~v(1) if name == "not" else np.negative(v(1))
        if name in ("mul", "mad"):
            wider = _WIDER.get(dtype, object)  # of 64 bits, Python's integers
            if modifiers[0] == "lo":
                product, added = v(1) * v(2), dtype
            elif modifiers[0] == "wide":
                product, added = v(1).astype(wider) * v(2).astype(wider), wider
            else:
                bits = 8 * np.dtype(dtype).itemsize
                product, added = (v(1).astype(wider) * v(2).astype(wider) >> bits).astype(dtype), dtype
            return product + v(3, added) if name == "mad" else product
        if name == "high_product":
            wide = [v(i, np.uint32).astype(np.uint64) for i in (1, 2, 3)]
            return (wide[0] * wide[1] >> wide[2]).astype(np.uint32)
        if name in ("shl", "shr"):
            bits, by = 8 * np.dtype(dtype).itemsize, v(2, np.uint32)
            most = np.minimum(by, bits - 1).astype(dtype)
            moved = v(1) << most if name == "shl" else v(1) >> most
            clamped = moved if name == "shr" and np.dtype(dtype).kind == "i" else dtype(0)
            return np.where(by < bits, moved, clamped)
        if name == "setp":
            return _COMPARE[modifiers[0]](v(1), v(2))
        if name == "selp":
            return np.where(v(3), v(1), v(2))
        if name == "cvt":
            return v(1, dtype).astype(_TYPES[modifiers[-2]])
        if name == "popc":
            return np.bitwise_count(v(1)).astype(np.uint32)
        if name == "clz":
            return np.uint32(32) - np.frexp(v(1).astype(np.float64))[1].astype(np.uint32)
        self._whole_warps(name, active)
        if name == "vote":
            bits = (v(1) & active).reshape(-1, LANES).astype(np.uint64) << np.arange(LANES, dtype=np.uint64)
            return np.repeat(bits.sum(1).astype(np.uint32), LANES)
        warps = v(1).reshape(-1, LANES)
        if name == "redux":
            return np.repeat(_BITWISE[modifiers[1]].reduce(warps, axis=1, dtype=warps.dtype), LANES)
        if name == "shfl":
            lane = np.arange(LANES)
            by = v(2, np.uint32).astype(np.int64).reshape(-1, LANES)
            source = np.where(lane < by, lane, lane - by) if modifiers[1] == "up" else by % LANES
            return np.take_along_axis(warps, source, 1).reshape(-1)
        raise NotImplementedError(f"{name}.{'.'.join(modifiers)}")

    def _access(self, name: str, modifiers: list[str], arguments: list[str], dtype: type, active: Vector) -> None:
        where, registers = arguments[1 if name == "ld" else 0], arguments[0 if name == "ld" else 1]
        registers = [register.strip() for register in registers.strip("{}").split(",")]
        size, count = np.dtype(dtype).itemsize, len(registers)
        if "param" in modifiers:
            parameter, offset = re.match(r"\[(\w+)(?:\+(\d+))?\]", where).groups()
            for i, register in enumerate(registers):
                value = np.frombuffer(self._parameters[parameter], dtype, 1, int(offset or 0) + i * size)
                self._set(register, np.repeat(value, self._n), active)
            return
        addresses = self._address(where, active)
        if "shared" in modifiers:
            addresses &= 0xFFFFFFFF
            threads = np.flatnonzero(active)
            if name == "st":
                self.shared.store(addresses, threads, [self._value(r, dtype)[active] for r in registers])
                return
            loaded = self.shared.load(addresses, threads, dtype, count)
        elif name == "st":
            self.memory.store(addresses, [self._value(register, dtype)[active] for register in registers])
            return
        else:
            loaded = self.memory.load(addresses, dtype, count)
        for register, part in zip(registers, loaded, strict=True):
            # A register can be wider than what is loaded into it: %r has 32 bits.
            wider = np.uint32 if size < 4 and re.match(r"%r\d", register) else dtype
            value = np.zeros(self._n, wider)
            value[active] = part
            self._set(register, value, active)

    def _atomic(self, name: str, modifiers: list[str], arguments: list[str], active: Vector) -> None:
        if name == "red":
            addresses, values = self._address(arguments[0], active) & 0xFFFFFFFF, self._value(arguments[1], np.uint32)
            self.shared.combine(addresses, np.flatnonzero(active), _BITWISE[modifiers[-2]], values[active])
            return
        old = np.zeros(self._n, np.uint32)
        addresses = np.zeros(self._n, np.int64)
        addresses[active] = self._address(arguments[1], active)
        for thread in self._random.permutation(np.flatnonzero(active)):  # in whatever order
            if "exch" in modifiers:
                here = addresses[thread : thread + 1]
                old[thread] = self.memory.load(here, np.uint32, 1)[0][0]
                self.memory.store(here, [self._value(arguments[2], np.uint32)[thread : thread + 1]])
            else:  # compare and swap
                here = addresses[thread : thread + 1]
                old[thread] = self.memory.load(here, np.uint32, 1)[0][0]
                if old[thread] == int(arguments[2]):
                    self.memory.store(here, [np.uint32([int(arguments[3])])])
        self._set(arguments[0], old, active)


def run_together(blocks: Sequence[Block], seed: int, turn: int = 2000) -> None:
    """Runs blocks that may wait for each other, in turns of up to ``turn`` instructions in random order."""
    random, alive = np.random.default_rng(seed), list(blocks)
    while alive:
        block = alive[random.integers(len(alive))]
        if block.run(int(random.integers(1, turn))):
            alive.remove(block)
