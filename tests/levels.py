"""Every ISA level inside of one test, for what is dear to set up and the same for all: compiled graphs, traces."""

import mha_ext


def each_level():
    """Set every level of this machine in turn, lowest first. What a test reports of itself names the one in use."""
    for name in mha_ext.supported_isas():
        mha_ext.set_isa(name)
        yield name
