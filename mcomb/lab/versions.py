"""The versions of the algorithms. Raise one by hand when a change of the code alters its numbers.

Networks, matchings and results record the version that made them, and those of another version are not used.
"""

TRAINING = 1
MATCHING = 2
MEASUREMENT = 2
FIGURES = 2  # kept results are only drawn anew
