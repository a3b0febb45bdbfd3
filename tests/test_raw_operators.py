"""Whatever is passed to torch.ops.mha_ext.* raises: no crash, no abort, nothing written before."""

import math

import operators
import oracle
import pytest
import torch

from mha_ext import reference

pytestmark = pytest.mark.usefixtures("isa")

BAD_TENSORS = {
    "rank_0": lambda x: x.flatten()[:1].reshape(()),
    "rank_1": lambda x: x.flatten(),
    "rank_2": lambda x: x.reshape(x.shape[0], -1),
    "rank_20": lambda x: x.reshape(*[1] * (20 - x.dim()), *x.shape),
    "one_row_more": lambda x: torch.cat([x, x.narrow(-2, 0, 1)], -2) if x.dim() > 1 else torch.cat([x, x]),
    "one_column_more": lambda x: torch.cat([x, x.narrow(-1, 0, 1)], -1),
    "three_heads": lambda x: x.repeat_interleave(3, 1) if x.dim() > 1 else x.repeat(3),
    "batch_of_3": lambda x: torch.cat([x, x[:1]]),
    "empty": lambda x: x.new_empty(0),
    "other_dtype": lambda x: x.to(torch.int16),
    "complex": lambda x: x.to(torch.complex64),
    "float8": lambda x: x.float().to(torch.float8_e4m3fn),
    "double": lambda x: x.double(),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
}
ANY_RANK = ("rank_0", "rank_1", "empty", "other_dtype", "complex", "float8", "double", "meta")  # the seed too
BAD_NUMBERS = (-(2**63), -1, 2**62, 2**63 - 1, float("nan"), float("inf"), [-9], [9], [0, 0], [])
ANY_SIZE = {"batch_of_3", "one_row_more", "one_column_more", "three_heads", "double"}
# What a spoilt argument may be and still fit; everything else must raise. For example, more keys than the sample has
# are only a longer call, and twelve query heads share two key heads as well as four do.
FITS = {
    ("attention_scores", "query"): {"one_row_more", "three_heads"},
    ("attention_scores", "key"): {"one_row_more"},
    ("weighted_sum", "weights"): {"one_row_more", "three_heads"},
    ("weighted_sum", "value"): {"one_column_more"},
    ("weighted_sum_over_queries", "weights"): {"one_column_more"},
    ("weighted_sum_over_queries", "x"): {"one_column_more"},
    ("masked_softmax", "bias"): {"batch_of_3"},  # of one entry, so it becomes one of two
    ("masked_softmax", "sinks"): {"batch_of_3", "one_row_more", "rank_2"},
    ("masked_softmax", "key_lengths"): {"rank_2"},
    ("masked_softmax", "causal_offsets"): {"rank_2"},
    ("masked_softmax_backward", "key_lengths"): {"rank_2"},
    ("masked_softmax_backward", "causal_offsets"): {"rank_2"},
    ("fused_attention", "query"): {"one_row_more", "three_heads"},
    ("fused_attention", "value"): {"one_column_more"},
    **{
        (operator, parameter): fits
        for operator in ("fused_attention", "fused_attention_backward")
        for parameter, fits in (
            ("bias", {"batch_of_3"}),
            ("sinks", {"batch_of_3", "one_row_more", "rank_2"}),
            ("key_lengths", {"rank_2"}),
            ("causal_offsets", {"rank_2"}),
            ("seed", {"rank_0", "rank_1"}),
        )
    },
    ("sum_over", "x"): {*ANY_SIZE, "rank_1", "rank_2", "empty"},
    ("dropout", "weights"): ANY_SIZE,
    ("dropout", "seed"): {"rank_0", "rank_1"},
    ("keep_mask", "mask"): {*ANY_SIZE, "rank_0", "rank_1", "rank_2", "empty", "other_dtype"},
}
HARMLESS = (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError)


def error_of(op, arguments):
    """The exception that the call raises, or None. Anything that is not an ordinary exception ends the test run."""
    try:
        op(*arguments)
    except HARMLESS as error:
        return error
    return None


