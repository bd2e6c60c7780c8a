"""What goes wrong with data."""


class DataError(ValueError):
    """Data that cannot be used; the message names the file and the place in it."""
