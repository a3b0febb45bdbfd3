"""What nvcc makes of each CUDA kernel, as a table: registers, stack, shared memory, and the mix of the main loop.

``python tests/gauge/gauge.py`` prints it, ``--write`` stores it in table.json beside this file, which test_gauge.py
holds every later build against. It needs nvcc, and nvdisasm and cuobjdump (``pip install nvidia-cuda-nvdisasm
nvidia-cuda-cuobjdump``); no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sass import Function, parse

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parents[1] / "csrc" / "cuda" / "launch"
TABLE = HERE / "table.json"
ARCHS = ("sm_80", "sm_90")

Row = dict[str, int]
Rows = dict[str, Row]  # by kernel
USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def tool(name: str) -> str | None:
    """Where a CUDA tool is: on PATH, or where its PyPI package puts it."""
    packaged = [path / "nvidia" / "cu13" / "bin" / name for path in map(Path, sys.path)]
    return shutil.which(name) or next((str(path) for path in packaged if path.exists()), None)


def missing_tools() -> list[str]:
    return [name for name in ("nvcc", "nvdisasm", "cuobjdump", "c++filt") if tool(name) is None]


def output_of(name: str, *arguments: str, text: str | None = None) -> str:
    return subprocess.run([str(tool(name)), *arguments], input=text, capture_output=True, text=True, check=True).stdout


def nvcc_version() -> str:
    found = re.search(r"V([\d.]+)", output_of("nvcc", "--version"))
    return found[1] if found else "unknown"


def kernel_name(mangled: str) -> str:
    """``product_mma_kernel<float16, false>``, without namespaces and parameters."""
    name = output_of("c++filt", text=mangled).strip()
    name = (
        name.removeprefix("void ")
        .replace("mha::cuda::", "")
        .replace("mha::", "")
        .replace("(anonymous namespace)::", "")
    )
    depth = 0
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return name[:i]
    return name


def main_loop(function: Function) -> Row:
    loop = function.main_loop()
    pipes = Counter(i.pipe for i in loop)
    row = {"loop": len(loop), **{f"loop_{pipe}": count for pipe, count in sorted(pipes.items())}}
    row["loop_ldmatrix"] = sum(i.base == "LDSM" for i in loop)
    return {name: count for name, count in row.items() if count or name == "loop"}


def measure(source: Path, arch: str) -> Rows:
    """A row for each kernel of a source file."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = str(Path(folder) / "kernels.cubin")
        output_of("nvcc", "-std=c++17", "-O3", "-cubin", f"-arch={arch}", "-o", cubin, str(source))
        usage, code = output_of("cuobjdump", "-res-usage", cubin), output_of("nvdisasm", "-c", cubin)
    rows = {}
    functions = {function.name: function for function in parse(code)}
    for name, registers, stack, shared, local in USAGE.findall(usage):
        function = functions[name]
        spills = sum(i.pipe == "local" for i in function.instructions)
        resources = {"registers": int(registers), "stack": int(stack) + int(local), "shared": int(shared)}
        row = {**resources, "local_accesses": spills, "code": len(function.instructions), **main_loop(function)}
        rows[kernel_name(name)] = row
    return rows


def measure_all() -> dict[str, Rows]:
    """All kernels, by architecture."""
    jobs = [(source, arch) for arch in ARCHS for source in sorted(LAUNCH.glob("*.cu"))]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda job: measure(*job), jobs))
    table: dict[str, Rows] = {arch: {} for arch in ARCHS}
    for (_, arch), rows in zip(jobs, found, strict=True):
        table[arch].update(rows)
    return {arch: dict(sorted(rows.items())) for arch, rows in table.items()}


def per_tensor(row: Row) -> float | None:
    """Instructions of the main loop for each of its tensor-core instructions."""
    return row["loop"] / row["loop_tensor"] if row.get("loop_tensor") else None


def text_of(table: dict[str, Rows]) -> str:
    lines = []
    for arch, rows in table.items():
        lines.append(f"{arch:74} regs stack shared   code   loop tensor per tensor")
        for name, row in rows.items():
            ratio = per_tensor(row)
            lines.append(
                f"{name[:74]:74} {row['registers']:4} {row['stack']:5} {row['shared']:6} {row['code']:6} "
                f"{row['loop']:6} {row.get('loop_tensor', 0):6} {'' if ratio is None else f'{ratio:10.1f}'}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table")
    arguments = parser.parse_args()
    if missing := missing_tools():
        sys.exit(f"not found: {', '.join(missing)}")
    table = measure_all()
    print(text_of(table))
    if arguments.write:
        TABLE.write_text(json.dumps({"nvcc": nvcc_version(), "archs": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
