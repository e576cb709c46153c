"""Run experiments and keep their results."""
