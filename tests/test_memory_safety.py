"""Operators look at the memory behind a tensor before they use it, and convert masks of every dtype and layout."""

import operators
import pytest
import torch

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")

TENSOR_OPERATORS = operators.names()


def samples(name):
    return operators.samples(operators.SHAPES["usual"], "contiguous")[name]


def shrunk(x, nbytes):
    """A copy whose storage was cut to ``nbytes`` behind its back."""
    copy = x.clone()
    copy.untyped_storage().resize_(nbytes)
    return copy


@pytest.mark.parametrize("left", ["nothing", "all_but_one_byte"])
@pytest.mark.parametrize("name", TENSOR_OPERATORS)
def test_storage_too_small(name, left):
    """Every tensor argument in turn: an error that names it, and whatever else was passed stays as it was."""
    op = getattr(torch.ops.mha_ext, name)
    names = [a.name for a in op.default._schema.arguments]
    for arguments in samples(name):
        for n, x in enumerate(arguments):
            if not isinstance(x, torch.Tensor):
                continue
            bad = shrunk(x, 0 if left == "nothing" else x.numel() * x.element_size() - 1)
            others = [a for m, a in enumerate(arguments) if m != n and isinstance(a, torch.Tensor)]
            before = [a.clone() for a in others]
            with pytest.raises(ValueError, match=rf"^mha_ext: {names[n]} needs a storage of \d+ bytes"):
                op(*arguments[:n], bad, *arguments[n + 1 :])
            assert all(torch.equal(was, now) for was, now in zip(before, others, strict=True))


def test_storage_text():
    query, key = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 4, 3)
    key.untyped_storage().resize_(47)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole text is compared)
        mha_ext.attention_scores(query, key)
    assert str(caught.value) == "mha_ext: key needs a storage of 48 bytes, but its storage has 47"


def test_storage_counts_from_the_offset_and_by_strides():
    """A view needs its offset and its last element, not its number of elements."""
    base = torch.randn(400)
    view = base.as_strided((1, 1, 2, 4), (0, 0, 100, 3), 50)  # the last element is 50 + 100 + 9
    query, whole = torch.randn(1, 1, 3, 4), view.clone()
    base.untyped_storage().resize_(4 * 160)
    assert torch.equal(mha_ext.attention_scores(query, view), mha_ext.attention_scores(query, whole))
    base.untyped_storage().resize_(4 * 160 - 1)
    with pytest.raises(ValueError, match="key needs a storage of 640 bytes, but its storage has 639"):
        mha_ext.attention_scores(query, view)


def test_empty_tensors_need_no_storage():
    query, key = torch.randn(2, 3, 4), torch.empty(2, 0, 4)
    assert key.untyped_storage().nbytes() == 0
    assert mha_ext.attention_scores(query, key).shape == (2, 3, 0)
    one = torch.randn(1).expand(2, 5, 4)  # 40 elements that are one
    assert mha_ext.attention_scores(query, one).shape == (2, 3, 5)


def out_and_inputs(name):
    """For each input of an ``_out`` operator: arguments where it and out are pieces of one buffer, ``gap`` apart."""
    *inputs, scale, out = samples(name)[0]
    for n, x in enumerate(inputs):
        for gap, shares in ((-1, True), (0, False)):
            buffer = torch.full((x.numel() + out.numel(),), 3.0)
            piece = buffer[: x.numel()].view(x.shape)
            target = buffer[x.numel() + gap :][: out.numel()].view(out.shape)
            yield (*inputs[:n], piece, *inputs[n + 1 :], scale, target), buffer, shares, n


