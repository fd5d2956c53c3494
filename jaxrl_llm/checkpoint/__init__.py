"""Atomic, sealed steps of a job on disk, and the lock of its folder."""
