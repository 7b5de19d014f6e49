"""TextArena's own games, from their prompt to the reward, with scripted completions."""

import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

textarena = pytest.importorskip("textarena")

from trl_rollouts import SetupError, env_reward, env_rollout  # noqa: E402
from trl_rollouts.env import EnvFactory  # noqa: E402
from trl_rollouts.envs.textarena import textarena_env  # noqa: E402
from trl_rollouts.rollout import Rollout  # noqa: E402
from trl_rollouts.testing import ScriptedClient, byte_tokenizer, check_env, fake_trainer  # noqa: E402

TOKENIZER = byte_tokenizer()
COMPLAINT = "You attempted an invalid move. Reason: "
ADVICE = " Please resubmit a valid move and remember to follow the game rules to avoid penalties."

Roll = Callable[..., dict[str, Any]]


@pytest.fixture
def roll() -> Iterator[Roll]:
    rollouts: list[Rollout] = []

    def run(env_factory: EnvFactory, replies: Any, *, prompts: Any = None, max_turns: int | None = None) -> Any:
        client = ScriptedClient(replies, tokenizer=TOKENIZER, max_model_len=None)
        rollouts.append(env_rollout(env_factory, max_turns=max_turns or len(replies), client=client))
        batch = rollouts[-1](prompts or [prompt()], fake_trainer(TOKENIZER, max_completion_length=20_000))
        return {name: column[0] for name, column in batch.items()} | {"batch": batch}

    yield run
    for rollout in rollouts:
        rollout.close()


def prompt(text: str = "Play.", seed: int = 0) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, "task": {"seed": seed}}]


def contents(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["transcript"]]


def opening(env: Any, seed: int) -> str:
    text: str = env.reset(prompt(seed=seed))[-1]["content"]
    return text


def played(factory: EnvFactory, actions: list[str], seed: int = 0) -> list[Any]:
    """Everything that an episode shows and pays."""
    env: Any = factory()
    seen: list[Any] = [opening(env, seed)]
    for action in actions:
        result = env.step({"role": "assistant", "content": action})
        seen.append((result.messages, result.reward, result.terminated))
        if result.terminated:
            break
    env.close()
    return seen


# What the model sees, and what it is paid


def test_a_number_is_guessed_by_the_games_hints(roll: Roll) -> None:
    row = roll(textarena_env("GuessTheNumber-v0"), ["I try [10].", "[15]", "[13]", "[never]"])  # the seed's is 13
    assert contents(row)[0].startswith("Play.\n\nYou are Player 0. You are playing Guess The Number.\n")
    assert [(message["role"], message["content"]) for message in row["transcript"][1:]] == [
        ("assistant", "I try [10]."),
        ("user", "The target number is higher."),
        ("assistant", "[15]"),
        ("user", "The target number is lower."),
        ("assistant", "[13]"),
    ]
    assert (row["step_rewards"], env_reward(**row["batch"])) == ([0.0, 0.0, 1.0], [1.0])
    assert (row["stop_reason"], row["num_turns"]) == ("terminated", 3)


def test_the_games_own_limit_of_turns_pays_what_it_pays_and_is_an_end_by_its_rules(roll: Roll) -> None:
    row = roll(textarena_env("GuessTheNumber-v0", max_turns=2), ["[1]", "[2]", "[12]", "[11]"])
    # TextArena looks at the limit before it counts the turn: the third guess is the last. |12 - 13| of 19.
    assert (row["stop_reason"], row["num_turns"]) == ("terminated", 3)
    assert row["step_rewards"] == [0.0, 0.0, pytest.approx(1 - 1 / 19)]


def test_what_the_game_says_of_an_invalid_move_reaches_the_model_and_a_second_one_ends_the_game(roll: Roll) -> None:
    row = roll(textarena_env("GuessTheNumber-v0"), ["[10]", "[99]", "none", "[13]"])
    assert (
        contents(row)[4] == f"{COMPLAINT}Invalid move. Player 0 guessed a number outside the range specified.{ADVICE}"
    )
    assert (row["stop_reason"], row["num_turns"]) == ("terminated", 3)
    assert row["env_reward"] == pytest.approx(1 - 3 / 19)  # what GuessTheNumber pays for the last valid guess


