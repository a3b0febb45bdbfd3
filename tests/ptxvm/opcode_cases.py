"""One-instruction kernels: what each opcode does to 32 lanes, by numpy.

A Case is an opcode, the types of its result and operands, and a function of the operands' arrays. `module` writes them
all as PTX: kernel k<number> loads an operand per lane, executes the instruction and stores the result.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LANES = 32


@dataclass
class Case:
    """`text` stands for the operands where they are not just the registers: "{d}, {a}, {b}, 0x96"."""

    opcode: str
    types: str  # "s32 s32 u32": the result first
    expected: Callable
    text: str = ""
    tolerance: float = 0.0  # relative; 0: the same bits
    inputs: str = (
        ""  # "finite", "positive", "small": what the floats are like; "shift", "bits": the last integer operands
    )

    @property
    def result(self):
        return self.types.split()[0]

    @property
    def operands(self):
        return self.types.split()[1:]

    @property
    def name(self):
        return f"{self.opcode}({self.text})" if self.text else self.opcode


SIZES = (8, 16, 32, 64)
STORAGE = {  # the numpy type of a PTX type; bf16 and pairs of 16-bit numbers are kept as bits
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in SIZES},
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}").type for kind in "ub" for bits in SIZES},
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16},
    **{"f16x2": np.uint32, "bf16x2": np.uint32, "pred": np.uint32},
}


def from_bf16(bits):
    """The float32 values of bfloat16 bits."""
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def to_bf16(x):
    """The bits of float32 values rounded to bfloat16, nearest even."""
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.float32)
        bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def halves(pairs):
    """Low and high half of 32-bit words."""
    return pairs.astype(np.uint16), (pairs >> 16).astype(np.uint16)


def joined(low, high):
    """32-bit words of two halves."""
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


# ---- PTX text --------------------------------------------------------------------------------------------------------


def width(kind):
    """Bits of a type's register; 8-bit values live in 16-bit registers."""
    if kind == "pred":
        return 1
    return 32 if kind.endswith("x2") else max(16, 8 * np.dtype(STORAGE[kind]).itemsize)


def register(kind, index):
    """Name of operand `index`'s register."""
    return f"%{ {1: 'p', 16: 'h', 32: 'r', 64: 'd'}[width(kind)] }{index}"


def memory_type(kind):
    """Type with which a value of this kind is loaded and stored."""
    return f"b{8 * np.dtype(STORAGE[kind]).itemsize}"


def load(kind, index):
    """Statements that load operand `index` of this lane."""
    size = np.dtype(STORAGE[kind]).itemsize
    lines = [f"ld.param.u64 %a, [in{index}];", f"mad.wide.u32 %a, %lane, {size}, %a;"]
    if kind == "pred":
        return [*lines, "ld.global.b32 %w, [%a];", f"setp.ne.u32 %p{index}, %w, 0;"]
    return [*lines, f"ld.global.{memory_type(kind)} {register(kind, index)}, [%a];"]


def store(kind):
    """Statements that store the result of this lane."""
    size = np.dtype(STORAGE[kind]).itemsize
    lines = ["ld.param.u64 %a, [out];", f"mad.wide.u32 %a, %lane, {size}, %a;"]
    if kind == "pred":
        return [*lines, "selp.b32 %w, 1, 0, %p0;", "st.global.b32 [%a], %w;"]
    return [*lines, f"st.global.{memory_type(kind)} [%a], {register(kind, 0)};"]


def kernel(number, case):
    """PTX of the kernel for one case."""
    names = ["d", "a", "b", "c", "e"]
    registers = [register(kind, index) for index, kind in enumerate(case.types.split())]
    text = case.text or ", ".join("{" + name + "}" for name in names[: len(registers)])
    instruction = f"{case.opcode} {text.format(**dict(zip(names, registers, strict=False)))};"
    parameters = ["out", *(f"in{index}" for index in range(1, len(registers)))]
    body = ["mov.u32 %lane, %tid.x;"]
    for index, kind in enumerate(case.operands, start=1):
        body += load(kind, index)
    body += [instruction, *store(case.result)]
    declarations = (
        ".reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .b64 %a; .reg .b32 %lane, %w;"
    )
    listed = ", ".join(f".param .u64 {name}" for name in parameters)
    return f".visible .entry k{number}({listed})\n{{\n{declarations}\n" + "\n".join(body) + "\nret;\n}\n"


def module(cases):
    """All cases as one PTX module."""
    header = ".version 8.0\n.target sm_90\n.address_size 64\n"
    return header + "\n".join(kernel(number, case) for number, case in enumerate(cases))


# ---- Operands --------------------------------------------------------------------------------------------------------


def integers(rng, kind):
    """Random integers of all magnitudes, with the extreme ones."""
    dtype = np.dtype(STORAGE[kind])
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max, LANES, dtype=dtype, endpoint=True)
    x[8:16] >>= dtype.itemsize * 4  # about half the bits
    edges = [0, 1, info.max, info.min, info.max - 1, info.max // 2 + 1]
    x[: len(edges)] = np.array(edges, dtype=dtype)
    return x


def floats(rng, inputs):
    """Random floats; unless asked otherwise also zeros, infinities, NaN and subnormals."""
    x = rng.standard_normal(LANES)
    if inputs == "small":
        return x
    x *= 10.0 ** rng.integers(-3, 4, LANES)
    if inputs == "positive":
        return np.abs(x)
    if inputs != "finite":
        x[:10] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-41, 3e-6, 65520.0, 1e9, 2.5]
    return x


def operand(rng, kind, inputs=""):
    """An operand's array of 32 lanes, as it lies in memory."""
    with np.errstate(over="ignore", under="ignore"):
        if kind == "pred":
            return rng.integers(0, 2, LANES, dtype=np.uint32)
        if kind in ("f16", "f32", "f64"):
            return floats(rng, inputs).astype(STORAGE[kind])
        if kind == "bf16":
            return to_bf16(floats(rng, inputs))
        if kind == "f16x2":
            return joined(*(floats(rng, "small").astype(np.float16).view(np.uint16) for _ in range(2)))
        if kind == "bf16x2":
            return joined(*(to_bf16(floats(rng, "small")) for _ in range(2)))
        return integers(rng, kind)


def operands(case, number):
    """All operands of a case. Operands that count bits are small, with some that are too large."""
    rng = np.random.default_rng(number)
    arrays = [operand(rng, kind, case.inputs) for kind in case.operands]
    counts = {"shift": 1, "bits": 2}.get(case.inputs, 0)
    for index in range(len(arrays) - counts, len(arrays)):
        arrays[index] = rng.integers(0, 70, LANES, dtype=np.uint32)
    if len(arrays) > 1 and case.operands[0] == case.operands[1]:
        arrays[1][rng.permutation(LANES)] = arrays[1].copy()  # edges meet other values
        arrays[1][20:24] = arrays[0][20:24]  # and equal ones
    return arrays
