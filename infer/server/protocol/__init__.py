"""Schemas of the HTTP APIs: fields of requests and responses, limits, errors."""
