"""Checkpoints, paths, locks and fingerprints."""
