"""An environment behind an OpenEnv server: a trajectory has a session of it, over a WebSocket of its own.

    openenv init word_game && cd word_game && python -m server.app --host 127.0.0.1 --port 8001
    env_rollout(openenv_env("http://127.0.0.1:8001", max_concurrency=8, to_text=show), max_turns=8)

The server's observation, as text, follows the prompt's last message; each later one is a user's message. `reset` gets
the row's columns and the seed, of which the server drops what the environment does not take. An action that the server
finds invalid is answered in a sentence and costs a turn. `done` ends the episode. A missing reward counts 0 until
then; an episode that has ended without any has failed.

An environment that acts by MCP tools shows them to the chat template, and the model calls them, until it answers
without a call or the environment says `done`.

How sessions are had, held and ended is `session`'s. The package `openenv` is not needed here; it cannot be
installed beside vLLM 0.31, which wants another `mcp`, and its client, when it loses a connection, goes on by itself in
an environment that was never reset.

Not here: starting servers and containers, and proxies that environment variables name. A server's `session_timeout`,
if it has one, must be longer than the longest generation.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import SetupError, boundary
from ...options import check_positive
from .environment import OpenEnvFactory
from .session import Server
from .tools import takes_calls

_BASE_FIELDS = frozenset({"done", "reward", "metadata"})


def openenv_env(
    base_url: str,
    *,
    max_concurrency: int,
    to_text: Callable[[Any], Any] | None = None,
    to_action: Callable[[str], Any] | None = None,
    client: type[Any] | None = None,
    capacity_timeout_s: float = 240.0,
    keepalive_s: float | None = 20.0,
    headers: Mapping[str, str] | None = None,
) -> OpenEnvFactory:
    """What `env_rollout` takes, of an environment server that runs.

    Args:
        base_url: the server's, such as "http://127.0.0.1:8001".
        max_concurrency: sessions of this process at a time: the server's `max_concurrent_envs`, which is 1 unless its
            author has raised it, divided by the number of training processes.
        to_text: takes an observation, returns what the model sees; "" after reset adds nothing to the prompt. By
            default the observation's only field, where that is a text. With tools it is asked for the first
            observation only, and by default shows nothing of that.
        to_action: takes what the model writes, without its thoughts, and returns an action. A `ValueError` is told to
            the model. By default the stripped text as the action's only text, where it needs no other field; or the
            model's calls, where the actions are calls of MCP tools.
        client: the environment's own `EnvClient` class, where it is installed: actions and observations then are of
            its types, by its `_step_payload` and `_parse_result`. Without one they are dicts.
        capacity_timeout_s: how long a trajectory waits for a place while others have them all. Keep it below
            `env_rollout`'s `reset_timeout_s`.
        keepalive_s: seconds between pings, which keep proxies from closing a connection while the model writes. A late
            answer to one closes nothing. None for no pings.
        headers: sent when connecting, such as `{"Authorization": "Bearer ..."}` for a private Space.

    Raises:
        SetupError: an argument cannot work, or there is no default way to show or to act.
        ServerError: no OpenEnv server answers there.

    Example:
        >>> def show(observation):
        ...     return observation["echoed_message"]
        >>> echo = openenv_env("http://127.0.0.1:8001", max_concurrency=8, to_text=show)  # doctest: +SKIP
        >>> env_rollout(echo, max_turns=4)  # doctest: +SKIP
    """
    try:
        import websockets  # noqa: F401
    except ImportError as cause:
        raise SetupError("openenv_env needs websockets: pip install 'trl-rollouts[openenv]'.") from cause

    if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
        raise SetupError(f"base_url must begin with http:// or https://, not {base_url!r:.200}.")
    if type(max_concurrency) is not int or max_concurrency < 1:
        raise SetupError(f"max_concurrency must be a number of sessions, 1 or more, not {max_concurrency!r:.100}.")
    check_positive("capacity_timeout_s", capacity_timeout_s)
    if keepalive_s is not None:
        check_positive("keepalive_s", keepalive_s)
    if any(function is not None and not callable(function) for function in (to_text, to_action)):
        raise SetupError(f"to_text and to_action must be functions, not {to_text!r} and {to_action!r}.")
    server = Server(
        base_url=base_url.rstrip("/"),
        headers=dict(headers or {}),
        max_concurrency=max_concurrency,
        capacity_timeout_s=capacity_timeout_s,
        keepalive_s=keepalive_s,
    )
    codec = _codec(client, server.base_url)
    schema = server.schema()
    has_tools = to_action is None and takes_calls(schema)
    return OpenEnvFactory(
        server=server,
        codec=codec,
        has_tools=has_tools,
        to_text=to_text or (_nothing if has_tools else _default_to_text(schema, server.base_url)),
        to_action=to_action or (_nothing if has_tools else _default_to_action(schema, server.base_url)),
        action_fields=frozenset(schema["action"].get("properties", {})),
    )


def _nothing(_: Any) -> str:
    return ""


def _codec(client: Any, base_url: str) -> Any:
    if client is None:
        return None
    names = ("_step_payload", "_parse_result")
    if not isinstance(client, type) or not all(callable(getattr(client, name, None)) for name in names):
        raise SetupError(f"client must be the environment's EnvClient class, not {client!r:.200}.")
    with boundary(SetupError, f"{client.__name__} cannot be made"):
        return client(base_url=base_url)


def _default_to_action(schema: dict[str, Any], base_url: str) -> Callable[[str], Any]:
    fields = _own_fields(schema["action"])
    texts = [name for name, one in fields.items() if one.get("type") == "string"]
    is_free = len(texts) == 1 and not {"const", "enum"} & fields[texts[0]].keys()
    if not is_free or set(schema["action"].get("required", [])) - {*texts}:
        raise SetupError(
            f"An action of {base_url} has the fields {', '.join(fields) or 'none'}, of which a text alone makes none. "
            "Pass to_action, which takes the model's text and returns a dict with them."
        )
    return lambda text: {texts[0]: text.strip()}


def _default_to_text(schema: dict[str, Any], base_url: str) -> Callable[[Any], Any]:
    shown = [_own_fields(schema[name]) for name in ("observation", "reset_observation") if name in schema]
    name = next(iter(shown[0]), "")
    if any([*fields] != [name] or fields[name].get("type") != "string" for fields in shown):
        raise SetupError(
            f"An observation of {base_url} has the fields {', '.join(shown[0]) or 'none'}. Pass to_text, which takes "
            "one and returns what the model sees."
        )
    return lambda observation: observation[name] if isinstance(observation, dict) else getattr(observation, name)


def _own_fields(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in schema.get("properties", {}).items() if name not in _BASE_FIELDS}
