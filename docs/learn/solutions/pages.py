"""A cache of pages with counted references (chapter 8)."""


class Pages:
    def __init__(self, num):
        self._holds, self._free = [0] * num, list(range(num))

    @property
    def num_free(self):
        return len(self._free)

    def take(self, count):
        if count > len(self._free):
            raise MemoryError(f"{count} pages wanted, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holds[page] = 1
        return pages

    def share(self, pages):
        self._check(pages)
        for page in pages:
            self._holds[page] += 1

    def release(self, pages):
        self._check(pages)
        for page in pages:
            self._holds[page] -= 1
            if not self._holds[page]:
                self._free.append(page)

    def _check(self, pages):
        if unused := [page for page in pages if not self._holds[page]]:
            raise ValueError(f"pages {unused} are free")
