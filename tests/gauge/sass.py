"""Machine code as nvdisasm prints it: functions, their instructions, and the loop that does the work.

A loop is what lies between a label and a branch back to it; the one counts of whose instructions the largest part
multiplies (tensor cores, else multiply-adds), so that a loop without mask work is taken before its twin with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

FUNCTION = re.compile(r"\.text\.(\S+):")
LABEL = re.compile(r"\s*(\.L_x_\d+):")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")

# What an instruction keeps busy, by the first part of its name.
TENSOR = {"HMMA", "DMMA", "IMMA", "HGMMA"}
MULTIPLY_ADD = {"FFMA", "DFMA", "FFMA2"}
PIPES = {
    "tensor": TENSOR,
    "float": {"FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2", "IMAD"},
    "double": {"DFMA", "DMUL", "DADD", "DSETP"},
    "special": {"MUFU"},
    "shared": {"LDSM", "LDS", "STS", "STSM"},
    "global": {"LDGSTS", "LDG", "STG", "LD", "ST"},
    "local": {"LDL", "STL"},
    "control": {
        "BRA",
        "BSSY",
        "BSYNC",
        "EXIT",
        "BAR",
        "WARPSYNC",
        "DEPBAR",
        "LDGDEPBAR",
        "NOP",
        "CALL",
        "RET",
        "BREAK",
    },
    "shuffle": {"SHFL"},
}
PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names}


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a warp moves with it."""
        if self.pipe != "shared":
            return 0
        if self.base in ("LDSM", "STSM"):
            return 128 * int(self.name.rsplit(".", 1)[1])  # .M88.4: four matrices of 8 rows of 16 bytes
        width = re.search(r"\.(8|16|32|64|128)\b", self.name)
        return 32 * (int(width[1]) // 8 if width else 4)

    @property
    def pipe(self) -> str:
        return PIPE_OF.get(self.base, "uniform" if self.base.startswith("U") else "integer")


@dataclass
class Function:
    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def loops(self) -> Iterator[list[Instruction]]:
        for branch in self.instructions:
            target = re.search(r"\.L_x_\d+", branch.operands) if branch.base == "BRA" else None
            begin = self.labels.get(target[0], branch.address + 1) if target else branch.address + 1
            if begin < branch.address:
                yield [i for i in self.instructions if begin <= i.address <= branch.address]

    def main_loop(self) -> list[Instruction]:
        """Where the largest part of the instructions multiplies; empty where no loop does."""

        def weight(loop: list[Instruction]) -> tuple[float, float]:
            names = Counter(i.base for i in loop)
            return sum(names[n] for n in TENSOR) / len(loop), sum(names[n] for n in MULTIPLY_ADD) / len(loop)

        loop = max(self.loops(), key=weight, default=[])
        return loop if loop and any(weight(loop)) else []


def parse(text: str) -> list[Function]:
    """The functions of nvdisasm's output. Instructions that never run (@!PT, which ptxas puts in for the hardware's
    sake) are left out."""
    functions: list[Function] = []
    waiting: list[str] = []
    for line in text.splitlines():
        if found := FUNCTION.match(line):
            functions.append(Function(found[1]))
        elif not functions:
            continue
        elif found := LABEL.match(line):
            waiting.append(found[1])
        elif found := INSTRUCTION.match(line):
            address, guard, name, operands = int(found[1], 16), found[2], found[3], found[4]
            for label in waiting:
                functions[-1].labels[label] = address
            waiting.clear()
            if (guard or "").strip() != "@!PT":
                functions[-1].instructions.append(Instruction(address, name, operands))
    return functions
