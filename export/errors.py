"""What a user can cause and mend: each is one line on standard error, without a traceback."""


class ExportRefused(Exception):
    """Nothing was published; the message says what was expected, what came, where and the cure."""


class SourceInvalid(ExportRefused):
    """The weights cannot be read, or are not those of one attention layer."""
