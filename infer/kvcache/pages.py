"""Reference counts of the pool's pages, and the prefix cache of full pages, keyed by content. Uses no tensors.

A published page is looked up by its key: a keyed hash over all tokens up to its end, the tenant's salt and what filled
it. Several requests may hold a page at once. When the last holder drops it, the page stays cached until its memory is
needed: the page that was dropped first is evicted first.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

KEY_BYTES = 16


class PageKeys:
    """Content keys of a sequence's full blocks, each computed once. The hash is keyed to prevent forged collisions."""

    def __init__(self, secret: bytes, salt: str, filled_by: str, block: int) -> None:
        self._secret, self._block = secret, block
        self._keys: list[bytes] = []
        self._start = self._hash(b"", f"{len(salt)}:{salt}:{filled_by}".encode())

    def upto(self, tokens: Sequence[int], blocks: int) -> list[bytes]:
        """Return the keys of the first `blocks` blocks. `tokens` must extend those of the last call."""
        while len(self._keys) < blocks:
            first = len(self._keys) * self._block
            content = b"".join(token.to_bytes(4, "little") for token in tokens[first : first + self._block])
            self._keys.append(self._hash(self._keys[-1] if self._keys else self._start, content))
        return self._keys[:blocks]

    def _hash(self, parent: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(parent + content, digest_size=KEY_BYTES, key=self._secret).digest()


class Pages:
    """Pages of these `ids`. The cost of no method depends on the number of pages."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.secret = secrets.token_bytes(32)
        self._free = list(reversed(ids))
        self._holders = dict.fromkeys(ids, 0)
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._value_of: dict[int, Any] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()  # published pages without a holder, oldest first

    @property
    def free(self) -> int:
        """Return the number of pages that can be taken: unused ones and cached ones without a holder."""
        return len(self._free) + len(self._unheld)

    def free_without(self, pages: Iterable[int]) -> int:
        """Return what `free` will be once `pages` are held."""
        return self.free - sum(page in self._unheld for page in pages)

    def take(self, count: int) -> list[int]:
        """Take `count` pages, with one holder each. The caller must have checked `free`."""
        return [self._take() for _ in range(count)]

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that are published or held."""
        for page in pages:
            self._unheld.pop(page, None)
            self._holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Remove a holder, last page first: a page is useful only with those before it, so these are evicted later."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._unheld[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, key: bytes, value: Any) -> None:
        """Add a full, verified page to the prefix cache. A second page with the same content stays private."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page], self._value_of[page] = page, key, value

    def find(self, *chains: Sequence[bytes]) -> list[int]:
        """Return the longest prefix of cached pages, each found by a key of any chain. Chains have equal length."""
        pages = []
        for keys in zip(*chains, strict=True):
            page = next((self._page_of[key] for key in keys if key in self._page_of), None)
            if page is None:
                break
            pages.append(page)
        return pages

    def value(self, page: int) -> Any:
        return self._value_of[page]

    def clear_cache(self) -> None:
        """Empty the prefix cache (the layers that fill pages have changed)."""
        self._free += self._unheld
        for mapping in (self._unheld, self._page_of, self._key_of, self._value_of):
            mapping.clear()

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._unheld.popitem(last=False)
            del self._page_of[self._key_of.pop(page)], self._value_of[page]
        self._holders[page] = 1
        return page
