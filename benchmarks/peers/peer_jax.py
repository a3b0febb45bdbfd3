"""JAX: jax.nn.dot_product_attention, and the formula in jax.numpy, which XLA often makes the faster of the two.

JAX has no setting for its number of threads: it takes as many as the process has cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack

from mha_ext.bench.cases import Results, trained

from .peer import Call, Peer
from .task import ATTENTION, CAUSAL, PADDED, TRAINED, TRAINED_CAUSAL, WEIGHTS, Task

__all__ = ["PEERS"]


def _library(task: Task, inputs: Sequence[Tensor]) -> Call:
    import jax

    lengths = None if task.key_lengths is None else jax.numpy.asarray(task.key_lengths.int().numpy())

    def attention(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=task.is_causal, key_value_seq_lengths=lengths, implementation="xla"
        )

    layout = [x.transpose(1, 2).contiguous() for x in inputs]  # (B, L, H, D)
    return _call(attention, task, layout, lambda x: x.transpose(1, 2))


def _plain(task: Task, inputs: Sequence[Tensor]) -> Call:
    import jax
    import jax.numpy as jnp

    mask = None if task.added_mask is None else _to_jax(task.added_mask)

    def attention(query: Any, key: Any, value: Any) -> Any:
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) * jnp.asarray(task.scale, query.dtype)
        weights = jax.nn.softmax(scores if mask is None else scores + mask, axis=-1)
        output = jnp.einsum("bhqk,bhkd->bhqd", weights, value)
        return (output, weights) if task.kind == WEIGHTS else output

    return _call(attention, task, inputs, lambda x: x)


def _call(
    attention: Callable[..., Any], task: Task, inputs: Sequence[Tensor], layout: Callable[[Tensor], Tensor]
) -> Call:
    import jax

    def trained_attention(query: Any, key: Any, value: Any, grad_output: Any) -> Any:
        output, pullback = jax.vjp(attention, query, key, value)
        return output, *pullback(grad_output)

    compiled = jax.jit(trained_attention if task.passes is trained else attention)
    arrays = [_to_jax(x) for x in inputs]

    def call() -> Results:
        results = jax.block_until_ready(compiled(*arrays))
        results = results if isinstance(results, tuple) else (results,)
        return tuple(layout(from_dlpack(x)) for x in results)

    return call


def _to_jax(x: Tensor) -> Any:
    import jax

    return jax.dlpack.from_dlpack(x.contiguous(), copy=True)


GRADIENTS = {TRAINED, TRAINED_CAUSAL}
PEERS = (
    Peer("JAX", ("jax",), ATTENTION | {CAUSAL, PADDED} | GRADIENTS, _library, "dot_product_attention"),
    Peer("JAX", ("jax",), ATTENTION | {CAUSAL, PADDED, WEIGHTS} | GRADIENTS, _plain, "jax.numpy"),
)
