"""Where the nodes of a workflow stand: links run from left to right, and frames fit into a box."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import combinations
from math import exp, floor
from random import Random

# ComfyUI fits the nodes of a template into three quarters of the window, and draws no text below 57 percent: at
# 1456x819 this box is shown at that zoom.
BOX = (1925, 1090)
_TRIES, _STEPS = 6, 2000  # of simulated annealing, where the first plan does not fit
# Pixels on the canvas, measured in the front end of ComfyUI 0.33.0.
TITLE, FRAME_TITLE, MARGIN = 30, 50, 18
APART, FRAMES_APART = 36, 16  # between columns, and between a frame and the next one below

Size = tuple[int, int]  # width, height below the title
Point = tuple[int, int]  # of a node's body: its title is above
Link = tuple[int, int]  # from a node to a node
Frame = tuple[int, int, int, int]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Plan:
    """Frames in the order in which they take their places, the first column that each may use, and whether its nodes
    are stacked: its links then run down.
    """

    order: tuple[int, ...]
    starts: tuple[int, ...]
    stacked: tuple[bool, ...]

    def changed(self) -> Iterator[Plan]:
        """Each plan that differs in one step: two frames exchanged, one stacked or not, one a column to the side."""
        for one, other in combinations(range(len(self.order)), 2):
            order = list(self.order)
            order[one], order[other] = order[other], order[one]
            yield replace(self, order=tuple(order))
        for frame, start in enumerate(self.starts):
            yield replace(self, starts=(*self.starts[:frame], start + 1, *self.starts[frame + 1 :]))
            if start:
                yield replace(self, starts=(*self.starts[:frame], start - 1, *self.starts[frame + 1 :]))
        for frame, stacked in enumerate(self.stacked):
            yield replace(self, stacked=(*self.stacked[:frame], not stacked, *self.stacked[frame + 1 :]))


@dataclass(slots=True)
class Placement:
    """A workflow to be placed. below: the gap below each node. down: links that may run straight down to the next
    frame. Notes are in no frame.
    """

    sizes: Mapping[int, Size]
    below: Mapping[int, int]
    links: Sequence[Link]
    frames: Sequence[Sequence[int]]
    down: Collection[Link] = ()
    box: Size = BOX
    starts: tuple[int, ...] = ()  # the first column of each frame, to begin with

    def best(self) -> tuple[dict[int, Point], list[Frame]]:
        """Position of each node, and each frame around its nodes: of several plans the one that fits the box best."""
        count = len(self.frames)
        free = Plan(tuple(range(count)), self.starts or (0,) * count, (False,) * count)
        plans = (free, replace(free, stacked=(True,) * count))
        plan = max(map(self._improved, plans), key=self._score)
        for seed in range(_TRIES):
            if self._score(plan)[0] == 100:
                break
            plan = max(plan, self._improved(self._annealed(free, Random(seed))), key=self._score)
        points, taken = self._arranged(plan)
        return points, taken[: len(self.frames)]

    def _annealed(self, plan: Plan, random: Random) -> Plan:
        """The smallest of the plans that simulated annealing comes to; the same for the same seed."""
        plan = replace(plan, stacked=(random.random() < 0.5,) * len(self.frames))
        size = self._size(plan)
        best, least = plan, size
        for step in range(_STEPS):
            other = random.choice(list(plan.changed()))
            found = self._size(other)
            heat = 0.08 * (1 - step / _STEPS)
            if found < size or random.random() < exp((size - found) / heat):
                plan, size = other, found
            if size < least:
                best, least = plan, size
        return best

    def _size(self, plan: Plan) -> float:
        """How much of the box is filled, 1 if it just fits: mostly the side that fits worse."""
        width, height = _extent(self._arranged(plan)[1])
        sides = width / self.box[0], height / self.box[1]
        return max(sides) + 0.15 * sum(sides)

    def _improved(self, plan: Plan) -> Plan:
        while (better := max(plan.changed(), key=self._score, default=plan)) and self._score(better) > self._score(
            plan
        ):
            plan = better
        return plan

    def _score(self, plan: Plan) -> tuple[int, int, int]:
        """Percent of fit, then few frames stacked or out of their order, then short links."""
        points, taken = self._arranged(plan)
        swapped = sum(one > other for one, other in combinations(plan.order, 2))
        length = sum(abs(points[one][1] - points[other][1]) for one, other in self.links)
        return floor(100 * _fit(taken, self.box)), -swapped - sum(plan.stacked), -length

    def _home(self) -> dict[int, int]:
        """The frame of each node that is in one."""
        return {node: frame for frame, nodes in enumerate(self.frames) for node in nodes}

    def _down(self, plan: Plan) -> set[Link]:
        """The links that may run straight down."""
        home = self._home()
        stacked = {(one, other) for one, other in self.links if home[one] == home[other] and plan.stacked[home[one]]}
        return stacked | set(self.down)

    def _columns(self, plan: Plan) -> dict[int, int]:
        """The column of each node: right of its sources. What has targets goes as far right as its frame does."""
        home, down = self._home(), self._down(plan)
        sources: dict[int, list[int]] = {node: [] for node in home}
        targets: dict[int, list[int]] = {node: [] for node in home}
        for one, other in self.links:
            sources[other].append(one)
            targets[one].append(other)
        order = list(TopologicalSorter(sources).static_order())
        columns: dict[int, int] = {}
        for node in order:
            steps = [columns[each] + ((each, node) not in down) for each in sources[node]]
            columns[node] = max([plan.starts[home[node]], *steps])
        ends = [max(columns[node] for node in frame) for frame in self.frames]
        for node in reversed(order):
            if targets[node]:
                steps = [columns[each] - ((node, each) not in down) for each in targets[node]]
                columns[node] = min([ends[home[node]], *steps])
        return columns

    def _arranged(self, plan: Plan) -> tuple[dict[int, Point], list[Frame]]:
        """Positions, and what is taken: frames in their own order, then notes."""
        columns = self._columns(plan)
        widths = [0] * (max(columns.values()) + 1)
        for node, column in columns.items():
            widths[column] = max(widths[column], self.sizes[node][0])
        lefts = [MARGIN + sum(widths[:each]) + APART * each for each in range(len(widths))]
        points: dict[int, Point] = {}
        around: dict[int, Frame] = {}
        for each in plan.order:
            stacked, (left, right, height) = self._stacked(self.frames[each], columns, lefts)
            top = _free(around.values(), left, right, height)
            around[each] = (left, top, right, top + height)
            points |= {node: (x, top + y) for node, (x, y) in stacked.items()}
        taken = [around[each] for each in range(len(self.frames))]
        for note in (node for node in self.sizes if node not in columns):
            spots = [_spot(taken, left, self.sizes[note]) for left in lefts]
            taken.append(max(spots, key=lambda spot: (_fit([*taken, spot], self.box), -spot[1], -spot[0])))
            points[note] = (taken[-1][0], taken[-1][1] + TITLE)
        return points, taken

    def _stacked(
        self, frame: Sequence[int], columns: Mapping[int, int], lefts: Sequence[int]
    ) -> tuple[dict[int, Point], tuple[int, int, int]]:
        """The nodes of a frame, one below the other in each column; the frame's left, right and height."""
        bottoms: dict[int, int] = {}
        points = {}
        for node in frame:
            top = bottoms.get(columns[node], FRAME_TITLE) + TITLE
            points[node] = (lefts[columns[node]], top)
            bottoms[columns[node]] = top + self.sizes[node][1] + self.below[node]
        right = max(points[node][0] + self.sizes[node][0] for node in frame)
        left = min(points[node][0] for node in frame)
        return points, (
            left - MARGIN,
            right + MARGIN,
            max(points[node][1] + self.sizes[node][1] for node in frame) + MARGIN,
        )


def _free(taken: Collection[Frame], left: int, right: int, height: int) -> int:
    """The top of the first place between `left` and `right` that is high enough."""
    beside = [each for each in taken if each[0] < right and left < each[2]]
    tops = sorted([0, *(each[3] + FRAMES_APART for each in beside)])
    return next(top for top in tops if all(top + height + FRAMES_APART <= each[1] or each[3] < top for each in beside))


def _spot(taken: Collection[Frame], left: int, size: Size) -> Frame:
    """Where a note lies that begins at `left`."""
    height = size[1] + TITLE
    top = _free(taken, left - MARGIN, left + size[0], height)
    return left, top, left + size[0], top + height


def _fit(taken: Sequence[Frame], box: Size) -> float:
    """The zoom at which everything is inside the box, at most 1."""
    width, height = _extent(taken)
    return min(1.0, box[0] / width, box[1] / height)


def _extent(taken: Sequence[Frame]) -> Size:
    return max(each[2] for each in taken) - min(each[0] for each in taken), max(each[3] for each in taken)
