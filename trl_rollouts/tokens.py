"""The one place where text becomes token ids: a prompt, once, and each observation as it comes (`bridging`).

Sampled ids never pass through here on their way to the trainer.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from .bridging import Bridge, alternatives
from .errors import PromptTooLongError, SetupError, TemplateError
from .messages import arguments_as_text, in_parts, marked, message_text, plain
from .trajectory import Message

_PLAIN_TEXT = "Hello, world!\n  x = 1"
_SHOWN = "SHOWNtext"
_MAX_CHARS_PER_TOKEN_KEPT = 8


class ChatTokenizer:
    """A tokenizer with the chat template and the arguments that the trainer uses.

    Args:
        tokenizer: a Hugging Face tokenizer, or a processor that holds one.
        chat_template: replaces the tokenizer's own.
        template_kwargs: passed to every render, such as `enable_thinking`.
        eos_token_ids: ids that end a turn, besides the tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor wraps its tokenizer
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None) or None
        self._template_kwargs = template_kwargs or {}
        self.settings = (self._tokenizer, self.chat_template, self._template_kwargs, frozenset(eos_token_ids))
        """What was given. Another chat tokenizer with equal ones would be this one again."""
        if isinstance(self.chat_template, dict):
            raise TemplateError(
                f"The tokenizer has several chat templates ({', '.join(self.chat_template)}). Set "
                "tokenizer.chat_template to one of them."
            )
        if self._tokenizer.eos_token_id is None:
            raise TemplateError("The tokenizer has no eos_token, so no turn can end. Set tokenizer.eos_token.")
        self.eos_token_id: int = self._tokenizer.eos_token_id
        self.eos_token_ids = frozenset({self.eos_token_id, *eos_token_ids})
        if (back := self._decode(self.encode(_PLAIN_TEXT))) != _PLAIN_TEXT:
            raise SetupError(
                f"The tokenizer encodes {_PLAIN_TEXT!r} to ids that decode to {back!r}. It is loaded as another class "
                "than it was saved as (transformers 5 makes a LlamaTokenizer of files that are none); load "
                "it as PreTrainedTokenizerFast, or beside the model's config.json."
            )
        self._shown: set[tuple[tuple[str, bool, int], ...]] = set()
        self._bridge = Bridge(self)
        added = self._tokenizer.added_tokens_decoder
        self.special_ids = frozenset({*self.eos_token_ids, *(i for i, token in added.items() if token.special)})
        in_template = str(self.chat_template)
        control = {
            token.content
            for token_id, token in added.items()
            if token_id in self.special_ids or (token.content.strip() and token.content in in_template)
        }
        self.control_words = alternatives(control | set(self._tokenizer.all_special_tokens))
        """Matches the text of a token that means something to the model beyond its text."""

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """`text` as ids. With `special_tokens`, as the tokenizer wraps a whole text (a BOS that the text does not
        have yet).
        """
        bos = self._tokenizer.bos_token
        wrap = special_tokens and not (bos and text.startswith(bos))
        return list(self._tokenizer(_encodable(text), add_special_tokens=wrap)["input_ids"])

    def encode_words(self, text: str) -> list[int]:
        """`text` as the words it spells, where `encode` would make a control token of it."""
        ids = self.encode_rest(text, split_special_tokens=True)
        if any(self.control_words.search(self.decode_one(token_id)) for token_id in ids):
            # That splits none but special tokens. No token begins in the middle of another one.
            ids = self.encode_rest(text[:1]) + self.encode_rest(text[1:])
        return ids

    def encode_inline(self, text: str) -> list[int]:
        """`text` behind a completion, within the same turn. It holds no control token, whatever it spells."""
        ids: list[int] = []
        start = 0
        for word in self.control_words.finditer(text):
            ids += self.encode_rest(text[start : word.start()]) + self.encode_words(word.group())
            start = word.end()
        return ids + self.encode_rest(text[start:])

    def encode_rest(self, text: str, **kwargs: Any) -> list[int]:
        """`text` as it continues another text: SentencePiece puts a space before the first word of a whole one."""

        def encode(text: str) -> list[int]:
            return list(self._tokenizer(_encodable(text), add_special_tokens=False, **kwargs)["input_ids"])

        if not self._adds_space:
            return encode(text)
        before = encode("\n")  # a byte token in SentencePiece's vocabularies: it merges with nothing
        whole = encode("\n" + text)
        if whole[: len(before)] != before:
            raise TemplateError(f"The tokenizer merges a newline with what follows it: {text!r:.200}.")
        return whole[len(before) :]

    @cached_property
    def _adds_space(self) -> bool:
        return str(self._tokenizer.decode(2 * self.encode("a"))) != "aa"

    def decode(self, token_ids: list[int]) -> str:
        """A completion's text, without the token that ended the turn, and nothing else removed or tidied."""
        num = len(token_ids)
        while num and token_ids[num - 1] in self.eos_token_ids:
            num -= 1
        return self._decode(token_ids[:num])

    def cut(self, text: str, max_tokens: int) -> str:
        """`text`, or its beginning and its end with a mark between them where it has more than `max_tokens` tokens.

        Of a text of many characters a token the middle is left out unread, and it may come out shorter than that.
        """
        if len(text.encode(errors="replace")) <= max_tokens:
            return text
        span = _MAX_CHARS_PER_TOKEN_KEPT * max_tokens
        if len(text) > 2 * span:  # the middle is not even encoded
            head, tail = self.encode(text[:span]), self.encode(text[-span:])
        else:
            head = tail = self.encode(text)
            if len(head) <= max_tokens:
                return text
        num_first = max_tokens // 2
        first = self._decode(head[:num_first]).rstrip("\ufffd")  # half of a character
        last = self._decode(tail[-(max_tokens - num_first) :]).lstrip("\ufffd")
        return f"{first}\n[... {len(text) - len(first) - len(last)} characters left out ...]\n{last}"

    def decode_one(self, token_id: int) -> str:
        return self._decode([token_id])

    def decode_end(self, token_ids: list[int]) -> str:
        """The text of the last few ids."""
        return self._decode(token_ids[-16:])

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def prompt(self, messages: str | list[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of a conversation that the model is to continue. A string is taken as rendered already.

        Raises:
            TemplateError: there is no template, it fails, or it does not show a message.
            SetupError: it does not show the tools.
        """
        if isinstance(messages, str):
            text, bare = messages, ""
        else:
            text = self.render(messages, tools=list(tools) or None)
            bare = self.render(messages) if tools else ""
            self._check_shown(messages)
        functions = [tool.get("function", tool) for tool in tools]
        hidden = [function.get("name") for function in functions if not _is_tool_shown(function, text, bare)]
        if hidden:
            what = f"The prompt does not show the tools {hidden} to the model."
            if isinstance(messages, str):
                raise TemplateError(f"{what} It is a string, which no template is applied to: use messages.")
            raise SetupError(
                f"{what} Use a chat template that renders `tools` (TRL ships some in trl/chat_templates), or describe "
                "each in a system message, by its name and the first line of its docstring, and pass parser=."
            )
        token_ids = self.encode(text, special_tokens=isinstance(messages, str))
        if not token_ids:
            raise TemplateError("The prompt is empty.")
        return token_ids

    def _check_shown(self, messages: list[Message]) -> None:
        """Some templates skip a role, a second system message or a call without a word."""
        if messages[-1]["role"] == "assistant" and messages[-1].get("tool_calls"):
            raise TemplateError("The prompt ends with a tool call of the assistant's. Add its answer, or take it out.")
        kinds = tuple((m["role"], bool(message_text(m)), len(m.get("tool_calls") or ())) for m in messages)
        if kinds in self._shown:
            return
        text = self.render([marked(plain(message), f"SHOWN{index}x") for index, message in enumerate(messages)])
        for index, (role, has_text, num_calls) in enumerate(kinds):
            for what, is_there in (("text", has_text), ("call", num_calls > 0)):
                if is_there and f"SHOWN{index}x{what}" not in text:
                    raise TemplateError(
                        f"The chat template does not show the {what} of message {index} of a prompt, whose role is "
                        f"{role!r} (the roles are {[kind[0] for kind in kinds]}). Leave it out, or use a template "
                        "that shows it."
                    )
        self._shown.add(kinds)

    def written_calls(self, functions: Sequence[dict[str, Any]], call_ids: Sequence[str]) -> str:
        """A turn in which the assistant calls `functions`, dicts of `name` and `arguments`, as the template writes it.

        Raises:
            TemplateError: the template fails on it.
        """
        pairs = list(zip(functions, call_ids, strict=True))
        calls = [{"id": call_id, "type": "function", "function": function} for function, call_id in pairs]
        answers = [
            {"role": "tool", "tool_call_id": call_id, "name": function["name"], "content": "."}
            for function, call_id in pairs
        ]
        question = {"role": "user", "content": "."}
        before = self.encode(self.render([question]))
        ids = self.encode(self.render([question, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]))
        start = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))
        end = next((i for i, token_id in enumerate(ids[start:], start) if token_id in self.eos_token_ids), len(ids))
        return self.decode(ids[start:end])

    def bridge(self, observation: list[Message], *, last_id: int) -> list[int]:
        """The ids that lead from a completion to the model's next turn; see `Bridge.ids`."""
        return self._bridge.ids(observation, last_id=last_id)

    def prove_answers(self, role: str) -> None:
        """Raises `SetupError` where an answer of that role ("tool", "user") cannot be shown.

        Found out row by row, it would mask the rows that call a tool or write code and train the others: both would
        be unlearned.
        """
        answer = {"role": role, "content": "."}
        if role == "tool":
            answer |= {"tool_call_id": "call00000", "name": "tool"}
        try:
            self._bridge.prove([answer])
        except TemplateError as cause:
            way_out = (
                "With max_turns=1 calls are run and none is answered."
                if role == "tool"
                else 'code_rollout(results_as="inline") needs no template.'
            )
            raise SetupError(
                f"An answer of the role {role!r} cannot be shown to the model. {cause} {way_out}"
            ) from cause

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, *, is_whole: bool = False
    ) -> str:
        """A conversation as the template writes it, up to the model's next word, or whole.

        Raises:
            TemplateError: there is no template, or it fails.
        """
        if self.chat_template is None:
            raise TemplateError(
                "The tokenizer has no chat template. Set tokenizer.chat_template, or use string prompts."
            )
        messages = [plain(message) for message in messages]
        if self._content_is_parts:
            messages = [in_parts(message) for message in messages]
        try:
            return self._apply(messages, tools, is_whole)
        except TemplateError:
            with suppress(
                TemplateError
            ):  # DeepSeek V3 puts a call's arguments into the text as they are: no dict can be
                return self._apply([arguments_as_text(message) for message in messages], tools, is_whole)
            raise

    def _apply(self, messages: list[Message], tools: list[dict[str, Any]] | None, is_whole: bool = False) -> str:
        continues = messages[-1]["role"] == "assistant" and not is_whole
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=self.chat_template,
                    add_generation_prompt=not continues and not is_whole,
                    continue_final_message=continues,
                    tokenize=False,
                    **self._template_kwargs,
                )
            )
        except Exception as cause:  # jinja raises many kinds, and templates raise on purpose
            roles = [message["role"] for message in messages]
            raise TemplateError(f"The chat template fails on messages {roles}: {cause}") from cause

    @cached_property
    def _content_is_parts(self) -> bool:
        """Templates of vision models know content only as a list of parts, and skip or refuse a text."""
        probe = {"role": "user", "content": _SHOWN}

        def is_shown(message: Message) -> bool:
            try:
                return _SHOWN in self._apply([message], None)
            except TemplateError:
                return False

        return not is_shown(probe) and is_shown(in_parts(probe))


def _encodable(text: str) -> str:
    """JSON can hold half of a surrogate pair, which has no encoding."""
    return text.encode(errors="replace").decode()


def _is_tool_shown(function: dict[str, Any], text: str, bare: str) -> bool:
    """Whether a prompt shows a tool: more often than it does without tools (a question may name it), or because its
    author has described it.
    """
    name, lines = str(function.get("name")), str(function.get("description", "")).strip().splitlines()
    first_line = lines[0] if lines else ""
    return text.count(name) > bare.count(name) or bool(name in bare and first_line and first_line in bare)


def check_room(prompt_ids: list[int], max_model_len: int | None) -> None:
    """Raises `PromptTooLongError` where the server's context has no room for a completion."""
    if max_model_len is not None and len(prompt_ids) >= max_model_len:
        raise PromptTooLongError(
            f"The prompt has {len(prompt_ids)} tokens and the server's max_model_len is {max_model_len}, so no "
            "completion fits. Filter long prompts from the dataset, or start the server with a larger --max-model-len."
        )
