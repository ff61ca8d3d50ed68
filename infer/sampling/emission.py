"""What a request may emit: its grammar, masks and stop conditions, applied to drafted and to sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from infer.batch.tree import DraftTree
from infer.request import Request
from infer.sampling.isolation import isolated
from infer.sampling.logits_processors import allowed_words, banned
from kernels.shape import FORBIDDEN, unpacked

NAN = (
    "the model's logits are NaN here, so that no token can be chosen: its weights are damaged, or its numbers exceed "
    "the range of model.dtype"
)
MASKS = ("allowed_token_ids", "bad_words", "min_tokens", "grammar")  # fields that forbid tokens


def without_forbidden(tree: DraftTree, requests: Sequence[Request]) -> DraftTree:
    """Return the tree without the drafted nodes that a request's grammar forbids, so that no row is spent on them."""
    if all(request.constraint is None for request in requests):
        return tree
    return without_ungrammatical(tree, requests)


def without_ungrammatical(tree: DraftTree, requests: Sequence[Request]) -> DraftTree:
    kept = [list(range(length)) for length in tree.length.tolist()]
    changed = False
    for b, request in enumerate(requests):
        if request.constraint is not None and len(kept[b]) > 1:
            count = len(kept[b])
            with isolated(request):
                kept[b] = request.constraint.allowed(tree.token[b, :count].tolist(), tree.parent[b, :count].tolist())
            changed |= len(kept[b]) < count
    return tree.only(kept) if changed else tree


def narrowed(requests: Sequence[Request], logits: Tensor, paths: Sequence[Sequence[int]], ids: Tensor) -> Tensor:
    """Mask draft logits `[B, K]`, over the target ids `ids` `[K]`, where a grammar forbids a token after its path.

    A row of which nothing would be left stays unmasked: what it drafts is dropped later (`without_forbidden`).
    """
    rows = [b for b, request in enumerate(requests) if request.constraint is not None]
    if not rows:
        return logits
    logits = logits.clone()
    for b in rows:
        constraint = requests[b].constraint
        assert constraint is not None
        mask = unpacked(constraint.words([paths[b]])[0], constraint.vocab_size).to(ids.device)[ids]
        if bool(mask.any()):
            logits[b] = logits[b].masked_fill(~mask, FORBIDDEN)
    return logits


def is_forbidden(request: Request, path: Sequence[int], token: int) -> bool:
    """Return whether a mask of the request forbids `token` after its tokens and `path`; grammars are not considered."""
    params = request.params
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return True
    if not params.bad_words and not params.min_tokens:
        return False
    return token in banned(request, path)


def masks_of(request: Request) -> str:
    """Return the names of the masks that the request asks for."""
    return ", ".join(name for name in MASKS if getattr(request.params, name))


def check_first_row(request: Request, vocab_size: int) -> None:
    """Raise ValueError if the masks of a new request together allow no first token."""
    params = request.params
    if masks_of(request) in ("", "grammar"):
        return
    forbidden = banned(request, ())
    grammar = None if request.constraint is None else request.constraint.words([[]])
    if not bool(allowed_words(vocab_size, params.allowed_token_ids, [forbidden], grammar).any()):
        names = masks_of(request)
        raise ValueError(f"{names.split(',')[0]}: no token can come first: {names} together allow none; relax one")


Cut = tuple[list[int], Literal["stop", "length", "error"] | None, int | str | None]


def cut(tokens: Sequence[int], request: Request, *, room: int) -> Cut:
    """Return the tokens of `tokens` to emit, the finish reason or None, and the stop id or stop string that matched.
    For the stop id `eos_id`, and for a grammar after which nothing may follow, the latter is None, as in vLLM.

    Tokens after a stop, or beyond `room`, are cut. One of -1, of NaN logits, ends the request with its `error`.
    """
    if request.constraint is not None or request.stop_text is not None or request.params.shapes_logits:
        with isolated(request):
            return checked(tokens, request, room=room)
        return [], None, None
    emitted = list(tokens[:room])
    for index, token in enumerate(emitted):
        if token < 0:
            request.error = NAN
            return emitted[:index], "error", None
        if token in request.stop_ids:
            return emitted[: index + 1], "stop", None if token == request.eos_id else token
    return emitted, "length" if len(emitted) == room else None, None


def checked(tokens: Sequence[int], request: Request, *, room: int) -> Cut:
    """As `cut`, for a request with masks, a grammar or stop strings.

    Before `min_tokens` stop strings are ignored (stop ids cannot occur there: they are masked). A token that is
    forbidden was sampled where the request's masks together allow none: it is not emitted, and the request ends with an
    error, which becomes its `error`.
    """
    emitted: list[int] = []
    for token in tokens[:room]:
        ended = False
        if token < 0:
            request.error = NAN
        elif request.rule != "synthetic" and is_forbidden(request, emitted, token):
            request.error = f"no token can follow: {masks_of(request)} together allow none"
        elif request.constraint is not None:
            ended = request.constraint.push(token)
            request.error = request.constraint.error
        if request.error is not None:
            return emitted, "error", None
        emitted.append(token)
        if token in request.stop_ids:
            return emitted, "stop", None if token == request.eos_id else token
        heed = request.output_length + len(emitted) >= request.params.min_tokens
        if request.stop_text is not None and request.stop_text.push(token, heed=heed):
            return emitted, "stop", request.stop_text.stop
        if ended:
            return emitted, "stop", None
    return emitted, "length" if len(emitted) == room else None, None
