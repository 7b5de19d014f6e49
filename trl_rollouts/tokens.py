"""The one place where text becomes token ids: a prompt, once, and each observation as it comes.

Sampled ids never pass through here on their way to the trainer. A prompt is rendered by the tokenizer's chat template;
an observation is *bridged*: the template renders it behind a short dummy assistant turn, and the part from that turn's
end on is encoded and appended to the sampled ids. So the work of a turn depends on its new messages only, and
templates that rewrite earlier turns (Qwen3 drops past thoughts) cannot touch what was sampled.

TRL bridges by the difference of two such renders (`GRPOTrainer._get_tool_suffix_ids`), which needs a template whose
assistant turn looks the same when it is the last one. A marker inside the dummy turn does without the second render.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from .errors import PromptTooLongError, SetupError, TemplateError
from .trajectory import Message


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
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor wraps its tokenizer
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None) or None
        self._template_kwargs = template_kwargs or {}
        if self._tokenizer.eos_token_id is None:
            raise TemplateError("The tokenizer has no eos_token, so no turn can end. Set tokenizer.eos_token.")
        self.eos_token_id: int = self._tokenizer.eos_token_id
        self.eos_token_ids = frozenset({self.eos_token_id, *eos_token_ids})
        self._shown: set[str] = set()
        self._proved: set[tuple[str, ...]] = set()
        added = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        special = sorted(added | set(self._tokenizer.all_special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)))

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """`text` as ids. With `special_tokens`, as the tokenizer wraps a whole text (a BOS that the text does not
        have yet).
        """
        bos = self._tokenizer.bos_token
        wrap = special_tokens and not (bos and text.startswith(bos))
        text = text.encode(errors="replace").decode()  # JSON can hold half of a surrogate pair, which has no encoding
        return list(self._tokenizer(text, add_special_tokens=wrap)["input_ids"])

    def decode(self, token_ids: list[int]) -> str:
        """A completion's text, without the token that ended the turn, and nothing else removed or tidied."""
        num = len(token_ids)
        while num and token_ids[num - 1] in self.eos_token_ids:
            num -= 1
        return str(
            self._tokenizer.decode(token_ids[:num], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def prompt(self, messages: str | list[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of a conversation that the model is to continue. A string is taken as rendered already.

        Raises:
            TemplateError: there is no template, it fails, or it does not show the tools.
        """
        if isinstance(messages, str):
            text = bare = messages
        else:
            text = self._render(messages, tools=list(tools) or None)
            bare = self._render(messages) if tools else ""
            self._check_shown(messages)
        names = [tool["function"]["name"] for tool in tools]
        hidden = [name for name in names if text.count(name) <= (0 if isinstance(messages, str) else bare.count(name))]
        if hidden:
            raise TemplateError(
                f"The prompt does not show the tools {hidden} to the model. Use a chat template that renders `tools` "
                "(TRL ships some in trl/chat_templates), or describe them in a prompt that is a string."
            )
        token_ids = self.encode(text, special_tokens=isinstance(messages, str))
        if not token_ids:
            raise TemplateError("The prompt is empty.")
        return token_ids

    def _check_shown(self, messages: list[Message]) -> None:
        """Some templates know content only as a list of parts, and skip a text without a word."""
        for role in {message["role"] for message in messages} & {"user", "system"} - self._shown:
            probe = {"role": role, "content": "SHOWNtext"}
            after = [{"role": "user", "content": "."}] if role == "system" else []
            if "SHOWNtext" not in self._render([probe, *after]):
                raise TemplateError(f"The chat template does not show the text of {role} messages to the model.")
            self._shown.add(role)
        if messages[-1]["role"] == "assistant" and messages[-1].get("tool_calls"):
            raise TemplateError("The prompt ends with a tool call of the assistant's. Add its answer, or take it out.")

    def render_call(self, function: dict[str, Any]) -> str:
        """A conversation in which the assistant calls `function`, a dict of `name` and `arguments`."""
        call = {"id": "call00000", "type": "function", "function": function}
        answer = {"role": "tool", "tool_call_id": "call00000", "name": function["name"], "content": "."}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        return self._render([{"role": "user", "content": "."}, turn, answer])

    def bridge(self, observation: list[Message], *, last_id: int) -> list[int]:
        """The ids that lead from a completion to the model's next turn.

        Args:
            observation: the messages to show, never the assistant's.
            last_id: the completion's last id. Where it is the one that the template ends a turn with, that id is not
                added again.

        Raises:
            TemplateError: the template fails on these messages, leaves one out, or does not end the assistant's turn.
        """
        marker, hole = _absent("ENDofTHEturn", observation), _absent("SPECIALtoken", observation)
        shown = [{**message, "content": self._special.sub(hole, _text(message))} for message in observation]
        self._prove_junction(shown)
        tail = self._after_turn(marker, shown)
        ids = self._encode_with_holes(tail, hole, [t for m in observation for t in self._special.findall(_text(m))])
        end = self._find_end(ids)
        assert end is not None, "the junction was proved"
        return ids[end + 1 :] if ids[end] == last_id else ids[end:]

    def _prove_junction(self, observation: list[Message]) -> None:
        """Raise unless the template ends the assistant's turn and then shows every message, in order.

        Without this proof the end might be found behind the observation, and the observation be lost.
        """
        roles = tuple(message["role"] for message in observation)
        if roles in self._proved:
            return
        marks = [f"OBSERVATION{index}x" for index in range(len(observation))]
        marked = [{**message, "content": mark} for message, mark in zip(observation, marks, strict=True)]
        tail = self._after_turn("ENDofTHEturn", marked)
        places = [tail.find(mark) for mark in marks]
        if -1 in places or places != sorted(places) or self._find_end(self.encode(tail[: places[0]])) is None:
            raise TemplateError(
                f"The chat template does not end the assistant's turn and then show messages of the roles {roles}: it "
                f"continues with {tail[:200]!r}, and the ids that end a turn are {sorted(self.eos_token_ids)}. Set "
                "tokenizer.eos_token to the token that ends a turn, or use a template that shows these roles."
            )
        self._proved.add(roles)

    def _after_turn(self, marker: str, observation: list[Message]) -> str:
        """What the template writes behind a dummy assistant turn that `observation` follows."""
        calls = [message for message in observation if message["role"] == "tool"]
        text = self._render([{"role": "user", "content": "."}, _dummy_turn(marker, calls), *observation])
        return text.rpartition(marker)[2] if marker in text else ""

    def _find_end(self, token_ids: list[int]) -> int | None:
        return next((index for index, token_id in enumerate(token_ids) if token_id in self.eos_token_ids), None)

    def prove_tool_answers(self) -> None:
        """Raises `SetupError` where a tool's answer cannot be shown.

        Found out row by row, it would mask the rows that call a tool and train the others: calls would be unlearned.
        """
        try:
            self._prove_junction([{"role": "tool", "tool_call_id": "call_0", "name": "tool", "content": "."}])
        except TemplateError as cause:
            raise SetupError(str(cause)) from cause

    def _encode_with_holes(self, text: str, hole: str, literals: list[str]) -> list[int]:
        """`text` with each hole filled by its literal, the text of a special token, encoded as the text it is.

        A tool's result that spells out `<|im_end|>` must not end the turn.
        """
        parts = text.split(hole)
        if len(parts) != len(literals) + 1:
            raise TemplateError(
                "The chat template leaves out or repeats an observation that has a special token's text."
            )
        ids = self.encode(parts[0])
        for literal, part in zip(literals, parts[1:], strict=True):
            ids += self._tokenizer(literal, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            ids += self.encode(part)
        return ids

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        if self.chat_template is None:
            raise TemplateError(
                "The tokenizer has no chat template. Set tokenizer.chat_template, or use string prompts."
            )
        continues = messages[-1]["role"] == "assistant"
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [plain(message) for message in messages],
                    tools=tools,
                    chat_template=self.chat_template,
                    add_generation_prompt=not continues,
                    continue_final_message=continues,
                    tokenize=False,
                    **self._template_kwargs,
                )
            )
        except TemplateError:
            raise
        except Exception as cause:  # jinja raises many kinds, and templates raise on purpose
            roles = [message["role"] for message in messages]
            raise TemplateError(f"The chat template fails on messages {roles}: {cause}") from cause


def check_room(prompt_ids: list[int], max_model_len: int | None) -> None:
    """Raises `PromptTooLongError` where the server's context has no room for a completion."""
    if max_model_len is not None and len(prompt_ids) >= max_model_len:
        raise PromptTooLongError(
            f"The prompt has {len(prompt_ids)} tokens and the server's max_model_len is {max_model_len}, so no "
            "completion fits. Filter long prompts from the dataset, or start the server with a larger --max-model-len."
        )


def _dummy_turn(marker: str, calls: list[Message]) -> Message:
    """An assistant turn that holds `marker` where any template shows it, and calls for the tool messages to answer."""
    turn: Message = {"role": "assistant", "content": marker}
    if calls:
        turn["tool_calls"] = [
            {
                "id": message.get("tool_call_id", f"call_{index}"),
                "type": "function",
                "function": {"name": message.get("name", "tool"), "arguments": {"x": marker}},
            }
            for index, message in enumerate(calls)
        ]
    return turn


def _absent(word: str, messages: list[Message]) -> str:
    """`word`, made longer until it stands in no message."""
    while any(word in str(message) for message in messages):
        word += "Z"
    return word


def _text(message: Message) -> str:
    """The message's content as text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    kinds = {str(part.get("type")) for part in content}
    if kinds - {"text"}:
        raise TemplateError(
            f"A message has content of type {sorted(kinds)}. Only text can be trained through a rollout_func: TRL "
            "takes no images back from one."
        )
    return "".join(part["text"] for part in content)


def plain(message: Message) -> Message:
    """The message as a template takes it: text content, no task, none of the nulls that Arrow adds."""
    plain = {key: value for key, value in message.items() if key == "content" or (key != "task" and value is not None)}
    if "tool_calls" in plain:
        plain["tool_calls"] = _without_nulls(plain["tool_calls"])
    return {**plain, "content": _text(message)} if isinstance(plain.get("content"), list) else plain


def _without_nulls(value: Any) -> Any:
    """Arrow gives every row's calls the arguments of all rows' calls, null where a row has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
