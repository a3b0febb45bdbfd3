"""Every peer, in the order of the tables; ours first."""

from __future__ import annotations

from collections.abc import Sequence

import mha_ext
from mha_ext.bench.cases import OURS

from . import peer_flex, peer_jax, peer_onnxruntime, peer_openvino, peer_torch, peer_transformers
from .peer import Peer, Unavailable

__all__ = ["ALL", "versions"]

_MODULES = (peer_torch, peer_flex, peer_transformers, peer_onnxruntime, peer_openvino, peer_jax)
ALL: tuple[Peer, ...] = tuple(peer for module in _MODULES for peer in module.PEERS)


def versions(peers: Sequence[Peer]) -> tuple[dict[str, str], dict[str, str]]:
    """The version of each library that is installed, and the reason why another is not there."""
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    for peer in peers:
        try:
            found[peer.library] = mha_ext.__version__ if peer.library == OURS else peer.version
        except Unavailable as reason:
            missing[peer.library] = str(reason)
    return found, missing
