"""What the `forward` of a class returns, as sums of terms, read off its source text.

Every tensor is followed as the set of things that were added up to make it: the arguments of
`forward`, and the results of calls, which are named and not looked into. `residual + self.mlp(x)`
is the terms of `residual` and one more. Whether one of two tensors that are returned already holds
the other is then a question of sets. Every branch is followed. Nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

Terms = frozenset[str]
# None stands for Python's None; a tuple for a tuple. No terms at all: a number, or unknown.
Value: TypeAlias = Terms | tuple["Value", ...] | None
Names = dict[str, Value]

NOTHING: Terms = frozenset()
_OR_NONE = "None"  # stands in the value of an argument that may be None

# Norms of vllm.model_executor.layers.layernorm that, given a residual too, return the normalised
# sum and the sum.
FUSED_NORMS = ("RMSNorm", "GemmaRMSNorm")

# Calls that move the rows of a tensor, to other shapes, devices or ranks, and add nothing to them.
_MOVES = {
    "cast", "cast_overflow_tensors", "clone", "contiguous", "flatten", "float", "pad", "reshape",
    "sequence_parallel_chunk", "squeeze", "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce", "tensor_model_parallel_reduce_scatter", "to", "transpose",
    "type_as", "unflatten", "unsqueeze", "view",
}  # fmt: skip
# What a module runs when it is called; of vLLM's custom ops, the one that is plain torch.
_FORWARDS = ("forward", "forward_native")
_MOST_STATES = 512
_DEEPEST_CALL = 4


class UnreadableError(Exception):
    """The source says this in a way that isn't understood here."""


@dataclass(frozen=True)
class ClassSource:
    """A class and where it is defined."""

    module: str
    node: ast.ClassDef

    @cached_property
    def methods(self) -> Mapping[str, ast.FunctionDef]:
        """Its own methods by name."""
        return {part.name: part for part in self.node.body if isinstance(part, ast.FunctionDef)}

    @property
    def qualified(self) -> str:
        """`llama.LlamaDecoderLayer`."""
        return f"{self.module}.{self.node.name}"


