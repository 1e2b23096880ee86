"""Random engines, requests and runs for soak.py, each drawn from a random generator alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tapcheck.errors import SelectorError
from tapcheck.request import Request
from tapcheck.selectors import parse_selector, resolve
from tapcheck.sites import Site

VOCABULARY, MAX_MODEL_LEN = 512, 256
NEVER = 1 << 40  # steps
# Ids that are prefixes of one another, or look like those that vLLM and tapcheck give.
IDS = ("1", "10", "100", "1-0", "1/0", "a", "a-0", "a-0-0", "req-1", "req-1-0", "req-10", "", " ")

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Arrival:
    """A request: it joins after `steps_before` steps, and is aborted `abort_after` steps later.

    It takes the first of `ids` that is free. With `given` it is teacher-forced on these tokens,
    else it generates `new_tokens`, or fewer when it meets one of `stops`.
    """

    ids: tuple[str, ...]
    prompt: Tokens
    given: Tokens
    new_tokens: int
    stops: Tokens
    steps_before: int
    abort_after: int

    def endings(self) -> list[Request]:
        """What it may be at its end, as far as selectors can tell, the longest last."""
        first = 1 if self.stops else self.new_tokens
        lengths = [len(self.given)] if self.given else range(first, self.new_tokens + 1)
        return [Request("", self.prompt, (0,) * length) for length in lengths]


@dataclass(frozen=True)
class Scenario:
    """One run: what is captured, of whom; a collect is tried every `collect_every` steps."""

    sites: tuple[Site, ...]
    select: tuple[str, ...]
    read_prefix_cache: bool
    collect_every: int
    arrivals: tuple[Arrival, ...]

    def positions(self, request: Request) -> list[int]:
        """The positions that the selectors select."""
        return resolve(map(parse_selector, self.select), request)

    def owes(self, request: Request, forced: bool) -> bool:
        """Whether a row is due that no prefix cache can hold, of the last token fed or later."""
        fed = request.seen_length if forced else request.prompt_length
        first = fed - 1 if self.read_prefix_cache else 0
        return any(position >= first for position in self.positions(request))


def draw_settings(rng: random.Random) -> dict[str, Any]:
    """Engine arguments: chunks, a cache that may be too small for all who run, speculation."""
    chunk = rng.randint(8, 64)
    settings: dict[str, Any] = {
        "block_size": 32,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": chunk,
        "max_num_seqs": min(chunk, rng.choice((1, 3, 6, 12, 12))),
        "num_gpu_blocks_override": rng.choice((9, 9, 9, 10, 12, 64)),
    }
    if rng.random() < 0.5:
        settings["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": rng.randint(1, 4),
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    return settings


def draw_tokens(rng: random.Random, count: int) -> Tokens:
    """Any tokens of the vocabulary."""
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def draw_prefixes(rng: random.Random) -> list[Tokens]:
    """What prompts of one engine share: several blocks each."""
    return [draw_tokens(rng, rng.randint(64, 160)) for _ in range(2)]


def draw_prompt(rng: random.Random, prefixes: Sequence[Tokens]) -> Tokens:
    """One token, any tokens, a phrase over and over (drafts are accepted), or a shared prefix."""
    kind = rng.choice(("one", "any", "repeated", "repeated", "shared", "shared"))
    if kind == "one":
        return draw_tokens(rng, 1)
    if kind == "any":
        return draw_tokens(rng, rng.randint(2, 120))
    if kind == "repeated":
        return draw_tokens(rng, rng.randint(1, 9)) * rng.randint(2, 12)
    return rng.choice(prefixes) + draw_tokens(rng, rng.randint(0, 30))


def draw_arrival(rng: random.Random, prefixes: Sequence[Tokens]) -> Arrival:
    """Most join soon and run to their end; some are forced, stopped or aborted."""
    forced, stops = rng.random() < 0.15, rng.random() < 0.25
    return Arrival(
        ids=tuple(rng.sample(IDS, len(IDS))),
        prompt=draw_prompt(rng, prefixes),
        given=draw_tokens(rng, rng.randint(1, 40)) if forced else (),
        new_tokens=rng.randint(1, 60),
        stops=tuple(rng.sample(range(VOCABULARY), 25)) if stops and not forced else (),
        steps_before=rng.choice((0, 0, 0, rng.randint(1, 8), rng.randint(1, 40))),
        abort_after=rng.choice((0, 1, 2, rng.randint(3, 40))) if rng.random() < 0.25 else NEVER,
    )


def draw_selector(rng: random.Random) -> str:
    """Any form of the grammar; `all` is as likely as a part."""
    reach = rng.choice((3, 12, 120))
    part = rng.choice(("position", "prompt", "generated", "all"))
    if part == "position":
        return str(rng.randrange(reach))
    bounds = [rng.choice(("", str(rng.randint(-reach, reach)))) for _ in range(2)]
    inside = rng.choice(("*", ":".join(bounds), str(rng.choice((-1, 0, rng.randint(-9, 9))))))
    offset = rng.choice(("", "", f"+{rng.randint(1, 9)}", f"-{rng.randint(1, 9)}"))
    many = part == "all" or not inside.removeprefix("-").isdigit()
    stride = rng.choice(("", "", f"/{rng.randint(1, 9)}")) if many else ""
    return f"{part if part == 'all' else f'{part}[{inside}]'}{offset}{stride}"


def acceptable(selector: str, endings: Iterable[Request]) -> bool:
    """Whether the selector is refused at no ending: single positions must exist in all."""
    try:
        for request in endings:
            resolve([parse_selector(selector)], request)
    except SelectorError:
        return False
    return True


def draw_scenario(
    rng: random.Random, sites: Sequence[Site], prefixes: Sequence[Tokens]
) -> Scenario:
    """A run of 1 to 12 requests; its selectors are not refused, and leave some rows due."""
    arrivals = tuple(draw_arrival(rng, prefixes) for _ in range(rng.randint(1, 12)))
    endings = [request for arrival in arrivals for request in arrival.endings()]
    chosen, read = tuple(sorted(rng.sample(sites, rng.randint(2, 6)))), rng.random() < 0.5
    collect_every = rng.choice((7, 20, NEVER))
    while True:
        select: list[str] = []
        count = rng.randint(1, 3)
        while len(select) < count:
            drawn = draw_selector(rng)
            if acceptable(drawn, endings):
                select.append(drawn)
        scenario = Scenario(chosen, tuple(select), read, collect_every, arrivals)
        kept = [arrival for arrival in arrivals if arrival.abort_after == NEVER] or arrivals
        if any(scenario.owes(a.endings()[-1], bool(a.given)) for a in kept):
            return scenario
