"""The opcodes that test_ptxvm.py tries: one Case each."""

import math

import numpy as np

from .opcode_cases import STORAGE, Case, from_bf16, halves, joined, to_bf16

CASES: list[Case] = []


def case(opcode, types, expected, **options):
    """Add a case."""
    CASES.append(Case(opcode, types, expected, **options))


def same(opcode, kind, expected, operands=2, **options):
    """Add a case whose result has the operands' type, which ends the opcode."""
    case(f"{opcode}.{kind}", " ".join([kind] * (operands + 1)), expected, **options)


def exact(function):
    """The function on Python integers, lane by lane; the result wraps to the result's type."""

    def over_lanes(*arrays):
        return [function(*(int(x) for x in lane)) for lane in zip(*arrays, strict=True)]

    return over_lanes


def truncated(a, b):
    """C's division: the quotient rounds to zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


# ---- Integers --------------------------------------------------------------------------------------------------------

for kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
    bits = int(kind[1:])
    same("add", kind, exact(lambda a, b: a + b))
    same("sub", kind, exact(lambda a, b: a - b))
    same("mul.lo", kind, exact(lambda a, b: a * b))
    same("mul.hi", kind, exact(lambda a, b, bits=bits: a * b >> bits))
    same("mad.lo", kind, exact(lambda a, b, c: a * b + c), operands=3)
    same("min", kind, np.minimum)
    same("max", kind, np.maximum)
    same("div", kind, exact(lambda a, b: truncated(a, b) if b else -1))
    same("rem", kind, exact(lambda a, b: a - b * truncated(a, b) if b else a))
    if bits < 64:
        wide = f"{kind[0]}{2 * bits}"
        case(f"mul.wide.{kind}", f"{wide} {kind} {kind}", exact(lambda a, b: a * b))
        case(f"mad.wide.{kind}", f"{wide} {kind} {kind} {wide}", exact(lambda a, b, c: a * b + c))
    if bits > 16:
        same("mad.hi", kind, exact(lambda a, b, c, bits=bits: (a * b >> bits) + c), operands=3)
        same("sad", kind, exact(lambda a, b, c: c + abs(a - b)), operands=3)
    if kind[0] == "s":
        same("neg", kind, exact(lambda a: -a), operands=1)
        same("abs", kind, exact(abs), operands=1)
    case(f"shr.{kind}", f"{kind} {kind} u32", exact(lambda a, n: a >> n), inputs="shift")

# ---- Bits ------------------------------------------------------------------------------------------------------------


def field(a, position, length, bits, signed):
    """What bfe extracts from `a`: bits past its end or past the field are the field's sign, or 0."""
    position, length = position & 255, length & 255
    sign = a >> min(position + length - 1, bits - 1) & 1 if signed and length else 0
    taken = [a >> position + i & 1 if i < length and position + i < bits else sign for i in range(bits)]
    return sum(bit << i for i, bit in enumerate(taken))


def inserted(a, b, position, length, bits):
    """What bfi makes of `b`."""
    mask = (2 ** (length & 255) - 1) << (position & 255) & (2**bits - 1)
    return b & ~mask | a << (position & 255) & mask


def permuted(a, b, selectors):
    """What prmt picks from the bytes of b:a."""
    source = [(b << 32 | a) >> 8 * k & 255 for k in range(8)]
    chosen = [selectors >> 4 * k & 15 for k in range(4)]
    return sum((255 * (source[s & 7] >> 7) if s & 8 else source[s & 7]) << 8 * k for k, s in enumerate(chosen))


def looked_up(a, b, c, table=0x96):
    """What lop3 gives, bit by bit."""
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


