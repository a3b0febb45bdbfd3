"""The rule for rounding errors (tolerances.py) tested on itself: planted faults fail, honest rounding passes."""

import types

import pytest
import torch
from cases import DTYPES, Case
from compare import Expected
from tolerances import Magnitudes, assert_close

import mha_ext


def small_to_zero(x):
    """Everything below 0.3 % of the largest value is lost."""
    return torch.where(x.abs() < 0.003 * x.abs().max(), 0, x)


def wrong_sign(x):
    """Of one element: the largest one of the column whose values are the smallest."""
    x = x.clone()
    column = x[..., x.abs().amax(dim=(0, 1, 2)).argmin()]
    place = tuple(int(i) for i in torch.unravel_index(column.abs().argmax(), column.shape))
    column[place] = -column[place]
    return x


def swapped_rows(x):
    return x[..., [1, 0, *range(2, x.shape[-2])], :]


def one_nan(x):
    x = x.clone()
    x[..., 3, 1] = torch.nan
    return x


FAULTS = (small_to_zero, wrong_sign, swapped_rows, one_nan)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("result", ["output", "weights"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planted_fault_in_attention(dtype, result, fault):
    """Columns of value shrink by halves, so that small outputs are sums of small terms, not leftovers of large ones."""
    case = Case(dtype=dtype, batch=(1,), lq=9, lk=40, d=4, dv=16, scale=1.0)
    query, key, value, options = case.build()
    tensors = {"query": query, "key": key, "value": value * 0.5 ** torch.arange(16).to(dtype)}
    right = Expected(case, tensors, options, with_grads=False)
    got = dict(zip(("output", "weights"), right.check()[:2], strict=True))[result]
    n = ("output", "weights").index(result)
    spoilt = fault(got)
    assert not torch.equal(spoilt, got), "nothing was planted"
    with pytest.raises(AssertionError, match="worst at"):
        right.same(result, spoilt, right.want[n], right.plain[n])


def product(dtype):
    """(exact, rounded to the dtype) element-wise products: one rounding each, so a unit more must show."""
    a, b = (torch.randn(4, 50, dtype=torch.float64).to(dtype) for _ in range(2))
    return a.double() * b.double(), a * b


def check_product(got, want, plain, dtype):
    case = types.SimpleNamespace(longest_sum=1)
    assert_close(got, want, plain, Magnitudes(want.abs(), want.abs()), dtype=dtype, case=case, name="product")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rounding_passes_and_four_do_not(dtype):
    want, plain = product(dtype)
    check_product(plain, want, plain, dtype)
    with pytest.raises(AssertionError, match="worst at"):
        check_product((want * (1 + 5 * torch.finfo(dtype).eps)).to(dtype), want, plain, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_error_of_plain_torch_excuses_no_other_element(dtype):
    want, plain = product(dtype)
    plain[0, 0] = 100
    got = plain.clone()
    got[1, 1] = -got[1, 1]
    with pytest.raises(AssertionError, match=r"worst at \(1, 1\)"):
        check_product(got, want, plain, dtype)


def test_other_dtype_and_shape():
    want, plain = product(torch.float32)
    for wrong in (plain.double(), plain[:, :1], plain.tolist()):
        with pytest.raises(AssertionError, match="product"):
            check_product(wrong, want, plain, torch.float32)


def test_the_level_is_named_in_the_message():
    want, plain = product(torch.float32)
    with pytest.raises(AssertionError, match=f"ISA {mha_ext.isa()}"):
        check_product(plain + 1, want, plain, torch.float32)
