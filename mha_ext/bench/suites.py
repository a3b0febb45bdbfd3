"""The suites of `mha-ext bench`, in the order of a run."""

from __future__ import annotations

import torch

import mha_ext
from mha_ext._load import why_no_gpu

from .cases import Case, Suite
from .suite_attention import (
    backward_cases,
    decode_cases,
    forward_cases,
    overhead_cases,
    threads_cases,
    weights_cases,
)
from .suite_cuda import cuda_cases
from .suite_modules import modules
from .suite_options import dropout_cases, masks_cases, memory_cases
from .suite_steps import steps

__all__ = ["SUITES", "listed"]

# glibc takes large blocks from the system one by one and gives them back when freed, so that each result lies in fresh
# pages, which the system first has to clear. With these it keeps what it has.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**28)}
# ATen, MKL and oneDNN each choose for themselves: without the last two, torch would multiply with AVX-512.
AVX2 = {
    "MHA_EXT_ISA": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


def _why_no_avx2() -> str | None:
    return None if "avx2" in mha_ext.supported_isas() else "mha_ext's AVX2 level is absent"


def _on_avx2(quick: bool) -> list[Case]:
    if _why_no_avx2():
        return []
    return [case for case in forward_cases(quick) if case.dtype == torch.float32]


SUITES = {
    "forward": Suite("output without weights", forward_cases),
    "backward": Suite("gradients of query, key and value, the forward not timed", backward_cases),
    "weights": Suite("output and weights, in fresh memory", weights_cases),
    "weights_reused": Suite("the same, when memory is used again and again", weights_cases, KEEP_MEMORY),
    "decode": Suite("one query against a cache of keys and values", decode_cases),
    "masks": Suite("masks, bias, lengths, window, strides against the call without", masks_cases),
    "dropout": Suite("dropout against none", dropout_cases),
    "overhead": Suite("the smallest call: what a call costs by itself", overhead_cases),
    "threads": Suite("all threads against one", threads_cases),
    "avx2": Suite("forward on the AVX2 level, against torch held to AVX2", _on_avx2, AVX2, _why_no_avx2),
    "memory": Suite("extra memory of forward + backward of a long text", memory_cases),
    "cuda": Suite(
        "a GPU: forward, backward, weights, one query, against every backend of SDPA",
        cuda_cases,
        why_empty=why_no_gpu,
    ),
    "steps": Suite("attention_scores, masked_softmax, weighted_sum one by one", steps),
    "modules": Suite("MultiHeadAttention, projections and all", modules),
}


def listed(suite: str, quick: bool) -> list[tuple[str, Case]]:
    """The cases of a suite, each with the suite's name."""
    return [(suite, case) for case in SUITES[suite].cases(quick)]