class Library:
    """The classes of several modules, from their source text by module name.

    Imports are followed by the last part of the module's name, so that
    `from vllm.model_executor.models.llama import X` and `from .llama import X` both find module
    `llama`. Raises SyntaxError where a source is no Python.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.trees = {name: ast.parse(sources[name]) for name in sorted(sources)}
        self._classes = {
            name: {part.name: part for part in tree.body if isinstance(part, ast.ClassDef)}
            for name, tree in self.trees.items()
        }
        self._imports = {name: _imports(tree) for name, tree in self.trees.items()}

    def classes(self, module: str) -> Iterator[ClassSource]:
        """The classes that a module defines, in its order."""
        for node in self._classes[module].values():
            yield ClassSource(module, node)

    def resolve(self, module: str, name: str) -> tuple[str, str]:
        """The module that `name` comes from, in or out of the library, and what it has there."""
        seen = set()
        while name in self._imports.get(module, {}) and (module, name) not in seen:
            seen.add((module, name))
            module, name = self._imports[module][name]
        return module, name

    def find(self, module: str, name: str) -> ClassSource | None:
        """The class that `name` stands for in a module; None where that is not in the library."""
        module, name = self.resolve(module, name)
        node = self._classes.get(module, {}).get(name)
        return None if node is None else ClassSource(module, node)

    def lineage(self, source: ClassSource) -> Iterator[ClassSource]:
        """The class, then those of its bases that are in the library, nearest first."""
        yield source
        for base in source.node.bases:
            found = self.find(source.module, ast.unparse(base).rpartition(".")[2])
            if found is not None and found != source:
                yield from self.lineage(found)

    def method(self, source: ClassSource, name: str) -> tuple[ClassSource, ast.FunctionDef] | None:
        """The method that instances of the class have, and the class that defines it."""
        for owner in self.lineage(source):
            if name in owner.methods:
                return owner, owner.methods[name]
        return None

    def classes_of_child(self, source: ClassSource, child: str) -> set[tuple[str, str]]:
        """(module, name) of each class that a constructor of the lineage makes `self.child` of."""
        for owner in self.lineage(source):
            found = {
                (owner.module, ast.unparse(call.func).rpartition(".")[2])
                for statement in ast.walk(owner.methods.get("__init__", ast.Pass()))
                if isinstance(statement, ast.Assign)
                and any(ast.unparse(target) == f"self.{child}" for target in statement.targets)
                for call in ast.walk(statement.value)
                if isinstance(call, ast.Call) and _is_class_name(call.func)
            }
            if found:
                return found
        return set()


def _is_class_name(func: ast.expr) -> bool:
    name = ast.unparse(func).rpartition(".")[2]
    return name[:1].isupper() and name not in ("ModuleList", "Parameter")


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    return {
        alias.asname or alias.name: ((part.module or "").rpartition(".")[2], alias.name)
        for part in ast.walk(tree)
        if isinstance(part, ast.ImportFrom)
        for alias in part.names
    }


def returned(library: Library, source: ClassSource) -> tuple[list[str], list[Value]]:
    """The arguments of the class' `forward`, and the distinct values that it may return.

    An argument is a term of its own name. Raises UnreadableError, with the reason.
    """
    found = library.method(source, "forward")
    if found is None:
        raise UnreadableError("it has no forward")
    owner, function = found
    names: Names = {
        argument.arg: frozenset({argument.arg, _OR_NONE} if optional else {argument.arg})
        for argument, optional in _arguments(function)
    }
    return list(names), _Reader(library, source, owner, 0).run(function, names)


def _arguments(function: ast.FunctionDef) -> list[tuple[ast.arg, bool]]:
    """The arguments after `self`, and whether each may be None by its annotation or default."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    pairs = zip(
        [*positional, *given.kwonlyargs],
        [*missing, *given.defaults, *given.kw_defaults],
        strict=True,
    )
    return [
        (
            argument,
            any(
                part is not None and "None" in ast.unparse(part)
                for part in (argument.annotation, default)
            ),
        )
        for argument, default in pairs
    ][1:]


