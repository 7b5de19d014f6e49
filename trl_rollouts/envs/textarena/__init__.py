"""A TextArena game for one player, as it is: what the game says as text, what the model writes as its action.

The game's own prompt follows the prompt's last message. After each turn the model is shown, as a user's message, what
the game has said since, complaints about an invalid move included. Its own words are not repeated to it, nor what went
before: the wrappers that would do so, which "-train" at the end of an id exchanges, are passed over. Those of actions
count: most games read a text without brackets as if it stood in brackets; with "-raw" they do not.

The reward is TextArena's, paid once, in the turn that ends the game, as is its reason (`StepResult.info`). Most games
forgive one invalid move, which is no turn to them, and end at the next; so a game may take twice its own limit of
turns. That limit is part of its rules: it ends `terminated`. A game cut short by `max_turns` has paid nothing. What a
game pays is not judged: in 0.7.4 the right button of Bandit, for instance, is worth 0.

All trajectories of a group begin with the same seed: the row's "seed", handed over by `with_task(dataset, ["seed"])`.
Without one it is computed from the prompt's text. TextArena seeds and draws from the process's `random`; here a game
draws from a generator of its own, so what else runs makes no difference to it, nor it to that.

Some games need word lists of NLTK's, which are not downloaded here. GuessWho and TwentyQuestions ask a model at
OpenRouter, and are no more repeatable than that. Not here: games for several players.
"""

import copy
import difflib
import functools
import importlib
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...env import EnvFactory, StepResult
from ...errors import EnvError, SetupError, boundary
from ...messages import with_text_behind
from ...trajectory import Message
from ..seeds import reset_seed
from .generators import drawing_from, give_own_generators

logger = logging.getLogger(__name__)

NUM_KEPT = 64
"""Games that have begun, kept for others that begin with the same seed."""
NUM_WORDS = 1000
"""A collection in a game that has as many items is a list of words, which is never copied: it would take 0.1 s."""

_ONE_AT_A_TIME = threading.Lock()


def textarena_env(game: str, **options: Any) -> EnvFactory:
    """What `env_rollout` takes, of one of TextArena's games. It is begun at once, to see that it can be.

    Args:
        game: an id, such as "GuessTheNumber-v0".
        **options: what `textarena.make` takes beside the id: the game's own settings.

    Raises:
        SetupError: TextArena is missing or has no such game, it cannot be made, lacks NLTK's data, is not for one
            player, or the same seed does not begin the same game.

    Example:
        >>> env_rollout(textarena_env("GuessTheNumber-v0", max_turns=8), max_turns=18)  # doctest: +SKIP
    """
    library = _library()
    specification = _known(library.envs.registration.ENV_REGISTRY, game)
    with _ONE_AT_A_TIME, _without_downloads(game):
        give_own_generators(specification.entry_point)
        is_known = str(specification.entry_point).startswith("textarena.")
        games = _Games(functools.partial(library.make, game, **options), can_be_copied=is_known)
        _try_out(game, games, library.SinglePlayerState)
    return lambda: TextArenaEnv(game, games)


class TextArenaEnv:
    """One episode; see `textarena_env`."""

    answer_role = "user"

    def __init__(self, name: str, games: "_Games") -> None:
        self._name, self._games = name, games
        self._is_over = False

    def reset(self, prompt: list[Message]) -> list[Message]:
        if prompt[-1].get("is_rendered"):
            raise SetupError("textarena_env has a game's prompt to show; use prompts that are lists of messages.")
        self._game, self._generator = self._games.begun(reset_seed(prompt, self._name))
        _mend(_innermost(self._game).state)
        return with_text_behind(prompt, _said(self._game))

    def step(self, action: Message) -> StepResult:
        with drawing_from(self._generator):
            self._is_over, info = self._game.step(action["content"])
        if not self._is_over:
            return StepResult([{"role": "user", "content": _said(self._game)}], info=dict(info))
        rewards, players = self._game.close()
        if not rewards or 0 not in rewards:
            raise EnvError(f"{self._name} has ended with the rewards {rewards!r}, none of them the player's.")
        return StepResult(reward=float(rewards[0]), terminated=True, info={**info, **players[0]})

    async def final_reward(self) -> float:
        """Nothing; it says so, once a game, where the game is not over.

        It is the one call that tells an environment of a limit that has cut it. Async, so that it waits for no step.
        """
        if not self._is_over:
            _warn_unfinished(self._name)
        return 0.0

    def close(self) -> None:
        self._game = None


def _said(game: Any) -> str:
    """What the game has said to the player since it was asked last, without the player's own words."""
    own_words = _library().ObservationType.PLAYER_ACTION
    said = _innermost(game).state.get_current_player_observation()
    # Its place in the tuple is not looked at: some games hand their arguments over in another order.
    return "\n".join(str(entry[1]).strip("\n") for entry in said if own_words not in entry)


def _mend(state: Any) -> None:
    """Some games hand over the reason and the reward of an invalid move the wrong way round."""
    complain = state.set_invalid_move

    def in_order(reason: Any, reward: Any = -1.0) -> Any:
        if isinstance(reward, str):
            reason, reward = reward, reason
        return complain(reason=reason, reward=reward)

    state.set_invalid_move = in_order


