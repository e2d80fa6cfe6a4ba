"""Reads the imports of the library and draws them, room by room, in docs/architecture.md.

    python -m tools.draw_rooms

An arrow from `a` to `c` is left out if other arrows lead from `a` over `b` to `c`.
"""

import ast
import pathlib

_ROOT = pathlib.Path(__file__).parents[1]
_LIBRARY = "lingvo_gshard"
_BELOW = ("xla_plan", "xla_spmd")
_DOCUMENT = _ROOT / "docs/architecture.md"
_BEGIN = "```mermaid\n"
_END = "```\n"


def arrows() -> dict[str, set[str]]:
    """Returns the rooms and packages that each room imports.

    The modules at the library's top are one room, `programs`.
    """
    graph: dict[str, set[str]] = {"xla_plan": {"xla_spmd"}}
    for path in sorted((_ROOT / _LIBRARY).rglob("*.py")):
        parts = path.relative_to(_ROOT / _LIBRARY).parts
        if parts == ("__init__.py",):
            continue

        room = parts[0] if len(parts) > 1 else "programs"
        imported = graph.setdefault(room, set())
        for name in _imports(path):
            other = name.split(".")[1] if name.startswith(f"{_LIBRARY}.") else None
            if other is not None and (_ROOT / _LIBRARY / other).is_dir() and other != room:
                imported.add(other)
            if name.split(".")[0] in _BELOW:
                imported.add(name.split(".")[0])
    return graph


def _imports(path: pathlib.Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the graph without the arrows that longer paths imply."""
    reached: dict[str, set[str]] = {}

    def reach(node: str) -> set[str]:
        if node not in reached:
            reached[node] = set()
            for other in graph.get(node, ()):
                reached[node] |= {other} | reach(other)
        return reached[node]

    kept = {}
    for node, others in graph.items():
        indirect = set().union(*(reach(other) for other in others))
        kept[node] = others - indirect
    return kept


def mermaid() -> str:
    """Returns the drawing in Mermaid's language."""
    lines = ["graph TD"]
    for room, others in sorted(reduced(arrows()).items()):
        lines += [f"  {room} --> {other}" for other in sorted(others)]
    return "\n".join(lines) + "\n"


def drawn(document: str) -> str:
    """Returns a document in which the drawing is replaced by the current one."""
    before, _, rest = document.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{mermaid()}{_END}{after}"


if __name__ == "__main__":
    document = _DOCUMENT.read_text(encoding="utf-8")
    _DOCUMENT.write_text(drawn(document), encoding="utf-8")