class _Reader:
    """Follows one function of `owner`, called on an instance of `source`."""

    def __init__(
        self, library: Library, source: ClassSource, owner: ClassSource, depth: int
    ) -> None:
        self._library = library
        self._source = source
        self._owner = owner
        self._depth = depth
        self._returned: list[Value] = []
        if depth > _DEEPEST_CALL:
            raise UnreadableError("its calls go too deep")

    def run(self, function: ast.FunctionDef, names: Names) -> list[Value]:
        if self._block(function.body, [names]):
            self._returned.append(None)
        return list(dict.fromkeys(self._returned))

    def _block(self, statements: Sequence[ast.stmt], states: list[Names]) -> list[Names]:
        for statement in statements:
            states = _distinct(
                after for state in states for after in self._statement(statement, dict(state))
            )
            if len(states) > _MOST_STATES:
                raise UnreadableError("it has too many branches to follow")
        return states

    def _statement(self, statement: ast.stmt, names: Names) -> list[Names]:
        """The states after the statement, none where it ends the function."""
        after = [names]
        match statement:
            case ast.Assign(value=ast.IfExp() as choice):
                after = self._block(_chosen(choice, statement.targets), [names])
            case ast.Return(value=ast.IfExp() as choice):
                after = self._block(_chosen(choice, None), [names])
            case ast.Return(value=value):
                self._returned += [None] if value is None else self._results(value, names)
                after = []
            case ast.Raise():
                after = []
            case ast.Assign(targets=targets, value=value):
                after = self._assign(targets, self._results(value, names), names)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                after = self._assign([target], self._results(value, names), names)
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                names[name] = terms_of(names.get(name)) | terms_of(self._value(value, names))
            case ast.If(test=test, body=body, orelse=orelse):
                sides = [(body, _known(test, names, True)), (orelse, _known(test, names, False))]
                held = [(part, state) for part, state in sides if state is not None]
                after = [end for part, state in held for end in self._block(part, [state])]
            case ast.With(body=body) | ast.Try(body=body):
                after = self._block(body, [names])
            case ast.For(body=body) | ast.While(body=body):
                once = self._block(body, [names])
                after = [names, *once, *self._block(body, once)]
        return after

    def _assign(
        self, targets: Sequence[ast.expr], values: Sequence[Value], names: Names
    ) -> list[Names]:
        states = []
        for value in values:
            state = dict(names)
            for target in targets:
                _bind(target, value, state)
            states.append(state)
        return states

    def _results(self, node: ast.expr, names: Names) -> list[Value]:
        """What the expression may be: more than one value where it calls a method that branches."""
        called = self._called(node, names) if isinstance(node, ast.Call) else None
        return [self._value(node, names)] if called is None else called

    def _value(self, node: ast.expr, names: Names) -> Value:
        value: Value = NOTHING
        match node:
            case ast.Constant(value=None):
                value = None
            case ast.Name(id=name):
                value = names.get(name, NOTHING)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                value = tuple(self._value(part, names) for part in parts)
            case ast.BinOp(left=left, op=op, right=right):
                one, other = (terms_of(self._value(side, names)) for side in (left, right))
                adds = isinstance(op, ast.Add) or not (one and other)  # a scaled term is that term
                value = one | other if adds else self._named(node)
            case ast.UnaryOp(operand=operand):
                value = self._value(operand, names)
            case ast.Subscript(value=inner, slice=index):
                value = _item(self._value(inner, names), index)
            case ast.Call():
                value, *others = self._results_of_call(node, names)
                if others:
                    raise UnreadableError(f"line {node.lineno}: a call that returns one of several")
        return value

    def _results_of_call(self, call: ast.Call, names: Names) -> list[Value]:
        called = self._called(call, names)
        return [self._opaque_call(call, names)] if called is None else called

    def _called(self, call: ast.Call, names: Names) -> list[Value] | None:
        """What a call returns that is looked into; None for any other.

        That is a method of the class itself, or a norm that is given a residual.
        """
        func = call.func
        while isinstance(func, ast.Subscript):  # one of several: self.norms[0](...)
            func = func.value
        if ast.unparse(func) == "super().forward":
            return self._called_of_bases(call, names)
        if not (isinstance(func, ast.Attribute) and ast.unparse(func.value) == "self"):
            return None
        own = self._library.method(self._source, func.attr)
        if own is not None:
            return self._inline(self._source, *own, call, names)
        if len(self._tensors(call, names)) < 2 or not looks_like_norm(func.attr):
            return None
        children = sorted(self._library.classes_of_child(self._source, func.attr))
        results = [value for child in children for value in self._norm(*child, call, names)]
        return list(dict.fromkeys(results)) or None

    def _called_of_bases(self, call: ast.Call, names: Names) -> list[Value] | None:
        _, *bases = self._library.lineage(self._owner)
        for base in bases:
            if "forward" in base.methods:
                return self._inline(self._source, base, base.methods["forward"], call, names)
        outside = [ast.unparse(base) for base in self._owner.node.bases]
        if len(outside) == 1 and len(self._tensors(call, names)) == 2:
            return self._norm(self._owner.module, outside[0], call, names)
        return None

    def _norm(self, module: str, name: str, call: ast.Call, names: Names) -> list[Value]:
        """What a norm of that class returns, given a tensor and a residual."""
        norm = self._library.find(module, name)
        for method in _FORWARDS:
            forward = norm and self._library.method(norm, method)
            if norm and forward:
                return self._inline(norm, *forward, call, names)
        if self._library.resolve(module, name)[1] not in FUSED_NORMS:
            raise UnreadableError(f"what {name} does with a residual is not known")
        return [(self._named(call), frozenset().union(*self._tensors(call, names)))]

    def _tensors(self, call: ast.Call, names: Names) -> list[Terms]:
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        values = [terms_of(self._value(argument, names)) for argument in arguments]
        return [value for value in values if value]

    def _inline(
        self,
        source: ClassSource,
        owner: ClassSource,
        function: ast.FunctionDef,
        call: ast.Call,
        names: Names,
    ) -> list[Value]:
        known = [argument for argument, _ in _arguments(function)]
        # One that isn't given is the default: in a norm or a method of a layer, None.
        inner: Names = {
            argument.arg: None if optional else NOTHING
            for argument, optional in _arguments(function)
        }
        for argument, value in zip(known, call.args, strict=False):
            inner[argument.arg] = self._value(value, names)
        for keyword in call.keywords:
            if keyword.arg is not None:
                inner[keyword.arg] = self._value(keyword.value, names)
        return _Reader(self._library, source, owner, self._depth + 1).run(function, inner)

    def _opaque_call(self, call: ast.Call, names: Names) -> Value:
        func = call.func
        name = func.attr if isinstance(func, ast.Attribute) else ast.unparse(func)
        values = [self._value(argument, names) for argument in call.args]
        if isinstance(func, ast.Attribute):
            values.insert(0, self._value(func.value, names))
        tensors = [terms_of(value) for value in values if value]
        if tensors and name in _MOVES:
            return tensors[0]
        if tensors and name in ("add", "add_"):
            return frozenset().union(*tensors)
        return self._named(call)

    def _named(self, node: ast.expr) -> Terms:
        what = node.func if isinstance(node, ast.Call) else node
        return frozenset({f"{ast.unparse(what)}@{self._owner.module}:{node.lineno}"})


