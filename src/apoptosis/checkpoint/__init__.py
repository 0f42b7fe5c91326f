"""Results on disk: files and checkpoints that are either the old ones or the new ones, never half of them."""

from apoptosis.checkpoint.files import write_file, write_json

__all__ = ["write_file", "write_json"]
