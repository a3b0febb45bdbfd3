"""Bad input: the type of the error and its whole text. It names the argument, what was expected and what came."""

import pytest
import torch
from cases import Case

import mha_ext

QUERY, KEY, VALUE, _ = Case().build()  # (2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)
SCORES = torch.zeros(2, 2, 5, 7)
twin = mha_ext.scaled_dot_product_attention


def attend(query=QUERY, key=KEY, value=VALUE, **options):
    return mha_ext.attention(query, key, value, **options)


NAMES = ("query", "key", "value")

ADDITIVE = (
    "mha_ext: mask must hold 0 (hidden) and non-zero (may attend), got the negative value {}: "
    "pass an additive mask as bias="
)
# fmt: off
INPUTS = [
    *((f"{n}_not_a_tensor", lambda n=n: attend(**{n: [1.0]}), TypeError,
       f"{n} must be a torch.Tensor, got list") for n in NAMES),
    *((f"{n}_integer", lambda n=n: attend(**{n: torch.zeros(2, 2, 7, 8, dtype=torch.int64)}), TypeError,
       f"{n} must be float64, float32, bfloat16 or float16, got torch.int64") for n in NAMES),
    *((f"{n}_complex", lambda n=n: attend(**{n: torch.zeros(2, 2, 7, 8, dtype=torch.complex64)}), TypeError,
       f"{n} must be float64, float32, bfloat16 or float16, got torch.complex64") for n in NAMES),
    *((f"{n}_sparse", lambda n=n: attend(**{n: torch.zeros(7, 8).to_sparse()}), NotImplementedError,
       f"{n} must be a dense (strided) tensor, got a torch.sparse_coo one") for n in NAMES),
    ("nested", lambda: attend(torch.nested.nested_tensor([KEY[0, 0]], layout=torch.jagged)), NotImplementedError,
     "query must be a dense (strided) tensor, got a nested one"),
    *((f"{n}_mixed_dtype", lambda n=n, x=x: attend(**{n: x.half()}), TypeError,
       f"{n} must have the dtype of query, torch.float32, got torch.float16")
      for n, x in (("key", KEY), ("value", VALUE))),
    *((f"{n}_other_device", lambda n=n, x=x: attend(**{n: x.to("meta")}), ValueError,
       f"{n} must be on the device of query, cpu, got meta") for n, x in (("key", KEY), ("value", VALUE))),
    ("one_dimension", lambda: attend(torch.zeros(8), torch.zeros(8), torch.zeros(8)), ValueError,
     "query must have shape (..., heads, length, size), (batch, length, size) or (length, size), got (8,)"),
    ("zero_dimensions", lambda: attend(torch.zeros(()), torch.zeros(()), torch.zeros(())), ValueError,
     "query must have shape (..., heads, length, size), (batch, length, size) or (length, size), got ()"),
    ("key_dims", lambda: attend(key=KEY[0]), ValueError,
     "key must have as many dimensions as query, 4, got shape (2, 7, 8)"),
    ("value_dims", lambda: attend(value=VALUE[0, 0]), ValueError,
     "value must have as many dimensions as query, 4, got shape (7, 8)"),
    ("head_size", lambda: attend(key=KEY[..., :6]), ValueError,
     "key must have size 8 in dimension -1 (the head size of query), got shape (2, 2, 7, 6)"),
    ("value_length", lambda: attend(value=VALUE[..., :6, :]), ValueError,
     "value must have size 7 in dimension -2 (the number of keys), got shape (2, 2, 6, 8)"),
    ("batch", lambda: attend(torch.zeros(3, 2, 5, 8)), ValueError,
     "the batch dimensions of query and key must broadcast, got shapes query (3, 2, 5, 8), key (2, 2, 7, 8)"),
    ("heads_differ", lambda: attend(torch.zeros(2, 4, 5, 8)), ValueError,
     "key must have the number of heads of query, 4, got 2 (enable_gqa=True lets several query heads share one)"),
    ("heads_do_not_divide", lambda: attend(torch.zeros(2, 3, 5, 8), enable_gqa=True), ValueError,
     "key must have a number of heads that divides query's 3, got 2"),
    ("heads_of_value", lambda: attend(QUERY.repeat(1, 2, 1, 1), KEY, torch.zeros(2, 3, 7, 6), enable_gqa=True),
     ValueError, "value must have a number of heads that divides query's 4, got 3"),
]

