"""Changes of node states in Slurm and Kubernetes by `seatrial readmit`, and the drain limit of readmit and hooks."""
