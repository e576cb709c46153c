"""Run experiments and save their results."""
