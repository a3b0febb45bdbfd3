"""What a build's machine code is like, kernel by kernel: registers, stack, shared memory, and the mix of the main loop.

``python tests/gauge/gauge.py`` prints it for the ``mha_ext._C_cuda`` that is installed or built in place, ``--write``
stores it in table.json beside this file, which test_gauge.py holds every later build against; what is stored of
architectures that this build has no code for stays. It needs nvdisasm and cuobjdump
(``pip install 'mha_ext[gauge]'``); no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bound import bound
from sass import Function, parse

HERE = Path(__file__).resolve().parent
TABLE = HERE / "table.json"
ARCHS = ("sm_80", "sm_90")  # whose code is looked at; of the others only the resources are

Row = dict[str, int]
Rows = dict[str, Row]  # by kernel
USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def tool(name: str) -> str | None:
    """Where a CUDA tool is: on PATH, or where its PyPI package puts it."""
    packaged = [path / "nvidia" / "cu13" / "bin" / name for path in map(Path, sys.path)]
    return shutil.which(name) or next((str(path) for path in packaged if path.exists()), None)


def missing_tools() -> list[str]:
    return [name for name in ("nvdisasm", "cuobjdump", "c++filt") if tool(name) is None]


def library() -> Path | None:
    """The newest ``mha_ext._C_cuda``: of this source tree, of what Python imports, and of an installation that this
    hides."""
    spec = importlib.util.find_spec("mha_ext")  # knows editable installations, too
    folders = [HERE.parents[1] / "mha_ext", *(Path(entry or ".") / "mha_ext" for entry in sys.path)]
    folders += map(Path, (spec and spec.submodule_search_locations) or ())
    found = [path for folder in folders for path in folder.glob("_C_cuda*.so")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def output_of(name: str, *arguments: str, text: str | None = None, folder: str | None = None) -> str:
    command = [str(tool(name)), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=folder).stdout


def kernel_name(name: str) -> str:
    """``product_mma_kernel<float16, false>``, without namespaces and parameters."""
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
    row["loop_shared_bytes"] = sum(i.shared_bytes for i in loop)
    return {name: count for name, count in row.items() if count or name == "loop"}


def measure(cubin: Path, disassemble: bool) -> Rows:
    """A row for each kernel of a file of machine code: its resources and, which takes longer, what its code is like."""
    used = USAGE.findall(output_of("cuobjdump", "-res-usage", str(cubin)))
    names = output_of("c++filt", text="\n".join(name for name, *_ in used)).splitlines()
    functions = (
        {function.name: function for function in parse(output_of("nvdisasm", "-c", str(cubin)))} if disassemble else {}
    )
    rows = {}
    for (mangled, registers, stack, shared, local), name in zip(used, names, strict=True):
        row = {"registers": int(registers), "stack": int(stack) + int(local), "shared": int(shared)}
        if disassemble:
            row |= code_of(functions[mangled])
        rows[kernel_name(name)] = row
    return rows


def code_of(function: Function) -> Row:
    spills = sum(i.pipe == "local" for i in function.instructions)
    return {"local_accesses": spills, "code": len(function.instructions), **main_loop(function)}


def measure_all(built: Path) -> dict[str, Rows]:
    """All kernels of a library, by architecture."""
    table: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        output_of("cuobjdump", "-xelf", "all", str(built.resolve()), folder=folder)
        cubins = sorted(Path(folder).glob("*.cubin"))
        archs = [cubin.suffixes[-2].removeprefix(".") for cubin in cubins]
        for arch, rows in zip(archs, pool.map(measure, cubins, [arch in ARCHS for arch in archs]), strict=True):
            table.setdefault(arch, {}).update(rows)
    return {arch: dict(sorted(rows.items())) for arch, rows in sorted(table.items())}


def per_tensor(row: Row) -> float | None:
    """Instructions of the main loop for each of its tensor-core instructions."""
    return row["loop"] / row["loop_tensor"] if row.get("loop_tensor") else None


def text_of(table: dict[str, Rows]) -> str:
    lines = []
    for arch in (a for a in ARCHS if a in table):
        rows = table[arch]
        lines.append(f"{arch:74} regs stack shared   code   loop tensor per tensor  bound")
        for name, row in rows.items():
            ratio, limit = per_tensor(row), bound(row, arch)
            lines.append(
                f"{name[:74]:74} {row['registers']:4} {row['stack']:5} {row['shared']:6} {row['code']:6} "
                f"{row['loop']:6} {row.get('loop_tensor', 0):6} {'' if ratio is None else f'{ratio:.1f}':>10}"
                f"  {f'{limit[0]} {limit[1]:.0%}' if limit else ''}"
            )
    return "\n".join(lines)


def text_of_json(table: dict[str, Rows]) -> str:
    """A line for each kernel, which reads well in a diff."""
    archs = (
        f' "{arch}": {{\n'
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        + "\n }"
        for arch, rows in table.items()
    )
    return "{\n" + ",\n".join(archs) + "\n}\n"


def store(table: dict[str, Rows], file: Path) -> list[str]:
    """Write the table. Returns the architectures that it lacks, of which the file keeps what it has."""
    stored = json.loads(file.read_text())
    file.write_text(text_of_json(dict(sorted({**stored, **table}.items()))))
    return [arch for arch in stored if arch not in table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table")
    arguments = parser.parse_args()
    built = library()
    if missing := missing_tools() + ([] if built else ["mha_ext._C_cuda"]):
        sys.exit(f"not found: {', '.join(missing)}")
    table = measure_all(built)
    print(text_of(table))
    if arguments.write:
        kept = store(table, TABLE)
        print(f"stored: {', '.join(table)}" + (f"; kept, as this build has none: {', '.join(kept)}" if kept else ""))


if __name__ == "__main__":
    main()
