"""Chat templates of the model families, as TRL ships them, with their families' tokenizers.

The true tokenizers are fetched by `make setup`. A family whose tokenizer is not to be had has a stand-in: another
family's with the special tokens of its template added, so that its template is exact and its words are not.
"""

import copy
import functools
import importlib.util
import itertools
import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trl_rollouts.tokens import ChatTokenizer
from trl_rollouts.trajectory import Message

TOKENIZERS = Path(__file__).parents[1] / ".cache" / "tokenizers"
HAS_TOKENIZERS = any(TOKENIZERS.glob(".fetched-*"))
TEMPLATES = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"  # type: ignore[union-attr, index]
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))

MULTIPLY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first factor."},
                "b": {"type": "integer", "description": "The second factor."},
            },
            "required": ["a", "b"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Family:
    prefix: str
    """What the names of its templates begin with."""
    tokenizer: str
    eos_tokens: tuple[str, ...]
    """As its checkpoints' generation_config has them, the tokenizer's own first."""
    is_true: bool = True
    """Whether `tokenizer` is the family's own."""


_CHATML, _GEMMA4 = ("<|im_end|>", "<|endoftext|>"), ("<turn|>", "<|tool_response>", "<eos>")
_LLAMA3 = ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>",)
FAMILIES = (
    Family("qwen2_5", "qwen2_5", _CHATML),
    Family("qwen3_5", "qwen3", _CHATML, False),
    Family("qwen3_6", "qwen3", _CHATML, False),
    Family("qwen3_8", "qwen3", _CHATML, False),
    Family("qwen3", "qwen3", _CHATML),
    Family("llama3_2", "llama3_1", _LLAMA3),  # one vocabulary
    Family("llama3_1", "llama3_1", _LLAMA3),
    Family("llama3", "llama3", _LLAMA3[:2]),
    Family("gemma3", "gemma3", ("<end_of_turn>", "<eos>")),
    Family("gemma4", "gemma3", _GEMMA4, False),
    Family("diffusion_gemma", "gemma3", _GEMMA4, False),
    Family("gemma", "gemma2", ("<end_of_turn>", "<eos>")),
    Family("deepseekv3", "deepseek_v3", _DEEPSEEK),
    Family("deepseek_r1_distill", "deepseek_v3", _DEEPSEEK, False),
    Family("gptoss", "gptoss", ("<|return|>", "<|endoftext|>", "<|call|>")),
    Family("cohere", "qwen3", ("<|END_OF_TURN_TOKEN|>",), False),
    Family("glm4moe", "qwen3", ("<|endoftext|>", "<|user|>", "<|observation|>"), False),
    Family("idefics3", "qwen3", ("<end_of_utterance>",), False),
    Family("smolvlm", "qwen3", ("<end_of_utterance>",), False),
    Family("lfm2", "qwen3", ("<|im_end|>",), False),
    Family("llava_next", "llama2", ("</s>",), False),
    Family("muse_glimmer", "qwen3", ("<|eot|>",), False),
    Family("nemotron_3", "qwen3", ("<|im_end|>",), False),
    Family("phi3", "llama2", ("<|end|>", "<|endoftext|>"), False),
)

_SPECIAL = re.compile(
    r"<\|[\w/\" ]+\|>|<\|[\w/]+>|<[\w/]+\|>|<｜[^｜<>]+｜>|<end_of_\w+>|<start_of_turn>|\[/?(?:INST|gMASK)\]|<sop>"
    r"|</?(?:tool_call|tool_response|think|arg_key|arg_value)>"
)


def family_of(template: str) -> Family:
    return next(family for family in FAMILIES if template.startswith(family.prefix))


@functools.cache
def _loaded(name: str) -> Any:
    folder = TOKENIZERS / name
    if name == "deepseek_v3":  # its configuration names a class that transformers 5 builds in another way
        return PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            bos_token="<｜begin▁of▁sentence｜>",
            eos_token=_DEEPSEEK[0],
        )
    return AutoTokenizer.from_pretrained(folder)


