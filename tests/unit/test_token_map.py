"""Which of a draft model's tokens each token of the target is, for tokenizers of every kind."""

from __future__ import annotations

import itertools
import json

import pytest
import tokenizers
import torch

from kernels.choose import choose, choose_best
from models.token_map import map_tokens, same_ids
from models.tokenizer import Tokenizer
from tests.vocabularies import backend_of


def tokenizer(kind, tiny_tokenizer, **special):
    return tiny_tokenizer if kind == "bytes" else Tokenizer(backend_of(kind), special_tokens=special)


KINDS = ("bytes", "llama", "unigram", "word_piece")  # the other kinds have the vocabulary of llama


@pytest.mark.parametrize(("target_kind", "draft_kind"), list(itertools.permutations(KINDS, 2)))
def test_shared_tokens_have_the_same_bytes_and_are_drafted_once(tiny_tokenizer, target_kind, draft_kind):
    target, draft = tokenizer(target_kind, tiny_tokenizer), tokenizer(draft_kind, tiny_tokenizer)
    sizes = target.vocab_size + 3, draft.vocab_size + 5
    read, target_ids, undrafted = map_tokens(target, draft, *sizes)
    drafted = (~undrafted).nonzero()[:, 0].tolist()
    pairs = {index: int(target_ids[index]) for index in drafted}
    assert len(set(pairs.values())) == len(pairs) > 20
    assert all(target.token_bytes[target_id] == draft.token_bytes[index] for index, target_id in pairs.items())
    texts = set(target.token_bytes) & set(draft.token_bytes) - {b""}
    assert {draft.token_bytes[index] for index in pairs} == texts, "all that both have"
    for index, target_id in pairs.items():
        assert draft.token_bytes[int(read[target_id])] == target.token_bytes[target_id]
        assert int(read[target_id]) == index or not target.token_bytes[target_id]
    assert read.shape == (sizes[0],)
    assert 0 <= int(read.min()) <= int(read.max()) < draft.vocab_size


def test_a_token_that_the_draft_model_lacks_is_read_as_its_end(tiny_tokenizer):
    def word_level(*words):
        table = {word: index for index, word in enumerate(words)}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token=words[0]))
        backend.decoder = tokenizers.decoders.Fuse()
        return Tokenizer(backend)

    target, draft = word_level("?", "abc", "bc", "xyz", "c"), word_level("z", "c", "bc", "yz", "?", "abcd")
    read, target_ids, undrafted = map_tokens(target, draft, 6, 7)
    assert read.tolist() == [4, 2, 2, 3, 1, 0]
    assert undrafted.tolist() == [True, False, False, True, False, True, True]
    assert target_ids[~undrafted].tolist() == [4, 2, 0]


def test_ends_correspond_by_their_role(tiny_tokenizer):
    target = Tokenizer(tiny_tokenizer.backend, special_tokens={"eos_token": "<|endoftext|>"})
    draft = tokenizer("llama", tiny_tokenizer, eos_token="</s>", bos_token="<s>")
    read, target_ids, undrafted = map_tokens(target, draft, target.vocab_size, draft.vocab_size)
    end = draft.backend.token_to_id("</s>")
    assert (int(read[target.eos_id]), int(target_ids[end]), bool(undrafted[end])) == (end, target.eos_id, False)
    smaller = map_tokens(target, draft, target.vocab_size, end)
    assert int(smaller.read[target.eos_id]) < end


def test_one_vocabulary_in_other_sizes(tiny_tokenizer):
    for sizes in ((384, 400), (400, 384), (384, 384)):
        assert all(
            (one is None and other is None) or torch.equal(one, other)
            for one, other in zip(map_tokens(tiny_tokenizer, tiny_tokenizer, *sizes), same_ids(*sizes), strict=True)
        )
    read, target_ids, undrafted = same_ids(3, 5)
    assert (read.tolist(), target_ids.tolist()) == ([0, 1, 2], [0, 1, 2, 0, 0])
    assert undrafted.tolist() == [False] * 3 + [True] * 2
    assert same_ids(5, 3).read.tolist() == [0, 1, 2, 0, 0]
    assert same_ids(5, 3).undrafted is None


@pytest.mark.parametrize("sizes", [(300, 200), (200, 300)])
def test_rows_beyond_either_model_are_not_used(tiny_tokenizer, sizes):
    permuted = json.loads(tiny_tokenizer.backend.to_str())
    vocabulary, size = permuted["model"]["vocab"], tiny_tokenizer.vocab_size
    permuted["model"]["vocab"] = {token: size - 1 - index for token, index in vocabulary.items()}
    for token in permuted["added_tokens"]:
        token["id"] = size - 1 - token["id"]
    draft = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(permuted)))
    read, target_ids, undrafted = map_tokens(tiny_tokenizer, draft, *sizes)
    assert (len(read), len(target_ids), len(undrafted)) == (sizes[0], sizes[1], sizes[1])
    assert int(read.max()) < sizes[1]
    assert int(target_ids.max()) < sizes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_that_are_not_drafted_change_no_choice_among_the_others(dtype):
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    undrafted = torch.arange(64) % 3 == 0
    ids, positions = torch.randperm(64, generator=torch.Generator().manual_seed(1)), torch.arange(3)
    masked, left = logits.masked_fill(undrafted, float("-inf")), (~undrafted).nonzero()[:, 0]
    assert torch.equal(choose(masked, None, positions, ids), ids[left][logits[:, left].float().argmax(1)])
    tokens, values = choose_best(masked, None, positions, ids, 4)
    expected = logits[:, left].float().log_softmax(-1).topk(4)
    assert torch.equal(tokens, ids[left][expected.indices])
    torch.testing.assert_close(values, expected.values, atol=1e-5, rtol=1e-5)
