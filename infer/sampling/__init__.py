"""Sampling: request parameters, logits processors, grammars, the sampler, and stop conditions."""
