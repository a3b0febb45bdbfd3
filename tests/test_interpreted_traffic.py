"""How well the kernels on tensor cores use memory, counted by the PTX interpreter.

In all that the loops over tiles do, no two lanes meet in a bank of shared memory, and no byte of a sector of global
memory moves in vain.
"""

import other_devices
import pytest
import torch
from interpreted import OnInterpreter

import mha_ext

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif("ptx80" not in other_devices.NAMES, reason="MHA_EXT_TEST_ON does not name ptx80"),
]

# What a lane writes about its own row: the gradients, once at the end, and the bits of a tile with hidden pairs.
NOT_IN_LOOPS = ("st.global.u32", "st.shared.u8", "st.shared.u16", "st.shared.u32")


def traffic(head_dim, **options):
    """A line for each kernel, source line and opcode of a forward and a backward call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 128, head_dim), (1, 2, 192, head_dim), (1, 2, 192, head_dim), (1, 2, 128, head_dim)]
    query, key, value, grad = (torch.randn(s, generator=generator, dtype=torch.float32).bfloat16() for s in shapes)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    with OnInterpreter(80, statistics=True) as device:
        output, _ = mha_ext.attention(*leaves, **options, need_weights=False)
        torch.autograd.grad(output, leaves, grad)
        lines = device.statistics()
    return [line for line in lines if "tensor_cores" in line["kernel"]]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout": 0.1}], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_nothing_is_moved_in_vain(head_dim, options):
    lines = traffic(head_dim, **options)
    in_loops = [line for line in lines if line["opcode"] not in NOT_IN_LOOPS]
    opcodes = {line["opcode"].split(".")[0] for line in in_loops}
    assert {"ldmatrix", "cp", "ld"} <= opcodes, opcodes
    wasted = [
        f"{line['opcode']} at {line['where']} in {line['kernel']}: {line[unit]} {unit}, ideal {line['ideal_' + unit]}"
        for line in in_loops
        for unit in ("wavefronts", "sectors")
        if line[unit] != line["ideal_" + unit]
    ]
    assert not wasted, "\n".join(wasted)
