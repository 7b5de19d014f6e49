"""What `trl_rollouts.envs.verifiers` is made of: environments with one agent to train, tasks as rows, messages in the
words of both sides, and the chat loop that plays agents without a sandbox.

Not here: how an episode goes.
"""

import copy
import difflib
import functools
import importlib
import json
import pkgutil
import re
import types
from argparse import Namespace
from contextlib import AsyncExitStack
from importlib import metadata
from typing import Any

from ...errors import SetupError
from ...messages import message_text
from ...parsing import read_arguments
from ...trajectory import Message

MODEL = "policy"
TOKEN_LIMITS = ("max_input_tokens", "max_output_tokens", "max_total_tokens")
PLAIN_HARNESSES = ("null", "bash")
"""A chat loop, and verifiers' default: one with a shell."""


def part(name: str = "") -> Any:
    """A module of verifiers."""
    return importlib.import_module(f"verifiers.v1.{name}".rstrip("."))


def load_environment(environment: Any, caller: str) -> tuple[Any, str]:
    """The environment, and the name of its agent that is the policy.

    Args:
        environment: an id, a configuration, or an `Env`.
        caller: the function that is named where verifiers is missing.

    Raises:
        SetupError: there is none, or none that can be trained on.
    """
    try:
        part()
    except ImportError as cause:
        raise SetupError(f"{caller} needs verifiers: pip install 'trl-rollouts[verifiers]'. ({cause})") from cause
    config = _config(environment)
    agents = agents_of(config)
    free = [name for name, agent in agents.items() if agent.client is None]
    if len(free) != 1:
        raise SetupError(
            f"{config.env_id} has the agents {', '.join(agents)}. One is the policy; each other one needs a client "
            f"and a model of its own in the configuration. Without a client: {', '.join(free) or 'none'}."
        )
    if limits := [name for name in TOKEN_LIMITS if getattr(agents[free[0]], name) is not None]:
        raise SetupError(
            f"{config.env_id} sets {', '.join(limits)}. Set max_completion_length of the trainer instead."
        )
    config = config.model_copy(update={name: _played_here(agent, config) for name, agent in agents.items()})
    try:
        return part("utils.loaders").load_environment(config), free[0]
    except Exception as cause:
        raise SetupError(f"{config.env_id} cannot be made: {type(cause).__name__}: {cause}") from cause


def agents_of(config: Any) -> dict[str, Any]:
    """The configurations of an environment's agents, by name."""
    return {name: value for name, value in config if isinstance(value, part().AgentConfig)}


def take_over(agent: Any) -> None:
    """Let the chat loop play an agent that needs no sandbox."""
    if agent.harness.config.id == "null" and agent.runtime_config.type == "subprocess":
        agent.harness = _chat_harness()(agent.harness.config)


def row_prompt(task: Any, env: Any) -> list[Message]:
    """A row's prompt: the task's words, and the task itself."""
    name = env.config.taskset.id
    try:
        data = task.data.model_dump_json(exclude_none=True)
        is_whole = type(task.data).model_validate_json(data) == task.data
    except ValueError as cause:
        raise SetupError(f"Task {task.data.idx} of {name} is no plain data: {cause}") from cause
    if not is_whole or type(task.data) is not type(env.taskset).task_type().data_type():
        raise SetupError(f"Task {task.data.idx} of {name} cannot be made again of its data: {data:.200}")
    messages = [{**m, "content": message_text(m)} for m in _opening(task.data.system_prompt, task.data.prompt)]
    if not messages or messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": ""})
    return [*messages[:-1], {**messages[-1], "task": {"taskset": name, "data": data}}]


def task_of(row: Any, env: Any) -> Any:
    """The task of a row, made again."""
    name = env.config.taskset.id
    if not isinstance(row, dict) or row.get("taskset") != name:
        raise SetupError(
            f"verifiers_env needs the prompts of verifiers_dataset({name!r}), not of a row with {row!r:.200}."
        )
    kind = type(env.taskset).task_type()
    return kind(kind.data_type().model_validate_json(row["data"]), env.config.taskset.task)


def message_from(message: Any) -> Message:
    """verifiers' message as a chat template takes it."""
    wire: Message = part("dialects.chat").message_to_wire(message)
    return wire


def response_of(action: Message) -> Any:
    """The model's turn as verifiers has one. Of its tokens it says nothing."""
    vf = part()
    calls = [_call(index, item) for index, item in enumerate(action.get("tool_calls") or [])]
    message = vf.AssistantMessage(
        content=action["content"], reasoning_content=action.get("reasoning_content"), tool_calls=calls or None
    )
    reason = "tool_calls" if calls else "stop"
    return vf.Response(id="", created=0, model=MODEL, message=message, finish_reason=reason)


def _call(index: int, item: dict[str, Any]) -> Any:
    """A call of the model's. One that cannot be read is handed over as it is: verifiers tells the model so."""
    function = item["function"]
    arguments = read_arguments(function.get("arguments"))
    if item.get("error") is not None and not isinstance(arguments, str):
        arguments = item["error"]  # nothing is to be called with a part of them
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return part().ToolCall(id=item.get("id") or f"call{index:05}", name=function["name"], arguments=text)


