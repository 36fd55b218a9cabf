"""Keep what prologues computed, for calls in which their inputs have the same values.

A prologue (see `dependence`) depends on weights and on the time or the text. Its results are found by the values of
these inputs, bit for bit, so a key needs no name of a noise level or of a text.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch

from ..stats import Counters

Content = tuple[Hashable, ...]
Key = tuple[str, Content]  # with the source
Inputs = Sequence[torch.Tensor]
_PLAIN_BYTES = 1 << 14  # a larger tensor is compared with copies, where it is
_MOST_COPIES = 16


class KeptResults:
    """The results of the prologues of one model, in at most `limit` bytes.

    All that belongs to one source and one content of its inputs goes together: a noise level that is over makes room
    first. What finds no room is computed in each call. computed, reused: by source, how often a prologue ran, and how
    often it did not have to. reads: how often the values of inputs were read; on a GPU that waits for its work.

    Not thread-safe: callers hold the cache's lock.
    """

    def __init__(self, limit: int, counters: Counters | None = None) -> None:
        """counters: of the process."""
        self.limit = limit
        self._counters = counters or Counters()
        self._bytes = 0
        self.computed: Counter[str] = Counter()
        self.reused: Counter[str] = Counter()
        self.reads = 0
        self._groups: dict[Key, dict[Hashable, list[torch.Tensor]]] = {}  # the latest used comes last
        self._read: dict[str, _Read] = {}
        self._copies: dict[int, torch.Tensor] = {}  # of large inputs, the latest used last
        self._numbers = itertools.count()
        self._remembered: dict[int, tuple[torch.Tensor, Hashable]] = {}

    @property
    def bytes(self) -> int:
        """Of all results, and of the copies of large inputs."""
        return self._bytes

    @bytes.setter
    def bytes(self, size: int) -> None:
        self._counters.kept_bytes += size - self._bytes
        self._bytes = size

    def get(
        self,
        place: Hashable,
        source: str,
        inputs: Inputs,
        compute: Callable[[Sequence[Inputs]], Sequence[Sequence[torch.Tensor]]],
        ahead: Callable[[], Sequence[Inputs]] = tuple,
    ) -> list[torch.Tensor]:
        """The results of the prologue at `place` for these inputs, computed if they are not known.

        place: the block, and which prologue of it. compute: the results for each of some inputs. ahead: inputs of later
        calls; if anything is computed, so is what these need. No caller may write to the results. Raises what `compute`
        and `ahead` raise.
        """
        key = (source, self._content(place, source, inputs))
        group = self._groups.pop(key, {})
        self._groups[key] = group
        if place in group:
            self.reused[source] += 1
            self._counters.prologue_reuses += 1
            return group[place]
        wanted = {key: inputs, **self._unknown(place, source, ahead())}
        for each, results in zip(wanted, compute(list(wanted.values())), strict=True):
            kept = [_own(result, wanted[each]) for result in results]
            self.computed[source] += 1
            self._counters.prologue_runs += 1
            self._keep(each, place, kept, makes_room=each == key)
            if each == key:
                found = kept
        return found

    def _unknown(self, place: Hashable, source: str, ahead: Sequence[Inputs]) -> dict[Key, Inputs]:
        keys = [(source, tuple(self._value(tensor) for tensor in inputs)) for inputs in ahead]
        return {key: inputs for key, inputs in zip(keys, ahead, strict=True) if place not in self._groups.get(key, {})}

    def _keep(self, key: Key, place: Hashable, results: list[torch.Tensor], makes_room: bool) -> None:
        needed = sum(result.nbytes for result in results)
        if self._make_room(needed) if makes_room else self.bytes + needed <= self.limit:
            self._groups.setdefault(key, {})[place] = results
            self.bytes += needed
        elif not self._groups.get(key, True):
            del self._groups[key]

    def remember(self, inputs: Inputs) -> None:
        """Read the values of tensors once for all blocks, until `forget`. Nobody may write to them."""
        self._remembered.update({id(tensor): (tensor, self._read_value(tensor)) for tensor in inputs})

    def _value(self, tensor: torch.Tensor) -> Hashable:
        known = self._remembered.get(id(tensor))
        return self._read_value(tensor) if known is None or known[0] is not tensor else known[1]

    def _read_value(self, tensor: torch.Tensor) -> Hashable:
        about = (tuple(tensor.shape), tensor.dtype, str(tensor.device))
        if tensor.nbytes > _PLAIN_BYTES:
            return (*about, self._number_of(tensor.detach()))
        host = tensor.detach().to("cpu").contiguous()
        return (*about, host.flatten().view(torch.uint8).numpy().tobytes() if host.numel() else b"")

    def _number_of(self, tensor: torch.Tensor) -> int:
        """One number for all large tensors with the same bits."""
        for number, copy in reversed(self._copies.items()):
            alike = (copy.shape, copy.dtype, copy.device) == (tensor.shape, tensor.dtype, tensor.device)
            if alike and _have_same_bits(copy, tensor):
                self._copies[number] = self._copies.pop(number)
                return number
        while self._copies and (len(self._copies) >= _MOST_COPIES or self.bytes + tensor.nbytes > self.limit):
            self.bytes -= self._copies.pop(next(iter(self._copies))).nbytes
        number = next(self._numbers)
        if self.bytes + tensor.nbytes <= self.limit:
            self._copies[number] = tensor.clone(memory_format=torch.contiguous_format)
            self.bytes += tensor.nbytes
        return number

    def forget(self) -> None:
        """Let all results go: the weights changed, or the run is over."""
        self._groups.clear()
        self._read.clear()
        self._remembered.clear()
        self._copies.clear()
        self.bytes = 0

    def _make_room(self, needed: int) -> bool:
        """Drop the groups that were used longest ago, but not the latest of each source: the present call reads it."""
        latest = dict(list(self._groups))
        for each in list(self._groups):
            if self.bytes + needed <= self.limit:
                break
            if latest[each[0]] != each[1]:
                self.bytes -= sum(result.nbytes for results in self._groups.pop(each).values() for result in results)
        return self.bytes + needed <= self.limit

    def _content(self, place: Hashable, source: str, inputs: Sequence[torch.Tensor]) -> Content:
        """The values of the inputs: read once for all blocks of a call that get the same tensors.

        A place that comes again begins another call, and a tensor may have other values in it.
        """
        read = self._read.get(source)
        if read is None or place in read.places or not read.is_of(inputs):
            self.reads += 1
            read = self._read[source] = _Read(inputs, tuple(self._read_value(tensor) for tensor in inputs))
        read.places.add(place)
        return read.content


class _Read:
    """The inputs whose values were read last. It holds them, so no other tensors can take their identities."""

    def __init__(self, inputs: Inputs, content: Content) -> None:
        self._inputs = list(inputs)
        self._versions = [_version(tensor) for tensor in inputs]
        self.content = content
        self.places: set[Hashable] = set()

    def is_of(self, inputs: Sequence[torch.Tensor]) -> bool:
        return len(inputs) == len(self._inputs) and all(
            (now is then and _version(now) == version) or (now.numel() == 0 and now.shape == then.shape)
            for now, then, version in zip(inputs, self._inputs, self._versions, strict=True)
        )


def _version(tensor: torch.Tensor) -> int | None:
    """Counts the writes to a tensor; None in inference mode, where torch does not."""
    return None if tensor.is_inference() else tensor._version


def _have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """a, b: of one shape, dtype and device."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _own(result: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result in memory of its own: neither of an input, which may change, nor a view of something larger."""
    result = result.contiguous()
    storage = result.untyped_storage()
    if storage.nbytes() == result.nbytes and storage.data_ptr() not in [
        each.untyped_storage().data_ptr() for each in inputs
    ]:
        return result
    return result.clone()
