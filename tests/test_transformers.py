"""attn_implementation="mha_ext" in models of the transformers library, against its eager implementation: logits, every
layer's attentions, gradients, generation with a cache. Small models with random weights, in float64."""

import copy

import pytest
import torch
from test_fused import Calls

import mha_ext.integrations.transformers as integration

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'mha_ext[transformers]'"
)
integration.register()

BATCH, LENGTH = 2, 9
PADDED = torch.tensor([[1] * LENGTH, [1] * (LENGTH - 3) + [0] * 3])
LEFT_PADDED = PADDED.flip(-1)

DECODER = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
               max_position_embeddings=64, bos_token_id=1, eos_token_id=49, pad_token_id=0)  # fmt: skip
DECODERS = {
    "gpt2": transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1,
                                    eos_token_id=49, pad_token_id=0, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0),
    "llama": transformers.LlamaConfig(**DECODER, num_key_value_heads=2),
    "mistral": transformers.MistralConfig(**DECODER, num_key_value_heads=1, sliding_window=4),
    "qwen2": transformers.Qwen2Config(**DECODER, num_key_value_heads=4),
    "gemma2": transformers.Gemma2Config(**DECODER, num_key_value_heads=2, head_dim=8, sliding_window=4,
                                        attn_logit_softcapping=0.3, query_pre_attn_scalar=5),
    "gpt_oss": transformers.GptOssConfig(**DECODER, num_key_value_heads=2, head_dim=8, sliding_window=4,
                                         num_local_experts=2, num_experts_per_tok=1),
}  # fmt: skip
ENCODER = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
               max_position_embeddings=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0)  # fmt: skip
ENCODERS = {"bert": transformers.BertConfig(**ENCODER), "roberta": transformers.RobertaConfig(**ENCODER)}
T5 = transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0,
                           relative_attention_num_buckets=8, decoder_start_token_id=0)  # fmt: skip
WHISPER = transformers.WhisperConfig(vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2,
                                     encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
                                     decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=12,
                                     max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=49,
                                     decoder_start_token_id=1, begin_suppress_tokens=None)  # fmt: skip


@pytest.fixture(autouse=True)
def eager_in_float64(monkeypatch):
    """The eager implementations ask for a softmax in float32, whatever the inputs."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


def pair(auto, config):
    """One model with the eager implementation and one with ours, of the same weights; none of them zero."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"  # others do not take float64
    eager = auto.from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ours = auto.from_config(copy.deepcopy(config), attn_implementation="mha_ext").double().eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def tokens():
    return torch.randint(2, 49, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def assert_same(got, want, rows=None):
    """`rows` of a (B, L, ...) or (B, H, L, Lk) tensor: those that are not padding."""
    if rows is not None:
        rows = rows.bool()
        got, want = ((x.transpose(1, 2) if x.dim() == 4 else x)[rows] for x in (got, want))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


ATTENTIONS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def compare(auto, config, given, rows=None, layers=3):
    """Logits or states, all attentions, and the gradient of every parameter; each attention one fused call."""
    eager, ours = pair(auto, config)
    results = []
    for model in (ours, eager):
        with Calls() as calls:
            out = model(**given, output_attentions=True)
        result = out.logits if "logits" in out else out.last_hidden_state
        kept = result if rows is None else result[rows.bool()]
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        grads = torch.autograd.grad(kept.sin().sum(), learned, allow_unused=True)
        results.append((out, result, grads, calls.names))
    (got, got_result, got_grads, names), (want, want_result, want_grads, _) = results
    assert_same(got_result, want_result, rows)
    found = [name for name in ATTENTIONS if want.get(name)]
    assert found
    attentions = 0
    for name in found:
        assert len(got[name]) == len(want[name]) > 0
        for mine, theirs in zip(got[name], want[name], strict=True):
            assert_same(mine, theirs, rows)
            attentions += 1
    assert names.count("fused_attention") == len(names) == attentions
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_same(mine, theirs)
    return ours


@pytest.mark.parametrize("mask", [None, PADDED, LEFT_PADDED], ids=("whole", "padded", "left_padded"))
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, mask):
    given = {"input_ids": tokens()} if mask is None else {"input_ids": tokens(), "attention_mask": mask}
    compare(transformers.AutoModelForCausalLM, DECODERS[name], given, mask)


