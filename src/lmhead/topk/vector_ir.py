"""The screen's inner loop, written in LLVM's own terms so that it uses what the processor has.

A tile of 16 rows lies in memory as [groups, steps, 16 rows, 4 numbers], bytes c + 128. At each step
one vector of 16 · 4 bytes is read once and multiplied with four numbers of every plane of every
query; each of the 16 lanes adds the four products of its row, in 32-bit integers. They wrap around,
and the true sum fits (`table.WIDEST`), so every variant gives the same integers:

- `vnni512`, `vnni256`: one instruction a vector (x86 with AVX512-VNNI, or AVX-VNNI);
- `madd`: even and odd bytes apart, two multiply-adds of pairs (x86 with AVX2);
- `plain`: four multiplications, any processor.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

VARIANTS = ("plain", "madd", "vnni256", "vnni512")
AHEAD = 8192  # bytes that are asked for ahead of their use

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
V16, F16 = ir.VectorType(I32, 16), ir.VectorType(F32, 16)
LANE = ir.Constant(V16, [0] * 16)


def best_variant() -> int:
    """The index in VARIANTS of the widest that this processor has."""
    has = llvm.get_host_cpu_features()
    if has.get("avx512vnni") and has.get("avx512bw"):
        return 3
    if has.get("avxvnni") or (has.get("avx512vnni") and has.get("avx512vl")):
        return 2
    return 1 if has.get("avx2") else 0


def _number(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


class _Tile:
    """Writes the function body; one use."""

    def __init__(self, builder: Any, variant: int) -> None:
        self.b, self.variant = builder, VARIANTS[variant]

    def call(self, name: str, result: Any, *args: Any, fastmath: tuple[str, ...] = ()) -> Any:
        module = self.b.module
        function = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(result, [a.type for a in args]), name
        )
        return self.b.call(function, args, fastmath=fastmath)

    def load(self, base: Any, kind: Any, offset: int = 0) -> Any:
        at = self.b.add(base, _number(offset)) if offset else base
        value = self.b.load(self.b.inttoptr(at, kind.as_pointer()))
        value.align = 4
        return value

    def store(self, value: Any, base: Any) -> None:
        self.b.store(value, self.b.inttoptr(base, value.type.as_pointer())).align = 4

    def splat(self, value: Any, kind: Any) -> Any:
        unknown = ir.Constant(kind, ir.Undefined)
        return self.b.shuffle_vector(
            self.b.insert_element(unknown, value, ir.Constant(I32, 0)), unknown, LANE
        )

    def part(self, vector: Any, first: int, count: int) -> Any:
        mask = ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
        return self.b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)

    def halves(self, name: str, result: Any, kind: Any, *args: Any) -> Any:
        """An instruction on 8 lanes, used on both halves of 16."""
        parts = []
        for first in (0, 8):
            given = [self.b.bitcast(self.part(a, first, 8), kind) for a in args]
            parts.append(self.call(name, result, *given))
        mask = ir.Constant(V16, list(range(16)))
        return self.b.shuffle_vector(parts[0], parts[1], mask)

    def multiply_add(self, total: Any, table: Any, word: Any) -> Any:
        """total + Σ of the four products of table's unsigned and word's signed bytes, by lane."""
        b = self.b
        if self.variant == "vnni512":
            word = self.splat(word, V16)
            return self.call("llvm.x86.avx512.vpdpbusd.512", V16, total, table, word)
        if self.variant == "vnni256":
            eight = ir.VectorType(I32, 8)
            word = self.splat(word, V16)
            return self.halves("llvm.x86.avx512.vpdpbusd.256", eight, eight, total, table, word)
        if self.variant == "madd":
            sixteen = ir.Constant(V16, [0x00FF00FF] * 16)
            for shift in (0, 8):
                some = b.and_(b.lshr(table, ir.Constant(V16, [shift] * 16)), sixteen)
                low = b.ashr(b.shl(word, ir.Constant(I32, 24 - shift)), ir.Constant(I32, 24))
                high = b.ashr(b.shl(word, ir.Constant(I32, 8 - shift)), ir.Constant(I32, 24))
                pair = b.or_(
                    b.and_(low, ir.Constant(I32, 0xFFFF)), b.shl(high, ir.Constant(I32, 16))
                )
                product = self.halves(
                    "llvm.x86.avx2.pmadd.wd",
                    ir.VectorType(I32, 8),
                    ir.VectorType(I16, 16),
                    some,
                    self.splat(pair, V16),
                )
                total = b.add(total, product)
            return total
        byte = ir.Constant(V16, [0xFF] * 16)
        for shift in (0, 8, 16, 24):
            some = b.and_(b.lshr(table, ir.Constant(V16, [shift] * 16)), byte)
            number = b.ashr(b.shl(word, ir.Constant(I32, 24 - shift)), ir.Constant(I32, 24))
            total = b.add(total, b.mul(some, self.splat(number, V16)))
        return total

    def write(self, queries: int, planes: int, args: Any) -> None:
        """For 16 rows: their upper bounds, and the largest lower bound, of every query."""
        codes, words, starts, steps, groups, scale, rest, norm, bias, coefs, *results = args
        out, stride, tops, tops_stride = results
        b, columns = self.b, queries * planes
        entry = b.block
        each_group, each_step = b.append_basic_block("group"), b.append_basic_block("step")
        close, finish = b.append_basic_block("close"), b.append_basic_block("finish")
        b.branch(each_group)

        b.position_at_end(each_group)
        group, table_at, words_at = b.phi(I64), b.phi(I64), b.phi(I64)
        for phi, start in ((group, _number(0)), (table_at, codes), (words_at, words)):
            phi.add_incoming(start, entry)
        sums = [b.phi(F16) for _ in range(queries)]
        for total in sums:
            total.add_incoming(ir.Constant(F16, [0.0] * 16), entry)
        start_at = b.add(starts, b.mul(group, _number(4 * columns)))
        first = [self.splat(self.load(start_at, I32, 4 * c), V16) for c in range(columns)]
        b.branch(each_step)

        b.position_at_end(each_step)
        step, here, word_at = b.phi(I64), b.phi(I64), b.phi(I64)
        for phi, start in ((step, _number(0)), (here, table_at), (word_at, words_at)):
            phi.add_incoming(start, each_group)
        totals = [b.phi(V16) for _ in range(columns)]
        table = self.load(here, V16)
        if columns > 2:  # with fewer, the processor's own guess is as good and cheaper
            ahead = b.inttoptr(b.add(here, _number(AHEAD)), I8.as_pointer())
            hint = (ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1))
            self.call("llvm.prefetch.p0", ir.VoidType(), ahead, *hint)
        added = []
        for c, total in enumerate(totals):
            total.add_incoming(first[c], each_group)
            added.append(self.multiply_add(total, table, self.load(word_at, I32, 4 * c)))
            total.add_incoming(added[c], each_step)
        following = (
            b.add(step, _number(1)),
            b.add(here, _number(64)),
            b.add(word_at, _number(4 * columns)),
        )
        for phi, value in zip((step, here, word_at), following, strict=True):
            phi.add_incoming(value, each_step)
        b.cbranch(b.icmp_signed("<", following[0], steps), each_step, close)

        b.position_at_end(close)
        factor = self.load(b.add(scale, b.mul(group, _number(64))), F16)
        scored = []
        for n in range(queries):
            x = b.sitofp(added[n * planes], F16)
            if planes == 2:
                high = ir.Constant(F16, [256.0] * 16)
                x = self.call("llvm.fma.v16f32", F16, x, high, b.sitofp(added[2 * n + 1], F16))
            scored.append(self.call("llvm.fma.v16f32", F16, x, factor, sums[n]))
            sums[n].add_incoming(scored[n], close)
        next_group = b.add(group, _number(1))
        group.add_incoming(next_group, close)
        table_at.add_incoming(following[1], close)
        words_at.add_incoming(following[2], close)
        b.cbranch(b.icmp_signed("<", next_group, groups), each_group, finish)

        b.position_at_end(finish)
        rests, norms, biases = self.load(rest, F16), self.load(norm, F16), self.load(bias, F16)
        for n in range(queries):
            k = [self.splat(self.load(coefs, F32, 4 * (5 * n + j)), F16) for j in range(5)]
            middle = self.call("llvm.fma.v16f32", F16, biases, k[3], b.fmul(scored[n], k[0]))
            reach = self.call("llvm.fma.v16f32", F16, norms, k[2], k[4])
            reach = self.call("llvm.fma.v16f32", F16, rests, k[1], reach)
            self.store(b.fadd(middle, reach), b.add(out, b.mul(stride, _number(n))))
            lowest = b.fsub(middle, reach)
            largest = self.call("llvm.vector.reduce.fmax.v16f32", F32, lowest, fastmath=("nnan",))
            self.store(largest, b.add(tops, b.mul(tops_stride, _number(n))))


@intrinsic  # type: ignore[untyped-decorator]
def score_tile(
    typingctx: Any,
    variant: Any,
    queries: Any,
    planes: Any,
    codes: Any,
    words: Any,
    starts: Any,
    steps: Any,
    groups: Any,
    scale: Any,
    rest: Any,
    norm: Any,
    bias: Any,
    coefs: Any,
    out: Any,
    stride: Any,
    tops: Any,
    tops_stride: Any,
) -> Any:
    """One tile, all by address; `variant`, `queries` and `planes` are tuples that count by their
    length (variant by one more), so that the numbers are part of the type."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Tile(builder, variant.count - 1).write(queries.count, planes.count, args[3:])
        return context.get_dummy_value()

    where = (codes, words, starts, steps, groups, scale, rest, norm, bias, coefs)
    return types.void(variant, queries, planes, *where, out, stride, tops, tops_stride), write
