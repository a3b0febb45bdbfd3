"""What people train and serve models with: autocast, checkpointing, per-sample gradients, pickling, inference mode."""

import copy
import io
import itertools
import os
import pickle
import subprocess
import sys

import pytest
import torch
from language_model import LanguageModel, losses, text
from tolerances import assert_rounding_only, assert_same_bits
from torch import func, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import mha_ext


def parameter_grads(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def backward_grads(model, loss):
    """By backward(), the only way through reentrant checkpoints."""
    model.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_language_model_learns():
    """The model of these tests does: the loss comes down to a fraction, dropout or not."""
    for dropout in (0.0, 0.1):
        seen = losses(LanguageModel(dropout), [text()] * 60, rate=0.3)
        assert seen[-1] < seen[0] / 3, f"dropout {dropout}: {seen}"


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_checkpointing_recomputes_the_same_dropout(dtype, use_reentrant):
    """A training step with every layer checkpointed is one without, bit for bit, dropout included.

    Long enough that calls with and without gradients take one kernel: reentrant checkpointing makes both.
    """
    model = LanguageModel(dropout=0.3, dtype=dtype)
    tokens, lengths = text(length=40)
    torch.manual_seed(5)
    direct = model(tokens, lengths)
    grads = parameter_grads(model, direct)
    checkpoint_layers(model, use_reentrant)
    torch.manual_seed(5)
    replayed = model(tokens, lengths)
    assert_same_bits(replayed, direct)
    again = backward_grads(model, replayed)
    for (name, _), got, want in zip(model.named_parameters(), again, grads, strict=True):
        assert_same_bits(got, want, name)
    other = model(tokens, lengths)
    assert not torch.equal(other, direct)  # dropout is on


def test_reentrant_checkpointing_of_few_queries_drops_the_same_weights():
    """Without gradients few queries have a kernel that rounds differently; what is dropped is the same."""
    model = LanguageModel(dropout=0.3, dtype=torch.float32)
    tokens, lengths = text()
    torch.manual_seed(5)
    grads = parameter_grads(model, model(tokens, lengths))
    checkpoint_layers(model, use_reentrant=True)
    torch.manual_seed(5)
    replayed = backward_grads(model, model(tokens, lengths))
    assert_rounding_only(replayed, grads, list(model.parameters()), dtype=torch.float32)
    torch.manual_seed(6)
    others = backward_grads(model, model(tokens, lengths))
    with pytest.raises(AssertionError, match="is off by"):  # what other dropout does is far beyond rounding
        assert_rounding_only(others, grads, list(model.parameters()), dtype=torch.float32)


def checkpoint_layers(model, use_reentrant):
    for layer in model.layers:
        layer.forward = CheckpointedForward(layer.forward, use_reentrant)


class CheckpointedForward:
    def __init__(self, forward, use_reentrant):
        self.forward, self.use_reentrant = forward, use_reentrant

    def __call__(self, *args):
        return checkpoint(self.forward, *args, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_through_the_weights(use_reentrant):
    """Gradients that arrive through the returned weights are replayed as well."""
    layer, x = mha_ext.MultiHeadAttention(16, 4, dropout=0.4), torch.randn(3, 40, 16, requires_grad=True)
    grads = []
    for call in (layer, CheckpointedForward(layer, use_reentrant)):
        torch.manual_seed(5)
        output, weights = call(x, x, x)
        loss = output.sin().sum() + weights.square().sum()
        grads.append(backward_grads(layer, loss))
    for (name, _), direct, replayed in zip(layer.named_parameters(), *grads, strict=True):
        assert_same_bits(replayed, direct, name)


LOWER = [torch.float32, torch.bfloat16, torch.float16]
AUTOCAST = [(torch.float64, torch.float64), *itertools.product(LOWER, LOWER)]  # which leaves float64 alone


@pytest.mark.parametrize(("inputs", "weight"), AUTOCAST, ids=str)
def test_autocast_has_the_dtypes_of_sdpa(inputs, weight):
    """Projections, attention, loss outside: each dtype, forward and backward, is what it is with torch's attention."""

    def dtypes(attention):
        projection = torch.randn(8, 8, dtype=weight, requires_grad=True)
        x = torch.randn(2, 3, 5, 8, dtype=inputs, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            query = x @ projection
            output = attention(query, query, query)
            with torch.autocast("cpu", enabled=False):
                plain = attention(x, x, x)
        (output.double().sum() + plain.double().sum()).backward()
        return {"output": output.dtype, "disabled": plain.dtype, "x": x.grad.dtype, "projection": projection.grad.dtype}

    want = dtypes(scaled_dot_product_attention)
    assert dtypes(mha_ext.scaled_dot_product_attention) == want
    assert dtypes(lambda *qkv: mha_ext.attention(*qkv)[0]) == want


def test_autocast_training_is_as_exact_as_torchs():
    """Loss and gradients of a model in autocast: off from float64 by at most twice what the same model with torch's
    module is off, plus the rounding of the gradients that bfloat16 holds."""
    tokens, lengths = text(6, 12)
    exact = LanguageModel(layers=1)
    want = exact(tokens, lengths)
    want_grads = parameter_grads(exact, want)
    off = {}
    for kind in (mha_ext.nn.MultiheadAttention, nn.MultiheadAttention):
        model = LanguageModel(layers=1, dtype=torch.float32, attention=kind)
        model.load_state_dict(exact.state_dict())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens, lengths)
        assert loss.dtype == torch.float32
        grads = parameter_grads(model, loss)
        assert all(g.dtype == torch.float32 for g in grads)
        off[kind] = [(loss - want).abs(), *((g - w).norm() for g, w in zip(grads, want_grads, strict=True))]
    names = ["loss", *(name for name, _ in exact.named_parameters())]
    eps = torch.finfo(torch.bfloat16).eps
    for name, ours, theirs, size in zip(names, *off.values(), [want, *want_grads], strict=True):
        allowed = 2 * theirs + eps * size.norm()
        assert ours <= allowed, f"{name} is off by {ours.item():.3e}, allowed {allowed.item():.3e}"


def attend(layer):
    return lambda x: layer(x, x, x)[0]


@pytest.mark.parametrize("kind", ["MultiHeadAttention", "nn.MultiheadAttention"])
def test_per_sample_gradients_of_a_module(kind):
    """vmap(grad) over functional_call, as differential privacy uses it: each sample's gradient of every parameter."""
    layer = (
        mha_ext.MultiHeadAttention(16, 4, dropout=0.0)
        if kind == "MultiHeadAttention"
        else mha_ext.nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True)
    ).double()
    samples, targets = torch.randn(5, 7, 16).double(), torch.randn(5, 7, 16).double()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x, target):
        output, weights = func.functional_call(layer, parameters, (x[None],) * 3)
        return (output[0] - target).square().mean() + weights.square().mean()

    got = func.vmap(func.grad(loss), in_dims=(None, 0, 0))(parameters, samples, targets)
    for n, (x, target) in enumerate(zip(samples, targets, strict=True)):
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        want = torch.autograd.grad(loss(leaves, x, target), list(leaves.values()))
        assert_rounding_only([got[name][n] for name in leaves], want, (x, *want), f"sample {n}")


