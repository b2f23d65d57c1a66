"""Fast checks of one node for a program that calls them: Slurm, soperator, node-problem-detector or systemd.

A hook observes. Its exit code asks the caller to take the node out of service; the hook itself changes no node's state.
"""
