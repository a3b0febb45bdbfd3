"""The PTX interpreter of tests/ptxvm: each opcode against numpy. test_ptxvm_checker.py tests its checks."""

import subprocess

import numpy as np
import pytest
from ptxvm.build import cuda_home
from ptxvm.opcode_cases import STORAGE, from_bf16, module, operands, to_bf16
from ptxvm.opcode_table import CASES
from ptxvm.ptx import Ptx, run_body

pytestmark = pytest.mark.skipif(cuda_home() is None, reason="nvcc is not installed: no PTX to interpret")


@pytest.fixture(scope="session")
def opcodes():
    return Ptx(module(CASES))


def wrapped(values, kind):
    """Expected values as an array of the type; integers wrap."""
    dtype = np.dtype(STORAGE[kind])
    values = list(values) if not isinstance(values, np.ndarray) else values
    if isinstance(values, list) and dtype.kind in "iu":
        bits = 8 * dtype.itemsize
        return np.array([int(x) % 2**bits for x in values], dtype=f"u{dtype.itemsize}").view(dtype)
    return np.asarray(values).astype(dtype)


def numbers(array, kind):
    """What is compared: the bits as numbers, where NaN equals NaN."""
    if kind in ("f16x2", "bf16x2"):
        low_and_high = array.view(np.uint16)
        return (low_and_high.view(np.float16) if kind == "f16x2" else from_bf16(low_and_high)).astype(np.float64)
    return from_bf16(array).astype(np.float64) if kind == "bf16" else array


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_opcode_does_what_numpy_does(opcodes, number):
    case = CASES[number]
    inputs = operands(case, number)
    out = np.full(32, 99).astype(STORAGE[case.result])
    opcodes.run(f"k{number}", out, *inputs)
    with np.errstate(all="ignore"):
        expected = wrapped(case.expected(*inputs), case.result)
    out, expected = numbers(out, case.result), numbers(expected, case.result)
    np.testing.assert_allclose(out, expected, rtol=case.tolerance, atol=0.0, equal_nan=True)
    if out.dtype.kind == "f":
        zero = (expected == 0) & (case.tolerance == 0)
        np.testing.assert_array_equal(np.signbit(out[zero]), np.signbit(expected[zero]))


def test_ptxas_accepts_the_table(tmp_path):
    """The cases are PTX, not only what the interpreter makes of it."""
    source = tmp_path / "opcodes.ptx"
    source.write_text(module(CASES))
    command = [cuda_home() / "bin" / "ptxas", "-arch=sm_90", "-O0", source, "-o", tmp_path / "opcodes.cubin"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- Warp and memory instructions ------------------------------------------------------------------------------------

LANE = np.arange(32, dtype=np.uint32)
WORDS = np.random.default_rng(0).integers(0, 2**32, 32, dtype=np.uint32)
NEGATIVE = sum(1 << lane for lane in range(32) if WORDS[lane] >> 31)  # lanes whose word is negative as an integer


@pytest.mark.parametrize(
    ("shuffle", "source"),
    [
        ("bfly.b32 %r2, %r1, 5, 31", LANE ^ 5),
        ("idx.b32 %r2, %r1, 7, 31", 0 * LANE + 7),
        ("down.b32 %r2, %r1, 3, 31", np.where(LANE + 3 < 32, LANE + 3, LANE)),
        ("up.b32 %r2, %r1, 3, 0", np.where(LANE >= 3, LANE - 3, LANE)),
        ("idx.b32 %r2, %r1, 9, 0x181f", LANE // 8 * 8 + 1),  # segments of 8: lane 9 is lane 1
        ("bfly.b32 %r2, %r1, 9, 0x181f", np.where(LANE ^ 9 <= LANE | 7, LANE ^ 9, LANE)),  # a later segment: own value
    ],
)
def test_shuffle(shuffle, source):
    out = run_body(f"ld.global.u32 %r1, [%in]; shfl.sync.{shuffle}, -1; st.global.u32 [%out], %r2;", WORDS)
    np.testing.assert_array_equal(out, WORDS[source])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("setp.lt.s32 %p1, %r1, 0; vote.sync.ballot.b32 %r2, %p1, -1;", NEGATIVE),
        ("setp.lt.s32 %p1, %r1, 0; vote.sync.ballot.b32 %r2, !%p1, -1;", ~NEGATIVE),
        ("setp.ne.u32 %p1, %r0, 7; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;", 0),
        ("setp.eq.u32 %p1, %r0, 7; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;", 1),
        ("redux.sync.add.s32 %r2, %r1, -1;", int(WORDS.astype(np.uint64).sum() % 2**32)),
        ("redux.sync.max.s32 %r2, %r1, -1;", int(WORDS.view(np.int32).max())),
        ("redux.sync.xor.b32 %r2, %r1, -1;", int(np.bitwise_xor.reduce(WORDS))),
        ("activemask.b32 %r2;", 0xFFFFFFFF),
        ("match.all.sync.b32 %r2|%p1, %r1, -1;", 0),
        ("mov.u32 %r2, %ntid.x;", 32),
    ],
)
def test_whole_warp(body, expected):
    out = run_body(f"ld.global.u32 %r1, [%in]; {body} st.global.u32 [%out], %r2;", WORDS)
    np.testing.assert_array_equal(out, np.full(32, expected % 2**32, dtype=np.uint32))


