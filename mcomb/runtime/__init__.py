"""Devices, processes, interrupts, progress and the training loop."""
