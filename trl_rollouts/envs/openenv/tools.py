"""The MCP tools of an OpenEnv environment: their schemas for the chat template, and the calls that the model makes.

Calls of one turn run one after the other, as the session has one connection. What is wrong with a call is answered in
the server's words. The reports are those of `trl_rollouts.tools.Toolbox`.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from ...errors import EnvError
from ...parsing import read_arguments
from ...tools import MAX_CALLS_PER_TURN, as_text
from ...trajectory import Message
from .session import RefusedError, Session

_MAX_ERROR_CHARS = 500
_ERRORS = {"tool_not_found": "unknown_tool", "invalid_args": "invalid_arguments", "timeout": "timeout"}


def takes_calls(schema: dict[str, Any]) -> bool:
    """Whether an action of the environment is a call of a tool."""
    properties = schema["action"].get("properties", {})
    return properties.get("type", {}).get("const") == "call_tool" and "tool_name" in properties


async def list_tools(session: Session) -> list[dict[str, Any]]:
    """The schemas of the tools of an episode that has begun."""
    try:
        observation = (await session.step({"type": "list_tools"}))["observation"]
    except RefusedError as refused:
        raise EnvError(f"The environment failed to list its tools: {refused}") from refused
    if not observation["tools"]:
        raise EnvError(f"The environment has no tools: {observation['metadata'].get('error', 'its list is empty')}.")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["input_schema"],
            },
        }
        for tool in observation["tools"]
    ]


@dataclass(slots=True)
class Called:
    """What came of the calls of one turn."""

    answers: list[Message] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Of the calls that gave one."""
    is_over: bool = False
    """The episode has ended, and the calls behind were not made."""


async def run_calls(session: Session, calls: list[dict[str, Any]]) -> Called:
    """Make the calls of an assistant message.

    Raises:
        EnvError: the environment failed, or the session is gone.
    """
    called = Called()
    for index, item in enumerate(calls):
        started = time.monotonic()
        name, arguments = item["function"]["name"], read_arguments(item["function"].get("arguments"))
        problem = _problem(index, item, name, arguments)
        reply = {} if problem else await _call(session, name, arguments)
        result, error, content = (None, *problem) if problem else _outcome(reply["observation"])
        content = content if error is None else f"Error: {content}"[:_MAX_ERROR_CHARS]
        report = {"name": name, "arguments": arguments, "result": result, "error": error, "content": content}
        called.reports.append({**report, "duration_s": time.monotonic() - started})
        id_ = item.get("id", f"call{index:05}")
        called.answers.append({"role": "tool", "tool_call_id": id_, "name": name, "content": content})
        if reply.get("reward") is not None:
            called.rewards.append(float(reply["reward"]))
        if reply.get("done"):
            called.is_over = True
            break
    return called


def _problem(index: int, item: dict[str, Any], name: str, arguments: Any) -> tuple[str, str] | None:
    """Why a call is not made: an error and what it says."""
    if index >= MAX_CALLS_PER_TURN:
        return "too_many_calls", f"only the first {MAX_CALLS_PER_TURN} calls of a turn are run."
    if item.get("error") is not None:
        return "parse_error", item["error"]
    if not isinstance(arguments, dict):
        return "invalid_arguments", f"The arguments of {name} must be a JSON object."
    return None


async def _call(session: Session, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return await session.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
    except RefusedError as refused:
        raise EnvError(f"The environment failed in a call of {name}: {refused}") from refused


def _outcome(observation: dict[str, Any]) -> tuple[Any, str | None, str]:
    """The result, the kind of error, and the text for the model."""
    if (failure := observation.get("error")) is not None:
        lines = [line for line in failure["message"].splitlines() if "errors.pydantic.dev" not in line]
        return None, _ERRORS.get(failure["error_type"], "exception"), "\n".join(lines)
    result = observation.get("result")
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return result, None, as_text(result)
    text = "\n".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in result["content"])
    return result.get("data"), "exception" if result.get("is_error") else None, text
