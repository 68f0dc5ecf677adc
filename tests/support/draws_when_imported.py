"""A module that draws from NumPy's generator when it is imported."""

import numpy as np

DRAWN = np.random.rand()
