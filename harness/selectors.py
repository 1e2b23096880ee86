"""Selectors: which positions of a request are captured.

Grammar, blanks ignored between its tokens:

    selector   = position | one [offset] | many [offset] [stride]
    position   = number                                from 0, over prompt and generated tokens
    one        = part "[" ["-"] number "]"
    many       = part "[" "*" "]" | part "[" [bound] ":" [bound] "]" | "all"
    part       = "prompt" | "generated"
    bound      = ["-"] number
    offset     = ("+" | "-") number                    shifts every position before it
    stride     = "/" number                            every n-th position, from the first

The generated part is what a forward pass sees of it: all but the last generated token. Negative
indices count from the end of that, so `generated[-1]` is the last position with activations. A
stride picks before an offset shifts: `generated[*]+1/4` shifts every fourth generated position.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tapcheck.errors import SelectorError
from tapcheck.request import Request

Part = Literal["position", "prompt", "generated", "all"]

ACCEPTED_FORMS = (
    "5, prompt[i], prompt[a:b], prompt[a:], prompt[:b], prompt[*], the same for generated, all; "
    "then an offset such as +1 or -1 (not after a bare 5); then, for many positions, a stride such "
    "as /4"
)
_YAML_BOOLEANS = ("true", "yes", "on", "false", "no", "off")
_DIGITS = frozenset("0123456789")
_MAX_DIGITS = 15  # far beyond any sequence, and sums stay exact in int64
_NO_END = 1 << 60


@dataclass(frozen=True)
class Selector:
    """One selector, as `parse_selector` reads it and `str` prints it.

    `index` names one position of a part (of the whole sequence when the part is "position");
    where it is None, `start` and `stop` bound many. `offset` shifts, `stride` thins out.
    """

    part: Part
    index: int | None = None
    start: int | None = None
    stop: int | None = None
    offset: int = 0
    stride: int = 1

    def __str__(self) -> str:
        return format_selector(self)


class _Scanner:
    """A cursor over the text of a selector."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._skip_blanks()

    def take(self, token: str) -> bool:
        """Whether `token` comes next; if so, step over it."""
        found = self.text.startswith(token, self.at)
        if found:
            self.at += len(token)
            self._skip_blanks()
        return found

    def number(self) -> int | None:
        """The digits that come next, or None when there are none."""
        end = self.at
        while self.text[end : end + 1] in _DIGITS:
            end += 1
        digits = self.text[self.at : end]
        if len(digits) > _MAX_DIGITS:
            raise self.error(f"a number of {len(digits)} digits is beyond any sequence")
        self.at = end
        self._skip_blanks()
        return int(digits) if digits else None

    def signed(self) -> int | None:
        """A number that may be negative, or None when neither sign nor digit comes next."""
        if not self.take("-"):
            return self.number()
        number = self.number()
        if number is None:
            raise self.error("a number is missing after the minus sign")
        return -number

    def error(self, problem: str, at: int | None = None) -> SelectorError:
        """An error that shows the text and the place in it."""
        shown = "".join(char if char.isprintable() else "?" for char in self.text)
        caret = " " * (self.at if at is None else at) + "^"
        return SelectorError(
            f"bad selector: {problem}\n  {shown}\n  {caret}\naccepted forms: {ACCEPTED_FORMS}"
        )

    def _skip_blanks(self) -> None:
        while self.text[self.at : self.at + 1] in {" ", "\t"}:
            self.at += 1


def parse_selector(text: int | str) -> Selector:
    """Read one selector; raises SelectorError that shows the place and the accepted forms."""
    scanner = _Scanner(_as_text(text))
    if scanner.text.strip().lower() in _YAML_BOOLEANS:
        raise scanner.error(f"{scanner.text.strip()} is a YAML boolean, not a selector")
    start = scanner.at
    number = scanner.signed()
    if number is None:
        selector = _read_part(scanner)
    elif number < 0:
        raise scanner.error(
            "a bare position counts from 0; for the last write prompt[-1] or generated[-1]", start
        )
    else:
        selector = Selector("position", index=number)
    if scanner.at < len(scanner.text):
        raise scanner.error(_unexpected(scanner.text[scanner.at], selector))
    return selector