def test_match_any():
    body = "and.b32 %r1, %r0, 3; match.any.sync.b32 %r2, %r1, -1; st.global.u32 [%out], %r2;"
    np.testing.assert_array_equal(run_body(body, WORDS), np.uint32(0x11111111) << (LANE & 3))


@pytest.mark.parametrize(
    ("lane_mask", "expected"), [("eq", 1 << LANE), ("lt", (1 << LANE) - 1), ("ge", ~((1 << LANE) - 1))]
)
def test_lane_masks(lane_mask, expected):
    out = run_body(f"mov.u32 %r1, %lanemask_{lane_mask}; st.global.u32 [%out], %r1;", WORDS)
    np.testing.assert_array_equal(out, expected.astype(np.uint32))


def test_diverging_loop_and_branch_table():
    """Lanes leave a loop at different times and take one of three ways after it."""
    body = """mov.u32 %r1, 0; mov.u32 %r2, 0;
    $loop: setp.ge.u32 %p1, %r1, %r0; @%p1 bra $done; add.u32 %r2, %r2, %r1; add.u32 %r1, %r1, 1; bra $loop;
    $done: rem.u32 %r3, %r0, 3;
    $table: .branchtargets $zero, $one, $two;
    brx.idx %r3, $table;
    $zero: add.u32 %r2, %r2, 1000; bra $end;
    $one: add.u32 %r2, %r2, 2000; bra $end;
    $two: add.u32 %r2, %r2, 3000;
    $end: st.global.u32 [%out], %r2;"""
    expected = LANE * (LANE.astype(np.int64) - 1) // 2 + 1000 * (1 + LANE % 3)
    np.testing.assert_array_equal(run_body(body, WORDS), expected.astype(np.uint32))


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("add.u32", WORDS.astype(np.uint64).sum() % 2**32),
        ("min.s32", int(WORDS.view(np.int32).min()) % 2**32),
        ("max.u32", WORDS.max()),
        ("or.b32", np.bitwise_or.reduce(WORDS)),
        ("exch.b32", WORDS[31]),
    ],
)
@pytest.mark.parametrize("space", ["shared", "global"])
def test_atomics(operation, expected, space):
    """All lanes on one word, which is 0 at first."""
    if space == "shared":
        body = f"""mov.u32 %r3, buffer; setp.eq.u32 %p1, %r0, 0; mov.u32 %r4, 0; @%p1 st.shared.u32 [%r3], %r4;
        bar.warp.sync -1; ld.global.u32 %r1, [%in]; atom.shared.{operation} %r2, [%r3], %r1;
        bar.warp.sync -1; ld.shared.u32 %r2, [%r3];"""
    else:
        opcode = "atom.global.exch.b32 %r2," if "exch" in operation else f"red.global.{operation}"
        body = f"ld.param.u64 %d1, [out]; ld.global.u32 %r1, [%in]; {opcode} [%d1], %r1; ld.global.u32 %r2, [%d1];"
    body += "setp.eq.u32 %p1, %r0, 0; @%p1 st.global.u32 [%out], %r2;"
    assert run_body(body, WORDS, shared=16)[0] == expected


