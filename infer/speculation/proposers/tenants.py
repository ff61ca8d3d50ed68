"""State that requests of one tenant share, and of no other: what one tenant sends must not show in another's drafts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from infer.request import Request

T = TypeVar("T")
MOST_TENANTS = 64


class PerTenant(Generic[T]):
    """What `make` returns, for each `cache_salt`; that of the least recently used tenants is dropped."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._by_salt: OrderedDict[str, T] = OrderedDict()  # the most recently used is last

    def of(self, request: Request) -> T:
        salt = request.params.cache_salt
        if salt not in self._by_salt:
            self._by_salt[salt] = self._make()
        self._by_salt.move_to_end(salt)
        if len(self._by_salt) > MOST_TENANTS:
            self._by_salt.popitem(last=False)
        return self._by_salt[salt]
