"""swap_attention, and swapped modules where torch puts them: encoder with its fast path and nested tensors, decoder."""

import copy
import math
import warnings

import pytest
import torch
from multihead import Ours, Theirs
from test_fused import Calls
from tolerances import assert_rounding_only
from torch import nn

import mha_ext

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True, but"
)
WIDTH, HEADS, BATCH, LENGTH = 16, 4, 3, 7
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [4], [2]])
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def encoder(dropout=0.0, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout, dtype=torch.float64, **options)
    made = nn.TransformerEncoder(layer, 2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def swapped(model):
    twin = copy.deepcopy(model)
    assert len(mha_ext.swap_attention(twin).swapped) > 0
    return twin


def x(batch_first=True):
    made = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    return made if batch_first else made.transpose(0, 1)


def test_report():
    class Own(nn.MultiheadAttention):
        pass

    model = nn.Sequential(Theirs(8, 2), Own(8, 2), Ours(8, 2), nn.Linear(2, 2), Theirs(8, 2, dtype=torch.complex64))
    report = mha_ext.swap_attention(model)
    assert report.swapped == ("0",)
    assert type(model[0]) is Ours
    assert type(model[1]) is Own
    lines = str(report).split("\n")
    assert lines[0] == "1 of 4 attention modules swapped"
    assert lines[1].startswith("  1: it is a ")
    assert lines[1].endswith(".Own, a subclass of torch.nn.MultiheadAttention whose own behaviour would be lost")
    assert lines[2] == "  2: it is mha_ext's already"
    assert lines[3] == "  4: in_proj_weight is torch.complex64, for which there are no kernels"


def test_of_the_module_itself():
    module = Theirs(8, 2)
    assert mha_ext.swap_attention(module) == (("",), {})
    assert type(module) is Ours
    assert str(mha_ext.swap_attention(module)).endswith("\n  the model: it is mha_ext's already")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        mha_ext.swap_attention({})


def test_everything_else_stays():
    """The same object with the same parameters, hooks and mode; a module that a model holds twice counts once."""
    module, calls = Theirs(8, 2).eval(), []
    module.register_forward_hook(lambda *_: calls.append(1))
    parameters = dict(module.named_parameters())
    model = nn.ModuleList([module, module])
    assert mha_ext.swap_attention(model).swapped == ("0",)
    assert model[1] is module
    assert all(dict(module.named_parameters())[n] is p for n, p in parameters.items())
    assert not module.training
    module(*[torch.randn(3, 2, 8)] * 3)
    assert calls == [1]
    assert list(module.state_dict()) == list(Theirs(8, 2).state_dict())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "masks",
    [{}, {"src_key_padding_mask": PADDING}, {"mask": CAUSAL}, {"mask": CAUSAL, "is_causal": True},
     {"src_key_padding_mask": PADDING, "mask": CAUSAL, "is_causal": True}],
    ids=("none", "padding", "mask", "causal", "causal_padding"),
)  # fmt: skip
def test_encoder(masks, batch_first, norm_first, training):
    """Where torch takes its fast path and where not; what padded positions hold is torch's business only there."""
    theirs = encoder(batch_first=batch_first, norm_first=norm_first).train(training)
    ours, given = swapped(theirs), x(batch_first)
    results = []
    for model in (ours, theirs):
        output = model(given, **masks)
        grads = torch.autograd.grad(output.sin().sum(), list(model.parameters()))
        results.append((output, *grads))
    assert_rounding_only(*results, list(ours.parameters()))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got, want = ours(given, **masks), theirs(given, **masks)
        assert_rounding_only(got, want, list(ours.parameters()))


def test_the_fast_path_does_not_bypass_the_module():
    """torch's encoder would compute a layer in evaluation from its weights alone."""
    model = encoder(batch_first=True).eval()
    mha_ext.swap_attention(model)
    with torch.inference_mode():
        with Calls() as calls:
            model(x())
        assert calls.names == ["fused_attention"] * 2
        with Calls() as calls:
            output = model(x(), src_key_padding_mask=PADDING)
    assert calls.names == ["fused_attention"] * 2
    assert (output[PADDING] == 0).all()  # as torch's own, which packs the batch


