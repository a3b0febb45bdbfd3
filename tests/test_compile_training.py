"""torch.compile of a whole model: training gives the eager losses, and new lengths do not compile it again."""

import pytest
import torch
from language_model import LanguageModel, losses, text
from tolerances import assert_rounding_only
from torch._dynamo.config import patch

import mha_ext

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")]
LENGTHS = (9, 6, 17, 40, 33)


def test_training_gives_the_eager_losses():
    """Ten steps of a causal transformer over padded text, forward and backward by inductor."""
    batches = [text()] * 10
    eager, model = LanguageModel(layers=1), LanguageModel(layers=1)
    want = losses(eager, batches)
    got = losses(model, batches, torch.compile(model, fullgraph=True))
    assert want[-1] < want[0]
    assert_rounding_only(got, want, list(eager.parameters()), "losses")
    assert_rounding_only(list(model.parameters()), list(eager.parameters()), list(eager.parameters()), "parameters")


def test_training_at_many_lengths_compiles_once():
    """Every batch has its own length, as text has."""
    batches = [text(batch=2 + n, length=length) for n, length in enumerate(LENGTHS)]
    eager, model = LanguageModel(layers=1), LanguageModel(layers=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with patch(error_on_recompile=True):
        got = losses(model, batches, compiled)
    assert_rounding_only(got, losses(eager, batches), list(eager.parameters()), "losses")


def test_lengths_that_change_by_surprise_compile_twice():
    """Without dynamic=True torch finds out at the second length, and that is all."""
    model = LanguageModel(layers=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for n, length in enumerate(LENGTHS):
        batch = text(batch=2 + n, length=length)
        with patch(error_on_recompile=n > 1):
            got = compiled(*batch)
        assert_rounding_only(got, model(*batch), list(model.parameters()), f"length {length}")


def test_decoding_with_a_growing_cache_compiles_twice():
    """A generation loop: one query each time against one key more, of which each entry has filled its own number."""

    def step(query, key, lengths):
        return mha_ext.attention(
            query, key, key, is_causal=True, causal_offset="lower_right", key_lengths=lengths, window=(6, None)
        )

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    cache = torch.randn(2, 4, 30, 8, dtype=torch.float64)
    for n in range(15):
        query, key, lengths = cache[:, :, n + 5 : n + 6], cache[:, :, : n + 5], torch.tensor([n + 5, n + 2])
        with patch(error_on_recompile=n > 1):
            got = compiled(query, key, lengths)
        assert_rounding_only(got, step(query, key, lengths), (query, key), f"step {n}")


def test_a_model_with_swapped_attention():
    """An encoder of torch's in one graph, with padding, a batch entry of nothing but padding and a causal mask."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert len(mha_ext.swap_attention(model).swapped) == 2
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    options = {
        "mask": torch.ones(7, 7, dtype=torch.bool).triu(1),
        "src_key_padding_mask": torch.arange(7) >= torch.tensor([[7], [4], [0]]),
        "is_causal": True,
    }
    got, want = (f(x, **options) for f in (compiled, model))
    assert_rounding_only(got, want, list(model.parameters()))
    grads = [torch.autograd.grad(y.sin().sum(), list(model.parameters())) for y in (got, want)]
    assert_rounding_only(*grads, list(model.parameters()))


def test_dropout_trains_compiled():
    """A seed of its own for every step, and a loss that comes down all the same."""
    model = LanguageModel(dropout=0.1, layers=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    batch = text()
    assert not torch.equal(compiled(*batch), compiled(*batch))
    seen = losses(model, [batch] * 60, compiled, rate=0.3)
    assert seen[-5:].max() < seen[0] / 2, seen
