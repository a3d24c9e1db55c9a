"""The rooms of the Python package: which may import which. Imports inside functions count as well."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "cutefuse"
OUTSIDE = ("models", "cutefuse_host")  # packages of ours that stand on this one
BASE = ("errors", "progress", "table", "output", "cli", "__init__", "__main__")

# room -> the rooms that it may import beside itself and the base; each stands above all that it may import.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "base": (),
    "kernels": (),
    "roofline": (),
    "graph": (),
    "operators": ("kernels", "graph"),
    "match": ("kernels", "graph", "operators"),
    "select": ("kernels", "roofline", "graph", "operators", "match"),
    "rewrite": ("kernels", "graph", "operators", "match", "select"),
    "torch": ("kernels", "graph", "operators", "match", "rewrite"),
    "timing": ("kernels", "graph"),
    "engines": ("kernels", "roofline", "graph", "operators", "torch", "timing"),
    "report.read": ("kernels", "roofline", "graph", "match", "engines"),
    "report.analyse": ("kernels", "roofline", "graph", "match", "select", "rewrite", "engines", "report.read"),
    "report.draw": ("roofline", "match", "engines", "report.read", "report.analyse"),
    "report": ("roofline", "report.read", "report.analyse", "report.draw"),
    "optimize": (
        "kernels", "graph", "operators", "match", "select", "rewrite", "timing", "engines", "report", "report.read",
        "report.analyse",
    ),
    "profilers": ("kernels", "roofline", "operators", "timing", "engines", "report.read", "report.analyse"),
}  # fmt: skip
ROOMS = tuple(MAY_IMPORT)
MAY_IMPORT["commands"] = ROOMS  # nothing imports it but `cutefuse.cli`, by name


def room_of(module: str) -> str:
    """'cutefuse.graph.read' -> 'graph'; of the base: 'base'."""
    _, *parts = (*module.split("."), "", "")
    for room in (".".join(parts[:2]), parts[0]):
        if room in MAY_IMPORT:
            return room
    return "base"


def imported(tree: ast.AST, package: str) -> set[str]:
    """The modules of ours that a file imports anywhere, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            head = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*head, *([node.module] if node.module else [])])
            # `from cutefuse import kernels` imports a module of the package, not a name of its __init__.
            found.update(f"{module}.{alias.name}" if module == "cutefuse" else module for alias in node.names)
    return {name for name in found if name.split(".")[0] in ("cutefuse", *OUTSIDE)}


