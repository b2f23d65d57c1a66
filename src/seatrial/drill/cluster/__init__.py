"""Drills on several nodes of Slurm, without GPUs."""
