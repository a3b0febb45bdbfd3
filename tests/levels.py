"""Which ISA levels a test runs on, where the fixture `isa` (the test once for each level) would be too dear."""

import pytest

import mha_ext

# Overrides the levels of the fixture `isa`.
highest_level_only = pytest.mark.parametrize("isa", mha_ext.supported_isas()[-1:], indirect=True)


def each_level():
    """Set every level in turn inside of one test, which shares what is the same for all: a compiled graph, a trace."""
    for name in mha_ext.supported_isas():
        mha_ext.set_isa(name)
        yield name