def _opening(system_prompt: str | None, prompt: Any) -> list[Message]:
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if prompt is None or isinstance(prompt, str):
        return [*system, {"role": "user", "content": prompt}] if prompt else system
    return [*system, *map(message_from, prompt)]


def _config(environment: Any) -> Any:
    vf = part()
    if isinstance(environment, vf.Env):
        return environment.config
    if isinstance(environment, str):
        environment = {"taskset": {"id": environment}}
    if not isinstance(environment, dict | vf.EnvConfig):
        raise SetupError(
            f"An environment of verifiers is an id, a dict, an EnvConfig or an Env, not {environment!r:.200}."
        )
    try:
        return part("utils.loaders").resolve_env_config(copy.deepcopy(environment))
    except ModuleNotFoundError as cause:
        raise SetupError(f"{environment!r:.200}: {cause} {_ids_at_hand(environment)}") from cause
    except Exception as cause:
        raise SetupError(f"{environment!r:.200} is no environment of verifiers: {cause!s:.500}") from cause


def _ids_at_hand(environment: Any) -> str:
    """Those near to a wrong one, or all, of verifiers itself and of installed packages that need it."""
    built_in = [module.name for module in pkgutil.iter_modules(part("tasksets").__path__)]
    needs = re.compile(r"verifiers(?![\w-])")
    named = [item for item in metadata.distributions() if item.name not in ("verifiers", "trl-rollouts")]
    others = [item.name for item in named if any(map(needs.match, item.requires or []))]
    ids = sorted({name.replace("_", "-") for name in (*built_in, *others)})
    parts = [environment, environment.get("taskset")] if isinstance(environment, dict) else []
    wanted = [str(item["id"]) for item in parts if isinstance(item, dict) and "id" in item]
    nearest = [near for name in wanted for near in difflib.get_close_matches(name, ids)]
    return f"Ids near it: {', '.join(nearest)}." if nearest else f"Ids at hand: {', '.join(ids)}."


def _played_here(agent: Any, config: Any) -> Any:
    """The agent's configuration, without a sandbox where it asks for none, and without retries."""
    vf = part()
    harness = agent.harness or vf.default_agent_harness(config.taskset.id)
    is_plain = harness.id in PLAIN_HARNESSES[: 1 if agent.harness else 2]
    update: dict[str, Any] = {"retries": vf.RetryConfig()}
    if is_plain and ("runtime" not in agent.model_fields_set or isinstance(agent.runtime, vf.SubprocessConfig)):
        null = part("harnesses.null").NullHarnessConfig(id="null")
        update |= {"harness": agent.harness or null, "runtime": vf.SubprocessConfig()}
    return agent.model_copy(update=update)


@functools.cache
def _chat_harness() -> Any:
    """verifiers' harness "null", but for the process in a sandbox that it starts."""
    result = part().ProgramResult(exit_code=0, stdout="", stderr="")

    class ChatHarness(part("harnesses.null").NullHarness):  # type: ignore[misc]
        async def setup(self, runtime: Any) -> None:
            pass

        async def launch(self, ctx: Any, trace: Any, runtime: Any, *where: Any, **options: Any) -> Any:
            await _chat(self, ctx.model, *where, **options)
            return result

    return ChatHarness


async def _chat(
    harness: Any,
    model: str,
    endpoint: str,
    secret: str,
    urls: Any,
    data: Any,
    tool_interception_url: str | None = None,
) -> None:
    """verifiers' own chat loop, from a conversation so far to an answer without a call."""
    program, completion = _chat_program(), importlib.import_module("openai.types.chat").ChatCompletion
    servers = {name: {"url": url, "timeout": harness.config.tool_timeout} for name, url in urls.items()}
    args = Namespace(api_key=secret, tool_interception_url=tool_interception_url, bash=False, edit=False, search=False)
    async with AsyncExitStack() as stack:
        # Nothing but loopback: no certificates to load, no proxy to go through, and the time limits are others'.
        http = program.httpx.AsyncClient(
            verify=False, trust_env=False, timeout=None, headers={"Authorization": f"Bearer {secret}"}
        )
        await stack.enter_async_context(http)
        tools, dispatch, connections = await program.connect_mcp({"mcpServers": servers}, stack)

        async def complete(messages: list[Message]) -> Any:
            """Ask for the next turn; without OpenAI's client, which takes longer than all the rest."""
            body = {"model": model, "messages": messages} | ({"tools": tools} if tools else {})
            answer = await http.post(f"{endpoint}/chat/completions", json=body)
            if answer.is_error:
                raise RuntimeError(answer.text)
            return completion.model_validate_json(answer.content), messages

        # In place of its compactor, which here has nothing to do but to ask.
        asks = Namespace(complete=complete, enabled=False, threshold=None, reached=lambda *_: False)
        messages = _opening(*harness.resolve_prompt(data))
        await program.run_chat_loop(args, asks, messages, dispatch, connections, http)


@functools.cache
def _chat_program() -> Any:
    """The program of that harness as a module: its parts find each other only when they are put together."""
    program = types.ModuleType("verifiers_chat_program")
    exec(compile(part("harnesses.utils.launch").CHAT_PROGRAM_SOURCE, program.__name__, "exec"), program.__dict__)
    return program
