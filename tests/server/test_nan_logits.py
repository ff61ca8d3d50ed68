"""A model that computes NaN after some token: that answer is a server's error in words, and the others are served."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from infer.sampling.emission import NAN
from tests.conftest import MakeTarget
from tests.server.harness import MakeServer

BROKEN = 7


def test_an_answer_of_nan_logits_is_an_error_and_others_go_on(
    make_target_folder: MakeTarget, make_server: MakeServer, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(make_target_folder(seed=2), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logit_bias": {str(BROKEN): -100}}
    with make_server(target=folder, proposer="ngram") as server:
        healthy = server.complete(prompt=[5, 6], **fields).json()["choices"][0]["text"]
        for stream in (False, True):
            response = server.complete(prompt=[5, BROKEN], **fields, stream=stream)
            assert response.status_code == 500, response.text
            assert (response.json()["error"]["message"], response.json()["error"]["code"]) == (NAN, "nan_logits")
        assert server.complete(prompt=[5, 6], **fields).json()["choices"][0]["text"] == healthy
