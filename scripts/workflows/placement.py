"""Where the nodes of a workflow stand: links run from left to right, and frames fit into a box."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import combinations

BOX = (2400, 1300)  # ComfyUI fits a template into the window: at 1456x819 this is shown at 60 percent
# Pixels on the canvas, measured in the front end of ComfyUI 0.33.0.
TITLE, FRAME_TITLE, MARGIN = 30, 50, 20
BELOW = 44  # between two nodes: Nodes 2.0 puts a bar below a node whose model is missing
APART, FRAMES_APART = 60, 30  # between columns, and between a frame and the next one below

Size = tuple[int, int]  # width, height below the title
Point = tuple[int, int]  # of a node's body: its title is above
Link = tuple[int, int]  # from a node to a node
Frame = tuple[int, int, int, int]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Plan:
    """Frames in the order in which they take their places, and the first column that each may use."""

    order: tuple[int, ...]
    starts: tuple[int, ...]

    def changed(self) -> Iterator[Plan]:
        """Each plan that differs in one step: two frames exchanged, or one begins a column further to the right."""
        for one, other in combinations(range(len(self.order)), 2):
            order = list(self.order)
            order[one], order[other] = order[other], order[one]
            yield replace(self, order=tuple(order))
        for frame, start in enumerate(self.starts):
            yield replace(self, starts=(*self.starts[:frame], start + 1, *self.starts[frame + 1 :]))


@dataclass(slots=True)
class Placement:
    """A workflow to be placed. down: links that may run straight down to the next frame. Notes are in no frame."""

    sizes: Mapping[int, Size]
    links: Sequence[Link]
    frames: Sequence[Sequence[int]]
    down: Collection[Link] = ()
    box: Size = BOX

    def best(self) -> tuple[dict[int, Point], list[Frame]]:
        """Position of each node, and each frame around its nodes: of several plans the one that fits the box best."""
        free = Plan(tuple(range(len(self.frames))), (0,) * len(self.frames))
        plan = max((self._improved(each) for each in (free, self._after_sources(free))), key=self._score)
        points, taken = self._arranged(plan)
        return points, taken[: len(self.frames)]

    def _improved(self, plan: Plan) -> Plan:
        while (better := max(plan.changed(), key=self._score, default=plan)) and self._score(better) > self._score(
            plan
        ):
            plan = better
        return plan

    def _score(self, plan: Plan) -> tuple[float, int, int]:
        """Fit, then few frames out of their order, then short links."""
        points, taken = self._arranged(plan)
        swapped = sum(one > other for one, other in combinations(plan.order, 2))
        length = sum(abs(points[one][1] - points[other][1]) for one, other in self.links)
        return round(_fit(taken, self.box), 2), -swapped, -length

    def _after_sources(self, plan: Plan) -> Plan:
        """The plan with each frame right of the nodes that it takes links from."""
        for _ in self.frames:
            columns = self._columns(plan)
            links = [each for each in self.links if each not in self.down]
            into = [[one for one, other in links if other in frame and one not in frame] for frame in self.frames]
            plan = replace(plan, starts=tuple(max((columns[one] + 1 for one in each), default=0) for each in into))
        return plan

    def _columns(self, plan: Plan) -> dict[int, int]:
        """The column of each node: right of its sources. What has targets goes as far right as its frame does."""
        home = {node: frame for frame, nodes in enumerate(self.frames) for node in nodes}
        sources: dict[int, list[int]] = {node: [] for node in home}
        targets: dict[int, list[int]] = {node: [] for node in home}
        for one, other in self.links:
            sources[other].append(one)
            targets[one].append(other)
        order = list(TopologicalSorter(sources).static_order())
        columns: dict[int, int] = {}
        for node in order:
            steps = [columns[each] + ((each, node) not in self.down) for each in sources[node]]
            columns[node] = max([plan.starts[home[node]], *steps])
        ends = [max(columns[node] for node in frame) for frame in self.frames]
        for node in reversed(order):
            if targets[node]:
                steps = [columns[each] - ((node, each) not in self.down) for each in targets[node]]
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
            top = bottoms.get(columns[node], FRAME_TITLE - BELOW) + BELOW + TITLE
            points[node] = (lefts[columns[node]], top)
            bottoms[columns[node]] = top + self.sizes[node][1]
        right = max(points[node][0] + self.sizes[node][0] for node in frame)
        left = min(points[node][0] for node in frame)
        return points, (left - MARGIN, right + MARGIN, max(bottoms.values()) + MARGIN)


def _free(taken: Collection[Frame], left: int, right: int, height: int) -> int:
    """The top of the first place between `left` and `right` that is high enough."""
    beside = [each for each in taken if each[0] < right and left < each[2]]
    tops = sorted([0, *(each[3] + FRAMES_APART for each in beside)])
    return next(top for top in tops if all(top + height + FRAMES_APART <= each[1] or each[3] < top for each in beside))


def _spot(taken: Collection[Frame], left: int, size: Size) -> Frame:
    """Where a note lies that begins at `left`."""
    height = size[1] + TITLE
    top = _free(taken, left - MARGIN, left + size[0], height)
    return left - MARGIN, top, left - MARGIN + size[0], top + height


def _fit(taken: Sequence[Frame], box: Size) -> float:
    """The zoom at which everything is inside the box, at most 1."""
    width = max(each[2] for each in taken) - min(each[0] for each in taken)
    return min(1.0, box[0] / width, box[1] / max(each[3] for each in taken))
