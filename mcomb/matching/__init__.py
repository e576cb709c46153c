"""Match the units of one network to those of another."""
