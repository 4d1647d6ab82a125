"""Engine: prompts in, text out. Owns one scheduler and one runner; has no thread of its own.

Whoever waits for something turns the loop (loop.py). Between two results of a stream the device works on, but no turn
is made.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxoverlap.calls import Call
from jaxoverlap.config import EngineConfig
from jaxoverlap.core import RequestError, Runner
from jaxoverlap.device.buckets import fit_chunk
from jaxoverlap.driver import Driver
from jaxoverlap.loading import OwnedRunner, ServedModel, load, load_grammar_backend
from jaxoverlap.loop import EngineError, Loop
from jaxoverlap.parallel.group import group_of
from jaxoverlap.progress import Report
from jaxoverlap.request_input import split
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler import Scheduler
from jaxoverlap.scheduler.grammar_queue import GrammarBackend
from jaxoverlap.stream import Stream, raise_refused
from jaxoverlap.submitter import Submitter, model_byte_ids
from jaxoverlap.trace.events import Trace
from jaxoverlap.trace.recorder import Annotator, Recorder
from jaxoverlap.weights import new_weights, swap

if TYPE_CHECKING:
    from jaxoverlap.grammar.backend import LLGuidanceBackend

__all__ = ["Engine", "EngineError"]

Params = Mapping[str, Any] | SamplingParams


class Engine:
    """SGLang's offline engine, with overlap scheduling on JAX.

    `Engine(model_path="smollm2-135m", max_running_requests=8)`: keyword arguments are EngineConfig's fields; what is
    not given comes from `JAXOVERLAP_*` variables, then from the defaults. Loads the model, compiles every program
    (unless skip_warmup), and raises before that on a bad setting. `progress` hears of loading and compiling.

    Safe to use from several threads. After an exception inside a turn every waiting and later call raises EngineError.
    """

    def __init__(self, model_path: str | None = None, *, progress: Report | None = None, **settings: Any) -> None:
        if model_path is not None:
            settings["model_path"] = model_path
        self._load(EngineConfig.from_sources(settings), progress)

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: Report | None = None) -> Engine:
        engine = cls.__new__(cls)
        engine._load(config, progress)
        return engine

    @classmethod
    def from_parts(
        cls,
        config: EngineConfig,
        model: ServedModel,
        runner: Runner,
        max_total_tokens: int,
        grammar_backend: GrammarBackend | None = None,
    ) -> Engine:
        """An engine over a loaded model, a runner with a pool of that many tokens, and what compiles grammars (None: it
        takes none), all of which stay the caller's. Engines may share a runner if only one at a time has requests and
        it flushes its cache before it takes over."""
        engine = cls.__new__(cls)
        engine._set_up(config, model, runner, max_total_tokens, grammar_backend)
        return engine

    def _set_up(
        self,
        config: EngineConfig,
        model: ServedModel,
        runner: Runner,
        max_total_tokens: int,
        grammar_backend: GrammarBackend | None,
    ) -> None:
        self.config = config
        self.model = model
        self.runner = runner
        self.max_total_tokens = max_total_tokens
        self.grammar_backend = grammar_backend
        self.tokenizer = model.tokenizer
        self.sampling_defaults: dict[str, Any] = dict(model.sampling_defaults)
        ranks: range = getattr(runner, "ranks", range(1))  # of this process
        schedulers = [
            Scheduler(
                config,
                max_total_tokens=max_total_tokens,
                context_length=model.context_length,
                vocab_size=model.config.vocab_size,
                decode=None if self.tokenizer is None else partial(self.tokenizer.decode, skip_special_tokens=False),
                byte_ids=model_byte_ids(model),
                grammar_backend=grammar_backend,
            )
            for _ in ranks
        ]
        self._scheduler = group_of(config, schedulers, ranks[0])
        self._loop = Loop(self._scheduler, Driver(runner))
        self._submitter = Submitter(config, model, runner, grammar_backend, self._scheduler, self._loop)
        self._control = threading.RLock()  # one pause, resumption, update or end at a time
        self._owned_runner: OwnedRunner | None = None
        self._owned_backend: LLGuidanceBackend | None = None

    def _load(self, config: EngineConfig, progress: Report | None) -> None:
        config = fit_chunk(config)
        model, runner, max_total_tokens = load(config, progress)
        backend = load_grammar_backend(config, model)
        self._set_up(config, model, runner, max_total_tokens, backend)
        self._owned_runner, self._owned_backend = runner, backend

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool | Sequence[bool] = False,
        logprob_start_len: int | Sequence[int | None] | None = -1,
        top_logprobs_num: int | Sequence[int | None] | None = 0,
        token_ids_logprob: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
        stream: bool = False,
        rid: str | Sequence[str] | None = None,
        priority: int | Sequence[int] | None = None,
        response_format: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        data_parallel_rank: int | Sequence[int | None] | None = None,
    ) -> Any:
        """One result, or a list of results in the order of a list of prompts; with `stream` an iterator of results.
        `n` above 1 makes a list too: n results for each prompt, one behind the other. They have the ids `rid_0`,
        `rid_1`, ..., and their prompt is brought into the prefix cache before they start, as in SGLang.

        A result is SGLang's: {"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens",
        "completion_tokens", "cached_tokens", "e2e_latency" (seconds, once finished)}}; "text" is absent where the model
        has no tokenizer. A streamed result holds everything so far; those of a list call carry "index". Closing the
        iterator aborts its requests.

        With `return_logprob` meta_info has "output_token_logprobs", (logprob, id, None) for each token, and
        "input_token_logprobs": the same for the prompt from `logprob_start_len` on, the first with None for logprob;
        empty at -1. `top_logprobs_num` adds "output_top_logprobs" and "input_top_logprobs", for each token the entries
        of that many likeliest ids; `token_ids_logprob` adds "output_token_ids_logprobs" and "input_token_ids_logprobs",
        those of the ids given (first input: None). Natural logarithms under the model's unchanged logits. All but
        the output tokens' own need the setting max_logprobs, the most that may be asked for.

        `sampling_params` are SamplingParams or a dict of its fields, with SamplingParams' defaults as in SGLang's
        Engine; what the model's generation_config.json recommends is in `sampling_defaults`. `response_format` is
        OpenAI's: {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}.
        `data_parallel_rank` is the rank that serves the request; default: as load_balance_method chooses.

        Raises RequestError for a malformed request. In a list call a malformed request gets a result whose
        finish_reason is an abort with status_code 400 and the message, and the others run.
        """
        details = (logprob_start_len, top_logprobs_num, token_ids_logprob)
        try:
            given, many = split(
                *(prompt, input_ids, sampling_params, rid, stream, return_logprob, priority, *details, response_format),
                data_parallel_rank,
            )
            if stream and self._scheduler.is_joint:
                raise RequestError("stream needs all ranks in one process: with several, all turn until all are done")
            call = self._submitter.open(given, many)
        except RequestError:
            self._loop.drive_until_done(Call())  # the other processes, if any, count on this one's turns
            raise
        if stream:
            return Stream(self._loop, call)
        try:
            self._loop.drive_until_done(call)
        except BaseException:
            self._loop.abandon(call)
            raise
        results = [t.render(t.snapshot()) for t in call.tickets]
        if not call.is_list:
            return raise_refused(results[0])
        return sorted([*results, *call.refused], key=lambda result: result.pop("index"))

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling_params: Params | None = None, **more: Any) -> Any:
        """`generate` on a conversation ({"role", "content"} each, oldest first) in the model's chat template. Raises
        RequestError where the model has none."""
        if self.tokenizer is None:
            raise RequestError("messages need a tokenizer with a chat template and this model has none")
        try:
            ids = self.tokenizer.encode_chat(messages)
        except (ValueError, TypeError, AttributeError) as e:
            raise RequestError(f"messages must be dicts with strings 'role' and 'content': {e}") from None
        return self.generate(input_ids=ids, sampling_params=sampling_params, **more)

    def abort(self, rid: str = "", abort_all: bool = False) -> None:
        """Ends the unfinished request `rid` (all its copies, if `n` made some), or all; returns when they have ended
        (while paused: at once, and they end after `continue_generation`). An id that is unknown or has ended is no
        error."""
        with self._loop.lock:
            live = self._loop.tickets.values()
            tickets = [t for t in live if abort_all or rid in (t.request.rid, t.group)]
        self._loop.abort(tickets)

    def pause_generation(self, mode: str = "abort") -> None:
        """SGLang's modes. "abort": every request is ended first. "in_place": all stays where it is, a launched step
        included. "retract": what runs goes back to the waiting queue and gives up its slot and pages. Until
        `continue_generation` calls block."""
        with self._control:
            self._loop.check_alive()
            if mode == "abort":
                self.abort(abort_all=True)
            self._pause(mode)

    def continue_generation(self) -> None:
        with self._control:
            self._loop.check_alive()
            self._loop.is_paused = False
            self._loop.operate(self._scheduler.resume)

    def update_weights(self, weights: Any, in_flight: str = "finish", *, progress: Report | None = None) -> None:
        """Other weights for what is submitted from now on, between two turns and without a compile (of programs that
        are compiled already). Cached prefixes are forgotten.

        `weights`: a directory or demo model with the served model's configuration, or the arrays themselves: an nnx
        module or state, or dictionaries, with the parameters' names, shapes and dtypes. They are copied. `in_flight`
        says what becomes of unfinished requests. "finish": they end on the old weights first, and calls that come
        meanwhile wait, as in SGLang's update_weights_from_disk. "retract": what runs goes back to the waiting queue,
        keeps its tokens and goes on with the new weights; works while paused too, and stays paused.

        Raises CheckpointError or ValueError naming what does not fit, and EngineError for "finish" while requests are
        paused; nothing has changed then.
        """
        if in_flight not in ("finish", "retract"):
            raise ValueError(f"in_flight must be finish or retract, not {in_flight!r}")
        self._loop.check_alive()
        new = new_weights(weights, self.model, self.runner, progress)
        with self._control, self._submitter.lock:
            if in_flight == "finish":
                self.wait_idle()
                if self._loop.tickets:
                    raise EngineError(f"{len(self._loop.tickets)} requests are paused and cannot finish: retract them")
            was_paused = self._loop.is_paused
            try:
                self._pause("retract", flush=True)
                swap(self._loop, self.runner, new)
            finally:
                if not was_paused and self._loop.failure is None:
                    self.continue_generation()

    def flush_cache(self) -> bool:
        """Forgets all cached prefixes. False, and nothing done, while there are unfinished requests."""
        if self._loop.tickets:
            return False
        self.wait_idle()
        self._loop.operate(self._scheduler.flush_cache)
        self.wait_idle()
        return True

    def wait_idle(self) -> None:
        """Turns until nothing is unfinished or in flight (the overlap loop leaves one launch behind). While paused it
        returns at once."""
        self._loop.drive_until_idle()

    def metrics(self) -> dict[str, Any]:
        """Counters since the start, queue lengths, free room, and `last_result`: `time.monotonic()` when the last
        result had been processed (None before the first), for liveness checks."""
        return {**self._scheduler.metrics(), "unfinished": len(self._loop.tickets)}

    @property
    def device_name(self) -> str:
        name: str | None = getattr(self.runner, "device_name", None)
        if name is not None:
            return name
        import jax

        return str(jax.devices()[0].device_kind)

    @contextlib.contextmanager
    def trace(self, *, annotations: bool = False) -> Iterator[Trace]:
        """Records every turn that begins inside the `with`, whoever's requests it is about; the Trace that it yields is
        filled when the block ends. `annotations` also names the parts of each turn, as SGLang does, in a trace that
        jax.profiler takes meanwhile. Raises RuntimeError inside another one of this engine, or beside it."""
        trace = Trace()
        if annotations:
            import jax.profiler

            recorder: Recorder = Annotator(self.runner, jax.profiler.TraceAnnotation)
        else:
            recorder = Recorder(self.runner)
        self._loop.record(recorder)
        try:
            yield trace
            self.wait_idle()
        finally:
            self._loop.record(None)
            done = recorder.trace()
            trace.host, trace.device = done.host, done.device

    def shutdown(self) -> None:
        """Ends every request and gives the device's memory back. Calls that come meanwhile or later raise EngineError;
        twice is once."""
        with self._control, self._submitter.lock:
            if self._loop.failure is None:
                if self._loop.is_paused:
                    self.continue_generation()
                self.abort(abort_all=True)
                self.wait_idle()
                self._loop.end("the engine was shut down")
        if self._owned_runner is not None:
            self._owned_runner.shutdown()
            self._owned_runner = None
        if self._owned_backend is not None:
            self._owned_backend.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _pause(self, mode: str, flush: bool = False) -> None:
        self._loop.operate(lambda: self._scheduler.pause(mode, flush=flush))
        self._loop.drive_until_seen()
        self._loop.is_paused = True