def parse_selectors(items: Iterable[int | str]) -> tuple[Selector, ...]:
    """Read a list of selectors; raises SelectorError for a bad one, or where there is none."""
    if isinstance(items, str | int):
        raise SelectorError(f"selectors come in a list: write [{items!r}] for this one alone")
    selectors = tuple(parse_selector(item) for item in items)
    if not selectors:
        raise SelectorError("no selector was given: name at least one, such as 'all'")
    return selectors


def format_selector(selector: Selector) -> str:
    """The selector's text; `parse_selector` reads it back."""
    if selector.part == "position":
        return str(selector.index)
    if selector.part == "all":
        text = "all"
    elif selector.index is not None:
        text = f"{selector.part}[{selector.index}]"
    elif selector.start is None and selector.stop is None:
        text = f"{selector.part}[*]"
    else:
        start, stop = ("" if bound is None else bound for bound in (selector.start, selector.stop))
        text = f"{selector.part}[{start}:{stop}]"
    offset = f"{selector.offset:+d}" if selector.offset else ""
    stride = f"/{selector.stride}" if selector.stride != 1 else ""
    return text + offset + stride


def resolve(selectors: Iterable[Selector], request: Request) -> list[int]:
    """The positions that `selectors` select of a finished request: sorted, distinct.

    What an offset carries out of the sequence is left out. Raises SelectorError for a single
    position that doesn't exist, and for one that is exactly the last generated token, which no
    forward pass sees; slices, wildcards and `all` end before it.
    """
    positions: set[int] = set()
    for selector in selectors:
        if selector.index is None:
            positions.update(_resolve_many(selector, request))
        else:
            positions.update(_resolve_one(selector, selector.index, request))
    return sorted(positions)


def reaches(selectors: Iterable[Selector], prompt_length: int) -> tuple[range, ...]:
    """The positions that each selector may select, at one final length or another.

    Rows at these positions are kept until the request ends and `resolve` decides. Where the end is
    open the range goes far beyond any sequence.
    """
    return tuple(_reach(selector, prompt_length) for selector in selectors)


def within(ranges: Sequence[range], start: int, count: int) -> Sequence[int]:
    """Which of the `count` positions from `start` on are in one of the ranges, ascending."""
    if count == 1:  # a decoding request's only row
        for reach in ranges:
            if start in reach:
                return (start,)
        return ()
    parts = [part for reach in ranges if (part := _clipped(reach, start, start + count))]
    if len(parts) <= 1:
        return parts[0] if parts else ()
    widest = max(parts, key=len)
    return widest if len(widest) == count else sorted(set().union(*parts))


def lasts(ranges: Sequence[range], position: int) -> int:
    """For how many further positions each range answers as for this one: has it, or hasn't."""
    return min((_lasts(reach, position) for reach in ranges), default=sys.maxsize)


def _lasts(reach: range, position: int) -> int:
    if not reach or position > reach[-1]:
        return sys.maxsize
    if position < reach[0]:
        return reach[0] - 1 - position
    return reach[-1] - position if reach.step == 1 else 0


def _as_text(text: int | str) -> str:
    if isinstance(text, str | bool):
        return str(text)
    try:
        return str(operator.index(text))  # numpy's integers too
    except TypeError:
        raise SelectorError(
            f"a selector is an integer or a string, not {text!r} of type {type(text).__name__}; "
            f"accepted forms: {ACCEPTED_FORMS}"
        ) from None


def _read_part(scanner: _Scanner) -> Selector:
    part = next((name for name in get_args(Part)[1:] if scanner.take(name)), None)
    if part is None:
        raise scanner.error("expected a position, prompt[...], generated[...] or all")
    index, start, stop = (None, None, None) if part == "all" else _read_brackets(scanner, part)
    sign = 1 if scanner.take("+") else -1 if scanner.take("-") else 0
    offset = _required_number(scanner, "offset") * sign if sign else 0
    stride, stride_at = 1, scanner.at
    if scanner.take("/"):
        if index is not None:
            raise scanner.error("a stride needs many positions: a slice, [*] or all", stride_at)
        stride_at = scanner.at
        stride = _required_number(scanner, "stride")
        if stride == 0:
            raise scanner.error("a stride is 1 or more", stride_at)
    return Selector(part, index, start, stop, offset, stride)


