"""The wire: fields of requests and responses, bounds, errors."""
