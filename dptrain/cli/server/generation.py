"""`POST /generate`: the tokens after a prompt, as one answer or as a stream of server-sent events.

Source of the stream's format: WHATWG, "HTML Living Standard", section "Server-sent events".
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dptrain.cli.server.bodies import parse_json
from dptrain.errors import DataError, printable
from dptrain.models import Model
from dptrain.registry.names import suggestion
from dptrain.runtime.failure import describe
from dptrain.runtime.text import one_line, short

# What a request may say beside its prompt, and what holds if it does not.
_OPTIONS = {
    **{"max_new_tokens": 16, "temperature": 1.0, "top_k": None, "top_p": None, "stop": None, "seed": None},
    "stream": False,
}


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt of ids, options of `Model.generate`, and whether the answer is a stream."""

    prompt: Any
    options: Mapping[str, Any]
    streams: bool

    def tokens(self, model: Model) -> Iterator[int]:
        """Return the tokens, each when it is asked for; errors as of `Model.generate`."""
        tokens: Iterator[int] = model.generate(self.prompt, stream=True, **self.options)
        return tokens

    def answer(self, tokens: list[int]) -> dict[str, Any]:
        """Return the tokens, and why there are no more: "stop" or "length"."""
        stop = self.options["stop"]
        stops = stop if isinstance(stop, list) else [stop]
        return {"tokens": tokens, "reason": "stop" if tokens and tokens[-1] in stops else "length"}


def read_generation(content: bytes) -> GenerationRequest:
    """Return the request of a body; DataError of anything that is none."""
    body = parse_json(content)
    if not isinstance(body, dict) or "prompt" not in body:
        raise DataError(f'body: {short(body)}; expected {{"prompt": [ids of tokens], "max_new_tokens": ...}}')
    prompt = body.pop("prompt")
    if unknown := sorted(body.keys() - _OPTIONS):
        name = unknown[0]
        raise DataError(f"body: unknown {printable(name[:80])!r}{suggestion(name[:80], _OPTIONS)}")
    options = _OPTIONS | body
    streams = options.pop("stream")
    if not isinstance(streams, bool):
        raise DataError(f"body: stream={short(streams)}; expected true or false")
    if isinstance(prompt, list) and any(isinstance(part, list) for part in prompt):
        raise DataError("body: several prompts; send one for each request")
    return GenerationRequest(prompt, options, streams)


class TokenEvents(StreamingResponse):
    """A stream with an event for each token, {"token": id}, and at last "end" with the answer, or "error".

    Args:
        request: that asks for it.
        first: the first token, None if there is none.
        following: returns the next token, None after the last.
        end: called when the stream has ended, or its client has gone.
    """

    def __init__(
        self,
        request: GenerationRequest,
        first: int | None,
        following: Callable[[], Awaitable[int | None]],
        end: Callable[[], None],
    ) -> None:
        self._request, self._following, self._end = request, following, end
        headers = {"Cache-Control": "no-store"}
        super().__init__(self._events(first), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()

    async def _events(self, token: int | None) -> AsyncIterator[bytes]:
        tokens: list[int] = []
        try:
            while token is not None:
                tokens.append(token)
                yield _event({"token": token})
                token = await self._following()
        except Exception as error:  # of the model's own layers; the status has been sent
            yield _event({"error": one_line(describe(error))}, "error")
            return
        yield _event(self._request.answer(tokens), "end")


def _event(data: Mapping[str, Any], kind: str = "") -> bytes:
    name = f"event: {kind}\n" if kind else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()
