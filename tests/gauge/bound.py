"""A model of how fast a main loop can run: the unit that its instructions keep busy longest, if nothing ever waits.

Rates are per cycle and quarter of a multiprocessor, from NVIDIA's white papers on A100 and H100 and the table of
arithmetic throughput in the CUDA programming guide. On sm_90 mma stays below the rate given here, which is that of
wgmma (Luo et al., arXiv:2402.13499). Latencies, caches and memory are left out: this is a bound, not a forecast.
"""

from __future__ import annotations

WARP = 32
SHARED_BYTES = 32  # 128 a cycle for the whole multiprocessor
MMA = 16 * 8 * 16  # multiply-adds of one m16n8k16


RATES = {
    "sm_80": {"tensor": 256, "float": 16, "double": 8, "special": 4},
    "sm_90": {"tensor": 512, "float": 32, "double": 16, "special": 4},
}


def busy(row: dict[str, int], arch: str) -> dict[str, float]:
    """Cycles that one round of the main loop takes of each unit."""
    rates = RATES[arch]
    cycles = {"issue": float(row["loop"]), "shared": row.get("loop_shared_bytes", 0) / SHARED_BYTES}
    for unit, lanes in rates.items():
        work = MMA if unit == "tensor" else WARP
        cycles[unit] = row.get(f"loop_{unit}", 0) * work / lanes
    return cycles


def bound(row: dict[str, int], arch: str) -> tuple[str, float] | None:
    """The unit that is busy longest, and the share of its time in which the multiplying unit is busy then."""
    cycles = busy(row, arch)
    work = max(cycles[unit] for unit in ("tensor", "float", "double"))
    if work == 0:
        return None
    if cycles["tensor"]:
        work = cycles["tensor"]
    unit = max(cycles, key=lambda name: cycles[name])
    return unit, work / cycles[unit]
