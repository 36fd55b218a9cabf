"""Keep the results of prologues, for calls in which their inputs have the same values.

A prologue (see `dependence`) depends on weights and on the time. Its results are looked up by the values of its inputs,
bit for bit, so a key needs no name of a noise level.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

from ....telemetry.stats import Counters

Content = tuple[Hashable, ...]
Inputs = Sequence[torch.Tensor]


class PrologueCache:
    """The results of the prologues of one model, in at most `limit` bytes.

    A call's results that do not fit evict all others; results larger than the limit are computed in each call.

    Not thread-safe: callers hold the cache's lock.
    """

    def __init__(self, limit: int, counters: Counters | None = None) -> None:
        """counters: of the process."""
        self.limit = limit
        self.bytes = 0
        self._counters = counters or Counters()
        self._results: dict[tuple[Hashable, Content], list[torch.Tensor]] = {}
        self._inputs: list[torch.Tensor] = []  # the inputs read last; kept alive, so no others get their ids
        self._values: Content = ()
        self._versions: list[int] = []
        self._places: set[Hashable] = set()  # that this call has reached so far
        self._is_written = False  # the model writes to such inputs between two blocks of a call

    def get(
        self,
        place: Hashable,
        inputs: Inputs,
        compute: Callable[[Sequence[Inputs]], Sequence[Sequence[torch.Tensor]]],
        ahead: Callable[[], Mapping[Content, Inputs]] = dict,
    ) -> list[torch.Tensor]:
        """Return the results of the prologue at `place` for these inputs, computed if they are not known.

        compute: returns the results for each of several inputs. ahead: returns inputs of later calls by `values_of`; a
        computation includes their results. No caller may write to results. Raises errors of `compute` and `ahead`.
        """
        now = self._read(place, inputs)
        if (place, now) in self._results:
            self._counters.prologue_reuses += 1
            return self._results[place, now]
        later = {} if self._is_written else ahead()  # a write between two blocks is unpredictable
        wanted = {now: inputs, **{key: each for key, each in later.items() if (place, key) not in self._results}}
        for key, results in zip(wanted, compute(list(wanted.values())), strict=True):
            self._counters.prologue_runs += 1
            # Copied: they may share memory with an input, which may change, or with a larger buffer.
            kept = [result.clone(memory_format=torch.contiguous_format) for result in results]
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

    def forget(self) -> None:
        """Drop all results: the weights changed, or the run is over."""
        self._drop()
        self._inputs, self._places = [], set()

    def _drop(self) -> None:
        self._results.clear()
        self._count(-self.bytes)

    def _count(self, size: int) -> None:
        self.bytes += size
        self._counters.kept_bytes += size

    def _read(self, place: Hashable, inputs: Inputs) -> Content:
        """Return the values of the inputs, read once for all blocks of a call that get the same tensors.

        A repeated place begins another call, in which a tensor may have other values. A write between two blocks shows
        in torch's version counter. Tensors of inference mode have no such counter, and reading their values at each
        block would make the host wait for the GPU. A block that writes to its inputs is not split (`dependence`), and a
        model that writes between two blocks does so in its first step, in which every place computes: there the values
        are read for each block.
        """
        versions = [each._version for each in inputs if not each.is_inference()]
        if place in self._places or versions != self._versions or not are_same(inputs, self._inputs):
            self._inputs, self._values, self._places = list(inputs), values_of(inputs), set()
        elif self._is_written or (place, self._values) not in self._results:
            before, self._values = self._values, values_of(inputs)
            self._is_written |= self._values != before
        self._versions = versions
        self._places.add(place)
        return self._values


def are_same(inputs: Inputs, others: Inputs) -> bool:
    """True if they are the same tensors."""
    return len(inputs) == len(others) and all(a is b for a, b in zip(inputs, others, strict=True))


def values_of(inputs: Inputs) -> Content:
    """Return the bits of these tensors, their shapes, dtypes and devices. Waits for the GPU's work."""
    return tuple((tuple(each.shape), each.dtype, str(each.device), _bytes_of(each)) for each in inputs)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    host = tensor.detach().to("cpu").contiguous()
    return host.flatten().view(torch.uint8).numpy().tobytes() if host.numel() else b""
