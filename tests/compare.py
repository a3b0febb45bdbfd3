"""Run one case through the product, the float64 oracle and plain PyTorch, and hold the results together."""

import functools

import oracle
import torch
import torch_same_dtype
from magnitudes import AttentionMagnitudes
from tolerances import assert_close

import mha_ext


def seed_drawn_from(generator_state):
    """The seed that the next dropout call draws from a generator in this state."""
    generator = torch.Generator()
    generator.set_state(generator_state)
    return int(torch.randint(-(2**63), 2**63 - 1, (), generator=generator))


def run(attention, tensors, options, grads):
    """(output, weights, gradients by name) of one implementation; `grads` is (d output, d weights) or None."""
    leaves = {name: x.detach() for name, x in tensors.items()}
    if grads is not None:
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    extra = {name: leaves[name] for name in leaves if name in ("bias", "sinks")}
    output, weights = attention(leaves["query"], leaves["key"], leaves["value"], **{**options, **extra})
    if grads is None:
        return output, weights, {}
    pairs = [(r, g.to(r.dtype)) for r, g in zip((output, weights), grads, strict=True) if g is not None]
    pairs = [(r, g) for r, g in pairs if r.requires_grad]
    if not pairs:  # nothing but constants: no query rows, or every row empty
        return output, weights, {name: torch.zeros_like(x) for name, x in leaves.items()}
    got = torch.autograd.grad(
        [r for r, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True, materialize_grads=True
    )
    return output, weights, dict(zip(leaves, got, strict=True))


class Expected:
    """What the oracle says about a call, how far plain PyTorch is off, and the magnitudes involved."""

    def __init__(self, case, tensors, options, with_grads=True, through_weights=True):
        self.case, self.options = case, dict(options)
        self.tensors = {**tensors, **{n: self.options.pop(n) for n in ("bias", "sinks") if n in self.options}}
        drop = {}
        if case.dropout:
            torch.manual_seed(case.seed)
            drop = {"keep": case.keep(seed_drawn_from(torch.get_rng_state())), "dropout": case.dropout}
        self.keep = drop.get("keep")
        self.grads = None
        if with_grads:
            out_shape = (*tensors["query"].shape[:-1], tensors["value"].shape[-1])
            through = case.randn("grad_weights", self.score_shape) if through_weights else None
            self.grads = (case.randn("grad_output", out_shape), through)
        self.want = run(lambda *a, **o: oracle.attention(*a, **o, **drop), self.tensors, self.options, self.grads)
        self.plain = run(
            lambda *a, **o: torch_same_dtype.attention(*a, **o, **drop), finite(self.tensors), self.options, self.grads
        )
        magnitudes = AttentionMagnitudes(**self.tensors, **self.options, **drop)
        self.magnitudes = {"output": magnitudes.output, "weights": magnitudes.weights}
        if with_grads:
            self.magnitudes |= magnitudes.backward(*self.grads)

    @property
    def score_shape(self):
        return (*self.tensors["query"].shape[:-1], self.tensors["key"].shape[-2])

    def product(self, need_weights=True):
        """What the product gives on the same call."""
        drop = {"dropout": self.case.dropout} if self.case.dropout else {}
        torch.manual_seed(self.case.seed)
        grads = self.grads if self.grads is None or need_weights else (self.grads[0], None)
        return run(
            lambda *a, **o: mha_ext.attention(*a, **o, **drop, need_weights=need_weights),
            self.tensors,
            self.options,
            grads,
        )

    def check(self, need_weights=True):
        """Run the product on the same call and hold every result against it."""
        got = self.product(need_weights)
        self.same("output", got[0], self.want[0], self.plain[0])
        if need_weights:
            self.same("weights", got[1], self.want[1], self.plain[1])
        else:
            assert got[1] is None
        for name in got[2]:
            self.same(name, got[2][name], self.want[2][name], self.plain[2][name])
        return got

    def same(self, name, got, want, plain):
        title = f"gradient of {name}" if name in self.tensors else name
        dtype = self.tensors[name if name in self.tensors else "query"].dtype
        assert_close(got, want, plain, self.magnitudes[name], dtype=dtype, case=self.case, name=title)


@functools.lru_cache(maxsize=1024)
def expected(case, through_weights=True):
    """The oracle's answer for a case, worked out once for all ISA levels."""
    query, key, value, options = case.build()
    return Expected(case, {"query": query, "key": key, "value": value}, options, through_weights=through_weights)


def check_attention(case, need_weights=True):
    """mha_ext.attention for `case` against the oracle: output, weights and every gradient."""
    return expected(case, through_weights=need_weights).check(need_weights)


def check_step(step, case, tensors, options, magnitudes):
    """One of the three steps, named `step`, against oracle and plain PyTorch: the result and each tensor's gradient.

    `magnitudes` maps the gradient of the result to magnitudes by name; the result's own stand under "result".
    """
    dtype = next(iter(tensors.values())).dtype

    def run_step(module):
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        result = getattr(module, step)(**leaves, **options)
        grad = case.randn("grad", result.shape).to(result.dtype)
        grads = (
            torch.autograd.grad(result, list(leaves.values()), grad, allow_unused=True, materialize_grads=True)
            if result.requires_grad
            else [torch.zeros_like(x) for x in leaves.values()]
        )
        return {"result": result, **dict(zip(leaves, grads, strict=True))}

    got, want, plain = (run_step(module) for module in (mha_ext, oracle, torch_same_dtype))
    assert got["result"].requires_grad
    sizes = magnitudes(case.randn("grad", want["result"].shape).double())
    for name in want:
        title = f"{step}: {name if name == 'result' else f'gradient of {name}'}"
        assert_close(got[name], want[name], plain[name], sizes[name], dtype=dtype, case=case, name=title)


def finite(tensors):
    """Hidden NaN and inf taken out, for plain PyTorch, which would spread them."""
    return {name: torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for name, x in tensors.items()}
