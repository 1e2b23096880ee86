"""The Hugging Face backend: forward hooks on any decoder-only Transformers model."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from tapcheck.anatomy import find_anatomy
from tapcheck.capture import Capture
from tapcheck.compatibility.environment import collect_environment
from tapcheck.contract import ModelContract, Source, Tensors, observe, solve
from tapcheck.errors import CaptureError, EngineError, ModelError, first_line
from tapcheck.layout import Segment, StepLayout
from tapcheck.models import (
    HF_DTYPES,
    layer_count,
    load_config,
    require_dtype,
    require_vocabulary,
)
from tapcheck.request import Request
from tapcheck.rowstore import RowStore
from tapcheck.runs import Plan, assemble, check_requests, finished, make_plan, prompt_to_run
from tapcheck.sites import Site
from tapcheck.taps import LOGITS, attach, plan_taps, require_all, tappable_sites

_PROBE_TOKENS = 8


class HFBackend:
    """Captures from a Transformers model on one device.

    Requests run `batch_size` at a time, padded on the left; padding is never captured. In float64,
    for a reference that is wider than float32, they run alone. Raises ModelError when the model
    can't be found or is not a decoder-only language model. `config` is
    the model's configuration, as Transformers loads it.
    """

    name = "hf"

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        batch_size: int = 8,
    ) -> None:
        self.config = load_config(model)
        self._model_name = str(model)
        self._dtype = require_dtype(dtype, HF_DTYPES)
        self._device = _usable_device(device)
        if batch_size < 1:
            raise CaptureError(f"batch_size is {batch_size}: at least 1 request runs at a time")
        # Eager attention takes its softmax in float32, in which float64's mask of padding is -inf.
        self._batch_size = 1 if dtype == "float64" else batch_size
        self._one_at_a_time = threading.Lock()  # hooks of two captures would take each other's rows
        self._loaded: Any = self._load()

    def _load(self) -> Any:
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM, GenerationConfig

        auto: Any = AutoModelForCausalLM
        try:
            model, loading = auto.from_pretrained(
                self._model_name,
                dtype=getattr(torch, self._dtype),
                output_loading_info=True,
                **_attention(self.config.get_text_config()),
            )
        except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
            reason = first_line(error)
            raise ModelError(f"Transformers can't load {self._model_name!r}: {reason}") from None
        missing = sorted(loading["missing_keys"])
        if missing:
            raise ModelError(
                f"model {self._model_name!r} comes without {len(missing)} of its weights, such as "
                f"{missing[0]}: Transformers would make them up at random"
            )
        # The checkpoint's own (an end-of-sequence token, a repetition penalty) fills in whatever
        # `generate` isn't told, and an explicit None doesn't stop it.
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        return model.to(self._device).eval()

    @property
    def model(self) -> Any:
        """The Transformers model; raises EngineError when the backend was closed."""
        if self._loaded is None:
            raise EngineError("this backend was closed: make a new one")
        return self._loaded

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return layer_count(self.config)

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site that this model has, in execution order."""
        return (*tappable_sites(self._contract), LOGITS)

    @functools.cached_property
    def _contract(self) -> ModelContract:
        """What the model's tensors mean, from one probe forward."""
        model = self.model
        anatomy = find_anatomy(model, self.num_layers, model.get_input_embeddings())
        tokens = torch.arange(_PROBE_TOKENS, device=self._device)[None] % self.vocabulary_size
        with torch.inference_mode():
            probe = observe(
                anatomy,
                lambda: model(
                    input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False
                ),
            )
        return solve(anatomy, probe)

    def capture(
        self,
        requests: Sequence[Request],
        sites: Iterable[str | Site],
        select: Iterable[int | str] = ("all",),
        *,
        max_new_tokens: int = 16,
        perturb: int | None = None,
    ) -> Capture:
        """Run `requests` and capture `sites` at the selected positions.

        See `Backend.capture`. A teacher-forced request runs as one forward pass; the others run
        through `generate`, and their rows are taken while it generates. With `perturb`, a seed,
        each value of the embeddings is moved to a neighbouring number of the dtype, up or down at
        random: what that changes is what the dtype does not settle. Raises CaptureError for a
        request that would generate then.
        """
        model = self.model
        if perturb is not None and not all(request.generated_token_ids for request in requests):
            raise CaptureError(
                "a perturbed run might generate other tokens: give it requests that are done"
            )
        check_requests(requests, [max_new_tokens] * len(requests))
        require_vocabulary(self._model_name, self.config, requests)
        plan = make_plan(sites, select, self.num_layers)
        store = RowStore(plan.sites, plan.selectors)
        done: dict[int, Request] = {}
        steps = itertools.count()
        with self._one_at_a_time, _perturbed(model, perturb), torch.inference_mode():
            taps = self._taps(plan)
            for indexes in self._batches(requests):
                batch = _Batch(model, [requests[i] for i in indexes], indexes, store, steps)
                for index, request in zip(indexes, batch.run(taps, max_new_tokens), strict=True):
                    done[index] = request
        runs = {str(index): done[index] for index in range(len(requests))}
        lengths = {owner: run.seen_length for owner, run in runs.items()}
        return assemble(runs, plan, store.drain(lengths), self._metadata(plan))

    def _taps(self, plan: Plan) -> dict[Site, Source]:
        taps = plan_taps(plan.sites, self._contract)
        require_all(plan.sites, {*taps, LOGITS}, type(self.model).__name__)
        return taps

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Indexes of requests that run together: teacher-forced and generating ones apart."""
        for forced in (True, False):
            group = [i for i, r in enumerate(requests) if bool(r.generated_token_ids) is forced]
            for start in range(0, len(group), self._batch_size):
                yield group[start : start + self._batch_size]

    def _metadata(self, plan: Plan) -> dict[str, Any]:
        return {
            "backend": "hf",
            "mode": "hook",
            "model": self._model_name,
            "dtype": self._dtype,
            "select": plan.select,
            "engine": {
                "architecture": type(self.model).__name__,
                "attention_implementation": str(self.model.config._attn_implementation),
                "sliding_window": getattr(self.config.get_text_config(), "sliding_window", None),
            },
            "environment": self._environment,
        }

    @functools.cached_property
    def _environment(self) -> dict[str, Any]:
        return asdict(collect_environment(self._device.type))

    def close(self) -> None:
        """Give back the model's memory."""
        self._loaded = None
        self.__dict__.pop("_contract", None)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> HFBackend:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


