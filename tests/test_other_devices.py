"""MHA_EXT_TEST_ON with what cannot be is refused before any test runs."""

import other_devices
import pytest

from mha_ext._load import why_no_gpu


@pytest.mark.parametrize("given", ["gpu", "sm80", "ptx80 ptx90", "ptx70", "cuda,ptx"])
def test_an_unknown_name_is_refused(given):
    with pytest.raises(pytest.UsageError, match=rf"^MHA_EXT_TEST_ON must be some of cuda, ptx80, .*, got '{given}'$"):
        other_devices.check_names(given)


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(pytest.UsageError, match=r"^MHA_EXT_TEST_ON=ptx80,cuda needs a GPU: "):
        other_devices.check_names("ptx80,cuda")
