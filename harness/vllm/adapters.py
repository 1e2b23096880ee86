"""Runner adapters: the only code that reads the undocumented internals of vLLM's model runners.

An adapter turns "the forward pass that runs now" into a step layout. Each read below has a
contract test in tests/engine/test_adapter_contract.py, run for both runners, or in
contract_of_v2.py, that fails when its meaning changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tapcheck.errors import EngineError
from tapcheck.layout import Repeat, Segment, StepLayout

# The keys in SamplingParams.extra_args under which a request carries its owner, and how many of
# the tokens of its prompt are a continuation that was given. vLLM hands extra_args to the worker
# unchanged, whatever it does to the request's id.
OWNER = "tapcheck_owner"
FORCED = "tapcheck_forced"

Begin = Callable[[StepLayout | Repeat], None]
End = Callable[[Any], None]


class RunnerAdapter(Protocol):
    """What tapcheck needs of a model runner. An implementer owes, for its runner's generation:

    every scheduled forward pass announced once, with the exact owner and position of each row;
    no dummy, profiling or warm-up pass announced; nothing left behind after `unwatch`.
    """

    runner: str

    @property
    def model(self) -> nn.Module:
        """The model as the runner calls it."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the runner's tensors live."""
        ...

    @property
    def first_stage(self) -> bool:
        """Whether this worker runs the embedding: always, but for later pipeline stages."""
        ...

    @property
    def last_stage(self) -> bool:
        """Whether this worker computes logits: always, but for earlier pipeline stages."""
        ...

    def run_dummy_forward(self) -> None:
        """Run one forward pass over a few rows that belong to no request."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits [rows, vocabulary] of final-norm outputs [rows, width]; None off the last rank."""
        ...

    def watch(self, begin: Begin, end: End) -> None:
        """Call `begin(layout)` before and `end(model output)` after every scheduled forward."""
        ...

    def unwatch(self) -> None:
        """Undo `watch`."""
        ...


@dataclass
class _Decoded:
    """A pass that decoded, after which `ahead` passes over the same slots did.

    request_ids, next_starts: of each slot, vLLM's id and the position that comes next.
    """

    first: StepLayout
    request_ids: Sequence[str]
    next_starts: list[int]
    ahead: int = 0


class _WatchingAdapter(ABC):
    """What the adapters share: how passes are announced, given each slot of a pass and its rows."""

    # Rows of the dummy pass: enough for a median, few enough for any max_num_batched_tokens.
    _DUMMY_ROWS = 8

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        # The scheduler's output while a scheduled pass may run: the model is called without one
        # for dummy passes.
        self._scheduled: Any = None
        self._step = 0
        self._decoded: _Decoded | None = None
        self._unwatch: list[Callable[[], None]] = []

    @property
    def model(self) -> nn.Module:
        """The model as the runner calls it."""
        model: nn.Module = self._runner.model
        return model

    @property
    def device(self) -> torch.device:
        """Where the runner's tensors live."""
        device: torch.device = self._runner.device
        return device

    @property
    def first_stage(self) -> bool:
        """The pipeline group's word for it."""
        from vllm.distributed import get_pp_group

        return bool(get_pp_group().is_first_rank)

    @property
    def last_stage(self) -> bool:
        """The pipeline group's word for it."""
        from vllm.distributed import get_pp_group

        return bool(get_pp_group().is_last_rank)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits as the runner computes them for its sampler and for prompt logprobs."""
        logits: torch.Tensor | None = self.model.compute_logits(hidden)  # type: ignore[operator]
        return logits

    def watch(self, begin: Begin, end: End) -> None:
        """Call `begin(layout)` before and `end(model output)` after every scheduled forward."""
        self._unwatch = [*self._watch_passes(begin, end), *self._watch_schedule()]

    def unwatch(self) -> None:
        """Undo `watch`."""
        for undo in self._unwatch:
            undo()
        self._unwatch = []

    @abstractmethod
    def _watch_passes(self, begin: Begin, end: End) -> list[Callable[[], None]]:
        """Enclose the forward passes that run while `_scheduled` is set; returns what undoes it."""

    @abstractmethod
    def _watch_schedule(self) -> list[Callable[[], None]]:
        """Have `_scheduled` set for scheduled passes only; returns what undoes it."""

    @abstractmethod
    def _slots(self) -> tuple[Sequence[str], list[int]]:
        """vLLM's id and the position of the first row of each slot of the pass, in row order."""

    @abstractmethod
    def _segments(self, starts: list[int]) -> tuple[Segment, ...]:
        """The rows of each slot of the pass, whose rows start at these positions."""

    def _shadow(self, name: str, method: Callable[..., Any]) -> Callable[[], None]:
        """Put `method` before a method of the runner; returns what undoes it."""
        shadowed = vars(self._runner).get(name)

        def restore() -> None:
            if shadowed is None:
                delattr(self._runner, name)
            else:
                setattr(self._runner, name, shadowed)

        setattr(self._runner, name, method)
        return restore

    def _layout(self, kwargs: dict[str, Any]) -> StepLayout | Repeat:
        scheduled = self._scheduled
        request_ids, starts = self._slots()
        rows = int(kwargs["positions"].shape[-1])
        step, self._step = self._step, self._step + 1
        last = self._decoded
        if (
            last is not None
            and request_ids == last.request_ids
            and not scheduled.scheduled_new_reqs
            and not scheduled.scheduled_spec_decode_tokens
            and not scheduled.scheduled_cached_reqs.resumed_req_ids
            and scheduled.total_num_scheduled_tokens == len(starts)
            and rows == last.first.total_rows
            and starts == last.next_starts
        ):
            last.ahead += 1
            last.next_starts = [start + 1 for start in starts]
            return Repeat(step, last.first, last.ahead)
        layout = StepLayout(step, self._segments(starts), rows)
        self._decoded = None
        if layout.decodes:
            self._decoded = _Decoded(layout, [*request_ids], [start + 1 for start in starts])
        return layout


