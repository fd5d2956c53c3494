"""A cache of pages with counted references (chapter 8)."""


class Pages:
    """`num` pages; a sequence holds some of them, and copies share pages."""

    def __init__(self, num):
        """All pages are free."""
        raise NotImplementedError

    @property
    def num_free(self):
        """Pages that no sequence holds."""
        raise NotImplementedError

    def take(self, count):
        """Returns `count` free pages, held once; MemoryError if there are fewer, taking none."""
        raise NotImplementedError

    def share(self, pages):
        """Holds pages once more: another sample of a prompt. ValueError if one is free."""
        raise NotImplementedError

    def release(self, pages):
        """Gives up one hold of each page; one that nobody holds is free. ValueError if it was."""
        raise NotImplementedError