def test_compare_and_swap():
    body = "ld.global.u32 %r1, [%in]; atom.global.cas.b32 %r2, [%out], 0, %r1; atom.global.cas.b32 %r2, [%out], 0, 5;"
    np.testing.assert_array_equal(run_body(body, WORDS), np.where(WORDS == 0, 5, WORDS))


def test_barriers_of_parts_of_a_block():
    """Warps 0 and 1 meet twice at barrier 3, warps 2 and 3 at barrier 4; then all count their odd threads."""
    body = """mov.u32 %r10, buffer; mad.lo.u32 %r11, %r0, 4, %r10; ld.global.u32 %r1, [%in];
    shr.u32 %r2, %r0, 6; add.u32 %r2, %r2, 3; xor.b32 %r3, %r0, 32; mad.lo.u32 %r12, %r3, 4, %r10;
    st.shared.u32 [%r11], %r1; bar.sync %r2, 64; ld.shared.u32 %r4, [%r12]; bar.sync %r2, 64; st.shared.u32 [%r11], %r4;
    and.b32 %r5, %r0, 1; setp.ne.u32 %p1, %r5, 0; bar.red.popc.u32 %r6, 0, %p1;
    xor.b32 %r3, %r0, 64; mad.lo.u32 %r12, %r3, 4, %r10; ld.shared.u32 %r7, [%r12];
    bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 0, %p1; @%p2 add.u32 %r6, %r6, 1000; @%p3 add.u32 %r6, %r6, 100;
    add.u32 %r7, %r7, %r6; st.global.u32 [%out], %r7;"""
    words = np.arange(128, dtype=np.uint32)
    out = run_body(body, words, shared=512, threads=128)
    np.testing.assert_array_equal(out, (words ^ 64 ^ 32) + 64 + 100)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, transposed):
    """The rows lie one after the other; each lane holds two neighbouring elements of each matrix."""
    registers = ", ".join(f"%r{10 + k}" for k in range(count))
    shape, trans = f"x{count}", ".trans" if transposed else ""
    fill = "mov.u32 %r1, buffer; mad.lo.u32 %r2, %r0, 16, %r1; ld.param.u64 %d1, [in]; mad.wide.u32 %d1, %r0, 16, %d1;"
    move = (
        "ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%d1]; st.shared.v4.b32 [%r2], {%r3, %r4, %r5, %r6}; bar.warp.sync -1;"
    )
    take = f"ldmatrix.sync.aligned.m8n8.{shape}{trans}.shared.b16 {{{registers}}}, [%r2];"
    matrices = np.random.default_rng(0).integers(0, 2**16, (4, 8, 8), dtype=np.uint16)
    for k in range(count):
        out = run_body(f"{fill}{move}{take} st.global.b32 [%out], %r{10 + k};", matrices, shared=512)
        expected = matrices[k].T if transposed else matrices[k]
        np.testing.assert_array_equal(out.view(np.uint16).reshape(8, 8), expected)


def test_movmatrix_and_stmatrix():
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    body = """ld.global.b32 %r1, [%in]; movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;
    mov.u32 %r3, buffer; mad.lo.u32 %r4, %r0, 16, %r3; mad.lo.u32 %r5, %r0, 4, %r3;
    stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4], {%r2}; bar.warp.sync -1;
    ld.shared.b32 %r6, [%r5]; st.global.b32 [%out], %r6;"""
    np.testing.assert_array_equal(run_body(body, matrix, shared=128).view(np.uint16).reshape(8, 8), matrix.T)