class V1RunnerAdapter(_WatchingAdapter):
    """Adapter of `vllm.v1.worker.gpu_model_runner.GPUModelRunner` and its CPU subclass."""

    runner = "v1"

    def run_dummy_forward(self) -> None:
        """Run one forward pass without KV cache, as vLLM's own memory profiling does."""
        self._runner._dummy_run(self._DUMMY_ROWS, is_profile=True)

    def _watch_passes(self, begin: Begin, end: End) -> list[Callable[[], None]]:
        """By the method through which the runner calls its model: a CUDA graph calls no hooks."""
        forward = self._runner._model_forward

        def enclosed(*args: Any, **kwargs: Any) -> Any:
            if self._scheduled is None:
                return forward(*args, **kwargs)
            begin(self._layout(kwargs))
            output = forward(*args, **kwargs)
            end(output)
            return output

        return [self._shadow("_model_forward", enclosed)]

    def _watch_schedule(self) -> list[Callable[[], None]]:
        """Dummy passes call the model without `execute_model`."""
        execute_model = self._runner.execute_model

        def execute(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._scheduled = scheduled
            try:
                return execute_model(scheduled, *args, **kwargs)
            finally:
                self._scheduled = None

        return [self._shadow("execute_model", execute)]

    def _slots(self) -> tuple[Sequence[str], list[int]]:
        batch = self._runner.input_batch
        # one read of the array, not one of each slot
        starts: list[int] = batch.num_computed_tokens_cpu[: len(batch.req_ids)].tolist()
        return batch.req_ids, starts

    def _segments(self, starts: list[int]) -> tuple[Segment, ...]:
        scheduled = self._scheduled
        counts, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        resumed = scheduled.scheduled_cached_reqs.resumed_req_ids
        segments = []
        for start, request_id in zip(starts, self._runner.input_batch.req_ids, strict=True):
            state = self._runner.requests[request_id]
            owner, forced = _carried(state.sampling_params)
            segments.append(
                Segment(
                    owner=owner,
                    start=start,
                    rows=counts[request_id],
                    prompt_length=state.num_prompt_tokens - forced,
                    drafts=len(drafts[request_id]) if request_id in drafts else 0,
                    resumed=request_id in resumed,
                    forced=forced,
                )
            )
        return tuple(segments)


class V2RunnerAdapter(_WatchingAdapter):
    """Adapter of `vllm.v1.worker.gpu.model_runner.GPUModelRunner` and its CPU subclass.

    This runner makes a batch of its own order for each pass and keeps it to itself, and forgets a
    request's sampling parameters once they are on the device. So the batch is taken where the
    runner makes it, and what a request carries where it arrives: one that arrived before `watch`
    is nobody's.
    """

    runner = "v2"

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._batch: Any = None
        self._carried: dict[str, tuple[str | None, int]] = {}
        self._preempted: set[str] = set()  # and not resumed yet
        self._resumed: set[str] = set()  # by the scheduler's last output

    def run_dummy_forward(self) -> None:
        """Run one forward pass without KV cache, as vLLM's own memory profiling does."""
        self._runner._dummy_run(self._DUMMY_ROWS, skip_attn=True, is_profile=True)

    def _watch_passes(self, begin: Begin, end: End) -> list[Callable[[], None]]:
        """By hooks on the model, which this runner calls itself."""

        def before(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            if self._scheduled is not None:
                begin(self._layout(kwargs))

        def after(_module: nn.Module, _args: Any, _kwargs: dict[str, Any], output: Any) -> None:
            if self._scheduled is not None:
                end(output)

        return [
            self.model.register_forward_pre_hook(before, with_kwargs=True).remove,
            self.model.register_forward_hook(after, with_kwargs=True).remove,
        ]

    def _watch_schedule(self) -> list[Callable[[], None]]:
        """Dummy passes go through `execute_model` too, but not through `prepare_inputs`."""
        execute_model, prepare_inputs = self._runner.execute_model, self._runner.prepare_inputs
        self._carried, self._preempted = {}, set()

        def execute(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("dummy_run"):
                self._learn(scheduled)
            try:
                return execute_model(scheduled, *args, **kwargs)
            finally:
                self._scheduled = self._batch = None

        def prepare(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            batch = prepare_inputs(scheduled, *args, **kwargs)
            self._scheduled, self._batch = scheduled, batch
            return batch

        return [self._shadow("execute_model", execute), self._shadow("prepare_inputs", prepare)]

    def _learn(self, scheduled: Any) -> None:
        """Take in who arrives, leaves and was preempted; a resumed request arrives anew."""
        self._preempted |= scheduled.preempted_req_ids or set()
        for gone in scheduled.finished_req_ids:
            self._carried.pop(gone, None)
            self._preempted.discard(gone)
        arrived = {
            new.req_id: _carried(new.sampling_params) for new in scheduled.scheduled_new_reqs
        }
        self._carried |= arrived
        self._resumed = self._preempted & arrived.keys()
        self._preempted -= self._resumed

    def _slots(self) -> tuple[Sequence[str], list[int]]:
        return self._batch.req_ids, self._batch.num_computed_tokens_np.tolist()

    def _segments(self, starts: list[int]) -> tuple[Segment, ...]:
        batch, drafts = self._batch, self._batch.num_draft_tokens_per_req
        rows = batch.num_scheduled_tokens.tolist()
        # Not prefill_len: of a resumed request that counts what it had generated.
        lengths = self._runner.req_states.prompt_len.np[batch.idx_mapping_np].tolist()
        drafted = [0] * len(rows) if drafts is None else drafts.tolist()
        segments = []
        for request_id, *slot in zip(batch.req_ids, starts, rows, lengths, drafted, strict=True):
            start, count, length, draft_rows = slot
            owner, forced = self._carried.get(request_id, (None, 0))
            segments.append(
                Segment(
                    owner=owner,
                    start=start,
                    rows=count,
                    prompt_length=length - forced,
                    drafts=draft_rows,
                    resumed=request_id in self._resumed,
                    forced=forced,
                )
            )
        return tuple(segments)


def _carried(sampling_params: Any) -> tuple[str | None, int]:
    """A request's owner, None for nobody's, and how many tokens of its prompt were forced."""
    extra = (sampling_params.extra_args if sampling_params is not None else None) or {}
    return extra.get(OWNER), extra.get(FORCED, 0)


def adapter_for(worker: Any) -> RunnerAdapter:
    """The adapter of a live worker's model runner; raises EngineError when there is none."""
    runner = worker.model_runner
    if not getattr(worker, "use_v2_model_runner", False):
        return V1RunnerAdapter(runner)
    if getattr(runner, "pcp_manager", None) is not None:
        raise EngineError(
            "this engine runs prefill context parallel, so each worker has other rows of a "
            "request, which hook mode can't merge yet. Start it with "
            "prefill_context_parallel_size=1"
        )
    if getattr(runner, "adaptive_verification", None) is not None:
        raise EngineError(
            "this engine decides on the device how many draft tokens it verifies, so which rows "
            "are whose is not known when they are taken. Start it without adaptive verification"
        )
    return V2RunnerAdapter(runner)


def find_embedding(model: nn.Module) -> nn.Module | None:
    """The token embedding, by vLLM's class for it; None on a later pipeline stage."""
    for module in model.modules():
        # The output head is a subclass, and may be the same weights.
        if type(module).__name__ == "VocabParallelEmbedding":
            return module
    return None


def live_settings(worker: Any) -> dict[str, Any]:
    """What this engine really runs, read off the live worker and not from what was asked for."""
    config, model = worker.vllm_config, worker.model_runner.model
    parallel = config.parallel_config
    backends = {
        layer.get_attn_backend().get_name()
        for layer in config.compilation_config.static_forward_context.values()
        if hasattr(layer, "get_attn_backend")
    }
    module = type(model).__module__
    return {
        "runner": "v2" if getattr(worker, "use_v2_model_runner", False) else "v1",
        "enforce_eager": bool(config.model_config.enforce_eager),
        "architecture": type(model).__name__,
        "model_impl": "transformers" if ".transformers" in module else "vllm",
        "engine_dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "attention_backend": ",".join(sorted(backends)) or "none",
        "block_size": int(config.cache_config.block_size),
        "quantization": config.model_config.quantization,
        "tensor_parallel_size": int(parallel.tensor_parallel_size),
        "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
        "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "enable_chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "max_num_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
        "data_parallel_size": int(parallel.data_parallel_size),
        "max_model_len": int(config.model_config.max_model_len),
        "speculative": config.speculative_config is not None,
        "workers": int(parallel.world_size),
        "microbatched": bool(parallel.enable_dbo),
    }
