"""How an operator becomes differentiable: the choice of the way that torch needs in each situation.

What the derivatives are is the business of the rules: :mod:`mha_ext.rules_steps` for the three steps,
:mod:`mha_ext.rules_fused` for all of attention in one operator.

torch has no single route that does everything: ``register_autograd`` loses forward-mode tangents silently, and an
``autograd.Function`` with ``jvp`` and ``vmap`` cannot be compiled (and costs 14 us more a call, for ``setup_context``).
So each operator gets two Functions, and :class:`DifferentiableOp` chooses:

======================================  ===================================================================
a ``torch.func`` transform or forward    ``Full``: backward, jvp and vmap. While compiling, and for jvp of jvp: the
AD is active                             plain-torch reference, because torch would drop tangents without a word.
some input requires grad                 ``Plain``: backward only; fast, and Dynamo can trace it.
neither                                  the operator itself.
======================================  ===================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

_functorch_active = torch._C._are_functorch_transforms_active


def needs_full() -> bool:
    """Whether a ``torch.func`` transform or a forward-mode level is active.

    Both probes are private to torch; they are the only ones that Dynamo traces right, and tests pin them.
    """
    return _functorch_active() or forward_ad._current_level >= 0


def _forward_levels() -> int:
    """How many forward-mode levels are active. In a Function, torch keeps only the innermost tangents of what was saved
    for forward, so that jvp of jvp would be zero without a word."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    nested = sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)
    return max(nested, forward_ad._current_level + 1)


class Rule(Protocol):
    """What is known of one operator. ``ctx`` is the context of an ``autograd.Function``."""

    call: Callable[..., Any]

    def op(self, *args: Any) -> Any:
        """The native operator."""

    def reference(self, *args: Any) -> Any:
        """The same in plain torch, for ``torch.func`` transforms inside ``torch.compile``."""

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        """Tensors that the derivatives need; everything else goes onto ``ctx``."""

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Gradients of the inputs from those of the outputs."""

    def jvp(self, ctx: Any, *tangents: Any) -> Any:
        """Tangents of the outputs from those of the inputs (None: zero)."""

    def vmap(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """The operator over a batch dimension: every kernel takes further leading dimensions as they come."""


class DifferentiableOp:
    """An operator that can be differentiated in every mode; see the table above for the routes."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        rule.call = self  # the rules differentiate themselves: a jvp or vmap of an operator calls it again
        self.op = rule.op
        self.plain, self.full = _functions(rule)

    def __call__(self, *args: Any) -> Any:
        if needs_full():
            by_torch = torch.compiler.is_compiling() or _forward_levels() > 1
            return self.rule.reference(*args) if by_torch else self.full.apply(*args)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return self.plain.apply(*distinct_while_compiling(args))
        return self.op(*args)

    def in_backward(self, *args: Any) -> Any:
        """The same from within a backward rule. Dynamo traces a backward once and cannot nest Functions there."""
        return self.op(*args) if torch.compiler.is_compiling() else self(*args)


def distinct_while_compiling(args: tuple[Any, ...]) -> tuple[Any, ...] | list[Any]:
    """The arguments with views for repeated tensors: Dynamo refuses a Function that gets the same tensor twice, as
    self-attention passes it."""
    if not torch.compiler.is_compiling():
        return args
    distinct: list[Any] = []
    for a in args:
        repeated = isinstance(a, Tensor) and any(a is b for b in distinct)
        distinct.append(a.view_as(a) if repeated else a)
    return distinct


def _functions(rule: Rule) -> tuple[Any, Any]:
    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = rule.op(*args)
            ctx.save_for_backward(*rule.save(ctx, args, output))
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return rule.backward(ctx, *grads)

    class Full(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return rule.op(*args)

        @staticmethod
        def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
            saved = rule.save(ctx, inputs, output)
            ctx.save_for_backward(*saved)
            ctx.save_for_forward(*saved)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return rule.backward(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return rule.jvp(ctx, *tangents)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            return rule.vmap(info, in_dims, *args)

    name = type(rule).__name__
    Plain.__name__, Full.__name__ = f"{name}Plain", f"{name}Full"
    return Plain, Full


# torch.autograd.grad(is_grads_batched=True), and with it functional.jacobian(vectorize=True) and gradcheck's batched
# check, runs backward under torch's older vmap, which needs_full() does not see. It loops over simple operators by
# itself; those with optional tensors register here what to do.
older_vmap = torch.library.Library("mha_ext", "IMPL")


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def batch_first(x: Any, dim: int | None, size: int, expand: bool = False) -> Any:
    """``x`` with its vmapped dimension in front; one that is not vmapped broadcasts there, expanded on demand."""
    if x is None:
        return None
    if dim is not None:
        return x.movedim(dim, 0)
    return x.unsqueeze(0).expand(size, *x.shape) if expand else x.unsqueeze(0)
