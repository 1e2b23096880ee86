from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import candidates, requests, selectors

from tapcheck.errors import SelectorError
from tapcheck.request import Request
from tapcheck.selectors import (
    ACCEPTED_FORMS,
    Selector,
    format_selector,
    lasts,
    parse_selector,
    parse_selectors,
    resolve,
)

TEN_AND_FIVE = Request("a", tuple(range(10)), tuple(range(5)))


def select(*texts: int | str, request: Request = TEN_AND_FIVE) -> list[int]:
    return resolve(parse_selectors(texts), request)


def shifted(selector: Selector, request: Request) -> list[int]:
    """What a selector means, in lists; IndexError for an index outside its part."""
    everything = list(range(len(request.token_ids)))
    seen = everything[: request.seen_length]
    cut = request.prompt_length
    if selector.index is not None:
        part = {"position": everything, "prompt": seen[:cut], "generated": seen[cut:]}
        if selector.part == "generated" and selector.index >= 0:
            part["generated"] = everything[cut:]
        picked = [part[selector.part][selector.index]]
    else:
        part = {"prompt": seen[:cut], "generated": seen[cut:], "all": seen}
        picked = part[selector.part][selector.start : selector.stop : selector.stride]
    return [at + selector.offset for at in picked]


def brute_force(selector: Selector, request: Request) -> list[int]:
    try:
        landed = shifted(selector, request)
    except IndexError:
        return []  # there is nothing to shift
    return [at for at in landed if 0 <= at < request.seen_length]


@given(st.builds(range, *[st.integers(0, 12)] * 2, st.integers(1, 3)), st.integers(0, 12))
def test_a_range_lasts_exactly_as_long_as_it_answers_alike(reach: range, position: int) -> None:
    alike = [(at in reach) == (position in reach) for at in range(position + 1, 40)]
    further = alike.index(False) if False in alike else len(alike)
    if reach.step == 1 or position not in range(reach.start, reach.stop):
        assert min(lasts([reach], position), len(alike)) == further
    assert lasts([reach, range(position, position)], position) <= further or further == len(alike)


@given(selectors)
def test_the_parser_reads_what_the_printer_prints(selector: Selector) -> None:
    assert parse_selector(format_selector(selector)) == selector
    assert parse_selector(str(selector)) == selector


def spaced(tokens: list[str]) -> st.SearchStrategy[str]:
    return st.lists(
        st.sampled_from(["", " ", "\t"]), min_size=len(tokens), max_size=len(tokens)
    ).map(lambda blanks: "".join(map("".join, zip(blanks, tokens, strict=True))))


tokens = st.lists(
    st.sampled_from(
        ["prompt", "generated", "all", "[", "]", ":", "*", "-", "+", "/", "0", "1", "17", "[1:]"]
    ),
    max_size=9,
)


@given(st.text(max_size=12) | tokens.map("".join) | tokens.flatmap(spaced))
def test_any_text_is_read_stably_or_refused_with_its_place(text: str) -> None:
    try:
        selector = parse_selector(text)
    except SelectorError as error:
        lines = str(error).splitlines()
        assert ACCEPTED_FORMS in lines[-1]
        caret = next(line for line in lines if line.strip() == "^")
        assert caret.index("^") - 2 <= len(text)
    else:
        assert parse_selector(format_selector(selector)) == selector


