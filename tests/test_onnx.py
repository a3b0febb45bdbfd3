"""Export to ONNX's Attention operator: what ONNX Runtime and the standard's reference evaluator make of the graphs."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
from cases import Case
from compare import expected
from multihead import WIDTH, inputs, pair
from test_swap_attention import PADDING, encoder, swapped, x
from tolerances import assert_rounding_only
from torch import nn

import mha_ext

HOW = "pip install 'mha_ext[onnx]'"
pytest.importorskip("onnxscript", reason=f"onnxscript is not installed: {HOW}")
onnx = pytest.importorskip("onnx", reason=f"onnx is not installed: {HOW}")
from onnx.reference import ReferenceEvaluator  # noqa: E402

from mha_ext.integrations.onnx import custom_translation_table  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"), pytest.mark.usefixtures("fresh_compiler")]


def exported(module, args, opset_version=23, **options):
    return torch.onnx.export(
        module, args, dynamo=True, opset_version=opset_version, verbose=False,
        custom_translation_table=custom_translation_table(), **options,
    )  # fmt: skip


def outputs(runtime, program, args):
    """What a runtime makes of the graph, by position."""
    model = program.model_proto
    onnx.checker.check_model(model, full_check=True)
    feeds = {i.name: x.detach().numpy() for i, x in zip(model.graph.input, args, strict=True)}
    if runtime == "reference":
        made = ReferenceEvaluator(model).run(None, feeds)
    else:
        ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install onnxruntime")
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        made = session.run(None, feeds)
    return tuple(torch.from_numpy(np.asarray(y)) for y in made)


def operators(program):
    return [node.op_type for node in program.model.graph]


def of_attention(program):
    """The inputs and attributes of the graph's one Attention."""
    (node,) = [node for node in program.model.graph if node.op_type == "Attention"]
    assert node.domain == ""
    return node, {name: attribute.value for name, attribute in node.attributes.items()}


class Call(nn.Module):
    """attention() in somebody's module. Tensors among the options become the graph's inputs."""

    def __init__(self, options, need_weights=True):
        super().__init__()
        self.tensors = [name for name, value in options.items() if torch.is_tensor(value)]
        self.numbers = {name: value for name, value in options.items() if name not in self.tensors}
        self.need_weights = need_weights

    def forward(self, query, key, value, *tensors):
        output, weights = mha_ext.attention(
            query, key, value, **dict(zip(self.tensors, tensors, strict=True)), **self.numbers,
            need_weights=self.need_weights,
        )  # fmt: skip
        return (output, weights) if self.need_weights else (output,)


def built(case):
    query, key, value, options = case.build()
    return (query, key, value, *(o for o in options.values() if torch.is_tensor(o))), options


@functools.lru_cache
def program_of(case):
    args, options = built(case)
    return exported(Call(options).eval(), args)


CASES = [
    Case(),
    Case(lq=7, is_causal=True),
    Case(is_causal=True),
    Case(lq=7, lk=5, is_causal=True),
    Case(is_causal=True, causal_offset="lower_right"),
    Case(is_causal=True, causal_offset=-2),
    Case(is_causal=True, causal_offset="lower_right", key_lengths=True),
    Case(is_causal=True, causal_offset="tensor", window=(2, None)),
    Case(window=(1, 2)),
    Case(window=(None, 1), mask="per_key"),
    Case(key_lengths=True),
    Case(key_lengths=True, bias="heads", is_causal=True),
    *(Case(mask=mask) for mask in ("full", "per_key", "per_query", "shared", "float", "int64", "one")),
    *(Case(bias=bias) for bias in ("full", "heads", "per_key", "per_query", "one")),
    Case(mask="full", bias="full", softcap=2.0),
    Case(lq=7, mask="full", is_causal=True, softcap=0.5),
    Case(heads=6, kv_heads=2, dv=5, mask="shared"),
    Case(heads=4, kv_heads=1, lq=1, key_lengths=True),
    *(Case(scale=scale, bias="full") for scale in (0.25, 0.0, -0.5)),
    Case(sinks=True),
    Case(sinks=True, window=(2, 0)),
    Case(sinks=True, mask="full", key_lengths=True, softcap=2.0),
    Case(sinks=True, bias="per_key", lq=7, is_causal=True, heads=4, kv_heads=2),
    Case(batch=(), heads=None),
    Case(heads=None, mask="full"),
]


