"""The rollouts that a user passes to `GRPOTrainer(rollout_func=...)`: one line each, over the same `Rollout`."""

import builtins
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

from .code import CODE_NAME, FORMATS, CodeEnv, code_instructions, code_parser
from .env import EnvFactory
from .errors import SetupError
from .hosting import EnvLimits
from .options import RolloutOptions, check_names, check_positive
from .rollout import Rollout
from .sandbox import Executor
from .tools import Tool, ToolEnv


def env_rollout(
    env_factory: EnvFactory | Mapping[str, EnvFactory],
    *,
    max_turns: int = 32,
    reset_timeout_s: float = 300.0,
    step_timeout_s: float = 120.0,
    close_timeout_s: float = 10.0,
    **options: Unpack[RolloutOptions],
) -> Rollout:
    """A `rollout_func` in which the model acts in an environment, one instance a trajectory.

    Args:
        env_factory: makes an environment (`Env`); a class without required arguments is one. Or several by name, of
            which each row names its own: `with_task(dataset, ["environment"])`.
        max_turns: completions of one trajectory.
        reset_timeout_s: seconds that making an environment may take, and its reset. One that takes longer fails its
            row.
        step_timeout_s: seconds that a step may take, and `final_reward`. The same.
        close_timeout_s: seconds after which a close is not waited for any more.
        **options: see `RolloutOptions`.

    Raises:
        SetupError: an argument cannot work.

    Example:
        >>> trainer = GRPOTrainer(..., reward_funcs=env_reward, rollout_func=env_rollout(MyEnv))  # doctest: +SKIP
    """
    limits = {
        "reset_timeout_s": reset_timeout_s,
        "step_timeout_s": step_timeout_s,
        "close_timeout_s": close_timeout_s,
    }
    check_names(options, ["env_factory", "max_turns", *limits])
    for name, limit_s in limits.items():
        check_positive(name, limit_s)
    return Rollout(env_factory, max_turns=max_turns, env_limits=EnvLimits(**limits), **options)


def tool_rollout(
    tools: Sequence[Callable[..., Any]],
    *,
    max_turns: int = 8,
    tool_timeout_s: float = 60.0,
    max_result_tokens: int | None = 2048,
    stop_tools: Sequence[str] = (),
    **options: Unpack[RolloutOptions],
) -> Rollout:
    """A `rollout_func` in which the model calls functions until it answers without a call.

    With `max_turns=1` it is the single-step tool call: the calls of the one completion are run and handed to the
    reward functions as `tool_calls`; nothing is fed back to the model.

    Args:
        tools: functions, sync or async, with type hints and a Google-style docstring, which become their schemas.
        max_turns: completions of one trajectory.
        tool_timeout_s: time limit of one call, in seconds. The calls of a turn run at the same time.
        max_result_tokens: a longer result is shown without its middle; None shows it whole.
        stop_tools: names of tools that end the trajectory once one of them has returned, such as `final_answer`.
        **options: see `RolloutOptions`.

    A row may offer some of the tools only: `with_task(dataset, ["tool_names"])`, with lists of names in that column.

    Raises:
        SetupError: there is no tool, two have one name, or one lacks hints or a docstring.

    Example:
        >>> trainer = GRPOTrainer(..., rollout_func=tool_rollout([multiply]))  # doctest: +SKIP
    """
    check_names(options, ["tools", "max_turns", "tool_timeout_s", "max_result_tokens", "stop_tools"])
    if callable(tools):
        raise SetupError("tools must be a list of functions: tool_rollout([...]).")
    check_positive("tool_timeout_s", tool_timeout_s)
    described = [Tool(function) for function in tools]
    names = [tool.name for tool in described]
    if not names or len(set(names)) < len(names):
        raise SetupError(f"tool_rollout needs tools with different names, not {names}.")
    _check_result_tokens(max_result_tokens)
    if not isinstance(stop_tools, list | tuple) or not set(stop_tools) <= set(names):
        raise SetupError(f"stop_tools must be a list of names among {names}, not {stop_tools!r}.")
    return Rollout(
        lambda: ToolEnv(described, timeout_s=tool_timeout_s, stop_tools=stop_tools),
        max_turns=max_turns,
        max_result_tokens=max_result_tokens,
        **options,
    )


