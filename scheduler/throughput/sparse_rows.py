"""The sparse rows of a linear programme, collected part by part: `SparseRows`."""

import numpy as np
from scipy.sparse import csr_matrix

from decentral.scheduler.topology.arrays import Floats, Ints


class SparseRows:
    """The sparse rows of a linear programme, collected part by part."""

    def __init__(self) -> None:
        """Begin without rows."""
        self.parts: list[tuple[Ints, Ints, Floats]] = []
        self.height = 0

    def reserve(self, count: int) -> int:
        """Add `count` empty rows, and return the number of the first."""
        self.height += count
        return self.height - count

    def add(self, rows: Ints, columns: Ints, values: Floats | float) -> None:
        """Add a value at each of these pairs of row and column."""
        self.parts.append((rows, columns, np.broadcast_to(np.asarray(values, np.float64), rows.shape)))

    def matrix(self, width: int) -> csr_matrix:
        """Return the rows as a sparse matrix; values at the same place are added."""
        rows, columns, values = (np.concatenate([part[axis] for part in self.parts]) for axis in range(3))
        return csr_matrix((values, (rows, columns)), shape=(self.height, width))
