"""timm's attention modules after swap_attention, against timm's own: results, gradients, weights; whole models."""

import copy
import functools
import pickle

import pytest
import torch
from test_fused import Calls
from tolerances import assert_rounding_only

import mha_ext

timm = pytest.importorskip("timm", reason="timm is not installed: pip install 'mha_ext[timm]'")

from timm import layers  # noqa: E402
from timm.models import beit, cait, eva, swin_transformer, vision_transformer, vision_transformer_relpos  # noqa: E402

from mha_ext.integrations.timm import REPLACEMENTS, attention_weights  # noqa: E402

WIDTH, HEADS, BATCH, SIDE = 32, 4, 2, 4
TOKENS = SIDE * SIDE
NORM = {"norm_layer": torch.nn.LayerNorm}
LOWER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def added(*shape):
    """An additive mask that hides nothing."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rope():
    return layers.RotaryEmbeddingCat(WIDTH // HEADS, in_pixels=False, feat_shape=[SIDE, SIDE]).get_embed().double()


# The module, how many tokens it takes, and what else its forward does.
CASES = {
    "vit": (functools.partial(layers.Attention, WIDTH, HEADS, qkv_bias=True), TOKENS, {}),
    "norms": (functools.partial(layers.Attention, WIDTH, HEADS, qk_norm=True, scale_norm=True, **NORM), TOKENS, {}),
    "gated": (functools.partial(layers.Attention, WIDTH, HEADS, gated=True, attn_head_dim=16, dim_out=8), TOKENS, {}),
    "causal": (functools.partial(layers.Attention, WIDTH, HEADS), TOKENS, {"is_causal": True}),
    "keep_mask": (functools.partial(layers.Attention, WIDTH, HEADS), TOKENS, {"attn_mask": LOWER}),
    "added_mask": (functools.partial(layers.Attention, WIDTH, HEADS), TOKENS,
                   {"attn_mask": added(BATCH, 1, TOKENS, TOKENS)}),
    "rope": (functools.partial(layers.AttentionRope, WIDTH, HEADS), 1 + TOKENS, {"rope": rope()}),
    "rope_gqa": (functools.partial(layers.AttentionRope, WIDTH, HEADS, qkv_fused=False, num_kv_heads=2, qk_norm=True,
                                   num_prefix_tokens=0, **NORM), TOKENS, {"rope": rope()}),
    "eva": (functools.partial(eva.EvaAttention, WIDTH, HEADS, scale_norm=True, **NORM), 1 + TOKENS, {"rope": rope()}),
    "beit": (functools.partial(beit.Attention, WIDTH, HEADS, qkv_bias=True, window_size=(SIDE, SIDE)), 1 + TOKENS,
             {"shared_rel_pos_bias": added(1, HEADS, 1 + TOKENS, 1 + TOKENS)}),
    "relpos": (functools.partial(vision_transformer_relpos.RelPosAttention, WIDTH, HEADS, qk_norm=True,
                                 rel_pos_cls=functools.partial(layers.RelPosBias, window_size=(SIDE, SIDE))),
               TOKENS, {}),
    "swin": (functools.partial(swin_transformer.WindowAttention, WIDTH, HEADS, window_size=SIDE), TOKENS,
             {"mask": added(BATCH, TOKENS, TOKENS)}),
    "class": (functools.partial(cait.ClassAttn, WIDTH, HEADS), 1 + TOKENS, {}),
    "pool": (functools.partial(layers.AttentionPoolLatent, WIDTH, num_heads=HEADS), TOKENS, {}),
}  # fmt: skip


def pair(name):
    """timm's module in float64 and its swapped copy."""
    make, tokens, options = CASES[name]
    theirs = make().double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # tables of relative positions begin as zeros
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = copy.deepcopy(theirs)
    assert mha_ext.swap_attention(ours) == (("",), {})
    return theirs, ours, torch.randn(BATCH, tokens, WIDTH, dtype=torch.float64), options


def results(module, x, options, dtype=torch.float64):
    """Output, and the gradients of the input and of every parameter that has one."""
    module = copy.deepcopy(module).to(dtype)
    x = x.to(dtype).requires_grad_()
    options = {
        n: o.to(dtype) if isinstance(o, torch.Tensor) and o.is_floating_point() else o for n, o in options.items()
    }
    output = module(x, **options)
    grads = torch.autograd.grad(output.sin().sum(), [x, *module.parameters()], allow_unused=True)
    return output, *(grad for grad in grads if grad is not None)


