"""The LSTM speculator of Arctic Inference (Snowflake): its config and its module."""