MASKS = [
    ("mask_not_a_tensor", lambda: attend(mask=[[True]]), TypeError, "mask must be a torch.Tensor, got list"),
    ("mask_complex", lambda: attend(mask=torch.zeros(5, 7, dtype=torch.complex64)), TypeError,
     "mask must be bool, integer or real floating point, got torch.complex64"),
    ("mask_shape", lambda: attend(mask=torch.ones(4, 7)), ValueError,
     "mask must broadcast to (2, 2, 5, 7), got shape (4, 7)"),
    ("mask_too_many_dims", lambda: attend(mask=torch.ones(1, 2, 2, 5, 7)), ValueError,
     "mask must have at most 4 dimensions like the inputs, got (1, 2, 2, 5, 7)"),
    ("mask_shape_3d", lambda: attend(QUERY[:, 0], KEY[:, 0], VALUE[:, 0], mask=torch.ones(3, 5, 7)), ValueError,
     "mask must broadcast to (2, 5, 7), got shape (3, 5, 7)"),
    ("mask_shape_2d", lambda: attend(QUERY[0, 0], KEY[0, 0], VALUE[0, 0], mask=torch.ones(5, 6)), ValueError,
     "mask must broadcast to (5, 7), got shape (5, 6)"),
    ("mask_per_batch_entry", lambda: attend(torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 7, 8), torch.zeros(2, 4, 7, 8),
                                            mask=torch.ones(2, 5, 7)), ValueError,
     "mask must broadcast to (2, 4, 5, 7), got shape (2, 5, 7); for one mask per batch entry, give it a head "
     "dimension: mask.unsqueeze(1)"),
    ("mask_device", lambda: attend(mask=torch.ones(5, 7, device="meta")), ValueError,
     "mask must be on the device of the inputs, cpu, got meta"),
    *((f"additive_mask_{d}", lambda d=d: attend(mask=torch.full((5, 7), -2.0, dtype=d)), ValueError,
       ADDITIVE.format(-2))
      for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    ("additive_mask_inf", lambda: attend(mask=torch.tensor([[0.0, -torch.inf, 0, 0, 0, 0, 0]])), ValueError,
     ADDITIVE.format("-inf")),
    ("bias_not_a_tensor", lambda: attend(bias=1.0), TypeError, "bias must be a torch.Tensor, got float"),
    ("bias_dtype", lambda: attend(bias=torch.zeros(5, 7).double()), TypeError,
     "bias must have the dtype of query, torch.float32, got torch.float64"),
    ("bias_bool", lambda: attend(bias=torch.ones(5, 7, dtype=torch.bool)), TypeError,
     "bias must be float64, float32, bfloat16 or float16, got torch.bool"),
    ("bias_shape", lambda: attend(bias=torch.zeros(3, 1, 1)), ValueError,
     "bias must broadcast to (2, 2, 5, 7), got shape (3, 1, 1)"),
    ("bias_device", lambda: attend(bias=torch.zeros(5, 7, device="meta")), ValueError,
     "bias must be on the device of query, cpu, got meta"),
]

