"""SelfAttention and MultiHeadAttention: the course's modules, their parameters, and their behaviour in training."""

import copy
import io
import math
import pickle

import pytest
import torch
from tolerances import assert_rounding_only
from torch import nn

import mha_ext

pytestmark = pytest.mark.usefixtures("isa")
WIDTH, HEADS = 24, 4


class CourseAttention(nn.Module):
    """What the course writes: mask == 0 gets -1e9; dropout on the weights."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = self.dropout(torch.softmax(scores, -1))
        return weights @ value, weights


class CourseMultiHead(nn.Module):
    def __init__(self, d_model, n_heads, dropout=0.1):
        super().__init__()
        self.heads = n_heads
        self.W_Q, self.W_K, self.W_V, self.fc = (nn.Linear(d_model, d_model) for _ in range(4))
        self.norm = nn.LayerNorm(d_model)
        self.attention = CourseAttention(dropout)

    def forward(self, query, key, value, mask=None):
        def split(x):
            return x.view(x.shape[0], -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2)

        heads, weights = self.attention(split(self.W_Q(query)), split(self.W_K(key)), split(self.W_V(value)), mask)
        merged = heads.transpose(1, 2).reshape(query.shape)
        return self.norm(self.fc(merged) + query), weights


def course_and_ours(dropout=0.0):
    torch.manual_seed(5)
    course = CourseMultiHead(WIDTH, HEADS, dropout).double()
    ours = mha_ext.MultiHeadAttention(WIDTH, HEADS, dropout).double()
    assert str(ours.load_state_dict(course.state_dict(), strict=True)) == "<All keys matched successfully>"
    return course, ours


def test_parameter_names():
    names = {f"{layer}.{kind}" for layer in ("W_Q", "W_K", "W_V", "fc", "norm") for kind in ("weight", "bias")}
    assert set(mha_ext.MultiHeadAttention(WIDTH, HEADS).state_dict()) == names
    assert mha_ext.SelfAttention().state_dict() == {}


MASKS = {
    "none": None,
    "causal": torch.tril(torch.ones(6, 6)),
    "padding": (torch.arange(6) < 4).int().view(1, 1, 1, 6),
    "per_entry": (torch.arange(6) < torch.tensor([[3], [6]]))[:, None, None, :],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_same_as_the_course(mask):
    """Output, weights, and the gradient of every parameter and input, with the course's checkpoint."""
    course, ours = course_and_ours()
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    results = []
    for module in (ours, course):
        out, attn = module(x, memory, memory, mask)
        grads = torch.autograd.grad(out.sin().sum() + attn.square().sum(), [x, memory, *module.parameters()])
        results.append((out, attn, *grads))
    assert_rounding_only(*results, (x, memory, *ours.parameters()))
    assert results[0][1].shape == (2, HEADS, 6, 6)


def test_self_attention_same_as_the_course():
    q, k, v = torch.randn(2, 3, 5, 8).double(), torch.randn(2, 3, 7, 8).double(), torch.randn(2, 3, 7, 4).double()
    mask = torch.rand(5, 7) < 0.7
    mask[:, 0] = True
    assert_rounding_only(mha_ext.SelfAttention(0.0)(q, k, v, mask), CourseAttention(0.0)(q, k, v, mask), (q, k, v))


@pytest.mark.parametrize("shape", [(4, 16), (2, 4, 16), (2, 3, 4, 16)], ids=str)
def test_self_attention_shapes(shape):
    x = torch.randn(shape)
    out, attn = mha_ext.SelfAttention()(x, x, x)
    assert out.shape == shape
    assert attn.shape == (*shape[:-1], shape[-2])


def test_dropout_in_training_only():
    layer = mha_ext.MultiHeadAttention(WIDTH, HEADS, dropout=0.5)
    x = torch.randn(2, 9, WIDTH)
    torch.manual_seed(1)
    first, second = layer(x, x, x), layer(x, x, x)
    assert not torch.equal(first[1], second[1])
    assert 0 < (first[1] == 0).double().mean() < 1
    torch.manual_seed(1)
    assert torch.equal(layer(x, x, x)[0], first[0])
    layer.eval()
    before = torch.get_rng_state()
    out, attn = layer(x, x, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(out, layer(x, x, x)[0])
    assert ((attn.sum(-1) - 1).abs() <= 9 * torch.finfo(torch.float32).eps).all()


def test_default_dropout_is_a_tenth():
    assert mha_ext.SelfAttention().dropout.p == 0.1
    assert mha_ext.MultiHeadAttention(8, 2).attention.dropout.p == 0.1


def test_pickle_deepcopy_and_save():
    layer = mha_ext.MultiHeadAttention(WIDTH, HEADS).eval()
    x = torch.randn(2, 5, WIDTH)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x, x, x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    layer = mha_ext.MultiHeadAttention(WIDTH, HEADS).to(dtype)
    x = torch.randn(2, 5, WIDTH, dtype=dtype)
    out, attn = layer(x, x, x)
    assert out.dtype == attn.dtype == dtype


def test_autocast():
    layer = mha_ext.MultiHeadAttention(WIDTH, HEADS)
    x = torch.randn(2, 5, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, attn = layer(x, x, x)
    assert attn.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in layer.parameters())


def test_a_padded_row_gives_no_nan():
    """A batch entry of nothing but padding: heads are zero, the output LayerNorm(fc.bias + Q), gradients finite."""
    layer = mha_ext.MultiHeadAttention(WIDTH, HEADS, dropout=0.0)
    x = torch.randn(2, 5, WIDTH)
    mask = torch.tensor([[True] * 5, [False] * 5])[:, None, None, :]
    out, attn = layer(x, x, x, mask)
    assert (attn[1] == 0).all()
    assert torch.equal(out[1], layer.norm(layer.fc(torch.zeros(2, 5, WIDTH)) + x)[1])
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_cross_attention_of_other_length():
    out, attn = mha_ext.MultiHeadAttention(WIDTH, HEADS)(torch.randn(3, 5, WIDTH), *[torch.randn(3, 8, WIDTH)] * 2)
    assert out.shape == (3, 5, WIDTH)
    assert attn.shape == (3, HEADS, 5, 8)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=str)
def test_empty_batches(shape):
    x = torch.randn(*shape, WIDTH)
    out, attn = mha_ext.MultiHeadAttention(WIDTH, HEADS)(x, x, x)
    assert out.shape == x.shape
    assert attn.shape == (shape[0], HEADS, shape[1], shape[1])


def test_a_module_learns():
    """Fifty steps of Adam on 'copy the first token' bring the loss down: gradients point the right way."""
    torch.manual_seed(0)
    layer, head = mha_ext.MultiHeadAttention(16, 2, dropout=0.1), nn.Linear(16, 16)
    optimiser = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.02)
    losses = []
    for _ in range(50):
        x = torch.randn(32, 4, 16)
        loss = (head(layer(x, x, x)[0]) - x[:, :1]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert max(losses[-5:]) < min(losses[:5]), losses