class _Games:
    """Where games come from. What is slow is done once, and copied: making a game of words takes seconds, and so does
    laying out some puzzles, the same for a whole group.

    A game is never begun a second time: some do not take everything back.

    Args:
        make: makes a game.
        can_be_copied: whether a copy is as good. Of a game registered by the user nobody knows: a function that it
            keeps would be that of the original.
    """

    def __init__(self, make: Callable[[], Any], *, can_be_copied: bool) -> None:
        self._make = make
        self._begun = functools.lru_cache(NUM_KEPT)(self.begin)
        self._lock = functools.lru_cache(NUM_KEPT)(lambda seed: threading.Lock())
        generator = random.Random(0)
        with drawing_from(generator):
            blank = make()
        asks_model = any(isinstance(value, _library().Agent) for value in vars(_innermost(blank)).values())
        self._can_be_copied = can_be_copied and not asks_model  # through a connection
        is_always_alike = generator.getstate() == random.Random(0).getstate()
        self._blank = blank if self._can_be_copied and is_always_alike else None

    def begun(self, seed: int) -> tuple[Any, random.Random]:
        """A game that has begun, and the generator it draws from."""
        if not self._can_be_copied:
            return self.begin(seed)
        with self._lock(seed):  # the others of its group wait for the first rather than do the same
            begun = self._begun(seed)
        game, generator = begun
        return _copied(game), copy.copy(generator)

    def begin(self, seed: int) -> tuple[Any, random.Random]:
        generator = random.Random(seed)
        with drawing_from(generator):
            game = self._make() if self._blank is None else _copied(self._blank)
            game.reset(num_players=1, seed=seed)
        return game, generator


def _copied(game: Any) -> Any:
    return copy.deepcopy(game, {id(value): value for value in vars(_innermost(game)).values() if _is_word_list(value)})


def _is_word_list(value: Any) -> bool:
    if isinstance(value, list | set):
        return len(value) >= NUM_WORDS
    return isinstance(value, importlib.import_module("textarena.envs.utils.word_lists").EnglishDictionary)


@contextmanager
def _without_downloads(game: str) -> Iterator[None]:
    """Make a game from what is there.

    Games ask for NLTK's data whenever they are made. Each time that would ask a server, even where the data is there,
    and without a time limit where there is none.
    """
    nltk: Any = importlib.import_module("nltk")
    wanted: list[str] = []

    def download(data: str | list[str], *args: Any, **kwargs: Any) -> bool:
        wanted.extend([data] if isinstance(data, str) else data)
        return False

    real, nltk.download = nltk.download, download
    try:
        with boundary(SetupError, f"TextArena's {game!r} cannot be made"):
            yield
    except SetupError as error:
        if type(error.__cause__) is LookupError and wanted:
            raise SetupError(
                f"TextArena's {game!r} needs data of NLTK's that is not on this machine. Once, with a network: "
                f"python -m nltk.downloader {' '.join(sorted({*wanted}))}. It then looks where NLTK_DATA says, too."
            ) from error
        if isinstance(error.__cause__, SyntaxError):
            version = ".".join(str(number) for number in sys.version_info[:2])
            raise SetupError(f"{error}. This is Python {version}; the game needs a later one.") from error
        raise
    finally:
        nltk.download = real


def _try_out(name: str, games: _Games, single_player: type) -> None:
    """Begin the game twice.

    Raises:
        SetupError: it cannot be, or not alike.
    """
    openings = []
    for _ in range(2):
        try:
            game, _generator = games.begin(0)
        except Exception as cause:
            problem = f"TextArena's {name!r} cannot begin with one player: {type(cause).__name__}: {cause}"
            raise SetupError(f"{problem}. This adapter plays single-player games only.") from cause
        if not isinstance(state := _innermost(game).state, single_player):
            raise SetupError(f"TextArena's {name!r} is no single-player game (it has a {type(state).__name__}).")
        openings.append(_said(game))
    if openings[0] != openings[1]:
        raise SetupError(
            f"TextArena's {name!r} begins differently with the same seed, so trajectories of a group could not be "
            "compared. Random numbers of a game of yours must come from Python's random, as in `random.choice(...)`."
        )


def _innermost(game: Any) -> Any:
    """The game without its wrappers."""
    wrapper = _library().Wrapper
    while isinstance(game, wrapper):
        game = game.env
    return game


def _known(registry: dict[str, Any], game: Any) -> Any:
    if isinstance(game, str) and game in registry:
        return registry[game]
    nearest = difflib.get_close_matches(str(game), registry, n=3)
    guess = f"Ids near it: {', '.join(nearest)}." if nearest else "textarena.pprint_registry_detailed() lists all."
    raise SetupError(f"TextArena has no game {game!r:.200}. {guess}")


def _library() -> Any:
    try:
        return importlib.import_module("textarena")
    except ImportError as cause:
        raise SetupError(f"TextArena cannot be imported ({cause}): pip install 'trl-rollouts[textarena]'") from cause


@functools.cache
def _warn_unfinished(name: str) -> None:
    """Once a game."""
    logger.warning(
        "A trajectory was cut short, by max_turns, length or time, before %s was over. TextArena pays at the end "
        "only, so its env_reward is 0. Raise the limit, or give the game fewer turns.",
        name,
    )
