"""Read and write checkpoints, and handle paths, locks and fingerprints."""
