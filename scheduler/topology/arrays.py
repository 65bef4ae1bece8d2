"""Array types of the planners, and the suffixes of their arrays' names.

A suffix is the array's shape: N peers, S stages, R replicas (devices in a stage), L layers, K kinds of peers,
P partitions. For example, `spans_N2` has one row [first, last) of layers per peer; a peer without layers has (0, 0).
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