def _read_brackets(scanner: _Scanner, part: str) -> tuple[int | None, int | None, int | None]:
    """Index, start and stop of what stands in brackets."""
    if not scanner.take("["):
        raise scanner.error(f"{part} needs an index, a slice or [*] after it")
    index = start = stop = None
    if not scanner.take("*"):
        start = scanner.signed()
        if scanner.take(":"):
            stop = scanner.signed()
            if scanner.take(":"):
                raise scanner.error("a slice has no step: write the stride after it, as in [a:b]/4")
        elif start is None:
            raise scanner.error("expected an index, a slice or *")
        else:
            index, start = start, None
    if not scanner.take("]"):
        raise scanner.error("expected a closing bracket")
    return index, start, stop


def _required_number(scanner: _Scanner, name: str) -> int:
    number = scanner.number()
    if number is None:
        raise scanner.error(f"the {name} needs a number")
    return number


def _unexpected(char: str, selector: Selector) -> str:
    if selector.part == "position" and char in "+-/":
        return "a bare position takes no offset or stride: write the position itself"
    if selector.stride != 1 and char in "+-":
        return "the offset comes before the stride, as in all+1/4"
    return f"{char!r} is not expected here"


def _resolve_many(selector: Selector, request: Request) -> list[int]:
    """Positions of a slice, a wildcard or `all`, less those that a forward pass doesn't see."""
    prompt, seen = request.prompt_length, request.seen_length
    first, end = {"prompt": (0, prompt), "generated": (prompt, seen)}.get(selector.part, (0, seen))
    picked = range(first, end)[selector.start : selector.stop : selector.stride]
    return [at + selector.offset for at in picked if 0 <= at + selector.offset < seen]


def _resolve_one(selector: Selector, index: int, request: Request) -> list[int]:
    """The position of an index, with its offset; none where the offset leaves the sequence."""
    prompt, seen, total = request.prompt_length, request.seen_length, len(request.token_ids)
    first, end = {"prompt": (0, prompt), "generated": (prompt, total)}.get(
        selector.part, (0, total)
    )
    # An index from the end counts in what a forward pass sees of the part.
    base = first + index if index >= 0 else min(end, seen) + index
    position = base + selector.offset
    if not first <= base < end:
        if selector.offset:
            return []
        raise SelectorError(_missing(selector, index, request))
    if seen <= position < total:
        raise SelectorError(
            f"{_of(selector, request)}: position {position} is the last generated token, which a "
            "forward pass never sees; generated[-1:] selects the last one that it does see"
        )
    return [position] if 0 <= position < seen else []


def _clipped(reach: range, start: int, stop: int) -> range:
    """The positions of `reach` that are in [start, stop)."""
    first = reach.start
    if first < start:
        first = start + (first - start) % reach.step
    return range(first, min(reach.stop, stop), reach.step)


def _reach(selector: Selector, prompt_length: int) -> range:
    """The positions that the selector may select at one final length or another."""
    index, start, stop, stride = selector.index, selector.start, selector.stop, selector.stride
    if selector.part == "prompt":
        if index is not None:
            start = index if index >= 0 else prompt_length + index
            stop = start + 1 if start >= 0 else 0
        reach = range(prompt_length)[start:stop:stride]
    else:
        first = prompt_length if selector.part == "generated" else 0
        if index is not None and index >= 0:
            start, stop = index, index + 1
        elif start is not None and start < 0:
            start, stride = 0, 1  # a bound from the end can fall anywhere
        end = _NO_END if stop is None or stop < 0 else first + stop
        reach = range(first + (start or 0), end, stride)
    return range(reach.start + selector.offset, reach.stop + selector.offset, reach.step)


def _of(selector: Selector, request: Request) -> str:
    generated = len(request.generated_token_ids)
    return (
        f"request {request.id!r} ({request.prompt_length} prompt and {generated} generated tokens),"
        f" selector {selector}"
    )


def _missing(selector: Selector, index: int, request: Request) -> str:
    what = f"{_of(selector, request)}: "
    if selector.part == "position":
        return (
            f"{what}the sequence has no position {index}; write prompt[:1]+{index} to select it "
            "only where it exists"
        )
    seen = request.seen_length - request.prompt_length
    length = f"the {selector.part} part has {request.prompt_length} positions"
    if selector.part == "generated":
        length = f"a forward pass sees {seen} of the generated tokens (all but the last)"
    return (
        f"{what}{length}; write {selector.part}[{index}:{index + 1 or ''}] to select the position "
        "only where it exists"
    )