@pytest.mark.parametrize("name", CASES)
def test_equals_timm(name):
    theirs, ours, x, options = pair(name)
    want = results(theirs, x, options)
    with Calls() as calls:
        got = results(ours, x, options)
    assert calls.names.count("fused_attention") == 1
    assert len(got) > 3
    assert_rounding_only(got, want, [x, *ours.parameters()], name)


@pytest.mark.parametrize("name", CASES)
def test_float32_is_as_near_to_float64_as_timm(name):
    theirs, ours, x, options = pair(name)
    want = results(theirs, x, options)
    plain, got = (results(module, x, options, torch.float32) for module in (theirs, ours))
    for n, (exact, other, mine) in enumerate(zip(want, plain, got, strict=True)):
        assert mine.dtype == torch.float32
        error, allowed = ((result.double() - exact).abs().max().item() for result in (mine, other))
        floor = torch.finfo(torch.float32).eps * exact.abs().max().item()
        assert error <= 2 * allowed + floor, f"{name}, result {n}: off by {error:.2e}, timm's own by {allowed:.2e}"


def test_every_replacement_is_compared():
    assert {type(pair(name)[0]) for name in CASES} == set(REPLACEMENTS)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("pool", "causal")])
def test_weights_are_those_of_timm_unfused(name):
    """timm passes them to attn_drop where its attention is not fused; their gradients agree, too."""
    theirs, ours, x, options = pair(name)
    theirs.fused_attn, seen = False, []
    theirs.attn_drop.register_forward_hook(lambda module, inputs, output: seen.append(output))
    theirs(x, **options)
    without = ours(x, **options)
    with attention_weights(ours) as weights:
        output = ours(x, **options)
    assert list(weights) == [""]
    both = [(w, *torch.autograd.grad(w.sin().sum(), list(m.parameters()), allow_unused=True)[:1])
            for w, m in ((weights[""], ours), (seen[0], theirs))]  # fmt: skip
    assert_rounding_only(*([r for r in result if r is not None] for result in both), [x, *ours.parameters()], name)
    assert_rounding_only(output, without, [x, *ours.parameters()], name)
    ours(torch.zeros_like(x), **options)
    assert_rounding_only(weights[""], seen[0], [x, *ours.parameters()], "a call after the block")


def test_dropout_in_training_only():
    module = layers.Attention(WIDTH, HEADS, attn_drop=0.5).double()
    mha_ext.swap_attention(module)
    x = torch.randn(BATCH, 64, WIDTH, dtype=torch.float64)
    found = {}
    for training in (True, False):
        with attention_weights(module.train(training)) as weights:
            output = module(x)
        found[training] = weights[""]
        value = module.qkv(x).unflatten(-1, (3, HEADS, -1))[:, :, 2].transpose(1, 2)
        want = module.proj((weights[""] @ value).transpose(1, 2).flatten(2))
        assert_rounding_only(output, want, [x, *module.parameters()])
    kept = found[True] != 0
    assert abs(kept.double().mean().item() - 0.5) < 4 * 0.5 / kept.numel() ** 0.5  # four standard deviations
    torch.testing.assert_close(found[True][kept], 2 * found[False][kept])
    assert (found[False] > 0).all()


MODELS = {
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 2},
    "vit_base_patch16_siglip_224": {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 3},
    "vit_relpos_small_patch16_224": {"img_size": 32, "depth": 1},
    "beitv2_base_patch16_224": {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 3},
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 2},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (2, 1), "embed_dim": 24, "num_heads": (2, 3)},
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_models(name):
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=5, **MODELS[name]).double().eval()
    ours = copy.deepcopy(theirs)
    report = mha_ext.swap_attention(ours)
    assert report.swapped
    assert not report.left, report
    side = MODELS[name]["img_size"]
    picture = torch.randn(2, 3, side, side, dtype=torch.float64)
    results = [(m(picture), *torch.autograd.grad(m(picture).sin().sum(), list(m.parameters()))) for m in (ours, theirs)]
    assert_rounding_only(*results, list(ours.parameters()), name)
    with Calls() as calls:
        ours(picture)
    assert calls.names == ["fused_attention"] * len(report.swapped)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    with attention_weights(ours) as weights:
        ours(picture)
    assert tuple(weights) == report.swapped


def vit():
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **MODELS["vit_tiny_patch16_224"]).eval()


def test_copies_and_pickles():
    model = vit()
    mha_ext.swap_attention(model)
    picture = torch.randn(1, 3, 32, 32)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert str(mha_ext.swap_attention(twin)).count("it is mha_ext's already") == 2
        assert torch.equal(twin(picture), model(picture))