def code_rollout(
    executor: Executor | None = None,
    *,
    tools: Sequence[Callable[..., Any]] = (),
    timeout_s: float = 10.0,
    tool_timeout_s: float = 60.0,
    max_turns: int = 8,
    max_result_tokens: int | None = 512,
    format: Literal["tags", "fenced"] = "tags",
    results_as: Literal["inline", "message"] = "message",
    instructions: str | Literal["auto"] | None = "auto",
    **options: Unpack[RolloutOptions],
) -> Rollout:
    """A `rollout_func` in which the model writes Python, reads what came of it, and goes on until it answers without.

    Variables and files stay from block to block of a trajectory. Every block and every call of a function from it is
    handed to the reward functions in `tool_calls` (see `trl_rollouts.code.CodeEnv`).

    Args:
        executor: where the code runs; a `LocalExecutor()` by default, confined by this machine's kernel. One may be
            shared by rollouts; its owner closes it.
        tools: functions that the code may call, such as `retrieve`. They run on this side, outside of the sandbox.
        timeout_s: time limit of one block, in seconds. Queueing does not count. A block that overruns is interrupted,
            and the model told; what does not stop then is killed, with its variables.
        tool_timeout_s: time limit of all calls of functions by one block, in seconds, beside its own time.
        max_turns: completions of one trajectory.
        max_result_tokens: a turn's result that is longer is shown without its middle; None shows it whole.
        format: "tags", `<code>` and `</code>`, answered by `<result>`; or "fenced", Markdown's "```python".
        results_as: "message", a user's message in the chat template; "inline", text that goes on within the
            assistant's turn, as for base models.
        instructions: the system message of prompts that have none of their own and are no strings. By default one that
            says how to write code, with the functions. None: no message.
        **options: see `RolloutOptions`.

    Raises:
        SetupError: an argument cannot work.

    Example:
        >>> trainer = GRPOTrainer(..., rollout_func=code_rollout())  # doctest: +SKIP
    """
    own = "executor tools timeout_s tool_timeout_s max_turns max_result_tokens format results_as instructions"
    check_names(options, own.split())
    if not isinstance(tools, list | tuple):
        raise SetupError("tools must be a list of functions: code_rollout(tools=[...]).")
    if format not in FORMATS or results_as not in ("inline", "message"):
        raise SetupError(
            f'format must be "tags" or "fenced", and results_as "inline" or "message", not {format!r} and '
            f"{results_as!r}."
        )
    if executor is not None and (isinstance(executor, type) or not callable(getattr(executor, "open", None))):
        raise SetupError(f"executor must be an Executor, such as LocalExecutor(), not {executor!r}.")
    check_positive("timeout_s", timeout_s)
    check_positive("tool_timeout_s", tool_timeout_s)
    _check_result_tokens(max_result_tokens)
    described, code_format = [Tool(function) for function in tools], FORMATS[format]
    _check_callable([tool.name for tool in described])
    if instructions is not None and not isinstance(instructions, str):
        raise SetupError(f'instructions must be a text, "auto" or None, not {instructions!r}.')
    text = code_instructions(code_format, described) if instructions == "auto" else instructions
    shared = _local() if executor is None else executor
    options.setdefault("parser", code_parser(code_format))
    return Rollout(
        lambda: CodeEnv(
            shared,
            described,
            timeout_s=timeout_s,
            tool_timeout_s=tool_timeout_s,
            code_format=code_format,
            results_as=results_as,
            instructions=text,
        ),
        max_turns=max_turns,
        max_result_tokens=max_result_tokens,
        stop=[code_format.stop],
        cleanups=[shared.close] if executor is None else (),
        **options,
    )


def _check_callable(names: list[str]) -> None:
    taken = {CODE_NAME, *dir(builtins), *keyword.kwlist}
    if wrong := [name for name in names if name in taken or not name.isidentifier() or names.count(name) > 1]:
        raise SetupError(
            f"The code cannot call functions by the names {wrong}: each must be a Python identifier, no keyword, no "
            f"builtin, not {CODE_NAME!r}, and different from the others."
        )


def _local() -> Executor:
    from .sandbox.local import LocalExecutor  # which needs Linux; the other rollouts do not

    return LocalExecutor()


def _check_result_tokens(max_result_tokens: Any) -> None:
    if max_result_tokens is not None and (type(max_result_tokens) is not int or max_result_tokens < 1):
        raise SetupError(f"max_result_tokens must be a number of tokens, or None, not {max_result_tokens!r}.")
