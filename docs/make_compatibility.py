"""Write docs/compatibility.md: what holds for each chat template that TRL ships, found by trying it.

    python docs/make_compatibility.py            write it (a minute)
    python docs/make_compatibility.py --check    exit with 1 if what it was made from has changed since
    python docs/make_compatibility.py --verify   exit with 1 if it is not what would be written

Run with tests/ on the path (`make compatibility`), which has the templates and the true tokenizers. `--check` is for
`make check`: a second, and no tokenizer. `--verify` is for the tests: it tries everything again.
"""

import difflib
import hashlib
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}

from families import (
    HAS_TOKENIZERS,
    MULTIPLY,
    NAMES,
    TEMPLATES,
    bridge_drift,
    chat,
    conversation,
    drops_thoughts,
    family_of,
    keeps_history,
)

from trl_rollouts import RolloutError
from trl_rollouts.parsing import find_format
from trl_rollouts.parsing.thoughts import opened_thoughts

NUM_TURNS = 8
PATH = Path(__file__).with_name("compatibility.md")

HEAD = f"""# Compatibility

Every chat template that TRL {version("trl")} ships, tried out. Written by `make compatibility`; `make check` fails
when it is stale.

- **tokenizer**: the family's own, or in parentheses a stand-in with the template's special tokens added.
- **user turns**, **tool turns**, **two calls**: tokens in which the bridges of {NUM_TURNS} turns differ from the
  template's own words in the same place. "refused" raises an error that says why, before anything is trained.
- **calls**: the format in which calls are read, found by reading a call back from the template's own text.
- **thoughts**: "opened" where the generation prompt opens them, so that a completion begins inside.
- **history**: what the template does to earlier turns when it renders the conversation again. Here nothing is rendered
  again: where a template rewrites, what was sampled is kept as it was sampled, thoughts included. DeepSeek's opens
  tool outputs in the first round only; a bridge opens them in every round, which is one token more in each later one.

A family outside this list works the same way: its template is proved at the first call, or refused.

| template | tokenizer | user turns | tool turns | two calls | calls | thoughts | history |
|---|---|---|---|---|---|---|---|
"""


def row(name: str) -> str:
    """One template's line."""
    tokenizer, family = chat(name), family_of(name)
    cells = [name, family.tokenizer if family.is_true else f"({family.tokenizer})"]
    cells.append(_drift(name, "user"))
    refusal = _refusal(name)
    cells += [refusal or _drift(name, "tool"), refusal or _drift(name, "tools")]
    cells.append("" if refusal else find_format(tokenizer).name)
    cells.append("opened" if opened_thoughts(tokenizer.render(conversation("user", 0))) else "")
    kinds = ("user",) if refusal else ("user", "tool")
    rewritten = [kind for kind in kinds if not keeps_history(tokenizer, conversation(kind, NUM_TURNS), None)]
    habits = [f"rewrites {' and '.join(rewritten)} turns"] * bool(rewritten)
    cells.append(", ".join(habits + ["drops thoughts"] * drops_thoughts(tokenizer)))
    return "| " + " | ".join(cells) + " |\n"


def _drift(name: str, kind: str) -> str:
    tools = None if kind == "user" else [MULTIPLY]
    try:
        return str(bridge_drift(chat(name), conversation(kind, NUM_TURNS), tools))
    except RolloutError as error:
        return "one call a turn" if kind == "tools" and "ingle tool" in str(error) else "refused"


def _refusal(name: str) -> str:
    """Why `tool_rollout` refuses the template; empty where it takes it."""
    tokenizer = chat(name)
    for what, prove in {
        "refused: shows no tools": lambda: tokenizer.prompt(conversation("user", 0), [MULTIPLY]),
        "refused: shows no answers": lambda: tokenizer.prove_answers("tool"),
        "refused: unknown calls": lambda: find_format(tokenizer),
    }.items():
        try:
            prove()
        except RolloutError:
            return what
    return ""


def table() -> str:
    """All lines."""
    with ProcessPoolExecutor() as pool:
        return "".join(pool.map(row, NAMES, chunksize=4))


def digest() -> str:
    """A hash of what the table is made from."""
    root = PATH.parents[1]
    package = root / "trl_rollouts"
    sources = [package / "tokens.py", package / "bridging.py", *sorted((package / "parsing").glob("*.py"))]
    sources += [root / "tests" / "families.py", Path(__file__), *(TEMPLATES / f"{name}.jinja" for name in NAMES)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def main() -> int:
    mark = f"\n<!-- made from {digest()} -->\n"
    if "--check" in sys.argv:
        is_fresh = PATH.exists() and PATH.read_text().endswith(mark)
        print(f"docs/compatibility.md {'is up to date' if is_fresh else 'is stale: run `make compatibility`'}")
        return 0 if is_fresh else 1
    if not HAS_TOKENIZERS:
        print("The tokenizers are missing: `make compatibility` fetches them with npm.")
        return 1
    text = HEAD + table() + mark
    if "--verify" in sys.argv:
        sys.stdout.writelines(difflib.unified_diff(PATH.read_text().splitlines(True), text.splitlines(True)))
        return int(PATH.read_text() != text)
    PATH.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
