"""Submitter: from the arguments of one call to submitted requests, in the order in which calls come."""

from __future__ import annotations

import threading
from collections import ChainMap

from jaxoverlap.calls import Call, Ticket, refusal
from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Request, RequestError, Runner
from jaxoverlap.detokenizer import Detokenizer
from jaxoverlap.growing_text import byte_tokens
from jaxoverlap.loading import ServedModel
from jaxoverlap.loop import Loop
from jaxoverlap.parallel.group import Group
from jaxoverlap.request_input import RequestInput
from jaxoverlap.requests import Limits, RequestFactory, prompt_alone
from jaxoverlap.scheduler import Scheduler
from jaxoverlap.scheduler.grammar_queue import GrammarBackend


class Submitter:
    """Whoever holds `lock` keeps new requests out; they get their ids and seeds under it."""

    def __init__(
        self,
        config: EngineConfig,
        model: ServedModel,
        runner: Runner,
        grammar_backend: GrammarBackend | None,
        scheduler: Scheduler | Group,
        loop: Loop,
    ) -> None:
        self.lock = threading.Lock()
        self._config = config
        self._tokenizer = model.tokenizer
        self._byte_ids = model_byte_ids(model)
        self._loop = loop
        self._scheduler = scheduler
        limits = Limits(
            vocab_size=model.config.vocab_size,
            context_length=model.context_length,
            max_total_tokens=scheduler.max_total_tokens,
            max_prompt_len=scheduler.max_prompt_len,
            eos_token_ids=tuple(model.config.eos_token_ids),
            priorities=config.enable_priority_scheduling,
            max_logprobs=min(config.max_logprobs, getattr(runner, "max_logprobs", 0)),
            check_params=getattr(runner, "check_params", None),
            ranks=scheduler.ranks,
            no_grammars=None if grammar_backend is not None else _why_no_grammars(config, model),
        )
        self._factory = RequestFactory(limits, self._tokenizer, config.random_seed)

    def open(self, given: list[RequestInput], many: bool) -> Call:
        """Checks and submits; raises RequestError unless it is a list call."""
        self._loop.check_alive()
        call, index = Call(is_list=many), 0
        with self.lock:
            opened: dict[str, Ticket] = {}
            for one in given:
                try:
                    request = self._factory.make(one, ChainMap(opened, self._loop.tickets))
                except RequestError as e:
                    if not many:
                        raise
                    call.refused.append(refusal(one.rid, str(e), index, self._tokenizer is not None))
                    index += 1
                    continue
                ahead = self._cache_prompt(request, call) if request.params.n > 1 else None
                copies = self._factory.copies(request)
                call.is_list |= len(copies) > 1
                for copy in copies:
                    self._scheduler.assign(copy)
                    place = index if call.is_list else None
                    ticket = Ticket(copy, self._detokenizer(copy), call, place, group=request.rid, waits_for=ahead)
                    opened[copy.rid] = ticket
                    index += 1
            call.tickets = list(opened.values())
            self._loop.submit(call)
        return call

    def _cache_prompt(self, request: Request, call: Call) -> str | None:
        """Id of a request that goes ahead of the copies, so that they find the prompt in the prefix cache."""
        page = self._config.page_size
        if self._config.disable_radix_cache or (request.prompt_len - 1) // page == 0:
            return None
        request.data_parallel_rank = self._scheduler.choose(request)  # the copies go where the prompt is cached
        ahead = prompt_alone(request)
        call.ahead.append(Ticket(ahead, None, Call(), group=request.rid))
        return ahead.rid

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        return None if self._tokenizer is None else Detokenizer(self._tokenizer, request.params, self._byte_ids)


def model_byte_ids(model: ServedModel) -> frozenset[int]:
    """Ids of its tokenizer's raw bytes."""
    return frozenset() if model.tokenizer is None else byte_tokens(model.tokenizer.backend.token_to_id)


def _why_no_grammars(config: EngineConfig, model: ServedModel) -> str:
    if config.grammar_backend == "none":
        return "needs grammar_backend llguidance, not none"
    return "needs a tokenizer and this model has none" if model.tokenizer is None else "needs a grammar backend"
