"""What an op may be handed, and what comes of it, as einsum writes it. Imports no torch.

- :mod:`.signature`: the dims of an op's operands and results, by name: free, contracted, whole.
- :mod:`.table`: one row for each op; :mod:`.rules`: from its arguments to a signature.
- :mod:`.assign`: which mesh dim cuts which name, where the fewest elements are received.
"""

from cute_sharding.ops.assign import Assignment, Linear, assign
from cute_sharding.ops.operands import Operand
from cute_sharding.ops.signature import Signature, parse
from cute_sharding.ops.table import TABLE, Row

__all__ = ["TABLE", "Assignment", "Linear", "Operand", "Row", "Signature", "assign", "parse"]