def test_the_end_of_a_game_tells_its_reason() -> None:
    env: Any = textarena_env("GuessTheNumber-v0")()
    env.reset(prompt())
    result = env.step({"role": "assistant", "content": "[13]"})
    assert result.info["reason"] == "Congratulations! You guessed the correct number."
    assert result.info["invalid_move"] is False


@pytest.mark.parametrize(
    ("game", "complaint", "reward"),
    [
        ("ThreeCardMonte-v0", "Bad action. Use `[k]`.", 0.0),
        ("Countdown-v0", "Invalid action format. Use `[i j op]`", 0.568),
        ("Cryptarithm-v0", "Bad action format. Use `[A 5]`.", 0.0),
        ("Slitherlink-v0", "Bad action format. Use [h row col] or [v row col].", 0.0),
    ],
)
def test_a_game_that_hands_its_complaint_over_in_the_wrong_place_is_understood(
    roll: Roll, game: str, complaint: str, reward: float
) -> None:
    row = roll(textarena_env(game), ["What?", "What?"])
    assert contents(row)[2].startswith(f"{COMPLAINT}{complaint}")
    assert "What?" not in contents(row)[2]
    assert (row["stop_reason"], row["rollout_error"]) == ("terminated", None)
    assert row["env_reward"] == pytest.approx(reward)


@pytest.mark.parametrize("suffix", ["", "-train", "-raw"])
def test_every_variant_of_an_id_shows_only_what_is_new(roll: Roll, suffix: str) -> None:
    row = roll(textarena_env(f"2048-v0-3x3{suffix}"), ["[up]", "[down]", "[left]", "[right]"])
    opening, *later = [message["content"] for message in row["transcript"] if message["role"] == "user"]
    assert opening.startswith("Play.\n\nYou are playing 2048")
    assert len(later) == 3
    for text in later:
        assert "You are playing" not in text
        assert text.count("+----+----+----+") in (0, 4)


def test_most_games_read_a_text_without_brackets_as_if_in_brackets(roll: Roll) -> None:
    assert contents(roll(textarena_env("GuessTheNumber-v0"), ["10", "."]))[2] == "The target number is higher."
    assert contents(roll(textarena_env("GuessTheNumber-v0-raw"), ["10", "."]))[2].startswith(COMPLAINT)


def test_options_reach_the_game(roll: Roll) -> None:
    row = roll(textarena_env("GuessTheNumber-v0", min_number=7, max_number=7), ["[7]"])
    assert "between 7 and 7" in contents(row)[0]
    assert row["env_reward"] == 1.0


def test_a_game_that_is_cut_short_pays_nothing_and_says_so_once(roll: Roll, caplog: pytest.LogCaptureFixture) -> None:
    lights = textarena_env("LightsOut-v0")
    with caplog.at_level(logging.WARNING):
        row = roll(lights, lambda ids: "[0, 0]", prompts=[prompt()] * 3, max_turns=1)
        roll(textarena_env("GuessTheNumber-v0"), ["[13]"])
    assert (row["stop_reason"], row["batch"]["env_reward"]) == ("max_turns", [0.0] * 3)
    assert [record.getMessage() for record in caplog.records if "cut short" in record.getMessage()] == [
        "A trajectory was cut short, by max_turns, length or time, before LightsOut-v0 was over. TextArena pays at "
        "the end only, so its env_reward is 0. Raise the limit, or give the game fewer turns."
    ]


def test_a_games_prompt_is_a_message_of_its_own_behind_a_system_message(roll: Roll) -> None:
    row = roll(textarena_env("Bandit-v0"), ["[red]"], prompts=[[{"role": "system", "content": "Play."}]])
    assert [message["role"] for message in row["transcript"]] == ["system", "user", "assistant"]
    assert contents(row)[1].startswith("You are in a room with 5 buttons")


def test_a_prompt_that_is_a_string_is_refused(roll: Roll) -> None:
    with pytest.raises(SetupError, match="use prompts that are lists of messages"):
        roll(textarena_env("Bandit-v0"), ["[red]"], prompts=["Play."])


# Every game for one player

