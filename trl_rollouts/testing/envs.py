"""What an `Env` owes, tried out on one: for whoever writes an environment of their own.

    check_env(MyEnv)
    check_env(MyEnv, prompt=dataset[0]["prompt"], actions=["guess 5", "guess 7"])

Not checked: whether what it says and rewards is right, which only who knows its rules can say, and, of what the loop
does, whether a chat template can show its observations.
"""

from collections.abc import Sequence
from textwrap import indent

from ..env import EnvFactory
from ..errors import EnvError, SetupError
from ..trajectory import Message
from .env_checks import CHECKS, COMPARISONS, Check, NotSeenError
from .env_plays import Plays


def check_env(
    env_factory: EnvFactory,
    *,
    prompt: list[Message] | None = None,
    actions: Sequence[str | Message] = ("...",),
    timeout_s: float = 10.0,
    is_deterministic: bool = True,
) -> list[str]:
    """Check that the environments which `env_factory` makes keep to the contract (`trl_rollouts.env`).

    A few episodes are played as a rollout plays them: one after the other, two in turns, one with a prompt that is a
    string. It also works where an event loop runs already, as in a notebook.

    Args:
        env_factory: makes an environment; a class without required arguments is one.
        prompt: the messages to begin with, such as a row's of your dataset, with its task.
        actions: the model's turns, one after the other, until the episode ends: texts, or assistant messages with
            `tool_calls`. What they do not lead to, such as the end, is not checked.
        timeout_s: how long one call of a method may take.
        is_deterministic: whether the same prompt and actions give the same episode. If not, episodes are not compared.

    Returns:
        The names of the checks that passed. One whose subject did not come up, such as the end, is not among them.

    Raises:
        AssertionError: it names each check that failed, with what was seen and what to do.
        SetupError: an argument cannot work.
    """
    if not callable(env_factory):
        raise SetupError(f"env_factory must be callable without arguments, such as a class, not {env_factory!r}.")
    if isinstance(actions, str | dict):
        raise SetupError(f"actions must be a list of the model's turns, such as [{actions!r}].")
    turns = [{"role": "assistant", "content": one} if isinstance(one, str) else one for one in actions]
    plays = Plays(env_factory, prompt or [{"role": "user", "content": "..."}], turns, timeout_s)
    plays.run()

    passed, failed = [], []
    checks = [check for check in CHECKS if is_deterministic or check not in COMPARISONS]
    for check in checks:
        failure = _failure(check, plays)
        if failure is None:
            passed.append(check.__name__)
        elif failure:
            failed.append(indent(f"{check.__name__}: {failure}", "  "))
    if failed:
        name = type(plays.alone.env).__name__ if plays.alone.env is not None else "The environment"
        lines = "\n".join(failed)
        raise AssertionError(f"{name} fails {len(failed)} of {len(checks)} checks.\n{lines}")
    return passed


def _failure(check: Check, plays: Plays) -> str | None:
    """What went wrong, if anything did; an empty text where that could not be seen."""
    try:
        check(plays)
    except NotSeenError:
        return ""
    except AssertionError as error:
        return str(error)
    except EnvError:  # what an earlier check has said
        return ""
    return None
