"""Drills that need GPUs."""