MOVES = {
    "2048-v0": ["[up]", "[left]", "?"],
    "Bandit-v0": ["[red]", "?", "[blue]"],
    "Blackjack-v0": ["[Hit]", "[Stand]", "?"],
    "Countdown-v0": ["[0 1 -]", "[0 0 +]"],
    "Crosswords-v0": ["[0 0 A]", "?"],
    "Cryptarithm-v0": ["[S 9]", "[M 9]"],
    "FifteenPuzzle-v0": ["[up]", "[down]", "?"],
    "FrozenLake-v0": ["[down]", "[up]", "?"],
    "GuessTheNumber-v0": ["[4]", "[4]", "[5]"],
    "LightsOut-v0": ["(1, 1)", "[1, 2]", "?"],
    "LogicPuzzle-v0": ["[X]", "?"],
    "Mastermind-v0": ["[1 2 3 4]", "[1 2]", "[4 3 2 1]"],
    "Minesweeper-v0": ["[3 3]", "?", "[0 0]"],
    "PegJump-v0": ["[12 5]", "?"],
    "RushHour-v0": ["[A+]", "[A-]", "[X+]"],
    "Secretary-v0": ["[continue]", "?", "[accept]"],
    "Set-v0": ["[0, 1, 2]", "?", "[3, 4, 5]"],
    "Slitherlink-v0": ["[h 0 0]", "[v 9 9]", "[v 1 1]"],
    "Sokoban-v0": ["[up]", "[left]", "[down]"],
    "Sudoku-v0": ["[1 1 1]", "?"],
    "ThreeCardMonte-v0": ["[7]", "[1]"],
    "TowerOfHanoi-v0": ["[A C]", "[A C]", "[A B]"],
}
OF_WORDS = {
    "Hangman-v0": ["[e]", "[e]", "[Q]"],
    "WordLadder-v0": ["[cold]", "[cord]"],
    "WordSearch-v0": ["[0 0 0 4]", "[0 0 0 4]", "?"],
    "Wordle-v0": ["[stone]", "[stone]", "[crane]"],
}


@pytest.mark.parametrize("game", MOVES)
def test_a_game_keeps_to_the_contract(game: str) -> None:
    passed = check_env(textarena_env(game), prompt=prompt(), actions=[*MOVES[game], *["no idea"] * 3])
    assert "an_episode_that_has_ended_does_not_go_on" in passed


# Seeds

DRAWS_IN_EVERY_TURN = ["[up]", "[left]", "[down]", "[right]"] * 6


def test_trajectories_that_run_at_once_with_one_seed_are_one_that_runs_alone() -> None:
    factory = textarena_env("2048-v0")
    alone = played(textarena_env("2048-v0"), DRAWS_IN_EVERY_TURN, seed=7)
    other = played(factory, DRAWS_IN_EVERY_TURN, seed=8)
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.is_set():
            random.seed(5)
            random.random()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            seeds = [7, 8] * 12
            episodes = list(pool.map(lambda seed: played(factory, DRAWS_IN_EVERY_TURN, seed=seed), seeds))
    finally:
        is_over.set()
        disturber.join()
    assert alone != other
    assert all(episode == (alone if seed == 7 else other) for episode, seed in zip(episodes, seeds, strict=True))


def test_trajectories_that_take_turns_do_not_disturb_each_other() -> None:
    factory = textarena_env("2048-v0")
    alone = played(factory, DRAWS_IN_EVERY_TURN, seed=7)
    envs: list[Any] = [factory() for _ in range(3)]
    seen: list[Any] = [[opening(env, 7)] for env in envs]
    for action in DRAWS_IN_EVERY_TURN[: len(alone) - 1]:
        for env, episode in zip(envs, seen, strict=True):
            result = env.step({"role": "assistant", "content": action})
            episode.append((result.messages, result.reward, result.terminated))
    assert seen == [alone] * 3


def test_the_processs_own_generator_is_neither_read_nor_changed() -> None:
    random.seed(3)
    before = random.getstate()
    for game in ["2048-v0", "RushHour-v0", "Secretary-v0"]:
        played(textarena_env(game), MOVES[game], seed=11)
    assert random.getstate() == before


def test_textarena_used_beside_an_adapter_still_draws_from_the_processs_generator() -> None:
    textarena_env("GuessTheNumber-v0")
    game = textarena.make("GuessTheNumber-v0-raw")
    game.reset(num_players=1, seed=4)
    drawn = random.random()
    assert (game.game_number, drawn) == (random.Random(4).randint(1, 20), _second_draw(4))