OPTIONS = [
    ("window_int", lambda: attend(window=3), TypeError, "window must be a pair (left, right) of ints or None, got 3"),
    ("window_one", lambda: attend(window=(3,)), TypeError,
     "window must be a pair (left, right) of ints or None, got (3,)"),
    ("window_float", lambda: attend(window=(1.5, 0)), TypeError,
     "window must be a pair (left, right) of ints or None, got (1.5, 0)"),
    ("window_huge", lambda: attend(window=(2**63, 0)), ValueError,
     "window must stay within 2^60, got (9223372036854775808, 0)"),
    ("offset_float", lambda: attend(causal_offset=1.5), TypeError,
     "causal_offset must be an int, an int tensor or 'lower_right', got float"),
    ("offset_text", lambda: attend(causal_offset="lower_left"), ValueError,
     "causal_offset must be an int, an int tensor or 'lower_right', got 'lower_left'"),
    ("offset_endless", lambda: attend(causal_offset=10**400), ValueError,
     "causal_offset must stay within 2^60, got one of 401 characters"),
    ("offset_huge", lambda: attend(causal_offset=2**63), ValueError,
     "causal_offset must stay within 2^60, got 9223372036854775808"),
    *((f"{n}_float_tensor", lambda n=n: attend(**{n: torch.tensor([1.0, 2.0])}), TypeError,
       f"{n} must be an int tensor (int64, int32, int16, int8 or uint8), got torch.float32")
      for n in ("causal_offset", "key_lengths")),
    *((f"{n}_shape", lambda n=n: attend(**{n: torch.tensor([1, 2, 3])}), ValueError,
       f"{n} must have one entry per batch entry, shape (2,), got (3,)") for n in ("causal_offset", "key_lengths")),
    *((f"{n}_dims", lambda n=n: attend(**{n: torch.ones(2, 1, dtype=torch.int64)}), ValueError,
       f"{n} must have one entry per batch entry, shape (2,), got (2, 1)") for n in ("causal_offset", "key_lengths")),
    *((f"{n}_device", lambda n=n: attend(**{n: torch.ones(2, dtype=torch.int64, device="meta")}), ValueError,
       f"{n} must be on the device of the inputs, cpu, got meta") for n in ("causal_offset", "key_lengths")),
    ("key_lengths_list", lambda: attend(key_lengths=[1, 2]), TypeError, "key_lengths must be an int tensor, got list"),
    ("key_lengths_bool", lambda: attend(key_lengths=torch.ones(2, dtype=torch.bool)), TypeError,
     "key_lengths must be an int tensor (int64, int32, int16, int8 or uint8), got torch.bool"),
    ("scale_text", lambda: attend(scale="1"), TypeError, "scale must be a real number, got str"),
    ("scale_nan", lambda: attend(scale=float("nan")), ValueError, "scale must be finite, got nan"),
    ("softcap_negative", lambda: attend(softcap=-1), ValueError,
     "softcap must be positive and finite, or None, got -1.0"),
    ("softcap_zero", lambda: attend(softcap=0.0), ValueError, "softcap must be positive and finite, or None, got 0.0"),
    ("softcap_tensor", lambda: attend(softcap=torch.tensor(1.0)), TypeError,
     "softcap must be a real number, got Tensor"),
    ("mask_value_nan", lambda: attend(mask_value=float("nan")), ValueError,
     "mask_value must be -inf or finite, got nan"),
    ("mask_value_inf", lambda: attend(mask_value=float("inf")), ValueError,
     "mask_value must be -inf or finite, got inf"),
    ("mask_value_none", lambda: attend(mask_value=None), TypeError, "mask_value must be a real number, got NoneType"),
    ("mask_value_tensor", lambda: attend(mask_value=torch.tensor([1.0, 2.0])), TypeError,
     "mask_value must be a real number, got Tensor"),
    ("mask_value_tensor_of_minus_inf", lambda: attend(mask_value=torch.tensor(float("-inf"))), TypeError,
     "mask_value must be a real number, got Tensor"),
    ("sinks_shape", lambda: attend(sinks=torch.zeros(3)), ValueError,
     "sinks must have shape (2,), one per head, got (3,)"),
    ("sinks_dims", lambda: attend(sinks=torch.zeros(2, 1)), ValueError,
     "sinks must have shape (2,), one per head, got (2, 1)"),
    ("sinks_dtype", lambda: attend(sinks=torch.zeros(2).double()), TypeError,
     "sinks must have the dtype of query, torch.float32, got torch.float64"),
    ("dropout_low", lambda: attend(dropout=-0.1), ValueError, "dropout must lie in [0, 1], got -0.1"),
    ("dropout_high", lambda: attend(dropout=1.5), ValueError, "dropout must lie in [0, 1], got 1.5"),
    ("dropout_nan", lambda: attend(dropout=float("nan")), ValueError, "dropout must lie in [0, 1], got nan"),
    ("dropout_class", lambda: attend(dropout=torch.nn.Dropout), TypeError,
     "dropout must be None, a probability, an nn.Dropout or a callable, got the class Dropout"),
    ("mask_uint1", lambda: attend(mask=torch.empty(5, 7, dtype=torch.uint1)), TypeError,
     "mask must be bool, integer or real floating point, got torch.uint1"),
    ("mask_float8", lambda: attend(mask=torch.zeros(5, 7).to(torch.float8_e4m3fn)), TypeError,
     "mask must be bool, integer or real floating point, got torch.float8_e4m3fn"),
    ("dropout_text", lambda: attend(dropout="0.1"), TypeError,
     "dropout must be None, a probability, an nn.Dropout or a callable, got str"),
    ("generator", lambda: attend(dropout=0.5, generator=3), TypeError,
     "generator must be a torch.Generator or None, got int"),
]