@pytest.mark.parametrize("name", [n for n in TENSOR_OPERATORS if n.endswith("_out")])
def test_out_shares_no_memory_with_an_input(name):
    op, plain = getattr(torch.ops.mha_ext, name), getattr(torch.ops.mha_ext, name.removesuffix("_out"))
    names = [a.name for a in op.default._schema.arguments]
    for arguments, buffer, shares, n in out_and_inputs(name):
        if shares:
            with pytest.raises(
                ValueError, match=rf"^mha_ext: out must not share memory with {names[n]}: the addresses"
            ):
                op(*arguments)
            assert (buffer == 3).all()
        else:
            want = plain(*arguments[:-1])
            op(*arguments)
            assert torch.equal(arguments[-1], want)


MASK_DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float64", "float32", "bfloat16", "float16"),
    )
]
MASK_LAYOUTS = {
    "contiguous": lambda m: m,
    "vector": lambda m: m[0, 0, 0],
    "number": lambda m: m[0, 0, 0, 0],
    "sliced": lambda m: m[..., 3:70],
    "every_second": lambda m: m[..., ::2],
    "transposed": lambda m: m.transpose(-1, -2),
    "permuted": lambda m: m.permute(2, 0, 3, 1),
    "broadcast_rows": lambda m: m[:, :, :1].expand(-1, -1, 33, -1),
    "broadcast_columns": lambda m: m[..., :1].expand(-1, -1, -1, 40),
    "empty": lambda m: m[:, :0],
}


def mask_of(dtype):
    values = torch.randint(0, 3, (2, 5, 41, 97))  # nearly 40000: more than one task
    return values.bool() if dtype == torch.bool else values.to(dtype)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layout", MASK_LAYOUTS)
@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_keep_mask(dtype, layout, threads):
    torch.set_num_threads(threads)
    mask = MASK_LAYOUTS[layout](mask_of(dtype))
    keep = torch.ops.mha_ext.keep_mask(mask)
    assert keep.dtype == torch.bool
    assert keep.is_contiguous()
    assert torch.equal(keep, mask.to(torch.float64) != 0)


@pytest.mark.parametrize("dtype", [d for d in MASK_DTYPES if d.is_floating_point], ids=str)
def test_keep_mask_special_numbers(dtype):
    """-0 is 0 and hides; the smallest subnormal, inf and NaN of either sign are non-zero and not negative, if so."""
    tiny, nan = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, float("nan")
    mask = torch.tensor([0.0, -0.0, tiny, 1.0, float("inf"), nan, -nan], dtype=torch.float64).to(dtype)
    assert torch.ops.mha_ext.keep_mask(mask).tolist() == [False, False, True, True, True, True, True]
    for bad in (-tiny, -1.0, -float("inf")):
        with pytest.raises(ValueError, match="negative value"):
            torch.ops.mha_ext.keep_mask(torch.tensor([1.0, bad], dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", [d for d in MASK_DTYPES if d.is_floating_point], ids=str)
def test_keep_mask_names_the_lowest_of_all_tasks(dtype):
    mask = mask_of(dtype).transpose(-1, -2)
    mask[0, 1, 2, 3], mask[1, 4, 96, 40] = -2.0, -1.0
    with pytest.raises(ValueError, match=r"got the negative value -2: pass an additive mask as bias=$"):
        torch.ops.mha_ext.keep_mask(mask)


def test_negative_integers_are_not_zero():
    assert torch.ops.mha_ext.keep_mask(torch.tensor([-1, 0, 1])).tolist() == [True, False, True]


def test_errors_name_dtypes_as_torch_does():
    matrices = torch.zeros(1, 2, 3)
    for call, text in (
        (
            lambda: torch.ops.mha_ext.attention_scores(matrices, matrices.half(), 1.0),
            "key must have dtype float32 like",
        ),
        (lambda: torch.ops.mha_ext.attention_scores(matrices, matrices.half(), 1.0), "others, got float16"),
        (lambda: torch.ops.mha_ext.sum_over(matrices.int(), [0]), "bfloat16 or float16, got int32"),
        (lambda: torch.ops.mha_ext.keep_mask(matrices.to(torch.complex64)), "floating point, got complex64"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
