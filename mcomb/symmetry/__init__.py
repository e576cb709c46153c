"""Symmetries of a network: permutations of hidden units that leave its function unchanged."""
