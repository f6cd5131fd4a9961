"""A small mutation tool: changes one operator, constant or statement, and asks the tests.

    python scripts/mutate.py --sample 200 --seed 1 --log mutation.jsonl FILE...

Each mutant is one place of one file: a comparison turned or shifted, `and` for `or`, `+` for `-`, a
constant changed, a condition negated, a statement left out. What a sound program is the same
without is left alone: asserts, `strict=` of a zip, annotations, docstrings. A mutant is killed by a
failing test or by running out of time. Mutants that the log has already are part of the sample and
are not tried again.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from scratch import ROOT, Scratch

DEFAULT_FILES = (
    "tiercache/tree.py",
    "tiercache/runs.py",
    "tiercache/catalog.py",
    "tiercache/moves.py",
    "tiercache/loads.py",
    "tiercache/room.py",
    "tiercache/writes.py",
    "tiercache/transfer.py",
    "tiercache/eviction.py",
)

_TURNED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


Change = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change, made by `make` to the node with number `index` of the file's syntax tree."""

    file: str
    line: int
    change: str
    index: int
    make: Change

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.change}"

    @property
    def source(self) -> str:
        """The whole file with the change."""
        tree = ast.parse((ROOT / self.file).read_text())
        self.make(next(node for at, node in enumerate(ast.walk(tree)) if at == self.index))
        return ast.unparse(ast.fix_missing_locations(tree))


def mutants_of(file: str) -> list[Mutant]:
    """Every mutant of one file, in the order of its lines."""
    tree = ast.parse((ROOT / file).read_text())
    _exempt(tree)
    found = []
    for index, node in enumerate(ast.walk(tree)):
        for change, label in _changes(node):
            found.append(Mutant(file, getattr(node, "lineno", 0), label, index, change))
    return sorted(found, key=lambda mutant: mutant.line)


def _changes(node: ast.AST) -> Iterator[tuple[Change, str]]:
    """Ways to change `node` in place, each with its description."""
    if getattr(node, "is_exempt", False):
        return
    text = ast.unparse(node) if isinstance(node, (ast.expr, ast.stmt)) else ""
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            if turned := _TURNED.get(type(operator)):
                yield partial(_turn_at, at, turned), f"{text!r}: {turned.__name__}"
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        if turned := _TURNED.get(type(node.op)):
            yield partial(_turn, turned), f"{text!r}: {turned.__name__}"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield partial(_put, value), f"{node.value} → {value}"
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield _negate, f"not {ast.unparse(node.test)!r}"
    if _can_be_left_out(node):
        yield _leave_out, f"without {text!r}"


def _can_be_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Return):
        return node.value is None
    if isinstance(node, ast.Assign):  # a name that is missing would fail wherever it is read
        return not isinstance(node.targets[0], ast.Name)
    return isinstance(node, (ast.Expr, ast.AugAssign, ast.Continue, ast.Break))


def _turn_at(at: int, turned: type[ast.cmpop], node: Any) -> None:
    node.ops[at] = turned()


def _turn(turned: type[ast.operator | ast.boolop], node: Any) -> None:
    node.op = turned()


def _put(value: object, node: Any) -> None:
    node.value = value


def _negate(node: Any) -> None:
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _leave_out(node: Any) -> None:
    """Turns a statement into `pass` where it stands."""
    node.__class__ = ast.Pass


def _exempt(tree: ast.Module) -> None:
    """Marks what is not to be changed: see the module, and `check`, which the tests stand on."""
    for node in ast.walk(tree):
        roots: list[ast.AST] = []
        if isinstance(node, (ast.Assert, ast.ImportFrom, ast.Import, ast.JoinedStr)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            roots = [node]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            is_check = node.name in ("check", "_check_slots", "_check_children")
            roots = [node] if is_check else list(node.decorator_list)
            if isinstance(node, ast.FunctionDef) and not is_check:
                roots += [node.returns] if node.returns else []
        elif isinstance(node, ast.arg):
            roots = [node.annotation] if node.annotation else []
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            roots = [node.value]
        elif isinstance(node, ast.AnnAssign):
            roots = [node.annotation]
        for root in roots:
            for inner in ast.walk(root):
                inner.is_exempt = True  # type: ignore[attr-defined]


def _verdicts(log: Path) -> dict[str, bool]:
    """What an earlier run found out: mutants by name, and whether they were killed."""
    lines = log.read_text().splitlines() if log.exists() else []
    return {entry["mutant"]: entry["killed"] for entry in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", default=DEFAULT_FILES)
    parser.add_argument("--sample", type=int, default=100, help="mutants to try, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each mutant")
    parser.add_argument("--log", type=Path, required=True, help="one JSON line for each mutant")
    parser.add_argument("--again", action="store_true", help="try the log's survivors again")
    options = parser.parse_args()
    everything = [mutant for file in options.files for mutant in mutants_of(file)]
    known = _verdicts(options.log)
    Random(options.seed).shuffle(everything)
    everything.sort(key=lambda mutant: mutant.name not in known)
    chosen = everything[: options.sample]
    print(f"{len(chosen)} of {len(everything)} mutants")
    killed = sum(known.get(mutant.name, False) for mutant in chosen)
    with Scratch() as scratch, options.log.open("a") as log:
        for number, mutant in enumerate(chosen, 1):
            if mutant.name in known and (known[mutant.name] or not options.again):
                continue
            verdict = scratch.try_with(mutant.file, mutant.source, options.timeout)
            killed += verdict.killed
            line = {"mutant": mutant.name, "killed": verdict.killed, "by": verdict.by}
            log.write(json.dumps(line, ensure_ascii=False) + "\n")
            log.flush()
            print(
                f"{number}: {killed} killed; {mutant.name}: {verdict.by or 'SURVIVED'}", flush=True
            )


if __name__ == "__main__":
    main()
