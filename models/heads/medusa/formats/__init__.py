"""The formats of Medusa heads; Headway exports them in vLLM's."""

from models.heads.medusa.formats import fasterdecoding, vllm

FORMATS, LAYOUT = (fasterdecoding.FORMAT, vllm.FORMAT), vllm.FORMAT
