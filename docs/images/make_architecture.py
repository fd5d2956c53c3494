"""Draws docs/images/architecture.svg from the imports of the package.

    python docs/images/make_architecture.py

The floors are those of tests/test_architecture.py (extra [test]). Imports that follow from others
are left out (transitive reduction).
"""

import functools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
sys.path.insert(0, str(ROOT / "tests"))

from test_architecture import (  # noqa: E402
    FLOORS,
    PACKAGE,
    PLACES,
    imported_modules,
    module_files,
    module_name,
)

# A block of FLOORS, or the waypoint (its target, floor) of arrows that pass through a floor.
Block = tuple[str, ...]
Node = Block | tuple[Block, int]
Graph = dict[Block, set[Block]]

WIDTH, FLOOR_HEIGHT, BOX_HEIGHT, MARGIN = 960, 66, 38, 44
GAP = 18  # between neighbours on a floor
COLORS = ("#eef2fb", "#ffffff")  # of the floors, in turns


def block_of(module: str) -> Block:
    floor, block, _ = PLACES[module.partition(".")[0]]
    return FLOORS[floor][block]


def floor_of(node: Node) -> int:
    return node[1] if isinstance(node[1:] and node[1], int) else PLACES[node[0]][0]


def is_waypoint(node: Node) -> bool:
    return len(node) == 2 and isinstance(node[1], int)


def import_graph() -> Graph:
    """The blocks that each block imports, without imports that follow from others."""
    graph: Graph = {block: set() for blocks in FLOORS for block in blocks}
    for path in module_files():
        if name := module_name(path):  # the package's own __init__ imports on first use
            graph[block_of(name)] |= {block_of(module) for module, _ in imported_modules(path)}
    graph = {block: imported - {block} for block, imported in graph.items()}
    below: Graph = {}  # all that a block imports, also through others
    for block in sorted(graph, key=floor_of):
        below[block] = graph[block].union(*(below[other] for other in graph[block]))
    return {
        block: imported - set().union(*(below[other] for other in imported))
        for block, imported in graph.items()
    }


def routed(graph: Graph) -> list[tuple[Node, Node]]:
    """Arrows from floor to floor; those to one target share their waypoints on each floor."""
    arrows: dict[tuple[Node, Node], None] = {}
    for block in graph:
        for target in sorted(graph[block]):
            node: Node = block
            for floor in range(floor_of(block) - 1, floor_of(target), -1):
                arrows[node, (target, floor)] = None
                node = (target, floor)
            arrows[node, target] = None
    return list(arrows)


@functools.cache
def label(block: Block) -> str:
    folders = [f"{name}/" if (PACKAGE / name).is_dir() else name for name in block]
    return " → ".join(reversed(folders))  # an arrow is an import


@functools.cache
def subfolders(block: Block) -> str:
    folders = (path.parent for name in block for path in PACKAGE.glob(f"{name}/*/__init__.py"))
    return "  ".join(f"{folder.name}/" for folder in sorted(folders))


@functools.cache
def width(node: Node) -> float:
    if is_waypoint(node):
        return 8.0
    return max(84.0, 8.5 * len(label(node)) + 18, 6.3 * len(subfolders(node)) + 18)


def spread(floor: Sequence[Node], wanted: dict[Node, float]) -> dict[Node, float]:
    """Centers of a floor's nodes, in their order, near the wanted ones and without overlap."""
    centers = [wanted[node] for node in floor]
    for _ in range(80):
        for i in range(len(floor) - 1):
            apart = (width(floor[i]) + width(floor[i + 1])) / 2 + GAP
            if (excess := apart - (centers[i + 1] - centers[i])) > 0:
                centers[i] -= excess / 2
                centers[i + 1] += excess / 2
        for i, node in enumerate(floor):
            half = width(node) / 2
            centers[i] = min(max(centers[i], MARGIN + half), WIDTH - 12 - half)
    return dict(zip(floor, centers, strict=True))


def placed(arrows: Sequence[tuple[Node, Node]]) -> dict[Node, float]:
    """The center of each node: floors are ordered by the mean center of their neighbours."""
    nodes = dict.fromkeys(block for blocks in FLOORS for block in blocks)
    nodes |= dict.fromkeys(node for arrow in arrows for node in arrow)
    floors = [[n for n in nodes if floor_of(n) == floor] for floor in range(len(FLOORS))]
    centers = {n: WIDTH * (i + 1) / (len(f) + 1) for f in floors for i, n in enumerate(f)}
    for sweep in range(24):
        for floor in floors if sweep % 2 else reversed(floors):
            wanted = {}
            for node in floor:
                near = [centers[b if a == node else a] for a, b in arrows if node in (a, b)]
                wanted[node] = sum(near) / len(near) if near else centers[node]
            floor.sort(key=lambda node: wanted[node])
            centers |= spread(floor, wanted)
    return centers


def lines(graph: Graph) -> Iterator[str]:
    """The lines of the SVG file."""
    height = FLOOR_HEIGHT * len(FLOORS)
    arrows = routed(graph)
    centers = placed(arrows)

    def middle(node: Node) -> float:
        return height - FLOOR_HEIGHT * (floor_of(node) + 0.5)

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
    yield ' font-family="sans-serif" font-size="14" text-anchor="middle">'
    yield '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
    yield ' orient="auto"><path d="M0 0L8 4L0 8z" fill="#5b6b8c"/></marker>'
    for floor in range(len(FLOORS)):
        top = height - FLOOR_HEIGHT * (floor + 1)
        yield f'<rect y="{top}" width="{WIDTH}" height="{FLOOR_HEIGHT}"'
        yield f' fill="{COLORS[floor % 2]}"/>'
        yield f'<text x="20" y="{top + FLOOR_HEIGHT / 2 + 5:.0f}" fill="#5b6b8c">{floor}</text>'
    for start, end in arrows:
        x0, x1 = centers[start], centers[end]
        y0 = middle(start) + (0 if is_waypoint(start) else BOX_HEIGHT / 2)
        y1 = middle(end) - (0 if is_waypoint(end) else BOX_HEIGHT / 2)
        bend = (y0 + y1) / 2
        head = "" if is_waypoint(end) else ' marker-end="url(#head)"'
        yield f'<path d="M{x0:.0f} {y0:.0f}'
        yield f'C{x0:.0f} {bend:.0f} {x1:.0f} {bend:.0f} {x1:.0f} {y1:.0f}"'
        yield f' fill="none" stroke="#5b6b8c" stroke-width="1.3"{head}/>'
    for node, center in sorted(centers.items(), key=lambda item: (floor_of(item[0]), item[1])):
        if is_waypoint(node):
            continue
        inside, y = subfolders(node), middle(node)
        left = center - width(node) / 2
        yield f'<rect x="{left:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{width(node):.0f}"'
        yield f' height="{BOX_HEIGHT}" rx="5" fill="#fff" stroke="#2f4b8f" stroke-width="1.5"/>'
        shift = -2 if inside else 5
        yield f'<text x="{center:.0f}" y="{y + shift:.0f}">{escape(label(node))}</text>'
        if inside:
            yield f'<text x="{center:.0f}" y="{y + 13:.0f}" font-size="11"'
            yield f' fill="#555">{inside}</text>'
    yield "</svg>"


def picture() -> str:
    """The SVG file of the package as it is."""
    return "\n".join(lines(import_graph())) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
