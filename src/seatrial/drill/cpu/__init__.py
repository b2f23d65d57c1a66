"""Drills on one machine without GPUs."""
