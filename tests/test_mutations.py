"""The list of planted faults follows the source."""

import pytest

from tests.mutations import FAULTS, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_line_of_a_fault_stands_once_in_its_file(fault):
    assert (ROOT / fault.file).read_text().count(fault.right) == 1
    assert fault.right != fault.wrong
