"""A Gymnasium environment, as it is: its observations as text, its actions read from what the model writes.

The first observation follows the prompt's last message, each later one is a user's message. Rewards, `terminated` and
`truncated` pass through. A turn in which no action can be read costs a turn, changes nothing, and is answered in a
sentence; how many turns there are is `env_rollout(..., max_turns=...)`'s.

Every trajectory has an instance of its own, and all of a group begin with the same seed: the row's "seed", handed over
by `with_task(dataset, ["seed"])`. Without one it is computed from the prompt's text.

Not here: vectorized environments, and memory of what was seen beside the conversation.
"""

import difflib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..env import EnvFactory, StepResult
from ..errors import SetupError, boundary
from ..messages import with_text_behind
from ..trajectory import Message
from .seeds import reset_seed

ToText = Callable[[Any, dict[str, Any]], str]
ToAction = Callable[[str, Any], Any]


def gymnasium_env(
    make: str | Callable[[], Any],
    *,
    to_text: ToText | None = None,
    to_action: ToAction | None = None,
    action_names: Sequence[str] | None = None,
    **make_options: Any,
) -> EnvFactory:
    """What `env_rollout` takes, of a Gymnasium environment. One is made at once, tried out and closed.

    Args:
        make: an id, such as "FrozenLake-v1", or a function without arguments that makes an environment.
        to_text: takes an observation and the info, returns what the model sees. By default what `render()` draws with
            `render_mode="ansi"`, a coloured place in brackets.
        to_action: takes what the model writes, without its thoughts, and the action space; returns an action. A
            `ValueError` is told to the model. By default the last integer in the text, for a `Discrete` space.
        action_names: what the model calls the actions of a `Discrete` space, in order. The last one that it names
            counts. The prompt has to tell it their names.
        **make_options: what `gymnasium.make` takes beside the id.

    Raises:
        SetupError: Gymnasium is missing, has no such id, cannot make it, or there is no way to show or to act.

    Example:
        >>> names = ["left", "down", "right", "up"]
        >>> lake = gymnasium_env("FrozenLake-v1", render_mode="ansi", action_names=names)  # doctest: +SKIP
        >>> env_rollout(lake, max_turns=20)  # doctest: +SKIP
    """
    if to_action is not None and action_names is not None:
        raise SetupError("Pass to_action or action_names, not both.")
    own = ["to_text", "to_action", "action_names"]
    for name in make_options:
        if near := difflib.get_close_matches(name, own, n=1, cutoff=0.8):
            raise SetupError(f"gymnasium_env has no option {name!r}. Did you mean {near[0]}?")
    if any(function is not None and not callable(function) for function in (to_text, to_action)):
        raise SetupError(f"to_text and to_action must be functions, not {to_text!r} and {to_action!r}.")
    factory = _factory(make, make_options)
    actions = _Actions(to_action, action_names)
    _try_out(factory, to_text, actions)
    return lambda: GymnasiumEnv(factory(), to_text=to_text, actions=actions)


class GymnasiumEnv:
    """One episode of `env`, and its end: `close` closes it."""

    answer_role = "user"

    def __init__(self, env: Any, *, to_text: ToText | None, actions: "_Actions") -> None:
        self._env = env
        self._to_text = to_text
        self._actions = actions

    def reset(self, prompt: list[Message]) -> list[Message]:
        if prompt[-1].get("is_rendered"):
            raise SetupError("gymnasium_env has a first observation to show; use prompts that are lists of messages.")
        observation, info = self._env.reset(seed=reset_seed(prompt, _name(self._env)))
        return with_text_behind(prompt, self._shown(observation, info))

    def step(self, action: Message) -> StepResult:
        try:
            chosen = self._actions.read(action["content"], self._env.action_space)
        except ValueError as problem:
            return _answer(f"Error: no action was taken: {problem}", refused=str(problem))
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        if terminated or truncated:
            return StepResult(reward=float(reward), terminated=bool(terminated), truncated=bool(truncated))
        return _answer(self._shown(observation, info), float(reward))

    def close(self) -> None:
        self._env.close()

    def _shown(self, observation: Any, info: dict[str, Any]) -> str:
        text = self._env.render() if self._to_text is None else self._to_text(observation, info)
        if not isinstance(text, str):
            raise TypeError(f"{'render()' if self._to_text is None else 'to_text'} returned {text!r:.200}, not a text")
        return text if self._to_text is not None else _COLOURED.sub(r"[\2]", text).strip("\n")


