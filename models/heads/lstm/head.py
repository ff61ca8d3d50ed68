"""LSTM speculator: the MLP speculator's module with the gates of an LSTM."""

from models.heads.mlp.head import HEAD

__all__ = ["HEAD"]
