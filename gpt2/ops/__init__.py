"""The operations of a model: reference implementations, and kernels that replace them.

`plain.py` holds the reference implementation of each operation. `table.py` lists the operations
that a model calls. `variants.py` defines the platform-specific forms of kernels, and `fsdp.py`
gathers sharded parameters. Every other file holds kernels for a few operations. The docstring of
such a file says what its kernels compute, and how much time or memory traffic they save.
"""

from gpt2.ops.plain import Scoring
from gpt2.ops.table import Ops