for kind in ("b16", "b32", "b64"):
    bits = int(kind[1:])
    same("and", kind, np.bitwise_and)
    same("or", kind, np.bitwise_or)
    same("xor", kind, np.bitwise_xor)
    same("not", kind, np.invert, operands=1)
    same("cnot", kind, exact(lambda a: a == 0), operands=1)
    same("mov", kind, lambda a: a, operands=1)
    case(f"shl.{kind}", f"{kind} {kind} u32", exact(lambda a, n: a << n), inputs="shift")
    case(f"selp.{kind}", f"{kind} {kind} {kind} pred", lambda a, b, p: np.where(p, a, b))
    case(f"slct.{kind}.s32", f"{kind} {kind} {kind} s32", lambda a, b, c: np.where(c >= 0, a, b))
for kind in ("b32", "b64"):
    bits = int(kind[1:])
    case(f"popc.{kind}", f"u32 {kind}", exact(int.bit_count))
    case(f"clz.{kind}", f"u32 {kind}", exact(lambda a, bits=bits: bits - a.bit_length()))
    same("brev", kind, exact(lambda a, bits=bits: int(f"{a:0{bits}b}"[::-1], 2)), operands=1)
    case(
        f"bfi.{kind}",
        f"{kind} {kind} {kind} u32 u32",
        exact(lambda a, b, p, n, bits=bits: inserted(a, b, p, n, bits)),
        inputs="bits",
    )
    case(
        f"bfe.u{bits}",
        f"u{bits} u{bits} u32 u32",
        exact(lambda a, p, n, bits=bits: field(a, p, n, bits, False)),
        inputs="bits",
    )
    case(
        f"bfe.s{bits}",
        f"s{bits} s{bits} u32 u32",
        exact(lambda a, p, n, bits=bits: field(a, p, n, bits, True)),
        inputs="bits",
    )
    case(f"bfind.u{bits}", f"u32 u{bits}", exact(lambda a: a.bit_length() - 1))
    case(f"bfind.s{bits}", f"u32 s{bits}", exact(lambda a: (a if a >= 0 else ~a).bit_length() - 1))
case("bfind.shiftamt.u32", "u32 u32", exact(lambda a: 32 - a.bit_length() if a else -1))
case("shf.l.wrap.b32", "b32 b32 b32 u32", exact(lambda a, b, n: (b << 32 | a) << (n & 31) >> 32), inputs="shift")
case("shf.l.clamp.b32", "b32 b32 b32 u32", exact(lambda a, b, n: (b << 32 | a) << min(n, 32) >> 32), inputs="shift")
case("shf.r.wrap.b32", "b32 b32 b32 u32", exact(lambda a, b, n: (b << 32 | a) >> (n & 31)), inputs="shift")
case("shf.r.clamp.b32", "b32 b32 b32 u32", exact(lambda a, b, n: (b << 32 | a) >> min(n, 32)), inputs="shift")
case("lop3.b32", "b32 b32 b32 b32", exact(looked_up), text="{d}, {a}, {b}, {c}, 0x96")
case("lop3.b32", "b32 b32 b32 b32", exact(lambda a, b, c: looked_up(a, b, c, 0xE2)), text="{d}, {a}, {b}, {c}, 0xE2")
case("prmt.b32", "b32 b32 b32 b32", exact(permuted))
for name, function in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
    case(f"{name}.pred", "pred pred pred", function)
case("and.pred", "pred pred pred", lambda a, b: a & ~b & 1, text="{d}, {a}, !{b}")
case("not.pred", "pred pred", np.logical_not)
case("mov.pred", "pred pred", lambda a: a)
case("mov.b32", "b32 b16 b16", lambda a, b: joined(a, b), text="{d}, {{{a}, {b}}}")
case("mov.b64", "b64 b32 b32", exact(lambda a, b: b << 32 | a), text="{d}, {{{a}, {b}}}")
case("mov.b32", "b16 b32", lambda a: halves(a)[1], text="{{_, {d}}}, {a}")
case("mov.b64", "b32 b64", exact(lambda a: a & 0xFFFFFFFF), text="{{{d}, _}}, {a}")
case("mov.u32", "u32 u32", lambda a: np.arange(32), text="{d}, %laneid")
case("mov.u32", "u32 u32", exact(lambda a: 77), text="{d}, 77")
case("mov.f32", "f32 f32", lambda a: np.full(32, 1.5), text="{d}, 0f3FC00000")
case("mov.f64", "f64 f64", lambda a: np.full(32, -2.5), text="{d}, 0dC004000000000000")
case("add.s32", "s32 s32", exact(lambda a: a - 5), text="{d}, {a}, -5")
case("add.s64", "s64 s64", exact(lambda a: a - 5), text="{d}, {a}, -5")