OTHERS = [
    ("scores_query", lambda: mha_ext.attention_scores(3, KEY), TypeError, "query must be a torch.Tensor, got int"),
    ("scores_head_size", lambda: mha_ext.attention_scores(QUERY, KEY[..., :4]), ValueError,
     "key must have size 8 in dimension -1 (the head size of query), got shape (2, 2, 7, 4)"),
    ("softmax_scores", lambda: mha_ext.masked_softmax(None), TypeError, "scores must be a torch.Tensor, got NoneType"),
    ("softmax_vector", lambda: mha_ext.masked_softmax(torch.zeros(3)), ValueError,
     "scores must have shape (..., heads, length, size), (batch, length, size) or (length, size), got (3,)"),
    ("softmax_bias_dtype", lambda: mha_ext.masked_softmax(SCORES, bias=SCORES.half()), TypeError,
     "bias must have the dtype of scores, torch.float32, got torch.float16"),
    ("weighted_sum_value", lambda: mha_ext.weighted_sum(SCORES, QUERY), ValueError,
     "value must have size 7 in dimension -2 (the number of keys in weights), got shape (2, 2, 5, 8)"),
    ("weighted_sum_dtype", lambda: mha_ext.weighted_sum(SCORES, VALUE.double()), TypeError,
     "value must have the dtype of weights, torch.float32, got torch.float64"),
    ("weighted_sum_heads", lambda: mha_ext.weighted_sum(torch.zeros(2, 4, 5, 7), VALUE), ValueError,
     "value must have the number of heads of weights, 4, got 2 (enable_gqa=True lets several query heads share one)"),
    ("twin_mask_integer", lambda: twin(QUERY, KEY, VALUE, torch.ones(5, 7).long()), TypeError,
     "attn_mask must be bool (keep) or floating point (additive), got torch.int64"),
    ("twin_mask_list", lambda: twin(QUERY, KEY, VALUE, [1]), TypeError,
     "attn_mask must be a torch.Tensor, got list"),
    ("twin_mask_shape", lambda: twin(QUERY, KEY, VALUE, torch.zeros(4, 7)), ValueError,
     "attn_mask must broadcast to (2, 2, 5, 7), got shape (4, 7)"),
    ("twin_mask_dtype", lambda: twin(QUERY, KEY, VALUE, torch.zeros(5, 7).double()), TypeError,
     "attn_mask must have the dtype of query, torch.float32, got torch.float64"),
    ("twin_scale_of_two", lambda: twin(QUERY, KEY, VALUE, scale=torch.ones(2)), TypeError,
     "scale must be a real number, got a tensor of torch.float32 and shape (2,)"),
    ("twin_scale_complex", lambda: twin(QUERY, KEY, VALUE, scale=torch.tensor(0.5j)), TypeError,
     "scale must be a real number, got a tensor of torch.complex64 and shape ()"),
    ("twin_dropout", lambda: twin(QUERY, KEY, VALUE, dropout_p=2), ValueError,
     "dropout_p must lie in [0, 1], got 2.0"),
    ("module_heads", lambda: mha_ext.MultiHeadAttention(10, 3), ValueError,
     "d_model must be a positive multiple of n_heads, got 10 and 3"),
    ("module_zero", lambda: mha_ext.MultiHeadAttention(8, 0), ValueError,
     "d_model must be a positive multiple of n_heads, got 8 and 0"),
    ("module_input", lambda: mha_ext.MultiHeadAttention(8, 2)(SCORES[0, :, :3, :6], VALUE[0], VALUE[0]),
     ValueError, "Q must have shape (batch, length, 8), got (2, 3, 6)"),
    ("isa_unknown", lambda: mha_ext.set_isa("mmx"), ValueError,
     f"isa must be one of the levels this machine has ({', '.join(mha_ext.supported_isas())}), got 'mmx'"),
]


