"""How a request's fields are told apart: implemented, asking for nothing, known but not implemented, unknown."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from infer.server.errors import field_error

ANY = object()  # a field without effect here, whatever its value

# Fields of OpenAI's and vLLM's APIs that are not implemented -> values that ask for nothing; null always does.
NOTHING: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "user": (ANY,),  # OpenAI: an identifier of the end user, without effect on the answer
    "safety_identifier": (ANY,),  # its successor
    **dict.fromkeys(
        (
            "audio",
            "prediction",
            "reasoning_effort",
            "metadata",
            "moderation",
            "prompt_cache_key",
            "verbosity",
            "web_search_options",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "chat_template",
            "truncate_prompt_tokens",
            "logits_processors",
        ),
        (),
    ),
}


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def drop_nothing(values: Any, known: set[str], nothing: dict[str, tuple[Any, ...]]) -> Any:
    """Drops the fields that ask for nothing; raises for those that ask for what is not implemented."""
    if not isinstance(values, dict):
        return values
    kept = {}
    for name, value in values.items():
        if name in known:
            kept[name] = value
        elif name not in nothing:
            raise field_error(name, "unknown field", "unknown_parameter")
        elif value is not None and ANY not in nothing[name] and not is_one_of(value, nothing[name]):
            allowed = " or ".join([str(option).lower() for option in nothing[name]] or ["null"])
            raise field_error(
                name, f"not implemented by this server; leave it out (or {allowed})", "unsupported_parameter"
            )
    return kept


def is_one_of(value: Any, options: tuple[Any, ...]) -> bool:
    """Like `in`, but 1 is not true and 0 is not false."""
    return any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in options)