def fragment_words(matrix, positions):
    """Per register and lane, the word that holds matrix[positions(register, lane)], of one or two elements."""
    words = np.empty((len(positions), 32), dtype=np.uint32)
    for r, position in enumerate(positions):
        for lane in range(32):
            row, column, step = position(lane // 4, lane % 4)
            elements = [matrix[row + i * step[0], column + i * step[1]] for i in range(4 // matrix.itemsize)]
            words[r, lane] = np.array(elements).view(np.uint32)[0]
    return words


SHAPES = {"bf16": ("m16n8k16", "m16n8k8"), "f16": ("m16n8k16", "m16n8k8"), "tf32": ("m16n8k8", "m16n8k4")}


@pytest.mark.parametrize(("shape", "kind"), [(shape, kind) for kind, shapes in SHAPES.items() for shape in shapes])
def test_mma(shape, kind):
    """D = A B + C with the fragments laid out as the PTX manual draws them."""
    depth, per = int(shape[6:]), 1 if kind == "tf32" else 2
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(size).astype(np.float32) for size in ((16, depth), (depth, 8), (16, 8)))
    if kind == "tf32":
        a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b))
    stored = {"bf16": to_bf16, "f16": np.float16, "tf32": np.float32}[kind]
    seen = {"bf16": lambda x: from_bf16(to_bf16(x)), "f16": lambda x: x.astype(np.float16), "tf32": lambda x: x}[kind]
    halves_of_k = depth // (4 * per)
    in_a = [lambda g, t, r=r: (g + 8 * (r % 2), per * t + 4 * per * (r // 2), (0, 1)) for r in range(2 * halves_of_k)]
    in_b = [lambda g, t, r=r: (per * t + 4 * per * r, g, (1, 0)) for r in range(halves_of_k)]
    in_c = [lambda g, t, r=r: (g + 8 * (r // 2), 2 * t + r % 2, (0, 1)) for r in range(4)]
    words = np.concatenate([fragment_words(stored(a), in_a), fragment_words(stored(b), in_b), fragment_words(c, in_c)])
    names = [f"%r{1 + i}" for i in range(len(words))]
    loads = " ".join(f"ld.global.b32 {name}, [%in+{128 * i}];" for i, name in enumerate(names))
    first_b, first_c = 2 * halves_of_k, 3 * halves_of_k
    groups = [["%r20", "%r21", "%r22", "%r23"], names[:first_b], names[first_b:first_c], names[first_c:]]
    listed = ", ".join("{" + ", ".join(group) + "}" for group in groups)
    product = f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {listed};"
    expected = seen(a).astype(np.float64) @ seen(b).astype(np.float64) + c
    for r in range(4):
        out = run_body(f"{loads} {product} st.global.b32 [%out], %r{20 + r};", words, result=np.float32)
        wanted = [expected[lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2] for lane in range(32)]
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "bytes_copied"), [("16", 16), ("16, 12", 12), ("16, 0", 0), ("8", 8), ("8, 4", 4), ("4", 4)]
)
def test_cp_async_fills_with_zeros(size, bytes_copied):
    cache = "cg" if size.startswith("16") else "ca"
    body = f"""mov.u32 %r1, buffer; ld.param.u64 %d1, [in]; setp.eq.u32 %p1, %r0, 0;
    @%p1 cp.async.{cache}.shared.global.L2::128B [%r1], [%d1], {size};
    cp.async.commit_group; cp.async.wait_group 0; bar.warp.sync -1;
    mad.lo.u32 %r2, %r0, 4, %r1; mov.u32 %r3, 7; setp.lt.u32 %p2, %r0, {int(size.split(",")[0]) // 4};
    @%p2 ld.shared.u32 %r3, [%r2]; st.global.u32 [%out], %r3;"""
    expected = np.full(32, 7, dtype=np.uint32)
    expected[: int(size.split(",")[0]) // 4] = 0
    expected[: bytes_copied // 4] = WORDS[: bytes_copied // 4]
    np.testing.assert_array_equal(run_body(body, WORDS, shared=16), expected)


def test_loads_extend_and_stores_truncate():
    """Registers may be wider than what is loaded and stored."""
    body = """ld.global.s8 %r1, [%in]; ld.global.u8 %r2, [%in+1]; ld.global.s16 %d1, [%in+2]; st.global.u8 [%out], %d1;
    st.global.u8 [%out+1], %r1; cvt.u16.u32 %h1, %r2; st.global.u16 [%out+2], %h1;"""
    parts = WORDS.view(np.uint8).reshape(32, 4)
    out = run_body(body, WORDS).view(np.uint8).reshape(32, 4)
    np.testing.assert_array_equal(out, np.stack([parts[:, 2], parts[:, 0], parts[:, 1], 0 * parts[:, 1]], axis=1))