def _usable_device(name: str) -> torch.device:
    """The device of that name; raises EngineError when torch knows or sees no such device."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        raise EngineError(f"device {name!r} can't be used: {first_line(error)}") from None
    return device


def _attention(config: Any) -> dict[str, str]:
    """How to load a model whose attention only the plain implementation computes in full.

    Transformers 5.19's default (sdpa) drops a soft cap on attention scores, as gemma2's, unsaid.
    """
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if capped else {}


@contextlib.contextmanager
def _perturbed(model: Any, seed: int | None) -> Iterator[None]:
    """A context in which the model's embeddings are off by a rounding each; not without a seed."""
    if seed is None:
        yield
        return
    generator = torch.Generator().manual_seed(seed)

    def perturb(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        half = torch.finfo(output.dtype).eps / 2
        up = torch.randint(2, output.shape, generator=generator).to(output.device, torch.double)
        return (output.double() * (1 + (2 * up - 1) * half)).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(perturb)
    try:
        yield
    finally:
        handle.remove()


class _Batch:
    """Requests that run together, padded on the left to the longest."""

    def __init__(
        self,
        model: Any,
        requests: Sequence[Request],
        indexes: Sequence[int],
        store: RowStore,
        steps: Iterator[int],
    ) -> None:
        self._model = model
        self._requests = requests
        self._owners = [str(index) for index in indexes]
        self._store = store
        self._steps = steps
        tokens = [prompt_to_run(request) for request in requests]
        width = max(map(len, tokens))
        self._padding = [width - len(ids) for ids in tokens]
        self._columns_done = 0
        rows = [[0] * pad + list(ids) for pad, ids in zip(self._padding, tokens, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in self._padding]
        self._input_ids = torch.tensor(rows, device=model.device)
        self._mask = torch.tensor(mask, device=model.device)

    def run(self, taps: dict[Site, Source], max_new_tokens: int) -> list[Request]:
        """Run the batch with its taps in place; returns the requests with what they generated."""
        handles = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            *attach(taps, self._put),
            self._model.register_forward_hook(self._after),
        ]
        try:
            if self._requests[0].generated_token_ids:
                self._model(**self._forward_arguments())
                return list(self._requests)
            generated = self._generate(max_new_tokens)
        finally:
            for handle in handles:
                handle.remove()
        return [
            finished(request, tokens, max_new_tokens)
            for request, tokens in zip(self._requests, generated, strict=True)
        ]

    def _forward_arguments(self) -> dict[str, Any]:
        arguments = {
            "input_ids": self._input_ids,
            "attention_mask": self._mask,
            "use_cache": False,
        }
        # Without position ids, padding would count as positions.
        parameters = inspect.signature(self._model.forward).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if "position_ids" in parameters or takes_any:
            arguments["position_ids"] = (self._mask.cumsum(-1) - 1).clamp_min(0)
        return arguments

    def _generate(self, max_new_tokens: int) -> list[list[int]]:
        from transformers import GenerationConfig

        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
        output = self._model.generate(
            self._input_ids, attention_mask=self._mask, generation_config=settings
        )
        tokens: list[list[int]] = output[:, self._input_ids.shape[1] :].tolist()
        return tokens

    def _before(
        self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Announce the forward pass: its rows are [batch x columns], padding first in each."""
        columns = int((args[0] if args else kwargs["input_ids"]).shape[1])
        segments = []
        for owner, request, pad in zip(self._owners, self._requests, self._padding, strict=True):
            padding = min(max(pad - self._columns_done, 0), columns)
            start = max(self._columns_done - pad, 0)
            segments += [
                Segment(None, 0, padding, 0),
                Segment(owner, start, columns - padding, request.prompt_length),
            ]
        layout = StepLayout(next(self._steps), tuple(segments), columns * len(self._requests))
        self._columns_done += columns
        self._store.begin_step(layout, self._model.device)
        if LOGITS in self._store.sites and "logits_to_keep" in kwargs:
            # `generate` asks for the last position's logits only.
            kwargs["logits_to_keep"] = 0
        return args, kwargs

    def _put(self, site: Site, terms: Tensors) -> None:
        self._store.put(site, [term.reshape(-1, term.shape[-1]) for term in terms])

    def _after(self, _model: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if self._store.open and LOGITS in self._store.sites:
            self._put(LOGITS, (output.logits,))
        self._store.end_step()
