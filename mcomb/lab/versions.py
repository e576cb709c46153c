"""The versions of the algorithms: raised by hand whenever one of them comes to give other numbers.

What is kept on disk records the version that made it, and is not taken for the work of another.
"""

TRAINING = 1
MATCHING = 1
MEASUREMENT = 1
