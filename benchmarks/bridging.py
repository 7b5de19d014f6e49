"""What is tokenised in a trajectory, by its number of turns: bridges against rendering the conversation again.

    make bench

Needs the true tokenizers that `make setup` fetches. `ratio` is the time of the other way over ours, in one run.
"""

import json
import time

from families import HAS_TOKENIZERS, chat

NUM_TURNS = (2, 8, 32, 128)
OBSERVATION = "The file has 240 lines; the first one that matches is this: " + "x = compute(x) " * 12


def bridged(num_turns: int) -> tuple[int, float]:
    """Characters tokenised, seconds."""
    tokenizer = chat("qwen3")
    num_chars, encode = 0, tokenizer.encode

    def counted(text: str, **kwargs: object) -> list[int]:
        nonlocal num_chars
        num_chars += len(text)
        return encode(text, **kwargs)

    tokenizer.encode = counted
    started = time.perf_counter()
    row = tokenizer.prompt([{"role": "user", "content": "Look for it."}])
    for _ in range(num_turns):
        row += tokenizer.bridge([{"role": "user", "content": OBSERVATION}], last_id=tokenizer.eos_token_id)
    return num_chars, time.perf_counter() - started


def rendered_again(num_turns: int) -> tuple[int, float]:
    """Characters tokenised, seconds."""
    tokenizer = chat("qwen3")
    num_chars, started = 0, time.perf_counter()
    messages = [{"role": "user", "content": "Look for it."}]
    for _ in range(num_turns):
        messages += [{"role": "assistant", "content": "Go on."}, {"role": "user", "content": OBSERVATION}]
        text = tokenizer.render(messages)
        num_chars += len(text)
        tokenizer.encode(text)
    return num_chars, time.perf_counter() - started


def main() -> dict[str, list[float]] | dict[str, str]:
    if not HAS_TOKENIZERS:
        return {"skipped": "no tokenizers: `make bench` fetches them with npm"}
    bridged(1)
    ours, others = [bridged(num) for num in NUM_TURNS], [rendered_again(num) for num in NUM_TURNS]
    return {
        "turns": list(NUM_TURNS),
        "chars_per_turn": [round(chars / num) for num, (chars, _) in zip(NUM_TURNS, ours, strict=True)],
        "chars_per_turn_again": [round(chars / num) for num, (chars, _) in zip(NUM_TURNS, others, strict=True)],
        "ratio": [round(b / a, 1) for (_, a), (_, b) in zip(ours, others, strict=True)],
    }


if __name__ == "__main__":
    print(json.dumps({"benchmark": "bridging", **main()}))