class _Actions:
    """From the model's text to an action."""

    def __init__(self, to_action: ToAction | None, names: Sequence[str] | None) -> None:
        if names is not None and (isinstance(names, str) or not all(isinstance(name, str) and name for name in names)):
            raise SetupError(f"action_names must be a list of names, not {names!r}.")
        self._to_action = to_action
        self._names = None if names is None else [name.lower() for name in names]
        # Of names that begin alike the longest is tried first.
        words = "|".join(re.escape(name) for name in sorted(self._names or (), key=len, reverse=True))
        self._named = re.compile(rf"(?<!\w)(?:{words})(?!\w)")

    def check(self, space: Any) -> None:
        from gymnasium.spaces import Discrete

        if self._to_action is not None:
            return
        if not isinstance(space, Discrete):
            raise SetupError(f"The action space is {space}. Pass to_action, which makes an action of a text.")
        if self._names is not None and len({*self._names}) != space.n:
            raise SetupError(f"{space} has {space.n} actions; action_names must name each once, not {self._names}.")

    def read(self, text: str, space: Any) -> Any:
        """The action.

        Raises:
            ValueError: there is none in the text, in words for the model.
        """
        if self._to_action is not None:
            action = self._to_action(text, space)
            if not space.contains(action):
                raise ValueError(f"{action!r:.200} is not in {space}.")
            return action
        if self._names is not None:
            if not (named := self._named.findall(text.lower())):
                raise ValueError(f"the actions are {', '.join(self._names)}.")
            return int(space.start) + self._names.index(named[-1])
        numbers = _INTEGER.findall(text)
        if not numbers or len(numbers[-1]) > 20 or not space.contains(int(numbers[-1])):
            raise ValueError(f"the actions are the integers from {space.start} to {space.start + space.n - 1}.")
        return int(numbers[-1])


_INTEGER = re.compile(r"(?<![\w.])-?\d+(?!\w|\.\d)")
"""Not a part of a word or of a decimal number."""

_COLOURED = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0m", re.DOTALL)


def _answer(text: str, reward: float = 0.0, refused: str | None = None) -> StepResult:
    info = {} if refused is None else {"refused_action": refused}
    return StepResult([{"role": "user", "content": text}], reward=reward, info=info)


def _factory(make: Any, options: dict[str, Any]) -> Callable[[], Any]:
    try:
        import gymnasium
    except ImportError as cause:
        raise SetupError("gymnasium_env needs Gymnasium: pip install 'trl-rollouts[gymnasium]'.") from cause

    if isinstance(make, str):
        return functools.partial(gymnasium.make, make, **options)
    if not callable(make):
        raise SetupError(f"gymnasium_env takes an id or a function that makes an environment, not {make!r:.200}.")
    if options:
        raise SetupError(f"{', '.join(options)}: what a function makes takes no options here; give them in it.")
    factory: Callable[[], Any] = make
    return factory


def _try_out(factory: Callable[[], Any], to_text: ToText | None, actions: _Actions) -> None:
    """Make one, begin an episode and close it: what cannot work is found before anything is sampled.

    Raises:
        SetupError: it does not.
    """
    env = _made(factory)
    try:
        if hasattr(env, "num_envs"):
            raise SetupError(
                f"{_name(env)} is vectorized. Pass a single environment: each trajectory gets one of its own."
            )
        actions.check(env.action_space)
        if to_text is None and getattr(env, "render_mode", None) != "ansi":
            raise SetupError(f'{_name(env)} draws no text. Pass to_text, or render_mode="ansi" where it knows that.')
        with boundary(SetupError, f"{_name(env)} cannot begin an episode"):
            GymnasiumEnv(env, to_text=to_text, actions=actions).reset([{"role": "user", "task": {"seed": 0}}])
            frame = env.render() if to_text is None else ""
        if len({colour for colour, _ in _COLOURED.findall(frame)}) > 1:
            raise SetupError(f"{_name(env)} draws in several colours, which the model would not see. Pass to_text.")
    finally:
        env.close()


def _name(env: Any) -> str:
    spec = getattr(env, "spec", None)
    return str(env) if spec is None else str(spec.id)


def _made(factory: Callable[[], Any]) -> Any:
    from gymnasium import registry
    from gymnasium.error import UnregisteredEnv

    try:
        return factory()
    except UnregisteredEnv as cause:
        name = str(factory.args[0]) if isinstance(factory, functools.partial) else ""
        nearest = difflib.get_close_matches(name, registry, n=3)
        guess = f" Ids near it: {', '.join(nearest)}." if nearest else " gymnasium.pprint_registry() lists all ids."
        raise SetupError(f"{cause}{guess}") from cause
    except Exception as cause:
        raise SetupError(f"The environment cannot be made: {type(cause).__name__}: {cause}") from cause