@given(selectors.flatmap(lambda selector: spaced(list(str(selector).partition("]")))))
def test_blanks_between_tokens_change_nothing(text: str) -> None:
    assert parse_selector(text) == parse_selector(text.replace(" ", "").replace("\t", ""))


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        (5, Selector("position", 5)),
        ("5", Selector("position", 5)),
        (np.int64(5), Selector("position", 5)),
        ("prompt[-1]", Selector("prompt", -1)),
        ("prompt[1:3]", Selector("prompt", start=1, stop=3)),
        ("prompt[:3]", Selector("prompt", stop=3)),
        ("prompt[:]", Selector("prompt")),
        ("prompt[*]", Selector("prompt")),
        ("generated[-3:]", Selector("generated", start=-3)),
        ("generated[*]/4", Selector("generated", stride=4)),
        ("generated[*]+1/4", Selector("generated", offset=1, stride=4)),
        ("all-2", Selector("all", offset=-2)),
        ("all/1", Selector("all")),
    ],
)
def test_every_form_is_read(text: int | str, selector: Selector) -> None:
    assert parse_selector(text) == selector


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("prompt", 6, "needs an index"),
        ("prompt[", 7, "expected an index"),
        ("prompt[]", 7, "expected an index"),
        ("prompt[1", 8, "closing bracket"),
        ("prompt[1.5]", 8, "closing bracket"),
        ("prompt[--1]", 8, "after the minus"),
        ("prompt[::2]", 9, "stride after it"),
        ("prompt[0]/2", 9, "needs many positions"),
        ("prompt[*]/0", 10, "1 or more"),
        ("prompt[*]+", 10, "offset needs a number"),
        ("prompt[*]/-1", 10, "stride needs a number"),
        ("all/4+1", 5, "before the stride"),
        ("all[0]", 3, "not expected"),
        ("5+1", 1, "no offset"),
        ("-1", 0, "generated[-1]"),
        (-1, 0, "generated[-1]"),
        ("", 0, "expected a position"),
        ("Prompt[0]", 0, "expected a position"),
        ("9" * 5000, 0, "beyond any sequence"),
        ("prompt[\n0]", 7, "expected an index"),
    ],
)
def test_a_bad_selector_shows_the_place_and_the_forms(
    text: int | str, place: int, says: str
) -> None:
    with pytest.raises(SelectorError) as caught:
        parse_selector(text)
    problem, shown, caret, forms = str(caught.value).splitlines()
    assert says in problem
    assert shown == f"  {text}".replace("\n", "?") or text == "prompt[\n0]"
    assert caret == "  " + " " * place + "^"
    assert ACCEPTED_FORMS in forms


@pytest.mark.parametrize("text", [True, False, "true", "Yes", " on ", "false", "no", "OFF"])
def test_yaml_booleans_are_refused_by_name(text: str | bool) -> None:
    with pytest.raises(SelectorError, match=f"{str(text).strip()} is a YAML boolean"):
        parse_selector(text)


@pytest.mark.parametrize("thing", [None, 1.0, [1], b"all", np.zeros(2)])
def test_other_types_are_refused(thing: object) -> None:
    with pytest.raises(SelectorError, match="integer or a string"):
        parse_selector(thing)  # type: ignore[arg-type]


@pytest.mark.parametrize("items", ["all", 5])
def test_a_lone_selector_is_not_a_list(items: object) -> None:
    with pytest.raises(SelectorError, match="come in a list"):
        parse_selectors(items)  # type: ignore[arg-type]


def test_no_selector_at_all_is_refused() -> None:
    with pytest.raises(SelectorError, match="no selector"):
        parse_selectors([])


def is_error(selector: Selector, request: Request) -> bool:
    try:
        landed = shifted(selector, request)
    except IndexError:
        return not selector.offset
    unseen = set(range(request.seen_length, len(request.token_ids)))
    return selector.index is not None and landed[0] in unseen


@given(selectors, requests())
def test_resolving_agrees_with_brute_force(selector: Selector, request: Request) -> None:
    if is_error(selector, request):
        with pytest.raises(SelectorError, match=r"prompt and \d generated tokens"):
            resolve([selector], request)
    else:
        assert resolve([selector], request) == brute_force(selector, request)


@given(st.lists(selectors, max_size=3), requests())
def test_several_selectors_select_each_position_once(
    chosen: list[Selector], request: Request
) -> None:
    chosen = [selector for selector in chosen if not is_error(selector, request)]
    alone = [resolve([selector], request) for selector in chosen]
    assert resolve(chosen, request) == sorted(set().union(*alone))


@given(selectors, requests())
def test_what_resolves_was_a_candidate(selector: Selector, request: Request) -> None:
    assume(not is_error(selector, request))
    kept = candidates((selector,), 0, 20, request.prompt_length)
    assert set(resolve([selector], request)) <= set(kept)


