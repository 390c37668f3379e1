"""The operations of a model: reference formulas, kernels that replace them, and their table.

`plain.py` holds each operation as its formula. `table.py` lists the operations that a model calls.
`variants.py` says how kernels are written for each platform, and `fsdp.py` gathers the parameters
that they read. Every other file holds one kernel; its docstring says what the kernel computes, on
which platform it is faster, and by how much.
"""

from gpt2.ops.plain import Scoring
from gpt2.ops.table import Ops
