"""One short program for each experiment: `python -m experiments.NAME` in a clone, `mcomb NAME` once installed."""