def test_a_slice_from_the_end_may_start_anywhere_whatever_its_stride() -> None:
    stride_two = parse_selectors(["generated[-3:]/2"])
    assert list(candidates(stride_two, 2, 5, prompt_length=4)) == [4, 5, 6]
    assert resolve(stride_two, Request("a", (0,) * 4, (0,) * 5)) == [5, 7]
    assert resolve(stride_two, Request("a", (0,) * 4, (0,) * 6)) == [6, 8]


@given(st.lists(selectors, max_size=3), st.integers(1, 9), st.integers(0, 20), st.integers(0, 20))
def test_candidates_of_a_step_are_a_window_on_those_of_the_sequence(
    chosen: list[Selector], prompt_length: int, start: int, count: int
) -> None:
    whole: set[int] = set()
    for selector in chosen:
        whole |= set(candidates((selector,), 0, start + count, prompt_length))
    expected = sorted(position for position in whole if position >= start)
    assert list(candidates(tuple(chosen), start, count, prompt_length)) == expected


@given(selectors, st.integers(1, 5), st.integers(0, 20))
def test_a_candidate_is_selected_at_some_length(
    selector: Selector, prompt_length: int, position: int
) -> None:
    from_the_end = any(
        bound is not None and bound < 0 for bound in (selector.index, selector.start, selector.stop)
    )
    assume(selector.part != "generated" or not from_the_end)  # may be too many there
    reached = False
    for generated in range(40):
        request = Request("a", (0,) * prompt_length, (0,) * generated)
        if not is_error(selector, request):
            reached |= position in resolve([selector], request)
    assert bool(candidates((selector,), position, 1, prompt_length)) == reached


@pytest.mark.parametrize(
    ("texts", "positions"),
    [
        ([5], [5]),
        (["prompt[-1]"], [9]),
        (["prompt[-1]+1"], [10]),
        (["prompt[*]"], list(range(10))),
        (["prompt[8:99]"], [8, 9]),
        (["generated[*]"], [10, 11, 12, 13]),
        (["generated[-1]"], [13]),
        (["generated[-2:]"], [12, 13]),
        (["generated[3]", 13, "generated[-1]"], [13]),
        (["generated[*]+1"], [11, 12, 13]),
        (["generated[*]-1"], [9, 10, 11, 12]),
        (["generated[4]-1"], [13]),
        (["generated[*]/2"], [10, 12]),
        (["generated[*]+1/2"], [11, 13]),
        (["prompt[1:]/4"], [1, 5, 9]),
        (["all"], list(range(14))),
        (["all-13"], [0]),
        (["prompt[500:501]"], []),
        (["prompt[500]+1"], []),
        (["prompt[0]-1"], []),
        (["prompt[-1]+50"], []),
        (["prompt[:1]+500"], []),
        (["prompt[:1]+12"], [12]),
    ],
)
def test_positions_of_ten_prompt_and_five_generated_tokens(
    texts: list[int | str], positions: list[int]
) -> None:
    assert select(*texts) == positions


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("prompt[10]", "prompt[10:11]"),
        ("prompt[-11]", "prompt[-11:-10]"),
        ("generated[5]", "generated[5:6]"),
        ("generated[-5]", "generated[-5:-4]"),
        ("15", "prompt[:1]+15"),
    ],
)
def test_a_missing_position_is_an_error_whose_way_out_works(text: str, way_out: str) -> None:
    with pytest.raises(SelectorError) as caught:
        select(text)
    message = str(caught.value)
    assert "request 'a' (10 prompt and 5 generated tokens)" in message
    assert f"write {way_out} to" in message
    assert select(way_out) == []


@pytest.mark.parametrize("text", ["14", "generated[4]", "prompt[-1]+5", "generated[-1]+1"])
def test_the_last_generated_token_is_never_seen(text: str) -> None:
    with pytest.raises(SelectorError, match="position 14 is the last generated token"):
        select(text)


@pytest.mark.parametrize("generated", [0, 1])
def test_the_last_generated_position_needs_two_generated_tokens(generated: int) -> None:
    request = Request("a", (1, 2), (3,) * generated)
    assert select("generated[*]", "generated[-1:]", request=request) == []
    with pytest.raises(SelectorError, match="sees 0 of the generated tokens"):
        select("generated[-1]", request=request)