# fmt: on
ROWS = INPUTS + MASKS + OPTIONS + OTHERS


@pytest.mark.parametrize(("call", "error", "text"), [pytest.param(*row[1:], id=row[0]) for row in ROWS])
def test_text(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text
    assert type(caught.value) is error


def test_autocast_does_not_hide_a_float64_among_others():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError) as caught:
        attend(key=KEY.double())
    assert str(caught.value) == "key must have the dtype of query, torch.bfloat16, got torch.float64"


def test_module_dropout_out_of_range():
    with pytest.raises(ValueError, match=r"^dropout must lie in \[0, 1\], got 1\.5$"):
        mha_ext.SelfAttention(dropout=1.5)


def test_nothing_is_drawn_before_an_error():
    """A failing call leaves the generator where it was."""
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="mask must broadcast"):
        attend(dropout=0.5, mask=torch.ones(4, 4))
    with pytest.raises(TypeError, match="value must have the dtype"):
        attend(dropout=0.5, value=VALUE.double())
    assert torch.equal(torch.get_rng_state(), before)


SPARSE = {
    "mask": torch.ones(5, 7).to_sparse(),
    "bias": torch.zeros(5, 7).to_sparse(),
    "key_lengths": torch.tensor([1, 2]).to_sparse(),
    "causal_offset": torch.tensor([1, 2]).to_sparse(),
    "sinks": torch.ones(2).to_sparse(),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_options(name):
    with pytest.raises(NotImplementedError, match=rf"^{name} must be a dense"):
        attend(**{name: SPARSE[name]})


@pytest.mark.parametrize("number", [10**400, -(10**400)], ids=("large", "negative"))
@pytest.mark.parametrize("name", ["scale", "softcap", "mask_value", "dropout"])
def test_integers_past_the_range_of_floats(name, number):
    with pytest.raises(ValueError, match=rf"^{name} must "):
        attend(**{name: number})


@pytest.mark.parametrize("place", [0, 1, 2])
def test_module_inputs_that_are_no_tensors(place):
    given = [torch.zeros(1, 3, 8)] * 3
    given[place] = [1]
    with pytest.raises(TypeError, match=rf"^{'QKV'[place]} must be a torch.Tensor, got list$"):
        mha_ext.MultiHeadAttention(8, 2)(*given)
    with pytest.raises(TypeError, match=r"^Q must be a torch.Tensor, got list$"):
        mha_ext.MultiHeadAttention(8, 2)([1], 2, 3)