def test_autocast():
    """Projections in bfloat16, the table of relative positions in float32."""
    theirs = timm.create_model("beitv2_base_patch16_224", **MODELS["beitv2_base_patch16_224"]).eval()
    ours, picture = copy.deepcopy(theirs), torch.randn(1, 3, 32, 32)
    mha_ext.swap_attention(ours)
    want = theirs(picture)
    with torch.autocast("cpu", torch.bfloat16):
        got, plain = ours(picture), theirs(picture)
    error, allowed = ((result - want).abs().max().item() for result in (got, plain))
    assert error <= 2 * allowed + torch.finfo(torch.bfloat16).eps * want.abs().max().item()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_compiles_and_exports_in_one_piece():
    model, picture = vit().double(), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    mha_ext.swap_attention(model)
    with torch.no_grad():
        want = model(picture)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_rounding_only(compiled(picture), want, list(model.parameters()))
        program = torch.export.export(model, (picture,))
        assert_rounding_only(program.module()(picture), want, list(model.parameters()))
    assert sum("fused_attention" in str(node.target) for node in program.graph.nodes) == 2


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_what_is_left_and_why():
    class Own(layers.Attention):
        pass

    model = torch.nn.ModuleDict({
        "vit": layers.Attention(WIDTH, HEADS),
        "own": Own(WIDTH, HEADS),
        "parallel": vision_transformer.ParallelScalingBlock(WIDTH, HEADS),
        "talking": cait.TalkingHeadAttn(WIDTH, HEADS),
        "torch": torch.nn.MultiheadAttention(WIDTH, HEADS),
        "complex": layers.Attention(WIDTH, HEADS).to(torch.complex64),
        "linear": torch.nn.Linear(2, 2),
    })  # fmt: skip
    lines = str(mha_ext.swap_attention(model)).split("\n")
    assert lines[0] == "2 of 6 attention modules swapped"
    assert lines[1].startswith("  own: it is a test_timm.")
    assert lines[1].endswith(".Own, a subclass of timm.layers.attention.Attention whose own behaviour would be lost")
    assert lines[2:] == [
        "  parallel: it is a timm.models.vision_transformer.ParallelScalingBlock, for which mha_ext has no replacement",
        "  talking: it is a timm.models.cait.TalkingHeadAttn, for which mha_ext has no replacement",
        "  complex: qkv.weight is torch.complex64, for which there are no kernels",
    ]
    for alone in ("vit", "own"):  # nothing else of timm beside them
        assert str(mha_ext.swap_attention(model[alone])).startswith("0 of 1 attention modules swapped")
    with pytest.raises(ValueError, match=r"model must hold modules of timm that .* swapped, got none"):
        attention_weights(torch.nn.Linear(2, 2)).__enter__()


def test_a_module_with_a_forward_of_its_own_is_left():
    module = layers.Attention(WIDTH, HEADS)
    module.forward = module.forward
    assert "its forward has been replaced in the module itself" in str(mha_ext.swap_attention(module))


def test_other_attention_is_named_and_gates_are_not():
    """Attention whose class has another name is left with a line; factors for channels and places are no attention."""
    gates = torch.nn.ModuleList([layers.create_attn(name, 16) for name in ("cbam", "coord")])
    assert str(mha_ext.swap_attention(gates)) == "0 of 0 attention modules swapped"
    model = timm.create_model("gcvit_xxtiny", num_classes=5)
    report = mha_ext.swap_attention(model)
    assert sum("WindowAttentionGlobal" in reason for reason in report.left.values()) > 0, report


def test_masks_of_integers_are_refused():
    """Added to the scores, as a number mask might be, they would hide nothing."""
    module = layers.Attention(WIDTH, HEADS)
    mha_ext.swap_attention(module)
    with pytest.raises(
        TypeError, match=r"attn_mask must be bool \(keep\) or floating point \(additive\), got torch.int64"
    ):
        module(torch.randn(1, 4, WIDTH), attn_mask=torch.ones(4, 4, dtype=torch.int64).tril())


def test_weights_of_nested_blocks_and_of_modules_off_the_fused_path():
    module, given = layers.Attention(WIDTH, HEADS).eval(), torch.randn(1, 4, WIDTH)
    mha_ext.swap_attention(module)
    with attention_weights(module) as outer:
        with attention_weights(module) as inner:
            module(given)
        assert list(inner) == [""]
        assert not outer
        module(given)
        assert torch.equal(outer[""], inner[""])
        module.fused_attn = False
        with pytest.raises(RuntimeError, match="is its fused_attn False"):
            module(given)
    module(given)  # nobody asks