def test_clipped_per_sample_gradients_train():
    """A step of DP-SGD without the noise: every sample's gradient clipped to one norm, then their mean."""
    layer = mha_ext.MultiHeadAttention(16, 4, dropout=0.0).double()
    samples = torch.randn(6, 5, 16).double()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x):
        return (func.functional_call(layer, parameters, (x[None],) * 3)[0] - 1).square().mean()

    before = sum(loss(parameters, x) for x in samples)
    for _ in range(5):
        grads = func.vmap(func.grad(loss), in_dims=(None, 0))(parameters, samples)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = (0.5 / norms).clamp(max=1)
        parameters = {
            name: p - (grads[name] * factors.view(-1, *[1] * p.dim())).mean(0) for name, p in parameters.items()
        }
    assert sum(loss(parameters, x) for x in samples) < before


def swapped_encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    assert len(mha_ext.swap_attention(model).swapped) == 2
    return model


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.load(saved(model), weights_only=False),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_swapped_model(how):
    """The copy is ours, computes the same bits, shares nothing, and trains by itself."""
    model = swapped_encoder()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [True] * 5])
    twin = COPIES[how](model)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    want = model(x, src_key_padding_mask=padding)
    assert_same_bits(twin(x, src_key_padding_mask=padding), want)
    twin.train()(x).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert all(p.grad is None for p in model.parameters())
    assert_same_bits(model(x, src_key_padding_mask=padding), want)
    assert not torch.equal(twin.eval()(x, src_key_padding_mask=padding), want)
    assert set(mha_ext.swap_attention(twin).left.values()) == {"it is mha_ext's already"}


