"""Changes of a node's state outside seatrial: each by a command of its own, never by a check."""