@pytest.mark.parametrize("mask", [None, PADDED], ids=("whole", "padded"))
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name, mask):
    given = {"input_ids": tokens()} if mask is None else {"input_ids": tokens(), "attention_mask": mask}
    compare(transformers.AutoModelForMaskedLM, ENCODERS[name], given, mask)


def test_vit():
    config = transformers.ViTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                                    image_size=8, patch_size=2, num_labels=3)  # fmt: skip
    pixels = torch.randn(BATCH, 3, 8, 8, dtype=torch.float64)
    compare(transformers.AutoModelForImageClassification, config, {"pixel_values": pixels})


def test_whisper():
    given = {"input_features": torch.randn(BATCH, 8, 24, dtype=torch.float64), "decoder_input_ids": tokens()}
    compare(transformers.AutoModelForSpeechSeq2Seq, WHISPER, given)


@pytest.mark.parametrize("mask", [None, PADDED], ids=("whole", "padded"))
def test_t5(mask):
    """The position bias is learned: its gradient is among those compared."""
    given = {"input_ids": tokens(), "decoder_input_ids": tokens()}
    if mask is not None:
        given["attention_mask"] = mask
    ours = compare(transformers.AutoModelForSeq2SeqLM, T5, given)
    assert any("relative_attention_bias" in name for name, _ in ours.named_parameters())


def generated(model, given, **options):
    with Calls() as calls:
        out = model.generate(**given, max_new_tokens=8, do_sample=False, return_dict_in_generate=True,
                             output_attentions=True, output_logits=True, min_new_tokens=8, **options)  # fmt: skip
    return out, calls.names


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache):
    """The same tokens, logits and attentions at each step, prompts padded on the left; with and without a cache."""
    eager, ours = pair(transformers.AutoModelForCausalLM, DECODERS[name])
    given = {"input_ids": tokens(), "attention_mask": LEFT_PADDED}
    options = {"use_cache": False} if cache is None else {"cache_implementation": cache}
    if cache == "static":
        options["disable_compile"] = True
    (got, names), (want, _) = generated(ours, given, **options), generated(eager, given, **options)
    assert torch.equal(got.sequences, want.sequences)
    for mine, theirs in zip(got.logits, want.logits, strict=True):
        assert_same(mine, theirs)
    for mine, theirs in zip(got.attentions, want.attentions, strict=True):  # by step, then by layer
        for a, b in zip(mine, theirs, strict=True):
            assert_same(a[..., -1, :], b[..., -1, :])
    assert names == ["fused_attention"] * (8 * 3)


@pytest.mark.parametrize("which", ["t5", "whisper"])
def test_generate_from_an_encoder(which):
    if which == "t5":
        auto, config, given = transformers.AutoModelForSeq2SeqLM, T5, {"input_ids": tokens(), "attention_mask": PADDED}
    else:
        auto, config = transformers.AutoModelForSpeechSeq2Seq, WHISPER
        given = {"input_features": torch.randn(BATCH, 8, 24, dtype=torch.float64)}
    eager, ours = pair(auto, config)
    (got, _), (want, _) = generated(ours, given), generated(eager, given)
    assert torch.equal(got.sequences, want.sequences)
    for name in ("decoder_attentions", "cross_attentions"):
        for mine, theirs in zip(getattr(got, name), getattr(want, name), strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert_same(a, b)


def test_no_weights_unless_asked_for():
    ours = pair(transformers.AutoModelForCausalLM, DECODERS["llama"])[1]
    with Calls() as calls:
        ours(tokens())
    assert calls.names == ["fused_attention"] * 3
    schema = torch.ops.mha_ext.fused_attention.default._schema
    position = [argument.name for argument in schema.arguments].index("need_weights")
    assert [arguments[position] for _, arguments in calls.calls] == [False] * 3


def test_training_with_dropout():
    """Attention dropout acts in training, and steps bring the loss down."""
    config = copy.deepcopy(DECODERS["llama"])
    config.attention_dropout = 0.2
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="mha_ext").train()
    given = tokens()
    weights = model(given, output_attentions=True).attentions[0]
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand_as(weights)
    assert 0.05 < (weights[seen] == 0).double().mean() < 0.4
    optimiser, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(30):
        loss = model(given, labels=given).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert max(losses[-3:]) < 0.5 * losses[0]