def attention_by_reference(q, k, v, scale, mask_value, right, need_weights, _, *options):
    """Output and weights by the three steps of reference.py."""
    options, average = options[:10] or (*[None] * 6, 2**63 - 1, 0, 0, 0), any(options[10:])
    bias, sinks, mask, lengths, offsets, seed, left, offset, softcap, p = options
    scores = reference.attention_scores(q, k, scale)
    weights, _ = reference.masked_softmax(
        scores, bias, sinks, mask, lengths, offsets, left, right, offset, softcap, mask_value
    )
    if p:
        weights = weights * oracle.keep_mask(int(seed), p, tuple(weights.shape)) / (1 - p)
    output = reference.weighted_sum(weights, v)
    return output, (weights.mean(-3, keepdim=True) if average else weights) if need_weights else None


def gradients_by_reference(grad_output, q, k, v, output, row_max, row_sum, scale, mask_value, right, *rest):
    """The gradients that are wanted, by autograd; that of the sinks for each of them, not for each row."""
    wanted, (grad_weights, _, *options) = (*rest[:4], True), rest[4:] or (None, None)
    bias, sinks, *others = options or (None,) * 2
    leaves = [None if x is None else x.detach().requires_grad_() for x in (q, k, v, bias, sinks)]
    results = attention_by_reference(*leaves[:3], scale, mask_value, right, True, True, *leaves[3:], *others)
    loss = (results[0] * grad_output).sum()
    if grad_weights is not None:
        loss = loss + (results[1] * grad_weights).sum()
    asked = [x if want else None for x, want in zip(leaves, wanted, strict=True)]
    grads = iter(torch.autograd.grad(loss, [x for x in asked if x is not None]))
    return tuple(None if x is None else next(grads) for x in asked)


def right_answer(name, arguments):
    """The operator in plain torch and float64 (dropout: from the oracle's bits)."""
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    if name == "keep_mask":
        return (arguments[0] != 0,)
    if name == "sum_over":
        return (wide[0].sum(wide[1], keepdim=True),)
    if name == "dropout":
        weights, seed, p = wide
        kept = oracle.keep_mask(int(seed), p, tuple(weights.shape))
        return (torch.where(kept, weights / (1 - p) if p < 1 else 0.0, 0.0),)
    if name == "fused_attention":
        return attention_by_reference(*wide)
    if name == "fused_attention_backward":
        return gradients_by_reference(*wide)
    results = getattr(reference, name)(*wide)
    return results if isinstance(results, tuple) else (results,)


def assert_right(results, name, arguments, about):
    """Each number is off by at most one unit of the largest for each number that went in: no stray memory got in."""
    terms = sum(a.numel() for a in arguments if isinstance(a, torch.Tensor))
    results = results[:2] if name == "fused_attention" else results  # row max and row sum are the backward's business
    if name == "fused_attention_backward" and results[4] is not None:
        results = (*results[:4], results[4].sum(-1).sum_to_size(arguments[17].shape))
    for got, want in zip(results, right_answer(name, arguments), strict=True):
        if want is None:
            assert got is None, about
            continue
        assert got.shape == want.shape, about
        if got.dtype == torch.bool:
            assert torch.equal(got, want), about
        elif got.numel():
            allowed = torch.finfo(got.dtype).eps * terms * max(want.abs().max().item(), 1.0)
            assert ((got.double() - want).abs() <= allowed).all(), f"{about}\n got {got}\nwant {want}"


def may_fit(name, sample, n, how):
    """FITS, less what the rest of the sample rules out: other tensors of the old size, sums over missing dimensions."""
    if name == "masked_softmax" and n == 0:
        return how in ANY_SIZE and sample[1] is None
    if name == "fused_attention" and n == 0 and len(sample) > 8 and sample[8] is not None:  # a bias of as many heads
        return False
    if name == "sum_over" and how in ("rank_1", "rank_2", "empty"):
        return max(sample[1]) < {"rank_1": 1, "empty": 1, "rank_2": 2}[how]
    parameter = getattr(torch.ops.mha_ext, name).default._schema.arguments[n].name
    return how in FITS.get((name, parameter), ())


def assert_no_real_result(op, arguments, about):
    """With an argument on the meta device: an error or results there, but no memory that nobody has written."""
    try:
        results = op(*arguments)
    except HARMLESS:
        return
    results = results if isinstance(results, tuple) else (results,)
    assert results[0] is not None, about
    assert all(r is None or r.is_meta for r in results), about


