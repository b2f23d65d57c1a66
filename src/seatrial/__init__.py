"""seatrial: an acceptance test for GPU clusters."""

__version__ = "0.1.0"
