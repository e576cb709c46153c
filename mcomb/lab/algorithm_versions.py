"""Define the versions of the algorithms. Increment one when a code change alters its numbers.

Networks, matchings and results record the version that made them. Caches ignore entries of other versions.
"""

TRAINING = 1
MATCHING = 3
MATRIX_GROUPS = 2  # of symmetries beyond permutations, and of matchings by them
MEASUREMENT = 3
FIGURES = 4  # a new version redraws figures but keeps results
