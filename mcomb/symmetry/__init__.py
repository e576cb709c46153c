"""The symmetries of a network: the permutations of hidden units that leave its function as it is."""
