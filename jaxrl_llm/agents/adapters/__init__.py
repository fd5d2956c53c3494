"""Environments of other libraries, seen as this project's; each file needs its own package."""