@pytest.mark.parametrize("runtime", ["onnxruntime", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option(case, runtime):
    """Output and weights, rows that see nothing included, by the tolerance rule."""
    right = expected(case)
    for n, (name, got) in enumerate(
        zip(("output", "weights"), outputs(runtime, program_of(case), built(case)[0]), strict=True)
    ):
        right.same(name, got, right.want[n], right.plain[n])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes(dtype):
    """float64 by the reference evaluator alone: ONNX Runtime's Attention works in float32 there."""
    case = Case(dtype=dtype, d=5, mask="full", bias="heads", is_causal=True, sinks=True)
    right = expected(case)
    for runtime in ("reference",) if dtype == torch.float64 else ("reference", "onnxruntime"):
        got = outputs(runtime, program_of(case), built(case)[0])
        for n, name in enumerate(("output", "weights")):
            right.same(name, got[n], right.want[n], right.plain[n])


@pytest.mark.parametrize("opset", [23, 24])
def test_the_operator_says_it_where_it_can(opset):
    """No mask is made for causality, and the attributes are those that were asked for."""
    args, options = built(Case(lq=7, is_causal=True, softcap=2.0, scale=0.25))
    program = exported(Call(options, need_weights=False).eval(), args, opset)
    assert program.model.opset_imports[""] == opset
    assert operators(program) == ["Attention"]
    node, attributes = of_attention(program)
    assert len(node.inputs) == 3
    assert len(node.outputs) == 1 or all(not out.name for out in node.outputs[1:])
    assert attributes.pop("qk_matmul_output_mode", 0) == 0
    assert attributes == {"is_causal": 1, "softcap": 2.0, "scale": 0.25}
    case = Case(lq=7, is_causal=True, softcap=2.0, scale=0.25)
    right = expected(case)
    right.same("output", outputs("onnxruntime", program, args)[0], right.want[0], right.plain[0])


def test_the_default_scale_is_the_operators_own():
    assert "scale" not in of_attention(program_of(Case()))[1]


def test_a_keep_mask_is_the_operators_mask():
    program = program_of(Case(mask="full"))
    assert operators(program) == ["Attention"]
    assert len(of_attention(program)[0].inputs) == 4


@pytest.mark.parametrize("runtime", ["onnxruntime", "reference"])
@pytest.mark.parametrize("name", ["MultiHeadAttention", "SelfAttention"])
def test_the_courses_modules(name, runtime):
    """With the course's kind of mask, zeros and ones, here of a batch entry that sees nothing in one row."""
    module = mha_ext.SelfAttention() if name == "SelfAttention" else mha_ext.MultiHeadAttention(16, 4)
    module.eval()
    query, key = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    mask = (torch.rand(2, 5, 7) < 0.6).float()
    mask[1, 2] = 0
    if name == "MultiHeadAttention":
        mask = mask.unsqueeze(1)
    args = (query, key, key, mask)
    program = exported(module, args)
    assert operators(program).count("Attention") == 1
    terms = (*args, *module.parameters())
    assert_rounding_only(outputs(runtime, program, args), module(*args), terms, name, torch.float32)


MULTIHEAD = {
    "packed": ({}, {}),
    "not_averaged": ({}, {"average_attn_weights": False}),
    "no_weights": ({}, {"need_weights": False}),
    "causal_and_padding": ({}, {"is_causal": True, "key_padding_mask": "bool"}),
    "float_padding": ({}, {"key_padding_mask": "float"}),
    "masks_of_both_kinds": ({}, {"key_padding_mask": "bool", "attn_mask": "float"}),
    "added_keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"attn_mask": "bool"}),
    "own_widths": ({"kdim": 8, "vdim": 10}, {}),
    "length_first": ({"batch_first": False}, {"key_padding_mask": "bool"}),
}


@pytest.mark.parametrize("name", MULTIHEAD)
def test_nn_multihead_attention(name):
    options, call = MULTIHEAD[name]
    options = {"batch_first": True, **options}
    ours = pair(**options)[1].eval()
    args = inputs(options["batch_first"], kdim=options.get("kdim", WIDTH), vdim=options.get("vdim", WIDTH))
    batch, queries, keys = 2, 5, 7
    padding = torch.tensor([[False] * keys, [True] * keys])  # the second entry sees nothing
    hidden = torch.rand(queries, keys) < 0.4
    values = {
        "key_padding_mask": padding if call.get("key_padding_mask") == "bool" else -torch.rand(batch, keys).double(),
        "attn_mask": hidden if call.get("attn_mask") == "bool" else torch.randn(queries, keys).double(),
    }
    kwargs = {k: values.get(k, v) if isinstance(v, str) else v for k, v in call.items()}
    tensors = {k: v for k, v in kwargs.items() if torch.is_tensor(v)}
    program = exported(ours, tuple(args), kwargs=kwargs)
    want = [y for y in ours(*args, **kwargs) if y is not None]
    got = outputs("reference", program, (*args, *tensors.values()))
    assert_rounding_only(got, want, (*args, *ours.parameters()), name)
    single = exported(copy.deepcopy(ours).float(), tuple(y.float() for y in args), kwargs={
        k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in kwargs.items()
    })  # fmt: skip
    feeds = [y.float() if y.is_floating_point() else y for y in (*args, *tensors.values())]
    got = outputs("onnxruntime", single, feeds)
    assert_rounding_only(got, [y.float() for y in want], (*args, *ours.parameters()), name, dtype=torch.float32)


def test_weights_that_torch_writes_out_take_one_node():
    """torch's own module, exported by torch, is products and a softmax where its weights are asked for."""
    theirs = nn.MultiheadAttention(WIDTH, 4, batch_first=True).eval()
    ours = copy.deepcopy(theirs)
    assert not mha_ext.swap_attention(ours).left
    args, nodes = (torch.randn(2, 5, WIDTH),) * 3, {}
    for layer in (theirs, ours):
        nodes[layer] = operators(exported(layer, args))
    assert "Attention" not in nodes[theirs]
    assert nodes[theirs].count("Softmax") == 1
    assert nodes[ours].count("Attention") == 1
    assert "Softmax" not in nodes[ours]
    assert len(nodes[ours]) < len(nodes[theirs])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_an_encoder_of_torch_with_swapped_attention():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = swapped(encoder(batch_first=True))
            self.encoder.enable_nested_tensor = False  # nested tensors are nothing that ONNX has

        def forward(self, tokens, padding):
            return self.encoder(tokens, src_key_padding_mask=padding)

    model, tokens = Padded().eval(), x()
    program = exported(model, (tokens, PADDING))
    assert operators(program).count("Attention") == 2
    (got,) = outputs("reference", program, (tokens, PADDING))
    assert_rounding_only(got, model(tokens, PADDING), (tokens, *model.parameters()))


class Decode(nn.Module):
    """A step of a key/value cache: one more query than before against keys that are filled to some length."""

    def forward(self, query, key, lengths):
        output, weights = mha_ext.attention(
            query, key, key, is_causal=True, causal_offset="lower_right", key_lengths=lengths, window=(4, None)
        )
        plain, _ = mha_ext.attention(
            query, key, key, is_causal=True, causal_offset="lower_right", sinks=query[0, :, 0, 0]
        )
        return output, weights, plain, weights.shape[-1] * weights.flatten(2).sum(-1)


@pytest.mark.parametrize("runtime", ["onnxruntime", "reference"])
def test_dynamic_batch_and_lengths(runtime):
    """One graph for all sizes; what is computed from the shape of the weights is right as well."""
    dynamic = torch.export.Dim.DYNAMIC
    first = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 6, 8), torch.tensor([6, 2])
    program = exported(
        Decode().eval(), first, dynamic_shapes=({0: dynamic, 2: dynamic}, {0: dynamic, 2: dynamic}, {0: dynamic})
    )
    for batch, queries, keys in ((2, 3, 6), (3, 5, 11), (4, 6, 6), (1, 2, 40)):
        args = torch.randn(batch, 4, queries, 8), torch.randn(batch, 4, keys, 8), torch.randint(0, keys + 1, (batch,))
        assert_rounding_only(
            outputs(runtime, program, args), Decode()(*args), args[:2], str((batch, queries, keys)), torch.float32
        )


def test_dynamic_self_attention_stays_causal_by_attribute():
    """One symbol for both lengths: no mask is needed."""

    class Causal(nn.Module):
        def forward(self, query):
            return mha_ext.scaled_dot_product_attention(query, query, query, is_causal=True)

    query = torch.randn(2, 4, 5, 8)
    program = exported(Causal().eval(), (query,), dynamic_shapes=({2: torch.export.Dim.DYNAMIC},))
    assert operators(program) == ["Attention"]
    longer = torch.randn(2, 4, 9, 8)
    (got,) = outputs("onnxruntime", program, (longer,))
    assert_rounding_only(got, Causal()(longer), (longer,) * 3, dtype=torch.float32)


def cause(error):
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@pytest.mark.parametrize(
    ("options", "shape", "text"),
    [
        ({"dropout": 0.5}, (2, 2, 5, 8), "dropout, or other random numbers .*, cannot be exported"),
        ({"mask_value": -1e9}, (2, 2, 5, 8), "mask_value must be -inf"),
        ({}, (3, 2, 2, 5, 8), "query must have at most one batch dimension .*, got 2"),
    ],
    ids=["dropout", "mask_value", "batch"],
)
def test_refusals_name_the_feature(options, shape, text):
    query = torch.randn(shape)
    with pytest.raises(torch.onnx.OnnxExporterError) as caught:
        exported(Call(options).eval(), (query, query, query))
    assert isinstance(cause(caught.value), NotImplementedError)
    with pytest.raises(NotImplementedError, match=text):
        raise cause(caught.value)


def test_the_steps_are_not_translated():
    class Steps(nn.Module):
        def forward(self, scores):
            return mha_ext.masked_softmax(scores, is_causal=True)

    with pytest.raises(torch.onnx.OnnxExporterError, match=r"mha_ext\.masked_softmax"):
        exported(Steps().eval(), (torch.randn(1, 2, 5, 5),))


def test_a_module_in_training_is_refused():
    query = torch.randn(2, 5, 16)
    with pytest.warns(UserWarning, match="training mode"), pytest.raises(torch.onnx.OnnxExporterError) as caught:
        exported(mha_ext.MultiHeadAttention(16, 4, dropout=0.1).train(), (query, query, query))
    assert "call eval() on the model first" in str(cause(caught.value))


def test_a_bias_that_hides_a_row():
    """A float mask of -inf, as torch's: the row sees nothing and is 0, in the weights as well."""
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    bias = torch.zeros(3, 5)
    bias[1] = -math.inf
    program = exported(Call({"bias": bias}).eval(), (query, key, key, bias))
    for runtime in ("onnxruntime", "reference"):
        got = outputs(runtime, program, (query, key, key, bias))
        assert all(bool((y[:, :, 1] == 0).all()) for y in got)
        assert_rounding_only(got, mha_ext.attention(query, key, key, bias=bias), (query, key), dtype=torch.float32)
