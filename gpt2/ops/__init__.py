"""The operations of a model: formulas, kernels that take their places, and the table of them.

`plain.py` has each operation as its formula. `table.py` says what a model computes with,
`variants.py` how kernels are written for a platform, and `fsdp.py` gathers what they take. Other
files hold a kernel each, whose docstring says what it computes, where it is faster and by how much.
"""

from gpt2.ops.plain import Scoring
from gpt2.ops.table import Ops