def _second_draw(seed: int) -> float:
    generator = random.Random(seed)
    generator.randint(1, 20)
    return generator.random()


def test_a_game_that_draws_while_it_is_made_begins_by_its_seed() -> None:
    factory = textarena_env("Countdown-v0", numbers=None, target=None)
    assert played(factory, [], seed=1) == played(factory, [], seed=1)
    assert len({str(played(factory, [], seed=seed)) for seed in range(5)}) == 5


def test_a_game_takes_nothing_over_from_one_before(word_lists: None) -> None:
    factory = textarena_env("WordSearch-v0")  # counts wrong guesses from when it was made
    guesses = [f"[0 0 0 {column}]" for column in range(1, 4)]
    assert played(factory, guesses) == played(factory, guesses)
    assert "19 incorrect tries remaining" in played(factory, guesses)[1][0][0]["content"]


def test_a_group_lays_out_its_puzzle_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from textarena.envs.Sudoku.env import SudokuEnv

    resets: list[int] = []
    reset = SudokuEnv.reset

    def slow_reset(self: Any, num_players: int, seed: int) -> None:
        resets.append(seed)
        time.sleep(0.05)
        reset(self, num_players=num_players, seed=seed)

    monkeypatch.setattr(SudokuEnv, "reset", slow_reset)
    factory = textarena_env("Sudoku-v0")
    resets.clear()
    with ThreadPoolExecutor(8) as pool:
        openings = list(pool.map(lambda _: str(played(factory, [], seed=5)), range(16)))
    assert len(set(openings)) == 1
    assert resets == [5]


SCRIPT = """
import hashlib, json, sys
from envs.test_textarena import MOVES, OF_WORDS, played
from trl_rollouts.envs.textarena import textarena_env
moves = MOVES | OF_WORDS
seen = {game: str(played(textarena_env(game), moves[game], seed=1)) for game in moves}
sys.stderr.write("SEEN" + json.dumps({game: hashlib.sha256(text.encode()).hexdigest() for game, text in seen.items()}))
"""


def test_a_seed_begins_the_same_game_in_every_process(word_lists: None) -> None:
    """Python's hashes, and so the order of its sets, differ from process to process."""

    def seen(hash_seed: str) -> Any:
        paths = os.pathsep.join(["tests", *sys.path])
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, env=environment
        )
        assert run.returncode == 0, run.stderr
        return json.loads(run.stderr.rpartition("SEEN")[2])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(seen, ["1", "2"])
    assert first == second
    assert first.keys() == MOVES.keys() | OF_WORDS.keys()


def test_a_game_of_ones_own_gets_a_generator_of_its_own(own_game: Callable[..., str]) -> None:
    factory = textarena_env(own_game(draw=lambda: random.randint(1, 10**6)))
    before = random.getstate()
    assert played(factory, [], seed=2) == played(factory, [], seed=2)
    assert random.getstate() == before


def test_a_game_whose_seed_does_not_tell_how_it_begins_is_refused(own_game: Callable[..., str]) -> None:
    with pytest.raises(SetupError, match="begins differently with the same seed, so trajectories of a group"):
        textarena_env(own_game(draw=lambda: os.urandom(8)))


def test_a_game_of_ones_own_is_made_for_each_trajectory(own_game: Callable[..., str]) -> None:
    made: list[int] = []
    factory = textarena_env(own_game(draw=lambda: random.random(), on_make=lambda: made.append(1)))
    made.clear()
    assert played(factory, [], seed=2) == played(factory, [], seed=2)
    assert made == [1, 1]


def test_a_game_that_asks_a_model_begins_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "none")
    factory = textarena_env("GuessWho-v0")
    assert played(factory, [], seed=2) == played(factory, [], seed=2)


@pytest.fixture
def own_game() -> Iterator[Callable[..., str]]:
    """Registers a game that shows what it draws."""
    registry = textarena.envs.registration.ENV_REGISTRY
    known = set(registry)

    class Own(textarena.Env):
        def __init__(self, draw: Callable[[], Any], on_make: Callable[[], None]) -> None:
            self.draw = draw
            on_make()

        def reset(self, num_players: int, seed: int | None = None) -> None:
            self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
            self.state.reset(player_prompt_function=lambda player_id, game_state: str(self.draw()))

        def step(self, action: str) -> Any:
            return self.state.step()

    def register(draw: Callable[[], Any], on_make: Callable[[], None] = lambda: None) -> str:
        textarena.register("Own-v0", entry_point=Own, draw=draw, on_make=on_make)
        return "Own-v0"

    yield register
    for name in set(registry) - known:
        del registry[name]


