"""Keep what prologues computed, for calls in which their inputs have the same values.

A prologue (see `dependence`) depends on weights and on the time. Its results are found by the values of its inputs, bit
for bit, so a key needs no name of a noise level.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from ..stats import Counters

Content = tuple[Hashable, ...]
Inputs = Sequence[torch.Tensor]


class KeptResults:
    """The results of the prologues of one model, in at most `limit` bytes.

    What finds no room drops everything else, and what is larger than the limit is computed in each call. reads: how
    often the values of inputs were read; on a GPU that waits for its work.

    Not thread-safe: callers hold the cache's lock.
    """

    def __init__(self, limit: int, counters: Counters | None = None) -> None:
        """counters: of the process."""
        self.limit = limit
        self.bytes = 0
        self.reads = 0
        self._counters = counters or Counters()
        self._results: dict[tuple[Hashable, Content], list[torch.Tensor]] = {}
        self._read: _Read | None = None
        self._is_written = False  # the model writes to such inputs between two blocks of a call
        self._remembered: dict[int, tuple[torch.Tensor, Hashable]] = {}

    def get(
        self,
        place: Hashable,
        inputs: Inputs,
        compute: Callable[[Sequence[Inputs]], Sequence[Sequence[torch.Tensor]]],
        ahead: Callable[[], Sequence[Inputs]] = tuple,
    ) -> list[torch.Tensor]:
        """The results of the prologue at `place` for these inputs, computed if they are not known.

        compute: the results for each of some inputs. ahead: inputs of later calls; if anything is computed, so is what
        these need. No caller may write to the results. Raises what `compute` and `ahead` raise.
        """
        now = self._content(place, inputs)
        if (place, now) in self._results:
            self._counters.prologue_reuses += 1
            return self._results[place, now]
        # A write between two blocks is foreseen by nobody.
        later = {} if self._is_written else {tuple(map(self._value, each)): each for each in ahead()}
        wanted = {now: inputs, **{key: each for key, each in later.items() if (place, key) not in self._results}}
        for key, results in zip(wanted, compute(list(wanted.values())), strict=True):
            self._counters.prologue_runs += 1
            kept = [_own(result, wanted[key]) for result in results]
            if key == now:
                found = kept
            self._keep((place, key), kept, makes_room=key == now)
        return found

    def _keep(self, key: tuple[Hashable, Content], results: list[torch.Tensor], makes_room: bool) -> None:
        size = sum(result.nbytes for result in results)
        if makes_room and self.bytes + size > self.limit:
            self._drop()
        if self.bytes + size <= self.limit:
            self._results[key] = results
            self._count(size)

    def remember(self, inputs: Inputs) -> None:
        """Read the values of tensors once for all blocks, until `forget`. Nobody may write to them."""
        self._remembered.update({id(tensor): (tensor, _value_of(tensor)) for tensor in inputs})

    def _value(self, tensor: torch.Tensor) -> Hashable:
        known = self._remembered.get(id(tensor))
        return _value_of(tensor) if known is None or known[0] is not tensor else known[1]

    def forget(self) -> None:
        """Let all results go: the weights changed, or the run is over."""
        self._drop()
        self._read = None
        self._remembered.clear()

    def _drop(self) -> None:
        self._results.clear()
        self._count(-self.bytes)

    def _count(self, size: int) -> None:
        self.bytes += size
        self._counters.kept_bytes += size

    def _content(self, place: Hashable, inputs: Inputs) -> Content:
        """The values of the inputs: read once for all blocks of a call that get the same tensors.

        A place that comes again begins another call, and a tensor may have other values in it. In inference mode torch
        counts no writes. A model that writes between two blocks does so in its first step, in which every place
        computes: there the values are read for each block.
        """
        read = self._read
        if read is None or place in read.places or not read.is_of(inputs):
            read = self._read = self._read_of(inputs, set())
        elif not read.counts_writes and (self._is_written or (place, read.content) not in self._results):
            self._read = self._read_of(inputs, read.places)
            self._is_written |= self._read.content != read.content
            read = self._read
        read.places.add(place)
        return read.content

    def _read_of(self, inputs: Inputs, places: set[Hashable]) -> _Read:
        self.reads += 1
        return _Read(inputs, places)


class _Read:
    """The inputs whose values were read last. It holds them, so no other tensors can take their identities.

    places: that this call has come to. counts_writes: torch counts the writes to all of these inputs.
    """

    def __init__(self, inputs: Inputs, places: set[Hashable]) -> None:
        self._inputs = list(inputs)
        self._versions = [_version(tensor) for tensor in inputs]
        self.content: Content = tuple(map(_value_of, inputs))
        self.places = places
        self.counts_writes = None not in self._versions

    def is_of(self, inputs: Inputs) -> bool:
        return len(inputs) == len(self._inputs) and all(
            (now is then and _version(now) == version) or (now.numel() == 0 and now.shape == then.shape)
            for now, then, version in zip(inputs, self._inputs, self._versions, strict=True)
        )


def _value_of(tensor: torch.Tensor) -> Hashable:
    host = tensor.detach().to("cpu").contiguous()
    values = host.flatten().view(torch.uint8).numpy().tobytes() if host.numel() else b""
    return tuple(tensor.shape), tensor.dtype, str(tensor.device), values


def _version(tensor: torch.Tensor) -> int | None:
    """Counts the writes to a tensor; None in inference mode, where torch does not."""
    return None if tensor.is_inference() else tensor._version


def _own(result: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """A result in memory of its own: neither of an input, which may change, nor a view of something larger."""
    result = result.contiguous()
    storage = result.untyped_storage()
    if storage.nbytes() == result.nbytes and storage.data_ptr() not in [
        each.untyped_storage().data_ptr() for each in inputs
    ]:
        return result
    return result.clone()
