"""What mends a network after a cut. A `Repair` is `(dense, small, plan, batches, task) → small`; repairs compose.

None changes the networks it is given, and none needs labels unless it says so.
"""

from apoptosis.repair.batch_norm import batch_norm, check_has_batch_norms
from apoptosis.repair.table import REPAIRS, Repair, find_repair

__all__ = ["REPAIRS", "Repair", "batch_norm", "check_has_batch_norms", "find_repair"]