@pytest.mark.parametrize("how", BAD_TENSORS)
@pytest.mark.parametrize("name", operators.names())
def test_bad_tensors(name, how):
    """Each tensor argument in turn: an error with a text and nothing written, or, where it fits, the right answer."""
    op = getattr(torch.ops.mha_ext, name)
    for sample in operators.samples(operators.SHAPES["usual"], "contiguous")[name]:
        for n, x in enumerate(sample):
            if not isinstance(x, torch.Tensor) or (x.dim() == 0 and how not in ANY_RANK):
                continue
            arguments = (*sample[:n], BAD_TENSORS[how](x.clone()), *sample[n + 1 :])
            about = f"{name}, argument {n}, {how}"
            others = [a for m, a in enumerate(sample) if m != n and isinstance(a, torch.Tensor)]
            before = [a.clone() for a in others]
            if how == "meta":
                assert_no_real_result(op, arguments, about)
            elif may_fit(name, sample, n, how):
                results = op(*arguments)
                assert_right(results if isinstance(results, tuple) else (results,), name, arguments, about)
            else:
                error = error_of(op, arguments)
                assert error is not None, f"{about} was taken"
                assert str(error), f"{about}: an error without a text"
            unchanged = [torch.equal(was, now) for was, now in zip(before, others, strict=True)]
            assert all(unchanged), f"{about}: another argument was written to"


@pytest.mark.parametrize("name", operators.names())
def test_bad_numbers(name):
    """Numbers out of all proportion and lists of dimensions that do not exist."""
    op = getattr(torch.ops.mha_ext, name)
    for arguments in operators.samples(operators.SHAPES["usual"], "contiguous")[name]:
        for n, x in enumerate(arguments):
            if isinstance(x, torch.Tensor) or x is None:
                continue
            for bad in BAD_NUMBERS:
                error = error_of(op, (*arguments[:n], bad, *arguments[n + 1 :]))
                assert error is None or str(error), f"argument {n} = {bad}: an error without a text"
                if isinstance(bad, list) and not isinstance(x, list):
                    assert error is not None, f"argument {n}: a list was taken for a number"


@pytest.mark.parametrize("how", ["one_row_more", "one_column_more", "batch_of_3", "complex", "double", "rank_20"])
def test_mismatch_is_a_value_error_of_ours(how):
    """Key against query: the library's own check speaks, not an assertion deep inside."""
    query, key, scale = operators.samples(operators.SHAPES["usual"], "contiguous")["attention_scores"][0]
    if how == "one_row_more":  # more keys are fine; a query must not care
        assert torch.ops.mha_ext.attention_scores(query, BAD_TENSORS[how](key), scale).shape[-1] == 8
        return
    with pytest.raises(ValueError, match=r"^mha_ext: key "):
        torch.ops.mha_ext.attention_scores(query, BAD_TENSORS[how](key), scale)


WHOLE_TEXTS = {
    "dims": (
        ("attention_scores", torch.zeros(2, 3), torch.zeros(2, 3), 1.0),
        "mha_ext: query must have shape (*, heads, rows, columns), got (2, 3)",
    ),
    "size": (
        ("attention_scores", torch.zeros(1, 2, 3), torch.zeros(1, 2, 4), 1.0),
        "mha_ext: key must have size 3 in dimension 2, got shape (1, 2, 4)",
    ),
    "heads": (
        ("weighted_sum", torch.zeros(3, 2, 4), torch.zeros(2, 4, 5), 1.0),
        "mha_ext: value must have a number of heads that divides 3, got 2 in shape (2, 4, 5)",
    ),
    "p": (("dropout", torch.zeros(1, 2, 4), torch.tensor(1), 1.5), "mha_ext: p must lie in [0, 1], got 1.5"),
    "p_nan": (
        ("dropout", torch.zeros(1, 2, 4), torch.tensor(1), float("nan")),
        "mha_ext: p must lie in [0, 1], got nan",
    ),
    "seed": (
        ("dropout", torch.zeros(1, 2, 4), torch.tensor([1, 2]), 0.5),
        "mha_ext: seed must hold one number, got shape (2)",
    ),
    "kv_heads": (
        ("weighted_sum_over_queries", torch.zeros(3, 2, 4), torch.zeros(3, 2, 5), 2, 1.0),
        "mha_ext: kv_heads must have a number of heads that divides 3, got 2 in shape (3, 2, 4)",
    ),
    "no_kv_heads": (
        ("weighted_sum_over_queries", torch.zeros(3, 2, 4), torch.zeros(3, 2, 5), -1, 1.0),
        "mha_ext: kv_heads must not be negative, got -1",
    ),
}


