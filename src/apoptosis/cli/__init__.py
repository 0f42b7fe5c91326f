"""What a person types. The only room that prints; torch is imported inside commands, so that help answers at once."""

from apoptosis.cli.app import main

__all__ = ["main"]
