"""POST /v1/responses: OpenAI's Responses API over the same sessions, with output items and named events.

One choice per request. Nothing is stored, so `previous_response_id` is refused and the response has `store: false`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from infer.server.api.conversation import Conversation, converse
from infer.server.api.items import ItemsAnswer, Kind
from infer.server.api.rendering import Json, shown, speculation
from infer.server.parsing.tool_styles import Call
from infer.server.protocol.errors import ApiError
from infer.server.protocol.logprobs import ScoredToken, chat_logprobs
from infer.server.protocol.responses import ResponsesRequest
from infer.server.service import Service
from infer.server.session import Choice, Piece, Session


class ResponseAnswer(ItemsAnswer):
    """One response, whose events have sequence numbers."""

    def __init__(self, body: ResponsesRequest, session: Session, conversation: Conversation) -> None:
        super().__init__(session, conversation)
        self._body, self._names = body, conversation.names
        self._scored: list[ScoredToken] = []  # scored tokens whose text is held back
        self._number = 0
        self._id, self._created = f"resp_{uuid.uuid4().hex}", time.time()
        self._namespaces = {function.name: function.namespace for function in body.functions}

    def begin(self, kind: Kind) -> Iterator[Json]:
        if kind == "content":
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: Json = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": []}
        yield self._add(item)
        item["content"].append(part)
        yield {"type": "response.content_part.added", **self._place(0), "part": part}

    def grow(self, kind: Kind, text: str, piece: Piece) -> Iterator[Json]:
        (part,) = self.items[-1]["content"]
        part["text"] += text
        delta = {"type": f"response.{part['type']}.delta", **self._place(0), "delta": text}
        if kind == "content":
            scored, self._scored = self._scored, []
            entries = chat_logprobs(scored, self._names)["content"] if self._body.num_logprobs is not None else []
            part["logprobs"] += entries
            delta |= {"logprobs": entries} | shown(self._body, piece)  # our extension: sent with the tokens' text
        yield delta

    def end(self, kind: Kind, *, complete: bool) -> Iterator[Json]:
        (part,) = self.items[-1]["content"]
        logprobs = {"logprobs": part["logprobs"]} if kind == "content" else {}
        yield {"type": f"response.{part['type']}.done", **self._place(0), "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **self._place(0), "part": part}
        yield self._done(complete)

    def call(self, call: Call) -> Iterator[Json]:
        namespace = self._namespaces[call.name]
        name = call.name.removeprefix(f"{namespace}.")
        identity = {"id": f"fc_{uuid.uuid4().hex}", "call_id": self._conversation.new_call_id(), "name": name}
        identity |= {"namespace": namespace} if name != call.name else {}
        yield self._add({"type": "function_call", **identity, "arguments": ""})
        yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": call.arguments}
        done = {"name": name, "arguments": call.arguments}
        yield {"type": "response.function_call_arguments.done", **self._place(), **done}
        self.items[-1]["arguments"] = call.arguments
        yield self._done(call.complete)

    def opening(self) -> list[Json]:
        document = self._document("in_progress")
        return [{"type": f"response.{status}", "response": document} for status in ("created", "in_progress")]

    def closing(self) -> list[Json]:
        document = self.result()
        return [{"type": f"response.{document['status']}", "response": document}]

    def result(self) -> Json:
        return self._document("completed" if self._choice.finish_reason == "stop" else "incomplete")

    def failure(self, error: ApiError) -> Json:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return {"type": "error", **fields, **error.body}

    def line(self, document: Json) -> str:
        self._number += 1
        return super().line(document | {"sequence_number": self._number - 1})

    def take(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        self._scored += piece.scored
        return super().take(choice, piece)

    def _add(self, item: Json) -> Json:
        item["status"] = "in_progress"
        self.items.append(item)
        return self._item_event("added")

    def _done(self, complete: bool) -> Json:
        self.items[-1]["status"] = "completed" if complete else "incomplete"
        return self._item_event("done")

    def _item_event(self, change: str) -> Json:
        item = self.items[-1]
        content = {"content": list(item["content"])} if "content" in item else {}
        place = {"output_index": len(self.items) - 1}
        return {"type": f"response.output_item.{change}", **place, "item": {**item, **content}}

    def _place(self, part: int | None = None) -> Json:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if part is None else place | {"content_index": part}

    def _document(self, status: str) -> Json:
        body, finished = self._body, status != "in_progress"
        form, choice = body.text and body.text.format, body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(self._created),
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": self.items if finished else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "seed": self._session.seed,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if finished else None,
            **(speculation(self._session) if finished else {}),
        }

    def _usage(self) -> Json:
        usage = self._session.usage(self.reasoning_tokens)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def add_routes(routes: APIRouter, service: Service) -> None:
    @routes.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await converse(service, request, body, ResponseAnswer)
