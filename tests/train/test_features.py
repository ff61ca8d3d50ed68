"""Features computed once equal features computed for every batch, in any order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer.engine import Engine
from models.attention import CausalAttention
from models.targets.llama import LlamaTarget
from train.config import OnlineFeaturesConfig
from train.data.sequences import Sequences
from train.features.layout import Layout
from train.features.online import feature_bytes, fits_cache, online_features
from train.features.store import CachedFeatures

AUX = (2, 4, 5)


def cache(target: LlamaTarget, responses: Sequences, batch_size: int) -> CachedFeatures:
    cached = CachedFeatures(Path("never written"), target, AUX, responses, Layout.of(target, AUX))
    cached.fill(batch_size, (0, 1), lambda: None, show=False)
    return cached


def test_cached_equals_online(engine: Engine, responses: Sequences) -> None:
    cached = cache(engine.target, responses, batch_size=2)
    online = online_features(engine.target, AUX)
    batch = responses.batch([5, 0, 3])
    inside = torch.arange(batch.ids.shape[1]) < responses.lengths[list(batch.rows)][:, None]
    for a, b in zip(
        (*cached(batch).aux, cached(batch).hidden), (*online(batch).aux, online(batch).hidden), strict=True
    ):
        assert torch.allclose(a[inside], b[inside], atol=1e-5)
        assert not a.requires_grad


def test_the_same_bits_whatever_was_asked_before(engine: Engine, responses: Sequences) -> None:
    first = cache(engine.target, responses, batch_size=4)
    second = cache(engine.target, responses, batch_size=4)
    first(responses.batch([1, 2, 3]))
    assert torch.equal(first(responses.batch([0])).hidden, second(responses.batch([0])).hidden)


def test_features_are_the_models(tiny_target: LlamaTarget, responses: Sequences) -> None:
    batch = responses.batch([2])
    features = online_features(tiny_target, AUX)(batch)
    positions = torch.arange(batch.ids.shape[1])[None]
    with torch.no_grad():
        output = tiny_target(batch.ids, positions, CausalAttention(), aux_layers=AUX)
    assert torch.equal(features.hidden, output.hidden)
    assert all(torch.equal(a, b) for a, b in zip(features.aux, output.aux, strict=True))


@pytest.mark.parametrize(("gigabytes", "fits"), [(4.0, True), (0.0, False)])
def test_the_cache_has_a_limit(gigabytes: float, fits: bool, engine: Engine) -> None:
    config = OnlineFeaturesConfig(name="online", cache_gb=gigabytes)
    assert fits_cache(config, engine.target, AUX, 100) == fits
    assert feature_bytes(engine.target, AUX, 100) == 4 * 100 * 64 * 4
