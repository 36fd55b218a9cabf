"""Where the weights of a module are while a call runs: the interface to whatever loads and unloads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Weights:
    """The weights of one module, as the cache sees them. This class: ordinary weights, which stay where they are.

    A subclass describes weights whose memory comes and goes behind fixed addresses. A capture reads those addresses, so
    it stays valid while nothing is there, but may only be replayed while everything is.

    pages: whether the weights may go and come. bytes: of memory that `pin` brings in, at most. streams: whether the
    weights of a block are on the device only while the block runs, because not all fit.
    """

    pages = False
    bytes = 0
    streams = False

    def pin(self) -> bool:
        """Bring every weight to its address, and keep it there until `unpin`.

        Returns False, with nothing pinned, if there is no room for all of them. Calls nest: each True needs an `unpin`.
        Raises what loading a weight raises.
        """
        return True

    def unpin(self) -> None:
        """The weights may go again, once the GPU's present work is done."""

    def ran_out(self) -> None:
        """Memory ran out while they were pinned, and they are not any more: those that went may come again."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Meanwhile the module's parameters are the pinned weights themselves. Only between `pin` and `unpin`."""
        yield
