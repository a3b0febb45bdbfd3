"""The machine: what it can do at most, measured, and what a reader of a result must know about it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

import mha_ext
from mha_ext._load import core

from .cases import Work

__all__ = ["Peaks", "describe", "least_seconds"]

# Which of the measured rates a product in a dtype could reach. float16 is widened: its sums are kept in float32.
# bfloat16 has instructions of its own, which are not faster on every CPU: so the fastest way counts.
KINDS = {
    "f64": ("fma_f64",),
    "f32": ("fma_f32",),
    "f16": ("fma_f32",),
    "bf16": ("fma_f32", "dot_bf16", "amx_bf16"),
}
STREAMS = ("read_bandwidth", "write_bandwidth")


class Peaks:
    """The best rate seen of each kind, in GF/s or GB/s."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.rates: dict[str, float] = {}

    def measure(self, work: Work, dtype: str) -> None:
        """Measure what bounds this work: arithmetic again at every call, as the clock wanders; memory, which takes
        seconds, at the first call that needs it."""
        wanted = KINDS[dtype] if work.flops else STREAMS
        for kind in set(wanted) & set(core.peak_kinds()):
            if kind not in STREAMS or kind not in self.rates:
                self.rates[kind] = max(self.rates.get(kind, 0.0), core.measure_peak(kind, self.threads))


def least_seconds(work: Work, dtype: str, rates: Mapping[str, float]) -> float | None:
    """The time that the work takes at the measured peak: of arithmetic for products, of memory for others.

    None where the peak was not measured.
    """
    if work.flops:
        peak = max(rates.get(kind, 0.0) for kind in KINDS[dtype])
        return work.flops / peak * 1e-9 if peak else None
    if any(kind not in rates for kind in STREAMS):
        return None
    return (work.bytes_read / rates["read_bandwidth"] + work.bytes_written / rates["write_bandwidth"]) * 1e-9


def describe(threads: int) -> dict[str, object]:
    """Machine, versions, flags and commit, as the JSON files hold them."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": os.getloadavg()[0],  # of the minute before: what else was running
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "isa": mha_ext.isa(),
        "supported_isas": list(mha_ext.supported_isas()),
        "mha_ext": mha_ext.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "build": mha_ext.build_info(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SETTINGS)},
    }


# Environment variables that change what is measured.
_SETTINGS = (
    "MHA_EXT_",
    "ATEN_CPU_CAPABILITY",
    "OMP_",
    "MKL_",
    "ONEDNN_",
    "DNNL_",
    "KMP_",
    "GOMP_",
    "MALLOC_",
    "LD_PRELOAD",
)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit of the source tree around the package, marked when files differ; None when installed elsewhere."""
    root = Path(mha_ext.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