@pytest.mark.parametrize(("call", "text"), WHOLE_TEXTS.values(), ids=WHOLE_TEXTS)
def test_whole_text(call, text):
    name, *arguments = call
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole text is compared)
        getattr(torch.ops.mha_ext, name)(*arguments)
    assert str(caught.value) == text


def test_out_must_fit():
    query, key, scale = operators.samples(operators.SHAPES["usual"], "contiguous")["attention_scores"][0]
    right = torch.full((2, 4, 5, 7), 9.0)
    for wrong in (
        right[..., :6],
        right[:1],
        right.double(),
        right.transpose(-1, -2).contiguous().transpose(-1, -2),
        right[0],
    ):
        with pytest.raises(ValueError, match=r"^mha_ext: out "):
            torch.ops.mha_ext.attention_scores_out(query, key, scale, wrong)
        assert (wrong == 9).all()
    assert torch.ops.mha_ext.attention_scores_out(query, key, scale, right) is None
    assert torch.equal(right, torch.ops.mha_ext.attention_scores(query, key, scale))


@pytest.mark.parametrize(("rows", "columns"), [(9, 2**58), (2**58, 9), (9, 2**21)])
def test_sizes_whose_products_overflow(rows, columns):
    """Views of one element, with strides of 0."""
    x = torch.zeros(1).expand(1, 1, rows, columns)
    with pytest.raises(ValueError, match="must have at most"):
        torch.ops.mha_ext.fused_attention(x, x, x, 1.0, -torch.inf, 2**63 - 1, False, False)


def test_nothing_to_write_takes_no_time():
    """Many queries, no element of the head."""
    query, key = torch.zeros(1).expand(1, 1, 2**36, 0), torch.zeros(1, 1, 2, 0)
    output, *_ = torch.ops.mha_ext.fused_attention(query, key, key, 1.0, -torch.inf, 2**63 - 1, False, False)
    assert output.shape == query.shape


@pytest.mark.parametrize(
    ("softcap", "mask_value", "message"),
    [
        (-1.0, None, "softcap"),
        (math.nan, None, "softcap"),
        (0.0, math.nan, "mask_value"),
        (0.0, math.inf, "mask_value"),
    ],
)
def test_numbers_of_the_softmax_are_checked_in_both_directions(softcap, mask_value, message):
    scores, unbounded = torch.rand(1, 1, 3, 4), 2**63 - 1
    numbers = (None, None, None, unbounded, unbounded, 0, softcap, mask_value)
    with pytest.raises(ValueError, match=f"{message} must be"):
        torch.ops.mha_ext.masked_softmax(scores, None, None, *numbers)
    with pytest.raises(ValueError, match=f"{message} must be"):
        torch.ops.mha_ext.masked_softmax_backward(scores, scores, None, None, scores, *numbers, False)


@pytest.mark.parametrize("name", ["window_left", "window_right", "causal_offset"])
@pytest.mark.parametrize("far", [2**60 + 1, 2**63 - 2, -(2**60) - 1, -(2**63)])
def test_distances_are_those_that_attention_takes(name, far):
    """Sums of longer ones would stop at the ends of 64 bits; 2^63 - 1 is no bound of a window."""
    scores, unbounded = torch.rand(1, 1, 3, 4), 2**63 - 1
    numbers = {"window_left": unbounded, "window_right": unbounded, "causal_offset": 0, name: far}
    with pytest.raises(ValueError, match=rf"{name} must stay within 2\^60, got {far}"):
        torch.ops.mha_ext.masked_softmax(scores, None, None, None, None, None, *numbers.values(), 0.0, -torch.inf)


def test_no_mask_value_is_minus_infinity():
    scores, mask, unbounded = torch.rand(1, 1, 3, 4), torch.rand(1, 1, 3, 4) < 0.5, 2**63 - 1
    results = [
        torch.ops.mha_ext.masked_softmax(scores, None, None, mask, None, None, unbounded, unbounded, 0, 0.0, number)[0]
        for number in (None, -torch.inf)
    ]
    assert torch.equal(*results)
