"""Where a module's weights are during a call: the interface to the code that loads and unloads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Weights:
    """The weights of one module, as the cache sees them. This class: ordinary weights, which stay resident.

    A subclass describes weights whose memory is mapped and unmapped behind fixed addresses. A capture reads those
    addresses, so it stays valid while weights are unmapped, but may be replayed only while all of them are mapped.

    pages: True if the weights may be evicted and loaded again. bytes: memory that `pin` loads, at most. streams: True
    if a block's weights are on the device only while the block runs, because not all fit.
    """

    pages = False
    bytes = 0
    streams = False

    def pin(self) -> bool:
        """Load every weight to its address, and keep it there until `unpin`.

        Returns False, with nothing pinned, if there is no room for all of them. Calls nest: each True needs an `unpin`.
        Raises the errors of loading a weight.
        """
        return True

    def unpin(self) -> None:
        """Let the weights be evicted again, once the GPU's pending work is done."""

    def ran_out(self) -> None:
        """Memory ran out while the weights were pinned. Now they are unpinned: let evicted weights be loaded again."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the module's parameters are the pinned weights themselves. Only between `pin` and `unpin`."""
        yield
