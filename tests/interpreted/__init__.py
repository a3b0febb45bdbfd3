"""CUDA kernels without a GPU: mha_ext's operators, run by the PTX interpreter.

``with OnInterpreter(): ...`` sends every operator of mha_ext that is called inside to its CUDA implementation; whatever
the interpreter finds fault with (memory out of bounds, races, values never written) is raised at the end.
"""

import json

from torch import ops
from torch.utils._python_dispatch import TorchDispatchMode

from .library import load, why_not

__all__ = ["OnInterpreter", "load", "why_not"]

# Of grids whose kernels loop over blocks: so few that small inputs make them turn.
MOST_BLOCKS = 2


class OnInterpreter(TorchDispatchMode):
    """On the PTX for ``architecture``, 80 or 90. ``statistics``: counts accesses to memory instead of checking them."""

    def __init__(self, architecture=80, statistics=False):
        super().__init__()
        self.architecture = architecture
        self.counts = statistics
        self.called = []

    def __enter__(self):
        self.interpreter = load()
        self.interpreter.ptxvm_reset()
        self.interpreter.ptxvm_device(self.architecture // 10, self.architecture % 10, 132)
        self.interpreter.ptxvm_most_blocks(MOST_BLOCKS)
        self.interpreter.ptxvm_options(not self.counts, self.counts)
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        if exception[0] is None:
            findings = self.interpreter.ptxvm_findings().decode()
            assert not findings, f"sm_{self.architecture}: {findings}"

    def statistics(self):
        """Of all calls so far: see ptxvm/statistics.h."""
        return json.loads(self.interpreter.ptxvm_statistics().decode())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mha_ext":
            self.called.append(func._opname)
            func = getattr(getattr(ops.mha_ext_ptxvm, func._opname), func._overloadname)
        return func(*args, **(kwargs or {}))