def test_state_dicts_load_with_weights_only():
    """What torch.load accepts from strangers: a checkpoint of a swapped model, into torch's model and back."""
    model = swapped_encoder()
    state = torch.load(saved(model.state_dict()), weights_only=True)
    theirs = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    assert str(theirs.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
    mha_ext.swap_attention(theirs)
    x = torch.randn(2, 5, 16)
    assert_same_bits(theirs(x), model(x))


def test_a_module_loads_with_weights_only_once_its_classes_are_named():
    """Whole modules, too, where the reader names the classes that it trusts."""
    layer = mha_ext.MultiHeadAttention(16, 4).eval()
    with pytest.raises(pickle.UnpicklingError, match="MultiHeadAttention"):
        torch.load(saved(layer), weights_only=True)
    kinds = {type(module) for module in layer.modules()}
    with torch.serialization.safe_globals([*kinds, set]):
        twin = torch.load(saved(layer), weights_only=True)
    x = torch.randn(2, 5, 16)
    assert_same_bits(twin(x, x, x)[0], layer(x, x, x)[0])


def test_a_pickle_opens_in_a_process_that_knows_nothing_of_us(tmp_path):
    """As workers and servers open it: the pickle itself imports the package."""
    model, x = swapped_encoder(), torch.randn(2, 5, 16)
    torch.save({"model": model, "x": x}, tmp_path / "model.pt")
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "given = torch.load('model.pt', weights_only=False)\n"
        "torch.save(given['model'](given['x']).detach(), 'output.pt')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the package need not be installed
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment, timeout=120)
    assert_same_bits(torch.load(tmp_path / "output.pt"), model(x).detach())


def test_generation_in_inference_mode():
    """Greedy decoding with a key/value cache: the tokens that whole passes give, and no tensor that autograd knows."""
    torch.manual_seed(2)
    table, projections = torch.randn(30, 16), torch.randn(3, 16, 16, requires_grad=True)

    def heads(x):
        return x.unflatten(-1, (4, 4)).transpose(1, 2)

    def attended(tokens, cache):
        x = table[tokens]
        query, key, value = (heads(x @ w) for w in projections)
        if cache is not None:
            key, value = torch.cat([cache[0], key], -2), torch.cat([cache[1], value], -2)
        output, _ = mha_ext.attention(
            query, key, value, is_causal=True, causal_offset="lower_right", need_weights=False
        )
        return (output.transpose(1, 2).flatten(2) @ table.T)[:, -1].argmax(-1, keepdim=True), output, (key, value)

    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.inference_mode():
        token, output, cache = attended(prompt, None)
        tokens = torch.cat([prompt, token], 1)
        for _ in range(6):
            token, output, cache = attended(token, cache)
            assert output.is_inference()
            tokens = torch.cat([tokens, token], 1)
    with torch.no_grad():
        again = prompt
        for _ in range(7):
            again = torch.cat([again, attended(again, None)[0]], 1)
    assert torch.equal(tokens, again)


@pytest.mark.parametrize(
    "attention", [scaled_dot_product_attention, mha_ext.scaled_dot_product_attention], ids=["torch", "ours"]
)
def test_inference_tensors_cannot_be_trained_on(attention):
    """As of any operator of torch, rather than a gradient that is wrong."""
    with torch.inference_mode():
        key = torch.randn(1, 2, 5, 8)
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        attention(query, key, key)


def test_inference_mode_has_the_bits_of_no_grad():
    model = LanguageModel(dtype=torch.float32).eval()
    tokens, lengths = text()
    with torch.no_grad():
        want = model.logits(tokens, lengths)[0]
    with torch.inference_mode():
        got = model.logits(tokens, lengths)[0]
    assert got.is_inference()
    assert_same_bits(got, want)
