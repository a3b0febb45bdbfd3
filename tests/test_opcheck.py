"""torch.library.opcheck on every operator and level: schema, fake (shapes, dtypes and strides), and AOT dispatch."""

import operators
import pytest
import torch
from cases import DTYPES, LAYOUTS
from levels import each_level

EVERY_OPERATOR = pytest.mark.parametrize("name", operators.names())
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACE = "test_aot_dispatch_dynamic"  # the same on every level, and 20 times as dear as the others together


def call(name):
    return getattr(torch.ops.mha_ext, name).default


def check(name, sizes, layout, dtype=torch.float32, checks=CHECKS):
    for arguments in operators.samples(operators.SHAPES[sizes], layout, dtype)[name]:
        torch.library.opcheck(call(name), arguments, test_utils=checks, raise_exception=True)


def test_every_operator_has_samples():
    assert set(operators.samples(operators.SHAPES["usual"], "contiguous")) == set(operators.names())


def check_on_every_level(name, sizes, layout, dtype=torch.float32):
    """The trace once, the rest on every level."""
    check(name, sizes, layout, dtype, checks=TRACE)
    for _ in each_level():
        check(name, sizes, layout, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY_OPERATOR
def test_layouts(name, layout):
    check_on_every_level(name, "usual", layout)


@pytest.mark.parametrize("sizes", [s for s in operators.SHAPES if s != "usual"])
@EVERY_OPERATOR
def test_sizes(name, sizes):
    check_on_every_level(name, sizes, "contiguous")


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
@EVERY_OPERATOR
def test_dtypes(name, dtype):
    check_on_every_level(name, "usual", "contiguous", dtype)


@pytest.mark.usefixtures("isa")
@EVERY_OPERATOR
def test_results_on_meta_tensors(name):
    """Shapes, strides and dtypes on the meta device are those of the CPU, for permuted inputs too."""
    for layout in LAYOUTS:
        for arguments in operators.samples(operators.SHAPES["usual"], layout)[name]:
            real = call(name)(*arguments)
            fake = call(name)(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
            for r, f in zip(*((x if isinstance(x, tuple) else (x,)) for x in (real, fake)), strict=True):
                if r is None:
                    assert f is None
                else:
                    assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


def split_names(out):
    return [name for name in operators.names() if name.endswith("_out") == out]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", split_names(out=False))
def test_results_do_not_alias_inputs(name):
    arguments = operators.samples(operators.SHAPES["usual"], "contiguous")[name][0]
    result = call(name)(*arguments)
    results = [r for r in (result if isinstance(result, tuple) else (result,)) if r is not None]
    assert results
    for r in results:
        assert all(r.data_ptr() != a.data_ptr() for a in arguments if isinstance(a, torch.Tensor))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", split_names(out=True))
def test_out_is_all_that_is_written(name):
    """The result stands in `out`, bit for bit that of the operator without it, and no other argument changes."""
    *arguments, out = operators.samples(operators.SHAPES["usual"], "contiguous")[name][0]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    assert call(name)(*arguments, out) is None
    assert torch.equal(out, call(name.removesuffix("_out"))(*arguments))
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True) if isinstance(a, torch.Tensor))
