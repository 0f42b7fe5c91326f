"""What mends a network after a cut. A `Repair` is `(dense, small, plan, batches, task) → small`; repairs compose.

None changes the networks it is given, and none needs labels. `batch_norm` measures statistics anew. `Refit` gives
layers new weights by least squares: `fits` has one layer, `targets` what it is fitted to, `normal_equations` the
algebra, `survey` which layers there are, `networks`, `lockstep` and `reaching` how they are watched. `RefitBlocks` goes
on with several layers at once: `blocks` has which, `block_fits` one of them. `Distil` trains towards the dense
network's predictions. `table` knows them by name, `names` tells records what they are called; options are
said by making one: `Refit(scope="consumers")`.
"""

from apoptosis.repair.batch_norm import batch_norm, check_has_batch_norms
from apoptosis.repair.distil import Distil
from apoptosis.repair.fits import LayerFit
from apoptosis.repair.names import repair_name
from apoptosis.repair.refit import Refit, Refitted
from apoptosis.repair.refit_blocks import RefitBlocks
from apoptosis.repair.table import REPAIRS, Repair, find_repair, find_repairs

__all__ = [
    "REPAIRS",
    "Distil",
    "LayerFit",
    "Refit",
    "RefitBlocks",
    "Refitted",
    "Repair",
    "batch_norm",
    "check_has_batch_norms",
    "find_repair",
    "find_repairs",
    "repair_name",
]