def test_a_mask_of_the_users_own():
    """4-D masks are passed on as they are: bool, or floating point to add."""
    eager, ours = pair(transformers.AutoModelForCausalLM, DECODERS["llama"])
    seen = (torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.6).tril() | torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    want = eager(tokens(), attention_mask=added).logits
    assert_same(ours(tokens(), attention_mask=added).logits, want)
    assert_same(ours(tokens(), attention_mask=seen).logits, want)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_compiled():
    ours = pair(transformers.AutoModelForCausalLM, DECODERS["gemma2"])[1]
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_same(compiled(tokens(), use_cache=False).logits, ours(tokens(), use_cache=False).logits)


class Attending(torch.nn.Module):
    config = DECODERS["llama"]


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "sequences that are packed by cumulative lengths"),
        ({"indices": torch.zeros(1, 3, 2)}, "a choice of single keys for each query"),
        ({"block_indices": torch.zeros(1, 3, 2)}, "a choice of blocks of keys for each query"),
        ({"s_aux": torch.zeros(2, 3)}, r"sinks \(s_aux\) of shape \(2, 3\) instead of one per head"),
        ({"attention_mask": "block"}, "a mask of type str"),
    ],
)
def test_refusals_name_the_feature_and_the_model(arguments, feature):
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(
        NotImplementedError, match=f"does not support {feature}.* which Attending of the model 'llama' needs"
    ):
        integration.attention_forward(Attending(), x, x, x, **{"attention_mask": None, **arguments})


def test_what_a_missing_library_says(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'mha_ext\[transformers\]'"):
        integration.register()


def test_masks_of_integers_are_refused():
    """The library hands 4-D masks on as they are. Added to the scores, 0 and 1 would hide nothing."""
    ours = pair(transformers.AutoModelForCausalLM, DECODERS["llama"])[1]
    ids = tokens()
    mask = torch.ones(ids.shape[0], 1, ids.shape[1], ids.shape[1], dtype=torch.int64).tril()
    with pytest.raises(TypeError, match=r"attention_mask must be bool \(keep\) or floating point \(additive\)"):
        ours(ids, attention_mask=mask)


SMALL = {"vocab_size": 50, "hidden_size": 32}
OF_THEIR_OWN = {
    "bloom": lambda: transformers.BloomConfig(**SMALL, n_layer=1, n_head=2),
    "mpnet": lambda: transformers.MPNetConfig(
        **SMALL, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    ),
    "roformer": lambda: transformers.RoFormerConfig(
        **SMALL, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    ),
}


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_models_with_attention_of_their_own_are_refused(name):
    """They ask for a mask and add it to scores of their own: a mask of ours would hide nothing, without a word."""
    model = transformers.AutoModel.from_config(OF_THEIR_OWN[name](), attn_implementation="mha_ext").eval()
    ids = tokens()
    padding = torch.ones_like(ids)
    padding[0, -2:] = 0
    with pytest.raises(NotImplementedError, match=rf"as transformers\.models\.{name}\.modeling_{name} does"):
        model(ids, attention_mask=padding)