# ---- Comparisons -----------------------------------------------------------------------------------------------------

COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


def ordered(function):
    """The comparison, false where one side is NaN."""
    return lambda a, b: function(a, b) & ~np.isnan(a) & ~np.isnan(b)


def unordered(function):
    """The comparison, true where one side is NaN."""
    return lambda a, b: function(a, b) | np.isnan(a) | np.isnan(b)


for name, function in COMPARISONS.items():
    for kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
        case(f"setp.{name}.{kind}", f"pred {kind} {kind}", function)
    for kind in ("f32", "f64"):
        case(f"setp.{name}.{kind}", f"pred {kind} {kind}", ordered(function))
        case(f"setp.{name}u.{kind}", f"pred {kind} {kind}", unordered(function))
for kind in ("f32", "f64"):
    case(f"setp.num.{kind}", f"pred {kind} {kind}", ordered(lambda a, b: a == a))
    case(f"setp.nan.{kind}", f"pred {kind} {kind}", lambda a, b: np.isnan(a) | np.isnan(b))
case("setp.lt.f16", "pred f16 f16", ordered(np.less))
case("setp.gtu.bf16", "pred bf16 bf16", lambda a, b: unordered(np.greater)(from_bf16(a), from_bf16(b)))
case("setp.lt.and.s32", "pred s32 s32 pred", lambda a, b, p: (a < b) & (p != 0))
case("setp.lt.or.s32", "pred s32 s32 pred", lambda a, b, p: (a < b) | (p == 0), text="{d}, {a}, {b}, !{c}")
case("setp.lt.xor.s32", "pred s32 s32 pred", lambda a, b, p: (a < b) ^ (p != 0))
case("setp.lt.and.s32", "pred s32 s32 pred", lambda a, b, p: (a >= b) & (p != 0), text="%p7|{d}, {a}, {b}, {c}")
case("set.lt.u32.f32", "u32 f32 f32", lambda a, b: np.where(a < b, 0xFFFFFFFF, 0))

# ---- Floats ----------------------------------------------------------------------------------------------------------


def number_wins(choose):
    """min and max: a NaN loses, -0 is less than +0."""
    return lambda a, b: np.where(
        np.isnan(a),
        b,
        np.where(
            np.isnan(b), a, np.where(a == b, choose(np.copysign(1, a), np.copysign(1, b)) * np.abs(a), choose(a, b))
        ),
    )


def nan_wins(choose):
    """min.NaN and max.NaN."""
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, number_wins(choose)(a, b))


def fused(a, b, c):
    """Fused multiply-add of float32: exact in longdouble but for bits far below the last."""
    wide = np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)


