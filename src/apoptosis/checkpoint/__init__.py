"""Results on disk: checkpoints and files that are either the old ones or the new ones, never half of them.

A checkpoint is a folder: `model.safetensors` (numbers), `plan.json` (how the dense network was cut) or
`masks.safetensors` (which single weights it lost), and `run.json` (the record, which vouches for all three). `saving`
writes it through `folders`, which replaces whole folders in one step; `loading` reads it, and `rebuilding` makes the
network again from the code of the `dense` one. `kinds` tells plans apart: `cuts`, some of them delivered as `programs`,
and `masked`. `weights` (of `number_types`), `inputs` and `record` say what stands in the files; `files` writes single
ones, `mask_files` those of masks alone. A `journal` holds what a run needs to go on after it was killed, in files
that `journal_files` tells from others. There is no pickle anywhere.

Start with `saving.save`. This room runs no network, except to trace one that is delivered as a program.
"""

from apoptosis.checkpoint.files import write_file, write_json
from apoptosis.checkpoint.journal import Journal, Note, open_journal
from apoptosis.checkpoint.journal_files import has_notes
from apoptosis.checkpoint.loading import load, load_outcome, read_run
from apoptosis.checkpoint.mask_files import load_masks, save_masks
from apoptosis.checkpoint.record import SavedRun, read_step, step_as_json
from apoptosis.checkpoint.saving import save

__all__ = [
    "Journal",
    "Note",
    "SavedRun",
    "load",
    "load_masks",
    "load_outcome",
    "has_notes",
    "open_journal",
    "read_run",
    "read_step",
    "save",
    "save_masks",
    "step_as_json",
    "write_file",
    "write_json",
]
