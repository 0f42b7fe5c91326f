"""Results on disk: checkpoints and files that are either the old ones or the new ones, never half of them.

A checkpoint is a folder: `model.safetensors` (numbers), `plan.json` (how the dense network was cut) and `run.json` (the
record, which vouches for all three). `saving` writes it through `folders`, which replaces whole folders in one step;
`loading` reads it, and `rebuilding` makes the network again from the code of the dense one. `weights`, `inputs` and
`record` say what stands in the files; `files` writes single ones. There is no pickle anywhere.

Start with `saving.save`. This room runs no network, except to trace one that is delivered as a program.
"""

from apoptosis.checkpoint.files import write_file, write_json
from apoptosis.checkpoint.loading import load, load_outcome, read_run
from apoptosis.checkpoint.record import SavedRun
from apoptosis.checkpoint.saving import save

__all__ = [
    "SavedRun",
    "load",
    "load_outcome",
    "read_run",
    "save",
    "write_file",
    "write_json",
]