def fraction_fma(a, b, c):
    """Fused multiply-add of float64, exact by fractions."""
    from fractions import Fraction

    return [
        float(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]


def directed(function, towards):
    """float32 arithmetic rounded towards a limit, from the result in longdouble."""

    def rounded(*arrays):
        exact_result = function(*(x.astype(np.longdouble) for x in arrays))
        nearest = exact_result.astype(np.float32)
        limit = {"rz": np.zeros_like(nearest), "rm": np.float32(-np.inf), "rp": np.float32(np.inf)}[towards]
        step = np.nextafter(nearest, limit)
        beyond = {
            "rz": np.abs(nearest) > np.abs(exact_result),
            "rm": nearest > exact_result,
            "rp": nearest < exact_result,
        }[towards]
        return np.where(beyond, step, nearest)

    return rounded


for kind in ("f32", "f64"):
    same("add.rn", kind, lambda a, b: a + b)
    same("sub.rn", kind, lambda a, b: a - b)
    same("mul.rn", kind, lambda a, b: a * b)
    same("div.rn", kind, lambda a, b: a / b)
    same("fma.rn", kind, fused if kind == "f32" else fraction_fma, operands=3, inputs="finite")
    same("min", kind, number_wins(np.minimum))
    same("max", kind, number_wins(np.maximum))
    same("neg", kind, np.negative, operands=1)
    same("abs", kind, np.abs, operands=1)
    same("sqrt.rn", kind, np.sqrt, operands=1)
    same("rcp.rn", kind, lambda a: 1 / a, operands=1)
    same("copysign", kind, lambda a, b: np.copysign(b, a))
same("min.NaN", "f32", nan_wins(np.minimum))
same("max.NaN", "f32", nan_wins(np.maximum))
for towards in ("rz", "rm", "rp"):
    same(f"add.{towards}", "f32", directed(lambda a, b: a + b, towards), inputs="finite")
    same(f"mul.{towards}", "f32", directed(lambda a, b: a * b, towards), inputs="finite")
    same(f"fma.{towards}", "f32", directed(lambda a, b, c: a * b + c, towards), operands=3, inputs="finite")
same("add.sat", "f32", lambda a, b: np.where(np.isnan(a + b), 0, np.clip(a + b, 0, 1)))
same("fma.rn.sat", "f32", lambda a, b, c: np.clip(fused(a, b, c), 0, 1), operands=3, inputs="small")
same("ex2.approx.ftz", "f32", np.exp2, operands=1, inputs="small", tolerance=3e-7)
same("lg2.approx", "f32", np.log2, operands=1, inputs="positive", tolerance=3e-7)
same("rsqrt.approx", "f32", lambda a: 1 / np.sqrt(a.astype(np.float64)), operands=1, inputs="positive", tolerance=3e-7)
same("rcp.approx.ftz", "f32", lambda a: 1 / a, operands=1, inputs="finite", tolerance=3e-7)
same("sqrt.approx", "f32", np.sqrt, operands=1, inputs="positive", tolerance=3e-7)
same("tanh.approx", "f32", np.tanh, operands=1, tolerance=3e-7)
same("sin.approx", "f32", np.sin, operands=1, inputs="small", tolerance=3e-7)
same("cos.approx", "f32", np.cos, operands=1, inputs="small", tolerance=1e-6)
same("div.full", "f32", lambda a, b: a / b, inputs="finite", tolerance=3e-7)


def through_bf16(function):
    """The function on bfloat16 bits, computed in float and rounded once."""
    return lambda *arrays: to_bf16(function(*(from_bf16(x) for x in arrays)))


def through_double(function):
    """The function on float16, computed in double and rounded once."""
    return lambda *arrays: function(*(x.astype(np.float64) for x in arrays)).astype(np.float16)


def in_pairs(function, view):
    """The function on both halves of 32-bit words."""

    def pairs(*words):
        parts = [[view(half) for half in halves(word)] for word in words]
        results = [function(*(part[k] for part in parts)) for k in range(2)]
        return joined(*(r.view(np.uint16) for r in results))

    return pairs


ARITHMETIC = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}
for name, function in ARITHMETIC.items():
    same(f"{name}.rn", "f16", through_double(function))
    same(f"{name}.rn", "bf16", through_bf16(function))
    same(f"{name}.rn", "f16x2", in_pairs(through_double(function), lambda h: h.view(np.float16)))
    same(f"{name}.rn", "bf16x2", in_pairs(through_bf16(function), lambda h: h))
same("fma.rn", "f16", through_double(lambda a, b, c: a * b + c), operands=3, inputs="finite")
same("fma.rn", "bf16", through_bf16(fused), operands=3, inputs="finite")
same("fma.rn", "f16x2", in_pairs(through_double(lambda a, b, c: a * b + c), lambda h: h.view(np.float16)), operands=3)
same("fma.rn", "bf16x2", in_pairs(through_bf16(fused), lambda h: h), operands=3)
for name, choose in (("min", np.minimum), ("max", np.maximum)):
    same(name, "f16", number_wins(choose))
    same(name, "bf16", through_bf16(number_wins(choose)))
    same(name, "bf16x2", in_pairs(through_bf16(number_wins(choose)), lambda h: h))
