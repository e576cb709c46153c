"""Handle devices, processes, interrupts and progress, and run the training loop."""
