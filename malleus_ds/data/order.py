"""The order in which training consumes samples; it knows nothing of plans. Imports no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class DataError(ValueError):
    """A data set, corpus or batch shape that cannot be used: names the value and the fix."""


class SampleOrder:
    """An infinite sequence of sample indices: one permutation of the data set per epoch.

    Position ``k`` lies in epoch ``k // num_samples``, whose permutation depends on (seed, epoch)
    alone. Step ``s`` of a global batch ``B`` consumes the positions ``[s * B, (s + 1) * B)``, so
    what is learned depends neither on the plan nor on where training was resumed.
    Raises `DataError` for ``num_samples < 1``.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True) -> None:
        if num_samples < 1:
            raise DataError(f"num_samples is {num_samples}: the data set is empty; give at least one sample")
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._permutations: dict[int, npt.NDArray[np.int64]] = {}

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Sample indices at the positions ``[start, stop)``; shape ``[stop - start]``."""
        if not 0 <= start <= stop:
            raise DataError(f"positions [{start}, {stop}) are not a range of non-negative positions")
        positions = np.arange(start, stop, dtype=np.int64)
        epochs, offsets = np.divmod(positions, self.num_samples)
        if not self.shuffle:
            return offsets
        result = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            result[in_epoch] = self._permutation(epoch)[offsets[in_epoch]]
        return result

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._permutations:
            # Two epochs are kept, because one batch may span the end of an epoch.
            while len(self._permutations) >= 2:
                del self._permutations[next(iter(self._permutations))]
            # SeedSequence takes non-negative integers only.
            entropy = np.random.SeedSequence((self.seed % 2**64, epoch))
            generator = np.random.Generator(np.random.PCG64(entropy))
            self._permutations[epoch] = generator.permutation(self.num_samples)
        return self._permutations[epoch]
