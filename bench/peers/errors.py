"""The one way in which a peer says no."""


class Unavailable(Exception):
    """A peer cannot be had on this machine; the message says why."""
