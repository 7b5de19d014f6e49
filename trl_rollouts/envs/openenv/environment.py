"""The environment of one trajectory, behind a session of a server, and what it shares with the others."""

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pydantic

from ...env import StepResult
from ...errors import EnvError, SetupError, boundary
from ...messages import with_text_behind
from ...trajectory import Message
from ...worker import call
from ..seeds import reset_seed
from .session import RefusedError, Server, Session, complaint
from .tools import list_tools, run_calls

logger = logging.getLogger(__name__)

_MAX_OPENINGS = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenEnvFactory:
    """An `EnvFactory`: called, it makes an environment. And what its environments share."""

    server: Server
    codec: Any
    """An instance of the environment's `EnvClient`, never connected; None: actions and observations are dicts."""
    has_tools: bool
    """The model acts by calls, and not by text."""
    to_text: Callable[[Any], Any]
    to_action: Callable[[str], Any]
    action_fields: frozenset[str]
    openings: dict[int, int] = field(default_factory=dict, repr=False)
    """By what reset was given, what the model saw then; hashes of both."""

    @property
    def max_concurrency(self) -> int:
        return self.server.max_concurrency

    def __call__(self) -> "OpenEnvEnv":
        return OpenEnvEnv(self)

    def payload(self, action: Any) -> Any:
        """The action as the server takes it."""
        if self.codec is not None and not isinstance(action, dict):
            return self.codec._step_payload(action)
        return action.model_dump() if hasattr(action, "model_dump") else action

    def result(self, reply: dict[str, Any]) -> tuple[Any, float | None, bool]:
        """Observation, reward and whether the episode is over."""
        if self.codec is not None:
            parsed = self.codec._parse_result(reply)
            return parsed.observation, parsed.reward, bool(parsed.done)
        return reply["observation"], reply.get("reward"), bool(reply.get("done"))

    def check_opening(self, given: str, text: str) -> None:
        """The members of a group are compared with each other, so they must face one task."""
        if len(self.openings) >= _MAX_OPENINGS:
            self.openings.clear()
        if self.openings.setdefault(hash(given), hash(text)) != hash(text):
            _warn_differs(self.server.base_url)


class OpenEnvEnv:
    """One episode, in a session of its own, which `close` ends."""

    def __init__(self, factory: OpenEnvFactory) -> None:
        self.tools: list[dict[str, Any]] = []
        self.answer_role = "tool" if factory.has_tools else "user"
        self._factory = factory
        self._url = factory.server.base_url
        self._session = Session(factory.server)
        self._is_over = self._is_rewarded = False

    async def reset(self, prompt: list[Message]) -> list[Message]:
        last = prompt[-1]
        if last.get("is_rendered"):
            raise SetupError("openenv_env has a first observation to show; use prompts that are lists of messages.")
        columns = last["task"] if isinstance(last.get("task"), dict) else {}
        data = {**columns, "seed": reset_seed(prompt, self._url)}
        given = json.dumps(data, sort_keys=True)
        observation, _, is_over = self._factory.result(await self._session.begin(data))
        if is_over:
            raise EnvError(f"{self._url} began an episode that is over (done) already.")
        if self._factory.has_tools:
            self.tools = await list_tools(self._session)
        text = await self._shown(observation)
        self._factory.check_opening(given, text)
        return with_text_behind(prompt, text) if text else prompt

    async def step(self, action: Message) -> StepResult:
        if self._is_over:
            raise EnvError("The episode is over.")
        if self._factory.has_tools:
            return await self._call(action.get("tool_calls") or [])
        try:
            reply = await self._act(action["content"])
        except _InvalidError as invalid:
            return _answer(f"Error: no action was taken: {invalid}", refused=str(invalid))
        observation, reward, is_over = self._factory.result(reply)
        self._note([] if reward is None else [reward], is_over)
        if is_over:
            return StepResult(reward=float(reward or 0.0), terminated=True)
        return _answer(await self._shown(observation), float(reward or 0.0))

    async def final_reward(self) -> float:
        """Nothing; it is the one call that tells of an end that the server has not made."""
        if not self._is_rewarded:
            _warn_unscored(self._url)
        return 0.0

    async def close(self) -> None:
        await self._session.close()

    async def _call(self, calls: list[dict[str, Any]]) -> StepResult:
        called = await run_calls(self._session, calls)
        self._note(called.rewards, called.is_over)
        return StepResult(
            called.answers,
            reward=sum(called.rewards),
            terminated=called.is_over or not calls,
            info={"tool_calls": called.reports},
        )

    def _note(self, rewards: list[float], is_over: bool) -> None:
        """Of a step. A missing reward is no zero: an environment that ends without any has failed."""
        self._is_over = is_over
        self._is_rewarded |= bool(rewards)
        if is_over and not self._is_rewarded:
            raise EnvError(
                f"{self._url} ended the episode without a reward in any of its steps: None, which is also what a NaN "
                "is on the way here."
            )

    async def _act(self, text: str) -> dict[str, Any]:
        """The server's reply to the action that is in the text."""
        try:
            action = await call(self._factory.to_action, text)
        except ValueError as problem:
            errors = problem.errors() if isinstance(problem, pydantic.ValidationError) else []
            raise _InvalidError(complaint(errors) or str(problem)) from problem
        payload = self._factory.payload(action)
        if not isinstance(payload, dict):
            raise EnvError(f"to_action must return a dict, or an action of the environment's, not {action!r:.200}.")
        try:
            return await self._session.step(payload)
        except RefusedError as refused:
            if refused.is_about(self._factory.action_fields | payload.keys()):
                raise _InvalidError(str(refused)) from refused
            raise EnvError(f"{self._url} failed to step: {refused}") from refused

    async def _shown(self, observation: Any) -> str:
        with boundary(EnvError, "to_text failed"):
            text = await call(self._factory.to_text, observation)
        if not isinstance(text, str):
            raise EnvError(f"to_text returned {text!r:.200}, not a text.")
        return text


class _InvalidError(Exception):
    """What the model wrote is no action, in words for it."""


def _answer(text: str, reward: float = 0.0, refused: str | None = None) -> StepResult:
    info = {} if refused is None else {"refused_action": refused}
    return StepResult([{"role": "user", "content": text}], reward=reward, info=info)


@functools.cache
def _warn_differs(base_url: str) -> None:
    """Once a server."""
    logger.warning(
        "%s began two episodes differently, though reset was given the same seed and columns. The members of a group "
        "then face different tasks, and comparing their rewards says little. Have its reset begin by them.",
        base_url,
    )


@functools.cache
def _warn_unscored(base_url: str) -> None:
    """Once a server."""
    logger.warning(
        "A trajectory ended, by max_turns, length, time or an answer without a call, before %s gave it a reward: its "
        "env_reward is 0.",
        base_url,
    )