@functools.cache
def tokenizer_of(family: Family) -> Any:
    """The family's tokenizer, or its stand-in. Shared: leave it as it is."""
    tokenizer = copy.deepcopy(_loaded(family.tokenizer))
    added = set(family.eos_tokens)
    if not family.is_true:
        texts = [(TEMPLATES / f"{name}.jinja").read_text() for name in NAMES if family_of(name) is family]
        added |= {token for text in texts for token in _SPECIAL.findall(text)}
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in sorted(added)])
    tokenizer.eos_token = family.eos_tokens[0]
    return tokenizer


def chat(template: str, **kwargs: Any) -> ChatTokenizer:
    """The chat tokenizer of one of TRL's templates."""
    family = family_of(template)
    tokenizer, text = tokenizer_of(family), (TEMPLATES / f"{template}.jinja").read_text()
    eos_token_ids = tokenizer.convert_tokens_to_ids(list(family.eos_tokens))
    return ChatTokenizer(tokenizer, chat_template=text, eos_token_ids=eos_token_ids, **kwargs)


def conversation(kind: str, num_turns: int) -> list[Message]:
    """A question, and turns of the assistant's with what follows each, of the kind "user", "tool" or "tools" (two)."""
    messages: list[Message] = [{"role": "user", "content": "What is 6 times 7?"}]
    for turn in range(num_turns):
        if kind == "user":
            messages += [
                {"role": "assistant", "content": f"It is {turn}."},
                {"role": "user", "content": f"No {turn}!"},
            ]
            continue
        ids = [f"call{turn:04}{index}" for index in range(2 if kind == "tools" else 1)]
        calls = [
            {"id": call_id, "type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": turn}}}
            for call_id in ids
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": i, "name": "multiply", "content": f"{6 * turn}"} for i in ids]
    return messages


def bridge_drift(chat: ChatTokenizer, messages: list[Message], tools: list[dict[str, Any]] | None) -> int:
    """Tokens in which the bridges of a conversation differ from the template's own words in the same place.

    The words are the end of the render of the whole conversation so far, encoded whole: all that stands behind the
    assistant's last turn, with the token that ended it.
    """
    drift = 0
    ends = [index for index, message in enumerate(messages) if message["role"] != "assistant"]
    ends = [index for index in ends if index + 1 == len(messages) or messages[index + 1]["role"] == "assistant"]
    for end in ends[1:]:
        start = max(index for index in range(end) if messages[index]["role"] == "assistant") + 1
        observation = messages[start : end + 1]
        end_id = chat._bridge.prove(observation).end_id
        bridge = [end_id, *chat.bridge(observation, last_id=end_id)]
        whole = chat.encode(chat.render(messages[: end + 1], tools))
        matching = SequenceMatcher(None, whole[-len(bridge) :], bridge, autojunk=False).get_matching_blocks()
        drift += len(bridge) - sum(block.size for block in matching)
    return drift


def keeps_history(chat: ChatTokenizer, messages: list[Message], tools: list[dict[str, Any]] | None) -> bool:
    """Whether the template writes earlier turns as it wrote them when they were the last."""
    texts = [
        chat.render(messages[:index], tools)
        for index in range(1, len(messages) + 1)
        if index == len(messages) or messages[index]["role"] == "assistant"
    ]
    return all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def drops_thoughts(chat: ChatTokenizer) -> bool:
    """Whether the template leaves thoughts out once the user has answered, whether they are in the content or not."""
    question, answer = {"role": "user", "content": "?"}, {"role": "user", "content": "!"}
    inline = {"role": "assistant", "content": "<think>\nTHOUGHT\n</think>\n\nIt is 42."}
    if "THOUGHT" not in chat.render([question, inline, answer]):
        return True
    apart = {"role": "assistant", "content": "It is 42.", "reasoning_content": "THOUGHT", "thinking": "THOUGHT"}
    is_shown = "THOUGHT" in chat.render([question, apart])
    return is_shown and "THOUGHT" not in chat.render([question, apart, answer])
