"""Named networks, built with random weights drawn from a seed. Knows nothing of data or pruning."""

from apoptosis.models.digits_cnn import ConvNormAct, DigitsCNN, digits_cnn

__all__ = ["ConvNormAct", "DigitsCNN", "digits_cnn"]
