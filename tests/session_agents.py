"""Black-box agents that do what real ones do: retry, edit history, branch, call sub-agents."""

import dataclasses
import itertools
import json
import random

from jaxrl_llm.rollout.engine.requests import Completion, Progress, RequestLimits
from jaxrl_llm.rollout.session_host import SessionEvent, SessionWave
from jaxrl_llm.serving.chat import ChatBody
from jaxrl_llm.serving.driver import RequestRejected
from jaxrl_llm.serving.protocol import ApiError
from jaxrl_llm.serving.sessions.session import ReplyParser, Session
from jaxrl_llm.types import EpisodeLog

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TEMPLATE = """{% for tool in tools or [] %}tool: {{ tool | tojson }}
{% endfor %}{% for m in messages %}{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: \
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<eos>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


class ScriptedEngine:
    """An engine whose replies come from a function, and whose log-probs number all its tokens.

    So the log-prob of a token says which one it is, wherever it turns up.
    """

    def __init__(self, tokenizer, say, seed=0, max_tokens=1000):
        self.tokenizer, self.say, self.max_tokens = tokenizer, say, max_tokens
        self.limits = RequestLimits(max_tokens, len(tokenizer), True)
        self._random, self._requests, self._count = random.Random(seed), {}, itertools.count(1)
        self.contexts = {}  # number of a token -> the tokens before it, itself
        self.freed, self.aborted = [], []

    def submit(self, request):
        self.limits.check(request, "request")
        number = next(self._count)
        samples = []
        for key, params in zip(request.keys, request.params, strict=True):
            text = self.say(random.Random(str(key.tolist())))
            tokens = [*self.tokenizer(text)["input_ids"], params.stop_tokens[0]]
            samples.append((Completion(), tokens[request.num_partial : params.max_tokens]))
        self._requests[number] = request, samples
        return number

    def completions(self, number):
        return [completion for completion, _ in self._requests[number][1]]

    def abort(self, number):
        self.aborted.append(number)
        return self._requests.pop(number, (None, []))[1]

    def free(self, number, index):
        self.freed.append((number, index))

    def step(self, params, version=0, *, ahead=False):
        told = []
        for number, (request, samples) in list(self._requests.items()):
            for index, (completion, tokens) in enumerate(samples):
                size = self._random.randint(0, 20)
                start = len(completion.tokens)
                chunk = tokens[start : start + size]
                if completion.finish_reason or not chunk:
                    continue
                numbers = []
                for at, token in enumerate(chunk, start):
                    numbers.append(-float(len(self.contexts)))
                    before = (*request.tokens, *tokens[:at])
                    self.contexts[numbers[-1]] = before, token
                is_last = start + len(chunk) == len(tokens)
                is_stop = is_last and tokens[-1] in request.params[index].stop_tokens
                reason = ("stop" if is_stop else "length") if is_last else ""
                completion.tokens += chunk
                completion.log_probs += numbers
                completion.versions += [version] * len(chunk)
                completion.finish_reason = reason
                told.append(
                    Progress(
                        number,
                        index,
                        tuple(chunk),
                        tuple(numbers),
                        (version,) * len(chunk),
                        (),
                        reason,
                    )
                )
            if all(completion.finish_reason for completion, _ in samples):
                del self._requests[number]
        return told


def random_reply(draw):
    """What a model with tools and thinking might say, and what it should not."""
    think = draw.choice(["", "", "<think>\nLet me see.\n</think>\n"])
    arguments = {"a": draw.randrange(100), "b": [1.5, "é", None], "note": draw.choice("xyz")}
    call = f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    text = draw.choice(["The answer is  2.", "Übung", "a\n\nb", "  spaces  ", "<tool_call>broken"])
    return think + draw.choice([text, call, text.strip("<>") + call, call + "\n" + call])


def changed_form(message, draw):
    """A reply as some client sends it back: another form of the same message."""
    message = json.loads(json.dumps(message))
    if draw.random() < 0.5:
        message.pop("reasoning_content", None)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        value = json.loads(function["arguments"])
        if draw.random() < 0.5:
            value = dict(reversed(value.items()))
        indent = draw.choice([None, 2])
        function["arguments"] = json.dumps(value, indent=indent, ensure_ascii=draw.random() < 0.5)
    content = message["content"]
    if content and draw.random() < 0.4:
        middle = len(content) // 2
        parts = (content[:middle], content[middle:])
        message["content"] = [{"type": "text", "text": part} for part in parts if part]
    elif content and draw.random() < 0.3:
        message["content"] = content.strip() or content
    elif not content:
        message["content"] = draw.choice([None, ""]) if message.get("tool_calls") else ""
    return message


def following(reply, draw):
    """The messages after a reply: results of its calls, or what the user says."""
    calls = reply.get("tool_calls")
    if not calls:
        return [{"role": "user", "content": f"And {draw.randrange(1000)}?"}]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": str(draw.randrange(100))}
        for call in calls
    ]


def linear_agent(draw):
    """Continues one dialogue; yields the requests that it sends at the same time."""
    messages = [{"role": "user", "content": f"What is {draw.randrange(1000)}?"}]
    for _ in range(draw.randint(2, 5)):
        ((reply,),) = yield [{"messages": messages, "tools": [ADD]}]
        if reply is None:
            return
        messages = [*messages, changed_form(reply, draw), *following(reply, draw)]


def wild_agent(draw):
    """Retries, edits, cuts, branches, asks several things at once, and calls sub-agents."""
    messages = [{"role": "user", "content": f"What is {draw.randrange(1000)}?"}]
    for _ in range(draw.randint(3, 8)):
        body = {"messages": messages, "tools": [ADD]}
        act = draw.choice(
            ["go on", "go on", "retry", "edit", "cut", "sub-agent", "at once", "n", "reword"]
        )
        if act == "retry":
            yield [body]
        if act == "sub-agent":
            system = {"role": "system", "content": "You are a sub-agent."}
            yield from linear_agent_of([system, *messages[:1]], draw)
        if act == "edit":
            messages = [{"role": "user", "content": "Something else."}, *messages[1:]]
        if act == "cut" and len(messages) > 3:
            last = max(i for i, m in enumerate(messages) if m["role"] == "user")
            messages = messages[last:]
        body = {"messages": messages, "tools": [ADD]}
        others = []
        if act == "at once":
            other = [*messages, {"role": "user", "content": "Quickly."}]
            others = [body, {"messages": other, "tools": [ADD]}]
        if act == "n":
            body["n"] = 2
        (replies, *_) = yield [body, *others]
        reply = draw.choice(replies)
        if reply is None:
            return
        answer = changed_form(reply, draw)
        if act == "reword" and isinstance(answer["content"], str):
            answer["content"] += " (reworded)"
        messages = [*messages, answer, *following(reply, draw)]


def linear_agent_of(messages, draw):
    for _ in range(2):
        ((reply,),) = yield [{"messages": messages}]
        if reply is None:
            return
        messages = [*messages, changed_form(reply, draw), {"role": "user", "content": "Go on."}]


@dataclasses.dataclass
class _Call:
    """A request of an agent and the replies to it so far."""

    chat: object
    tokens: list
    replies: list
    num_left: int

    def hear(self, event):
        if isinstance(event, RequestRejected):
            self.num_left = 0
            return
        index, progress = event
        self.tokens[index] += progress.tokens
        if progress.finish_reason:
            stopped = progress.finish_reason == "stop"
            self.replies[index] = client_message(self.chat, self.tokens[index], stopped)
            self.num_left -= 1


class ScriptedWave(SessionWave):
    """Sessions of agents in this process: `make_agent(episode)` is a generator."""

    def __init__(self, served, make_agent, max_requests=64):
        self.served, self.make_agent, self.max_requests = served, make_agent, max_requests
        self.num_delivered = self.num_samples = 0  # tokens, samples
        self.parser, self.inbox, self.sessions, self._agents, self._calls = (
            ReplyParser(served),
            [],
            {},
            {},
            {},
        )

    def compile_grammar(self, text):
        return self.served.grammars.compile_text(text)

    def start(self, prompt, episode):
        self.sessions[episode] = Session(
            episode,
            self.served,
            self.parser,
            self.max_requests,
            self.inbox.append,
            lambda function, *arguments: function(*arguments),
        )
        self._agents[episode], self._calls[episode] = self.make_agent(episode), []
        self._advance(episode, None)

    def _advance(self, episode, replies):
        session = self.sessions[episode]
        try:
            bodies = self._agents[episode].send(replies)
        except StopIteration:
            session.close()
            errors = session.errors
            log = EpisodeLog(errors=errors, num_unmatched=session.num_unmatched)
            self.inbox.append(SessionEvent(episode, log=log))
            del self._agents[episode]
            return
        self._calls[episode] = [self._ask(session, body) for body in bodies]

    def _ask(self, session, body):
        chats = []

        def tokenize(chat):
            chats.append(chat)
            return session.prompt_tokens(chat)

        served = dataclasses.replace(self.served, tokenize_chat=tokenize)
        count = body.get("n", 1)
        call = _Call(None, [[] for _ in range(count)], [None] * count, count)
        call.chat = lambda tokens, stopped: self.parser.parse(chats[0], tokens, stopped, ())[0]
        try:
            generation = ChatBody(model="m", **body).generation_request(served)
            session.submit(generation.requests, call.hear)
        except (ApiError, RequestRejected):  # too long
            call.num_left = 0
        return call

    def collect_events(self, wait):
        for episode in list(self._agents):
            if not any(call.num_left for call in self._calls[episode]):
                self._advance(episode, [call.replies for call in self._calls[episode]])
        events, self.inbox[:] = list(self.inbox), []
        return events

    def deliver(self, episode, number, progress):
        self.num_delivered += len(progress.tokens)
        self.num_samples += bool(progress.finish_reason)
        self.sessions[episode].deliver(number, progress)

    def refuse(self, episode, number, reason, message):
        self.sessions[episode].refuse(number, reason, "unfit", message)

    def close(self):
        pass


def client_message(parse, tokens, stopped):
    """A reply as an OpenAI client gets it."""
    message = parse(tokens, stopped)
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for number, call in enumerate(message.get("tool_calls", ()))
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)
