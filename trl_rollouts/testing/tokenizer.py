"""A real chat tokenizer and a real model, built in memory: no files, no network.

Every byte is one token and its id is the byte: `"A"` is 65. So any text survives encoding and decoding, and tests can
spell their ids out. Special tokens and the tags that chat models train on follow from 256 on, and merges, if asked
for, after them. The chat template is ChatML with tools in the words of Qwen and Hermes.

The model has random weights. It trains and generates; it knows nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # 256, 257, 258
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # 259 to 264

_CHAT_TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\nYou may call functions. Their signatures, within <tools></tools>:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n\nA call is one JSON object within <tool_call></tool_call>:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function or tool_call %}
            {%- set arguments = call.arguments if call.arguments is string else (call.arguments | tojson) %}
            {{- '\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + arguments + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""".strip()


def byte_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> "PreTrainedTokenizerFast":
    """A byte-level chat tokenizer; saves, loads and pickles like any other.

    Args:
        merges: pairs of tokens that encode as one, in order of priority. With `("h", "e"), ("l", "l"), ("ll", "o"),
            ("he", "llo")`, the ids of "he" and "llo" decode to "hello", which encodes as a third id: sampled ids are
            not what their text encodes to, as with real vocabularies.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [(_spelled(left), _spelled(right)) for left, right in merges]
    # The added tokens are part of the vocabulary, so that merges come after them and leave their ids alone.
    tokens = [*_byte_characters(), *_SPECIAL, *_TAGS, *(left + right for left, right in pairs)]
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"Two merges give the same token, or one gives a token that exists already: {list(merges)}")
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in _TAGS])
    fast: PreTrainedTokenizerFast = _untyped(PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def tiny_model(tokenizer: "PreTrainedTokenizerFast", *, seed: int = 0) -> "PreTrainedModel":
    """A one-layer Llama with random float32 weights over the tokenizer's vocabulary. Leaves the global seed alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = _untyped(LlamaForCausalLM)(config)
    return model


def _untyped(factory: Any) -> Any:
    """Transformers ships annotations, but not for these constructors."""
    return factory


def _byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself where it is visible, else one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def _spelled(token: str) -> str:
    characters = _byte_characters()
    return "".join(characters[byte] for byte in token.encode())
