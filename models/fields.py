"""A config.json read key by key, so that no key is overlooked.

The reader requests every key that it understands; `done` then rejects the remaining ones, because an unknown key may
change what the head computes. Independent of the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")
MOST, MAX_LAYERS = 2**24, 256
LONGEST = 100  # characters of a value in a message
LARGE = 1e300  # a whole number of a JSON file may be too large for a float

# Keys that transformers writes into any config.json and that no head's forward depends on.
BOILERPLATE = {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "add_cross_attention",
    "attention_dropout", "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "has_no_defaults_at_init", "id2label",
    "initializer_range",
    "is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "max_length", "max_window_layers", "min_length",
    "name_or_path", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix", "problem_type",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
    "tie_word_embeddings", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version",
    "typical_p", "unsloth_version", "use_bfloat16", "use_cache",
}  # fmt: skip
# Keys of training and of other programs' limits: accepted, and `done` says that nothing reads them.
UNUSED = {
    "base_model", "base_model_name_or_path", "max_seq_len", "max_seq_length", "max_sequence_length", "model_max_length",
    "n_ctx", "output_router_logits", "router_aux_loss_coef", "seq_length", "target_model", "target_model_type",
    "unsloth_fixed",
}  # fmt: skip
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class Fields:
    """`name` is used in error messages: "config.json", or "config.json: eagle_config" for a section of it."""

    def __init__(self, values: Mapping[str, Any], name: str = "config.json") -> None:
        self.values, self.name = values, name
        self._requested: set[str] = set(BOILERPLATE)

    def maybe(self, key: str, kind: type[T]) -> T | None:
        """Return the value, None when the key is absent or null. Raises ValueError for a value of another type."""
        self._requested.add(key)
        value = self.values.get(key)
        if value is None:
            return None
        fits = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{self.name}: {key}={brief(value)}: expected {KINDS[kind]}")
        if kind is not float:
            return cast(T, value)
        return cast(T, float(value) if abs(value) < LARGE else math.inf)

    def take(self, key: str, kind: type[T], default: T) -> T:
        value = self.maybe(key, kind)
        return default if value is None else value

    def need(self, key: str, kind: type[T], why: str = "") -> T:
        value = self.maybe(key, kind)
        if value is None:
            raise ValueError(f"{self.name}: {key} is missing" + (f"; {why}" if why else ""))
        return value

    def size(self, key: str, default: int | None = None, *, limit: int = MOST) -> int:
        """Return an integer from 1 to `limit`, so that a broken file cannot cost much. Raises ValueError otherwise."""
        value = self.need(key, int) if default is None else self.take(key, int, default)
        if not 1 <= value <= limit:
            raise ValueError(f"{self.name}: {key}={value}: must be 1 to {limit}")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self.take(key, float, default)
        if not 0 < value < math.inf:
            raise ValueError(f"{self.name}: {key}={value}: must be a positive number")
        return value

    def numbers(self, key: str) -> list[int] | None:
        """Return a list of whole numbers; None for an empty one too."""
        values = self.maybe(key, list) or None
        if values is not None and any(type(value) is not int for value in values):
            raise ValueError(f"{self.name}: {key}={brief(values)}: expected a list of whole numbers")
        return values

    def section(self, key: str) -> Fields | None:
        values = self.maybe(key, dict)
        return None if values is None else Fields(values, f"{self.name}: {key}")

    def need_section(self, key: str) -> Fields:
        return Fields(self.need(key, dict), f"{self.name}: {key}")

    def only(self, key: str, *allowed: Any) -> None:
        """Raise ValueError for a value that asks for something and is none of `allowed`: it needs another forward."""
        self._requested.add(key)
        value = self.values.get(key)
        if asks_for_nothing(value):
            return
        if not any(type(value) is type(option) and value == option for option in allowed):
            supported = " or ".join(repr(option) for option in allowed) or "no value"
            raise ValueError(f"{self.name}: {key}={brief(value)}: only {supported} is supported")

    def ignore(self, *keys: str) -> None:
        self._requested.update(keys)

    def done(self) -> list[str]:
        """Return a note on each key that is accepted though nothing reads it.

        Raises ValueError naming the other keys that were not requested, unless they ask for nothing.
        """
        rest = {
            key: value
            for key, value in self.values.items()
            if key not in self._requested and not asks_for_nothing(value)
        }
        unknown = [f"{key}={brief(value)}" for key, value in rest.items() if key not in UNUSED]
        if unknown:
            raise ValueError(
                f"{self.name}: unknown: {', '.join(unknown)}; what changes nothing that is computed may be removed "
                "from the file"
            )
        return [f"{key}={value!r} is not used: nothing that is computed depends on it" for key, value in rest.items()]


def brief(value: Any) -> str:
    """Return a value for a message, of a long one its beginning."""
    return text if len(text := repr(value)) <= LONGEST else f"{text[:LONGEST]}..."


def asks_for_nothing(value: Any) -> bool:
    """Return whether a value is null, `{}` or `[]`."""
    return value is None or (isinstance(value, (dict, list)) and not value)