def looks_like_norm(name: str) -> bool:
    """Whether a child of that name is a norm, in any of the names that vLLM's models use."""
    return "norm" in name.lower() or name.startswith("ln_")


def _chosen(choice: ast.IfExp, targets: list[ast.expr] | None) -> list[ast.stmt]:
    """`x = a if test else b` (or a return of it) as a statement with two branches."""
    sides: list[list[ast.stmt]] = [
        [ast.Return(side) if targets is None else ast.Assign(targets, side)]
        for side in (choice.body, choice.orelse)
    ]
    return [ast.If(choice.test, *sides)]


def _known(test: ast.expr, names: Names, outcome: bool) -> Names | None:
    """The state in which the test came out so; None where it can't.

    Understood are `x is None`, and the sameness of two tests of nothing but the module's settings.
    """
    state = dict(names)
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _known(operand, names, not outcome)
        case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[ast.Constant(value=None)]):
            none = outcome == isinstance(op, ast.Is | ast.Eq)
            value = names.get(name, NOTHING)
            if isinstance(value, frozenset) and _OR_NONE in value:
                state[name] = None if none else value - {_OR_NONE}
            elif (value is None) != none and value != NOTHING:
                return None
            return state
    if {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} == {"self"}:
        key = f"?{ast.unparse(test)}"
        now = frozenset({"true"}) if outcome else NOTHING
        return state if state.setdefault(key, now) == now else None
    return state


def _bind(target: ast.expr, value: Value, names: Names) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = value
    elif isinstance(target, ast.Tuple | ast.List):
        parts: Iterable[Value] = [_part(value, at) for at in range(len(target.elts))]
        if isinstance(value, tuple) and len(value) == len(target.elts):
            parts = value
        for inner, part in zip(target.elts, parts, strict=True):
            _bind(inner, part, names)


def _item(whole: Value, index: ast.expr) -> Value:
    if isinstance(whole, tuple) and isinstance(index, ast.Constant):
        if isinstance(index.value, int) and index.value < len(whole):
            return whole[index.value]
        raise UnreadableError(f"line {index.lineno}: an item that isn't there")
    return terms_of(whole)  # some of the rows are of the same terms


def _part(value: Value, at: int) -> Terms:
    return frozenset(f"{term}[{at}]" for term in terms_of(value))


def terms_of(value: Value) -> Terms:
    """All the terms of a value, in whatever tuple."""
    if isinstance(value, tuple):
        return frozenset().union(*map(terms_of, value))
    return (value or NOTHING) - {_OR_NONE}


def _distinct(states: Iterable[Names]) -> list[Names]:
    found = {tuple(sorted(state.items(), key=lambda item: item[0])): state for state in states}
    return list(found.values())
