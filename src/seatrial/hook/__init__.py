"""Fast checks of one node for those who call them: Slurm, soperator, node-problem-detector, systemd."""
