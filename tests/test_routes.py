"""A call of attention goes straight to the operator, past checks that it needs none of, or through all of them. Which
way it goes must not show: not in results, random numbers or errors."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mha_ext
from mha_ext import composition

twin = mha_ext.scaled_dot_product_attention


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def outcome(call):
    """Everything that a call gives: results or an error, and where it leaves torch's generator."""
    torch.manual_seed(0)
    try:
        results = call()
    except Exception as error:
        results = type(error), str(error)
    return results, torch.get_rng_state()


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


TRIL = torch.ones(3, 3).tril()
INPUTS = {
    "4-D": (randn(2, 4, 3, 8),) * 3,
    "3-D": (randn(2, 3, 8),) * 3,
    "2-D": (randn(3, 8),) * 3,
    "5-D": (randn(2, 2, 4, 3, 8),) * 3,
    "bfloat16": (randn(2, 4, 3, 8, dtype=torch.bfloat16),) * 3,
    "keys": (randn(2, 4, 3, 8), randn(2, 4, 3, 8) + 1, randn(2, 4, 3, 6)),
    "grouped": (randn(2, 4, 3, 8), randn(2, 2, 3, 8), randn(2, 2, 3, 8)),
    "grouped differently": (randn(2, 4, 3, 8), randn(2, 2, 3, 8), randn(2, 1, 3, 8)),
    "broadcast batch": (randn(2, 4, 3, 8), randn(1, 4, 3, 8), randn(1, 4, 3, 8)),
    "value's own batch": (randn(1, 4, 3, 8), randn(1, 4, 3, 8), randn(2, 4, 3, 8)),
    "no queries": (randn(2, 4, 0, 8), randn(2, 4, 3, 8), randn(2, 4, 3, 8)),
    "wrong length": (randn(2, 4, 3, 8), randn(2, 4, 3, 8), randn(2, 4, 5, 8)),
    "wrong size": (randn(2, 4, 3, 8), randn(2, 4, 3, 6), randn(2, 4, 3, 8)),
    "wrong heads": (randn(2, 4, 3, 8), randn(2, 3, 3, 8), randn(2, 3, 3, 8)),
    "wrong dtype": (randn(2, 4, 3, 8), randn(2, 4, 3, 8).double(), randn(2, 4, 3, 8)),
    "sparse": (randn(3, 8).to_sparse_csr(),) * 3,
    "integers": (torch.ones(2, 4, 3, 8, dtype=torch.int64),) * 3,
    "unknown to the stable ABI": (torch.empty(2, 4, 3, 8, dtype=torch.uint4),) * 3,
    "no tensor": (randn(2, 4, 3, 8), None, randn(2, 4, 3, 8)),
}
OPTIONS = {
    "none": {},
    "causal": {"is_causal": True},
    "wrong flag": {"is_causal": 1},
    "mask": {"mask": TRIL},
    "no dropout": {"dropout": 0.0},
    "dropout": {"dropout": 0.5},
    "evaluation": {"dropout": torch.nn.Dropout(0.5).eval()},
    "dropout and mask": {"dropout": 0.5, "mask": TRIL.bool()},
    "wrong mask": {"dropout": 0.5, "mask": torch.ones(7, 7)},
    "callable": {"dropout": lambda weights: 2 * weights},
    "scale": {"scale": 2},
    "wrong generator": {"generator": 3},
}


@pytest.mark.core
@pytest.mark.parametrize("enable_gqa", [False, True, 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_every_way_is_the_same(inputs, options, enable_gqa, monkeypatch):
    def call():
        return mha_ext.attention(*inputs, enable_gqa=enable_gqa, **options)

    way_found = outcome(call)
    monkeypatch.setattr(composition, "_plain_attention", lambda *arguments: None)
    fit = outcome(call)
    monkeypatch.setattr(composition, "_fit_as_they_are", lambda *arguments: False)
    checked = outcome(call)
    assert same(way_found, checked), (way_found, checked)
    assert same(fit, checked), (fit, checked)


@pytest.mark.parametrize("broken", ["query", "key", "value"])
@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn], ids=["sparse", "mkldnn"])
def test_the_twin_names_what_is_not_dense(broken, change):
    inputs = {name: randn(2, 4, 3, 8) for name in ("query", "key", "value")}
    inputs[broken] = change(inputs[broken])
    with pytest.raises(NotImplementedError, match=f"^{broken} must be a dense "):
        twin(**inputs)


def test_the_twin_has_heads_first_in_3d_with_grouped_heads():
    query, key = randn(3, 2, 4).transpose(0, 1), randn(1, 2, 4)
    for heads in (query, key):
        torch.manual_seed(0)
        three = twin(query, heads, heads, dropout_p=0.5, enable_gqa=True)
        torch.manual_seed(0)
        four = twin(query[None], heads[None], heads[None], dropout_p=0.5, enable_gqa=True)[0]
        assert same(three, four)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fake_tensors_of_other_devices_and_layouts_are_refused(options):
    with FakeTensorMode(allow_non_fake_inputs=True):
        elsewhere = torch.empty(2, 4, 3, 8, device="xpu")  # of which torch knows, and which has no kernels in any build
        sparse = torch.empty(2, 4, 3, 8, layout=torch.sparse_coo)
        refusal = f"query is on device xpu:0, but mha_ext has kernels for {mha_ext.ops.KERNELS}"
        with pytest.raises(NotImplementedError, match=re.escape(refusal)):
            mha_ext.attention(elsewhere, elsewhere, elsewhere, **options)
        with pytest.raises(NotImplementedError, match="query must be a dense "):
            mha_ext.attention(sparse, sparse, sparse, **options)


def test_what_a_dispatch_mode_raises_arrives_and_is_raised_once():
    class Refusing(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is mha_ext.ops.fused_attention:
                self.calls += 1
                raise ValueError(f"call {self.calls}")
            return function(*args, **(kwargs or {}))

    x = randn(2, 4, 3, 8)
    with Refusing(), pytest.raises(ValueError, match=r"^call 1$"):
        mha_ext.attention(x, x, x)


@pytest.mark.parametrize(
    "options",
    [{"mask": torch.ones(3, 3)}, {"key_lengths": torch.tensor([2, 3])}, {"causal_offset": torch.tensor([0, 1])}],
)
def test_compiled_with_symbolic_sizes_and_constant_options(options):
    query = randn(2, 4, 3, 8)
    compiled = torch.compile(
        lambda q: mha_ext.attention(q, q, q, **options)[0], dynamic=True, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(query), mha_ext.attention(query, query, query, **options)[0])
