"""Array types of the planner.

Letters used in shapes throughout: N peers, S stages, R replicas (devices in a stage), L layers.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