@pytest.mark.parametrize("built", ["before", "after"])
def test_an_encoder_with_the_module_put_in_by_hand(built):
    theirs = encoder(batch_first=True).eval()
    ours = copy.deepcopy(theirs)
    for layer in ours.layers:
        module = Ours(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
        module.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = module
    if built == "after":
        again = nn.TransformerEncoder(ours.layers[0], 2)  # which asks the layer whether it packs padded batches
        again.load_state_dict(ours.state_dict())
        ours = again
    ours.eval()
    given = x()
    with torch.inference_mode():
        got, want = ours(given, src_key_padding_mask=PADDING), theirs(given, src_key_padding_mask=PADDING)
    assert_rounding_only(got[~PADDING], want[~PADDING], list(ours.parameters()))


def test_a_sample_of_nothing_but_padding():
    """torch's slow path without a need for weights is finite as well; the module asked for weights is not."""
    padding = torch.tensor([[False] * LENGTH, [True] * LENGTH, [False] * LENGTH])
    ours = swapped(encoder(batch_first=True))
    output = ours(x(), src_key_padding_mask=padding)
    output.sum().backward()
    assert torch.isfinite(output).all()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters())
    module = ours.layers[0].self_attn
    given = x()
    output, weights = module(given, given, given, key_padding_mask=padding)
    assert torch.equal(output[1], module.out_proj.bias.expand(LENGTH, -1))
    assert (weights[1] == 0).all()


@pytest.mark.parametrize("batch_first", [False, True])
def test_decoder(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=batch_first, dtype=torch.float64)
    theirs = nn.TransformerDecoder(layer, 2)
    ours = swapped(theirs)
    given, memory = x(batch_first), torch.randn_like(x(batch_first))
    masks = {"tgt_mask": CAUSAL, "tgt_is_causal": True, "tgt_key_padding_mask": PADDING,
             "memory_key_padding_mask": PADDING}  # fmt: skip
    for options in ({}, {"tgt_mask": CAUSAL}, masks):
        results = []
        for model in (ours, theirs):
            output = model(given, memory, **options)
            results.append((output, *torch.autograd.grad(output.sin().sum(), list(model.parameters()))))
        assert_rounding_only(*results, list(ours.parameters()))


def test_transformer_learns():
    """A swapped model trains step by step like torch's."""
    torch.manual_seed(0)
    theirs = nn.Transformer(WIDTH, HEADS, 1, 1, 32, 0.0, batch_first=True, dtype=torch.float64)
    ours = swapped(theirs)
    losses = []
    for model in (ours, theirs):
        torch.manual_seed(1)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            given = x()
            loss = (model(given, given, tgt_mask=CAUSAL, tgt_is_causal=True) - given).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        losses.append(loss.item())
    assert math.isclose(*losses, rel_tol=1e-10)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("training", [False, True])
def test_compiled_encoder(training):
    ours, given = swapped(encoder(batch_first=True)).train(training), x()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    masks = {"mask": CAUSAL, "is_causal": True, "src_key_padding_mask": PADDING}
    with torch.set_grad_enabled(training):
        assert_rounding_only(compiled(given, **masks), ours(given, **masks), list(ours.parameters()))


def test_nested_input_needs_self_attention_without_masks():
    module = Ours(8, 2, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    output, weights = module(nested, nested, nested)
    assert [entry.shape for entry in output.unbind()] == [(3, 8), (5, 8)]
    assert weights.shape == (2, 5, 5)
    for entry, own in zip(output.unbind(), nested.unbind(), strict=True):
        torch.testing.assert_close(entry, module(own, own, own)[0])
    with pytest.raises(NotImplementedError, match="query must be a dense tensor, got a nested one, which goes with"):
        module(nested, nested, nested, attn_mask=torch.zeros(5, 5))
    with pytest.raises(ValueError, match="query must be a dense tensor where batch_first is False"):
        Ours(8, 2)(nested, nested, nested)


def test_a_jagged_result_can_be_added_to_the_input():
    module = Ours(8, 2, batch_first=True).eval()
    entries = [torch.randn(3, 8), torch.randn(5, 8)]
    jagged = torch.nested.nested_tensor(entries, layout=torch.jagged)
    total = jagged + module(jagged, jagged, jagged)[0]
    for entry, own in zip(total.unbind(), entries, strict=True):
        torch.testing.assert_close(entry, own + module(own, own, own)[0])


def test_a_module_with_a_forward_of_its_own_is_left():
    """As wrappers put there: they hold on to the forward of the class that it was."""
    module = nn.MultiheadAttention(8, 2)
    module.forward = module.forward
    assert str(mha_ext.swap_attention(module)).split("\n")[1:] == [
        "  the model: its forward has been replaced in the module itself"
    ]
    given = torch.randn(3, 1, 8)
    assert module(given, given, given)[0].isfinite().all()


def test_an_encoder_around_our_layers_warns_that_it_does_not_pack():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True)
    mha_ext.swap_attention(layer)
    with pytest.warns(UserWarning, match="enable_nested_tensor is True, but"):
        nn.TransformerEncoder(layer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
