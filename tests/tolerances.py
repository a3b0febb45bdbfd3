"""The one rule for rounding errors.

    |got - want| <= 2 * |plain PyTorch in the same dtype - want|  +  floor        for each element by itself

`want` comes from the float64 oracle. The rule is local because an allowance taken from the largest error of a whole
tensor would let its small values go wrong altogether; test_tolerances.py plants such faults. The floor is for elements
where PyTorch happens to be nearly exact: every value that is stored may be off by one unit of its dtype, and a running
sum of n terms by sqrt(n) units of the accumulation dtype for each unit of summed magnitude (rounding errors walk at
random: Higham and Mary, SIAM J. Sci. Comput. 41, 2019). Both magnitudes are computed from the case's own numbers
(magnitudes.py), so no tolerance is picked by hand. Below the normal numbers of the accumulation dtype nothing is
promised: exp may give zero there.
"""

import math

import torch

import mha_ext


def accumulation_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


class Magnitudes:
    """How large the terms are that were stored (`stored`) and that were summed (`summed`) on the way to a result."""

    def __init__(self, stored, summed):
        self.stored, self.summed = stored.detach().double(), summed.detach().double()

    def floor(self, dtype, terms):
        info, acc = torch.finfo(dtype), torch.finfo(accumulation_dtype(dtype))
        underflow = info.smallest_normal * info.eps + acc.smallest_normal
        return info.eps * self.stored + acc.eps * math.sqrt(terms) * self.summed + underflow


def assert_close(got, want, plain, magnitudes, *, dtype, case, name):
    """`got` against the oracle's `want`, allowed twice the error of `plain` (same-dtype PyTorch) plus the floor."""
    about = f"{name}\n  dtype {dtype}, ISA {mha_ext.isa()}\n  case {case}"
    assert isinstance(got, torch.Tensor), f"{about}\n  got {got!r}, wanted a tensor"
    assert got.dtype == dtype, f"{about}\n  got {got.dtype}"
    assert got.shape == want.shape, f"{about}\n  got shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if want.numel() == 0:
        return
    want = want.detach().double()
    plain_error = (plain.detach().double() - want).abs()
    assert torch.isfinite(plain_error).all(), f"{about}\n  plain PyTorch is not finite here: this case can't fail"
    error = (got.detach().double() - want).abs()
    allowed = 2 * plain_error + magnitudes.floor(dtype, case.longest_sum).expand(want.shape)
    excess = torch.where(torch.isnan(error), torch.inf, error - allowed)
    worst = int(excess.argmax())
    if excess.flatten()[worst] > 0:
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape))
        wrong = int((excess > 0).sum())
        raise AssertionError(
            f"{about}\n  worst at {index}: got {got[index].item()!r}, want {want[index].item()!r}\n"
            f"  error {error[index].item():.3e}, allowed {allowed[index].item():.3e} "
            f"(plain PyTorch is off by {plain_error[index].item():.3e}); {wrong} of {want.numel()} values are off"
        )


def assert_rounding_only(got, want, inputs, about="", dtype=torch.float64):
    """Two ways to one number: off by at most one unit of the largest value for each number that went in."""
    got, want = (tuple(x) if isinstance(x, (tuple, list)) else (x,) for x in (got, want))
    terms = sum(x.numel() for x in inputs)
    about = f"{about} (ISA {mha_ext.isa()})"
    for n, (mine, other) in enumerate(zip(got, want, strict=True)):
        assert mine.shape == other.shape, (
            f"{about}: result {n} has shape {tuple(mine.shape)}, want {tuple(other.shape)}"
        )
        assert mine.dtype == dtype, f"{about}: result {n} is {mine.dtype}"
        if mine.numel() == 0:
            continue
        allowed = torch.finfo(dtype).eps * terms * max(other.abs().max().item(), 1.0)
        error = (mine - other).abs().max().item()
        assert error <= allowed, (
            f"{about}: result {n} is off by {error:.3e}, allowed {allowed:.3e}\n got {mine}\nwant {other}"
        )


def assert_same_bits(got, want, about=""):
    """Equal down to the sign of zero and the position of NaNs (payloads aside)."""
    assert got.dtype == want.dtype, f"{about}: {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{about}: {tuple(got.shape)}, want {tuple(want.shape)}"
    same = (got == want) & (torch.signbit(got) == torch.signbit(want)) | (torch.isnan(got) & torch.isnan(want))
    if not bool(same.all()):
        index = tuple(int(i) for i in (~same).nonzero()[0])
        raise AssertionError(
            f"{about}: {int((~same).sum())} of {same.numel()} values differ, first at {index}: "
            f"{got[index].item()!r} is not {want[index].item()!r} (ISA {mha_ext.isa()})"
        )