same("neg", "f16", np.negative, operands=1)
same("abs", "f16", np.abs, operands=1)
same("neg", "bf16", through_bf16(np.negative), operands=1)
same("ex2.approx", "f16", through_double(np.exp2), operands=1, inputs="small", tolerance=2e-3)
same("tanh.approx", "bf16", through_bf16(np.tanh), operands=1, inputs="small")

# ---- Conversions -----------------------------------------------------------------------------------------------------

INTEGERS = [f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)]
for target in INTEGERS:
    for origin in INTEGERS:
        if target != origin:
            case(f"cvt.{target}.{origin}", f"{target} {origin}", exact(lambda a: a))
    if int(target[1:]) < 32:
        low, high = np.iinfo(STORAGE[target]).min, np.iinfo(STORAGE[target]).max
        case(f"cvt.sat.{target}.s32", f"{target} s32", lambda a, low=low, high=high: np.clip(a, low, high))


def to_integer(kind, rounding):
    """Float to integer with saturation; NaN becomes 0."""
    info = np.iinfo(STORAGE[kind])
    return lambda a: [
        0
        if math.isnan(x)
        else info.max
        if x >= float(info.max)
        else info.min
        if x <= float(info.min)
        else min(max(int(rounding(x)), info.min), info.max)
        for x in a.astype(np.float64).tolist()
    ]


for mode, rounding in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
    for kind in ("s32", "u32"):
        case(f"cvt.{mode}.{kind}.f32", f"{kind} f32", to_integer(kind, rounding))
    case(f"cvt.{mode}.s64.f64", "s64 f64", to_integer("s64", rounding), inputs="finite")
    case(f"cvt.{mode}.f32.f32", "f32 f32", {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode])
case("cvt.rzi.s16.f32", "s16 f32", to_integer("s16", math.trunc))
case("cvt.rzi.s32.f16", "s32 f16", to_integer("s32", math.trunc))
for kind in ("s32", "u32", "s64", "u64", "u8", "s16"):
    case(f"cvt.rn.f32.{kind}", f"f32 {kind}", lambda a: a.astype(np.float32))
    case(f"cvt.rn.f64.{kind}", f"f64 {kind}", lambda a: a.astype(np.float64))
case("cvt.rn.f16.s32", "f16 s32", lambda a: a.astype(np.float32).astype(np.float16))
case("cvt.rz.f32.s32", "f32 s32", directed(lambda a: a, "rz"))
case("cvt.rz.f32.f64", "f32 f64", directed(lambda a: a, "rz"), inputs="finite")
case("cvt.sat.f32.f32", "f32 f32", lambda a: np.where(np.isnan(a), 0, np.clip(a, 0, 1) + 0.0))  # -0 becomes 0
case("cvt.f64.f32", "f64 f32", lambda a: a.astype(np.float64))
case("cvt.rn.f32.f64", "f32 f64", lambda a: a.astype(np.float32))
case("cvt.f32.f16", "f32 f16", lambda a: a.astype(np.float32))
case("cvt.rn.f16.f32", "f16 f32", lambda a: a.astype(np.float16))
case("cvt.f32.bf16", "f32 bf16", from_bf16)
case("cvt.rn.bf16.f32", "bf16 f32", to_bf16)
case(
    "cvt.rn.f16x2.f32",
    "f16x2 f32 f32",
    lambda a, b: joined(b.astype(np.float16).view(np.uint16), a.astype(np.float16).view(np.uint16)),
    inputs="finite",
)
case("cvt.rn.bf16x2.f32", "bf16x2 f32 f32", lambda a, b: joined(to_bf16(b), to_bf16(a)))
case("cvt.rna.tf32.f32", "b32 f32", lambda a: a.view(np.uint32) + 0x1000 & 0xFFFFE000, inputs="finite")
