"""An engine of plain Python with the interface of the real one: what it samples is its clock."""

import dataclasses
import threading

from jaxrl_llm.rollout.engine.requests import EngineStatistics, Progress, RequestError


@dataclasses.dataclass
class CountingEngine:
    """Gives each sample the tokens 10, 11, 12, ...; one a step, in `num_slots` slots.

    Every step waits for `may_step`, and an entry of its params is told as the log-prob.
    """

    num_slots: int = 4
    too_long: int = 1000  # requests with longer prompts do not fit
    cursed: int = 1000  # what is done for a request with this token raises,
    fails_in: str = ""  # in "submit" or, on behalf of its last sample, in "step"
    may_step: threading.Event = dataclasses.field(default_factory=threading.Event)
    breaks: bool = False
    num_steps: int = 0
    aborted: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.may_step.set()
        self._samples = {}  # (request, sample) -> [params, tokens so far], in order of arrival
        self._count = 0
        self.threads = set()

    @property
    def num_active(self):
        return min(self.num_slots, len(self._samples))

    @property
    def statistics(self):
        return EngineStatistics()

    def num_compilations(self):
        return 0

    def submit(self, request):
        self.threads.add(threading.get_ident())
        if len(request.tokens) > self.too_long:
            raise RequestError(f"a prompt of {len(request.tokens)} tokens")
        if self.fails_in == "submit" and self.cursed in request.tokens:
            raise KeyError("a defect")
        number, self._count = self._count, self._count + 1
        for i, params in enumerate(request.params):
            is_cursed = self.cursed in request.tokens and i == len(request.params) - 1
            self._samples[number, i] = [params, 0, is_cursed]
        return number

    def compile(self, params, program):
        self.threads.add(threading.get_ident())
        program.idle_call(None, params, None)

    def abort(self, number):
        self.threads.add(threading.get_ident())
        self.aborted.append(number)
        self._samples = {key: s for key, s in self._samples.items() if key[0] != number}

    def step(self, params):
        self.threads.add(threading.get_ident())
        assert self.may_step.wait(30)
        if self.breaks:
            raise RuntimeError("device lost")
        self.num_steps += 1
        told = []
        for key in list(self._samples)[: self.num_slots]:
            sample = self._samples[key]
            sample[1] += 1
            reason = "length" if sample[1] == sample[0].max_tokens else ""
            error = None
            if self.fails_in == "step" and sample[2] and sample[1] == 2:
                reason, error = "error", KeyError("a defect")
            told.append(Progress(*key, (9 + sample[1],), (float(params),), (0,), (), reason, error))
            if reason:
                del self._samples[key]
        return told


class SayingEngine(CountingEngine):
    """Gives the samples of request `i` the tokens of `says[i]`; keeps what it was asked.

    With `decode`, it ends samples at stop strings.
    """

    def __init__(self, *says, decode=None, **fields):
        super().__init__(**fields)
        self.says, self.asked, self.decode = says, [], decode

    def submit(self, request):
        self.asked.append(request)
        return super().submit(request)

    def step(self, params):
        told = []
        for progress in super().step(params):
            tokens = self.says[progress.request]
            at = progress.tokens[0] - 10
            reason = "stop" if at == len(tokens) - 1 else progress.finish_reason
            stops = self.asked[progress.request].params[progress.sample].stop_strings
            if self.decode and any(stop in self.decode(tokens[: at + 1]) for stop in stops):
                reason = "stop"
            told.append(progress._replace(tokens=(tokens[at],), finish_reason=reason))
            if reason:
                self._samples.pop((progress.request, progress.sample), None)
        return told
