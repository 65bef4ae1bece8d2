"""Array types of the planner.

The suffix of an array's name is its shape: N peers, S stages, R replicas (devices in a stage), L layers, K kinds of
peers, P partitions. An array `spans_N2` holds each peer's layers [first, last); `(0, 0)` is a peer without layers.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
