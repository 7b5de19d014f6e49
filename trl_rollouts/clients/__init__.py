"""From token ids to token ids: what a server is to this package, and finding out which one answers.

A `Client` samples one completion for one context. `connect` asks the server what it is, takes the module that speaks
its protocol, and proves that what it samples can be trained on: same vocabulary, logprobs at the sampling
temperature, room for a completion. A wrong set-up is refused with the flag to add.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ServerError, SetupError
from ..sampling import Sampling
from ..tokens import ChatTokenizer
from ..trajectory import Completion

if TYPE_CHECKING:
    from .member import Restore
    from .pool import PoolClient


class Client(Protocol):
    """Samples completions. Used from one event loop."""

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and completion together that the server can hold; None if it does not say."""

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        """One completion of `token_ids`.

        Raises:
            RequestError: this request failed; others may succeed.
            ServerError: the server is gone, or breaks its protocol.
        """

    async def close(self) -> None:
        """Abort what is under way and close connections."""


class ServerClient(Client, Protocol):
    """A client of one server."""

    base_url: str

    async def instance(self) -> str | None:
        """What tells this process of the server from the next one at its address; None if it does not say.

        Raises:
            aiohttp.ClientError, TimeoutError: no answer.
        """


def check_completion(completion: Completion, vocab_size: int | None) -> None:
    """What any client owes, whoever wrote it.

    Raises:
        ServerError: ids and logprobs do not pair, or an id is none of the trainer's model.
    """
    token_ids, logprobs = completion.token_ids, completion.logprobs
    if not token_ids or len(token_ids) != len(logprobs):
        raise ServerError(f"A completion has {len(token_ids)} ids and {len(logprobs)} logprobs; it needs one each.")
    wrong = [i for i in token_ids if type(i) is not int or i < 0 or (vocab_size is not None and i >= vocab_size)]
    if wrong:
        raise ServerError(
            f"A completion has the ids {wrong[:5]}, which the trainer's model, of vocab_size={vocab_size}, does not "
            "know. Serve the model that is trained."
        )


def normal_url(url: str) -> str:
    """An address with a scheme, and without the slash or the `/v1` of an OpenAI address at its end."""
    if not isinstance(url, str) or not url:
        raise SetupError(f"A server's address must be a text such as 'http://localhost:8000', not {url!r}.")
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


async def connect(
    base_url: str | Sequence[str],
    tokenizer: ChatTokenizer,
    *,
    max_completion_length: int = 1,
    max_model_len: int | None = None,
    wait_s: float = 0.0,
    request_timeout_s: float = 600.0,
) -> Client:
    """A client for the vLLM server, or servers, at `base_url`.

    Args:
        base_url: one address, or several that serve the same model; requests go to the least busy one.
        tokenizer: the trainer's, which the server's must equal.
        max_completion_length: tokens of a completion that the server's context must have room for.
        max_model_len: the server's context, for a server that does not tell it (TRL's own).
        wait_s: seconds to wait for a server that does not answer yet.
        request_timeout_s: seconds that one request may take, queueing in the server included.

    Raises:
        ServerError: nothing answers, or something that is neither `vllm serve` nor `trl vllm-serve`.
        SetupError: the server runs, but what it samples could not be trained on.
    """
    return await connect_pool(
        [base_url] if isinstance(base_url, str) else base_url,
        tokenizer,
        max_completion_length=max_completion_length,
        max_model_len=max_model_len,
        wait_s=wait_s,
        request_timeout_s=request_timeout_s,
        restore=None,
    )


async def connect_pool(
    base_urls: Sequence[str],
    tokenizer: ChatTokenizer,
    *,
    wait_s: float,
    restore: "Restore | None",
    **expected: Any,
) -> "PoolClient":
    """As `connect`, with servers that may go and come back; for a caller that calls `roll_call` and `rest`.

    Args:
        base_urls: the servers' addresses.
        tokenizer: the trainer's.
        wait_s: also how long to wait for a server that does not answer any more.
        restore: brings the trainer's weights to a server that was started anew, by its address; it may block. None:
            nothing can, so a server that is gone is gone for good.
        **expected: as of `connect`.
    """
    from .detect import connect_one
    from .pool import PoolClient

    async def reach(base_url: str) -> ServerClient:
        return await connect_one(base_url, tokenizer, wait_s=wait_s, **expected)

    pool = PoolClient([normal_url(url) for url in base_urls], reach, restore, wait_s=wait_s)
    try:
        await pool.join()
    except BaseException:
        await pool.close()
        raise
    return pool