# Word lists


@pytest.fixture(scope="module")
def word_lists(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A small NLTK_DATA, laid out as the real one is."""
    import nltk

    folder = tmp_path_factory.mktemp("nltk_data")
    words, tagger = folder / "corpora/words", folder / "taggers/averaged_perceptron_tagger_eng"
    words.mkdir(parents=True)
    tagger.mkdir(parents=True)
    ladder = "cold cord card ward warm worm word wood food fool foot boot boat coat goat stone crane about plane trade"
    for name in ("en", "en-basic"):
        (words / name).write_text("\n".join(ladder.split()))
    for name, value in {"weights": {"bias": {"NN": 1.0}}, "tagdict": {}, "classes": ["NN", "VB"]}.items():
        (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(folder))
        patch.setattr(nltk.data, "path", [str(folder)])
        yield


@pytest.mark.parametrize("game", OF_WORDS)
def test_a_game_of_words_keeps_to_the_contract(word_lists: None, game: str) -> None:
    passed = check_env(textarena_env(game), prompt=prompt(), actions=[*OF_WORDS[game], *["?"] * 20])
    assert "an_episode_that_has_ended_does_not_go_on" in passed


def test_nothing_is_downloaded(word_lists: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    asked: list[Any] = []
    monkeypatch.setattr(nltk, "download", asked.append)
    factory = textarena_env("Wordle-v0")
    played(factory, ["[stone]"])
    assert asked == []
    nltk.download("words")  # is as before
    assert asked == ["words"]


def test_missing_word_lists_are_named_at_once(tmp_path: Path) -> None:
    script = "from trl_rollouts.envs.textarena import textarena_env\ntextarena_env('Wordle-v0')"
    environment = {**os.environ, "NLTK_DATA": str(tmp_path), "HOME": str(tmp_path)}
    failed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment
    )
    assert failed.stderr.splitlines()[-1] == (
        "trl_rollouts.errors.SetupError: TextArena's 'Wordle-v0' needs data of NLTK's that is not on this machine. "
        "Once, with a network: python -m nltk.downloader averaged_perceptron_tagger_eng words. It then looks where "
        "NLTK_DATA says, too."
    )


# What is refused


@pytest.mark.parametrize(
    ("game", "options", "words"),
    [
        ("GuessTheNumbr-v0", {}, "no game 'GuessTheNumbr-v0'. Ids near it: GuessTheNumber-v0"),
        ("zzz", {}, r"textarena.pprint_registry_detailed\(\) lists all"),
        (["Bandit-v0"], {}, r"TextArena has no game \['Bandit-v0'\]"),
        ("Bandit-v0", {"num_turn": 3}, "'Bandit-v0' cannot be made: TypeError: .*num_turn"),
        ("TicTacToe-v0", {}, "cannot begin with one player: AssertionError: .* plays single-player games only"),
        ("QuantumTicTacToe-v0", {}, r"no single-player game \(it has a TwoPlayerState\)"),
        ("PublicGoodsGame-v0", {}, r"no single-player game \(it has a FFAMultiPlayerState\)"),
        ("BabyAiText-v0", {}, "cannot be made: .*No module named 'gym'"),
    ],
)
def test_what_cannot_work_is_refused_at_once(game: Any, options: Any, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        textarena_env(game, **options)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="its code is Python 3.12's")
def test_a_game_that_needs_a_later_python_says_so() -> None:
    with pytest.raises(SetupError, match="This is Python 3.11; the game needs a later one"):
        textarena_env("Klondike-v0")


def test_a_game_that_asks_a_model_names_the_key_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(SetupError, match="set the OPENROUTER_API_KEY"):
        textarena_env("TwentyQuestions-v0")


def test_without_textarena_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(SetupError, match="pip install 'trl-rollouts.textarena.'"):
        textarena_env("Bandit-v0")
