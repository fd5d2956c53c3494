"""The HTTP server of a training run: the application of `serving/app.py` under an address for each
session, `http://127.0.0.1:PORT/session/ID/v1`, and for each role in it, `.../ID/role/NAME/v1`.
"""

import asyncio
import contextlib
import contextvars
import dataclasses
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl_llm.rollout.engine.requests import Request
from jaxrl_llm.rollout.session_host import SessionEvent
from jaxrl_llm.serving import messages_api
from jaxrl_llm.serving.app import make_app
from jaxrl_llm.serving.driver import SampleEvent, Ticket
from jaxrl_llm.serving.metrics import Metrics
from jaxrl_llm.serving.protocol import ApiError, ServedModel
from jaxrl_llm.serving.server import bind_socket, http_settings
from jaxrl_llm.serving.sessions.session import ReplyParser, Session

_HOST = "127.0.0.1"
_BODY_BYTES = 1 << 25  # dialogues of long episodes are sent whole with each request
_PATH = re.compile(r"/session/([0-9a-f]{32})(?:/role/([^/]*))?(/.*)")

# The session of the request that is handled, in its task and in the tokenizer thread.
_current_session: contextvars.ContextVar[Session] = contextvars.ContextVar("session")
_current_role: contextvars.ContextVar[int] = contextvars.ContextVar("role", default=0)


class SessionDriver:
    """Sends the requests of handlers to the session of their address."""

    state: Literal["ready"] = "ready"

    def submit(
        self, requests: Sequence[Request], listener: Callable[[SampleEvent], None]
    ) -> Ticket:
        """Submits to the current session; raises `RequestRejected`."""
        return _current_session.get().submit(requests, listener, _current_role.get())

    def cancel(self, ticket: Ticket) -> None:
        """Cancels in the current session."""
        _current_session.get().cancel(ticket)


class SessionServer(contextlib.AbstractContextManager["SessionServer"]):
    """Serves sessions in a thread of its own, until it is left as a context manager."""

    def __init__(
        self,
        served: ServedModel,
        max_requests: int,
        request_s: float,
        roles: Sequence[str] = (),
    ):
        """
        Args:
          served: The policy; its tokenizer is used by the threads of the server.
          max_requests: Of a session.
          request_s: Time limit of a request in seconds.
          roles: Those that have an address in a session; empty: a session is one speaker.
        """
        self._max_requests, self._roles = max_requests, tuple(roles)
        self._served = dataclasses.replace(
            served,
            tokenize_chat=lambda chat: _current_session.get().prompt_tokens(chat),
            answers_any_name=True,
        )
        self._parser = ReplyParser(served)
        self._sessions: dict[str, Session | None] = {}  # by id; None: it has ended
        self._is_closed = False
        driver = SessionDriver()
        app = make_app(self._served, driver, Metrics(), request_s, _BODY_BYTES)
        self._listener = bind_socket(_HOST, 0)
        self._listener.listen(1024)
        settings = http_settings(
            self._with_session(app),
            timeout_keep_alive=600,  # clients reuse connections, however long an agent thinks
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="session server", daemon=True)
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._server.should_exit = True
        self._thread.join(10.0)
        self._listener.close()

    @property
    def _address(self) -> str:
        return f"http://{_HOST}:{self._listener.getsockname()[1]}"

    def open_session(
        self, episode: int, push: Callable[[SessionEvent], None]
    ) -> tuple[Session, str]:
        """Opens a session whose events go to `push`; returns it and its `base_url`."""
        session_id = secrets.token_hex(16)
        session = Session(
            episode, self._served, self._parser, self._max_requests, push, self._call_soon
        )
        self._sessions[session_id] = session
        return session, f"{self._address}/session/{session_id}/v1"

    def close_session(self, base_url: str) -> None:
        """Ends a session: its address answers 410 from now on."""
        session_id = base_url.split("/")[-2]
        if (session := self._sessions[session_id]) is not None:
            session.close()
            self._sessions[session_id] = None

    def forget_sessions(self) -> None:
        """Forgets the sessions that have ended: their addresses answer 404 from now on."""
        for session_id, session in list(self._sessions.items()):
            if session is None:
                del self._sessions[session_id]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[self._listener]))
        finally:
            self._is_closed = True

    def _call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        if not self._is_closed:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(function, *arguments)

    def _role_problem(self, role: str | None) -> str:
        """Why an address has no role, or one that there is not; "" if it is right."""
        if not self._roles:
            rule = "this run has no roles (config.agent.roles); leave /role/NAME out"
            return rule if role is not None else ""
        if role in self._roles:
            return ""
        known = ", ".join(self._roles)
        what = f"no role {role!r}" if role is not None else "a request of no role"
        return f"{what}; send it to /session/ID/role/NAME/v1, NAME one of {known}"

    def _with_session(self, app: ASGIApp) -> ASGIApp:
        """The application below the address of each session; 404 and 410 without a session."""

        async def app_with_session(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            match = _PATH.fullmatch(scope["path"])
            session_id, role, path = match.groups() if match else ("", None, scope["path"])
            session = self._sessions.get(session_id)
            problem = self._role_problem(role)
            if session is None or problem:
                is_known = session_id in self._sessions
                error = ApiError(
                    410 if is_known else 404,
                    "the session has ended" if is_known else "no such session",
                    code="session_ended" if is_known else "session_not_found",
                )
                if session is not None:
                    error = ApiError(404, problem, code="role_not_found")
                is_anthropic = path.startswith(messages_api.PATH)
                body = messages_api.error_body(error) if is_anthropic else error.body
                return await JSONResponse(body, error.status)(scope, receive, send)
            _current_session.set(session)
            _current_role.set(self._roles.index(role) if role else 0)
            inner = {**scope, "path": path, "raw_path": path.encode()}
            return await app(inner, receive, send)

        return app_with_session