def module_of(path: Path) -> str:
    return ".".join(("cutefuse", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def circle(links: dict[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, in its order; empty when there is none."""
    done: set[str] = set()

    def walk(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        found = (
            [] if module in done else next(filter(None, (walk(m, [*trail, module]) for m in sorted(links[module]))), [])
        )
        done.add(module)
        return found

    return next(filter(None, (walk(m, []) for m in links)), [])


def links_of(texts: dict[str, tuple[str, str]]) -> dict[str, set[str]]:
    """module -> the modules that it imports, from module -> (its package, its text). What the `__init__` of a package
    hands on is not followed: `from cutefuse.operators import conv_math` is conv_math."""
    links: dict[str, set[str]] = {}
    for module, (package, text) in texts.items():
        tree = ast.parse(text)
        names = imported(tree, package) | {
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module for alias in node.names
        }  # fmt: skip
        links[module] = {name for name in names if name in texts} - {module}
    return links


def faults(path: Path, text: str) -> list[str]:
    """What a file imports against the table, in words."""
    parts = ("cutefuse", *path.relative_to(PACKAGE).with_suffix("").parts)
    own = room_of(".".join(parts))
    tree, found = ast.parse(text), []
    if parts == ("cutefuse", "__init__"):  # hands on names of rooms, which only a type checker imports at once
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    for name in sorted(imported(tree, ".".join(parts[:-1]))):
        if name.split(".")[0] in OUTSIDE:
            found.append(f"{'/'.join(parts)} imports {name}: the package needs neither demo models nor plugin host")
        elif (room := room_of(name)) not in ("base", own, *MAY_IMPORT[own]):
            found.append(f"{'/'.join(parts)} ({own}) imports {name} ({room})")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_no_file_imports_a_room_that_its_own_may_not() -> None:
    assert [fault for path in FILES for fault in faults(path, path.read_text())] == []


def lost(text: str) -> set[str]:
    """The modules of the package that a file imports and that are not there."""
    names = {name for name in imported(ast.parse(text), "") if name.count(".") > 1}
    paths = {name: PACKAGE.parent / name.replace(".", "/") for name in names if name.startswith("cutefuse.")}
    return {name for name, path in paths.items() if not path.with_suffix(".py").exists() and not path.is_dir()}


def test_every_import_around_the_package_leads_to_a_file() -> None:
    folders = ("benchmarks", "calibration", "models", "scripts", "tests")
    files = [path for folder in folders for path in (PACKAGE.parent / folder).rglob("*.py")]
    assert len(files) > 300
    assert {str(path): names for path in files if (names := lost(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import cutefuse.commands.tuning", {"cutefuse.commands.tuning"}),
        ("def f():\n    from cutefuse.commands.tuning import gpu_timer", {"cutefuse.commands.tuning"}),
        ("from cutefuse.commands.choices import gpu_timer\nimport cutefuse.commands\nimport torch.nothing", set()),
    ],
)
def test_an_import_that_leads_nowhere_is_seen(text: str, names: set[str]) -> None:
    assert lost(text) == names


def test_no_two_files_import_each_other_in_a_circle() -> None:
    files = [p for p in FILES if p.name != "__init__.py"]
    texts = {module_of(p): (module_of(p).rpartition(".")[0], p.read_text()) for p in files}
    assert circle(links_of(texts)) == []
    name = "cutefuse.graph.shapes"
    back = (texts[name][0], texts[name][1] + "\ndef f():\n    from cutefuse.match import find\n")
    assert set(circle(links_of({**texts, name: back}))) >= {name, "cutefuse.match.find"}


def test_every_room_stands_above_what_it_may_import() -> None:
    below: set[str] = set()
    for room, lower in MAY_IMPORT.items():
        assert set(lower) <= below, f"{room} may import {set(lower) - below}, which stand above it"
        below.add(room)


def test_every_folder_is_a_room_and_says_what_lives_there() -> None:
    folders = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert folders == {room.partition(".")[0] for room in MAY_IMPORT} - {"base", "kernels"}
    flat = {p.stem for p in PACKAGE.glob("*.py")}
    assert flat == {*BASE, "kernels"}
    for path in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(PACKAGE)} says not what lives there"


@pytest.mark.parametrize(
    "text, room",
    [
        ("from cutefuse.match.find import Site", "match"),
        ("def f():\n    from cutefuse import kernels", "kernels"),
        ("def f():\n    import cutefuse.report.analyse.rank as rank", "report.analyse"),
        ("if TYPE_CHECKING:\n    from ..engines.artifacts import Artifacts", "engines"),
        ("import models", "models"),
        ("def f():\n    from cutefuse_host import memory", "cutefuse_host"),
    ],
)
def test_an_upward_import_is_seen_wherever_it_stands(text: str, room: str) -> None:
    (fault,) = faults(PACKAGE / "graph/read.py", text)
    assert room in fault


def is_dataclass(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def held_callables(texts: dict[str, str]) -> list[str]:
    """The fields of dataclasses, and the parameters, that are typed as callables or by a name for one: code that a room
    above could hand down, where the table of imports does not see it."""
    trees = {name: ast.parse(text) for name, text in texts.items()}
    aliases = {
        ast.unparse(node.targets[0])
        for tree in trees.values() for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Callable[")
    }  # fmt: skip
    found = []
    for name, tree in trees.items():
        fields = [f for c in ast.walk(tree) if is_dataclass(c) for f in c.body if isinstance(f, ast.AnnAssign)]  # type: ignore[attr-defined]
        for item in (*fields, *(a for a in ast.walk(tree) if isinstance(a, ast.arg))):
            words = {n.id for n in ast.walk(item.annotation) if isinstance(n, ast.Name)} if item.annotation else set()
            what = ast.unparse(item.target) if isinstance(item, ast.AnnAssign) else f"({item.arg})"
            found += [f"{name} {what}: {word}" for word in sorted(words & {"Callable", *aliases})]
    return found


def test_no_room_below_optimize_holds_code_of_a_room_above() -> None:
    """Prices and tiles are handed to `patch` and to the pass that asks for them; nothing carries them further."""
    rooms = {room: sorted((PACKAGE / room).rglob("*.py")) for room in ("select", "rewrite")}
    texts = {f"{p.parent.name}/{p.stem}": p.read_text() for paths in rooms.values() for p in paths}
    found = held_callables(texts)
    assert [f for f in found if "(" not in f] == []  # fields
    assert {f.partition(": ")[2] for f in found if f.startswith("select/")} == {"Pricing"}
    assert "rewrite/patch (price): Pricing" in found
    worse = texts | {"rewrite/options": "@dataclass\nclass Options:\n    price: Pricing | None = None\n"}
    assert "rewrite/options price: Pricing" in held_callables(worse)
    worse["select/gain"] = "def choose(settle: Callable[[], None]) -> None: ..."
    assert "select/gain (settle): Callable" in held_callables(worse)
