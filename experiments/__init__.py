"""One short program for each experiment: `python -m experiments.NAME`."""
